"""Turns a Hugging Face model into its folded self, in place: class swap of blocks, parameters cut to this rank's
slices.

Nothing outside the model changes, but for one new name in transformers' attention interface.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from . import vocab
from .attention import INTERFACE, AttentionCore, attention_interface
from .blocks import plan_model
from .comm import Wire
from .config import TSPConfig
from .embedding import ShardedEmbedding
from .fold import Folded, fold_class
from .layout import WeightCut, cut_bounds, lay_together
from .materialise import hold_slices, whole_shapes
from .mesh import Mesh
from .model import ModelState, loss_function, model_class
from .recompute import Recompute
from .terms import FoldedConv1D, FoldPlan


@dataclass(frozen=True)
class ModelPlan:
    """How a model is folded: its blocks, and the cut of every parameter that is cut, by each of its names; and what
    its blocks share."""

    blocks: dict[str, FoldPlan]
    cuts: dict[str, WeightCut]
    wire: Wire
    recompute: Recompute


@dataclass(frozen=True)
class Loaded:
    """Hangs on a model that `from_pretrained` folded, as ``tsp_loaded``, until `initialize` takes it."""

    config: TSPConfig
    mesh: Mesh


def inject(model: nn.Module, config: TSPConfig, mesh: Mesh) -> list[type[nn.Module]]:
    """Fold `model` over the axis of `mesh`; returns the folded block classes.

    Parameters keep their names, identity, ``requires_grad`` and place in optimizers; those of folded blocks, and the
    vocabulary's two ends, hold 1/P of their elements from here on and carry their `WeightCut` as ``tsp_cut``. All ranks
    start from the weights and buffers of the group's first rank, as DeepSpeed does over data-parallel ranks.
    Communication: that of `hold_slices`. Raises ValueError naming the module that cannot be folded, before it.
    """
    loaded: Loaded | None = getattr(model, "tsp_loaded", None)
    if loaded is None:
        with whole_shapes(model):
            plan = plan_fold(model, config, mesh)
        assert isinstance(model, PreTrainedModel)
        hold_slices(model, plan.cuts, mesh)
        fold(model, plan, config)
    elif loaded.config != config:
        raise ValueError(f'this {type(model).__name__} was loaded with "tsp": {loaded.config.model_dump()}, and is to '
                         f"be initialized with {config.model_dump()}; give both the same config")  # fmt: skip
    else:
        del model.tsp_loaded
    return sorted({type(m) for m in model.modules() if isinstance(m, Folded)}, key=lambda c: c.__name__)


def inject_stage(model: PreTrainedModel, config: TSPConfig, mesh: Mesh) -> Recompute:
    """`inject` for one stage of a pipeline, but for the outermost ``forward``, which is the stage's.

    Parts of `model` on the meta device belong to other stages: they are checked like the others, so that every rank
    finds the same faults, and left alone.
    """
    plan = plan_fold(model, config, mesh)
    hold_slices(model, plan.cuts, mesh, others_on_meta=True)
    _fold_inside(model, plan, config)
    return plan.recompute


def inject_blocks(root: nn.Module, blocks: dict[str, FoldPlan], config: TSPConfig, wire: Wire) -> None:
    """`inject` for the planned blocks of any module, and nothing else in it."""
    cuts = _cuts(root, blocks)
    hold_slices(root, cuts, wire.mesh)
    _mark(root, cuts)
    _own_configs(root)
    _swap_blocks(root, blocks)
    _add_cores(root, config, wire)


def plan_fold(model: nn.Module, config: TSPConfig, mesh: Mesh) -> ModelPlan:
    """How `model` is folded; looks at shapes only and changes nothing. Raises ValueError if it cannot be."""
    check_model(model)
    assert isinstance(model, PreTrainedModel)
    wire, recompute = Wire(mesh, config.overlap), Recompute(config.recompute)
    blocks = plan_model(model, config, wire, recompute)
    names, cuts = {module: name for name, module in model.named_modules()}, _cuts(model, blocks)
    if config.shard_vocab:
        _check_vocabulary(model, mesh)
        for module in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
            for leaf, parameter in module.named_parameters(recurse=False):
                shape = tuple(parameter.shape)
                cuts[f"{names[module]}.{leaf}"] = WeightCut(shape, 0, cut_bounds(shape[0], mesh.size))
    return ModelPlan(blocks, cuts, wire, recompute)


def _cuts(root: nn.Module, blocks: dict[str, FoldPlan]) -> dict[str, WeightCut]:
    """Of the parameters of all blocks, by name."""
    names = {module: name for name, module in root.named_modules()}
    return {
        f"{names[owner]}.{leaf}": cut
        for block in blocks.values()
        for cut, (owner, leaf) in zip(block.transport.cut.weights, block.sharded, strict=True)
    }


def fold(model: PreTrainedModel, plan: ModelPlan, config: TSPConfig) -> None:
    """Swap classes, now that the parameters hold this rank's slices."""
    _fold_inside(model, plan, config)
    kind: Any = type(model)
    model.__class__ = model_class(kind)
    for module in model.modules():  # gradient checkpointing that was switched on before
        if hasattr(module, "_gradient_checkpointing_func"):
            around: Any = plan.recompute.around(module._gradient_checkpointing_func)  # type: ignore[arg-type]
            module._gradient_checkpointing_func = around


def _fold_inside(model: PreTrainedModel, plan: ModelPlan, config: TSPConfig) -> None:
    """All of `fold` but the outermost class."""
    _mark(model, plan.cuts)
    _own_configs(model)
    folded: Any = model
    folded.tsp_state = ModelState.of(model, config, plan.wire, plan.recompute)
    _swap_blocks(model, plan.blocks)
    _add_cores(model, config, plan.wire)
    if config.shard_vocab:
        _shard_vocabulary(folded, plan.wire)
    _follow_longest_position(folded)
    folded.loss_function = loss_function(model)


def _mark(root: nn.Module, cuts: dict[str, WeightCut]) -> None:
    for name, cut in cuts.items():
        marked: Any = root.get_parameter(name)
        marked.tsp_cut = cut
        # DeepSpeed counts the norm of a parameter on every rank of the axis if it is marked as sharded, else once.
        marked.model_parallel = marked.tensor_model_parallel = True


def _swap_blocks(root: nn.Module, blocks: dict[str, FoldPlan]) -> None:
    for name, plan in blocks.items():
        block: Any = root.get_submodule(name)
        if plan.rowwise.weight.is_meta:  # another stage's
            continue
        kind: Any = type(block)
        block.__class__ = fold_class(kind)
        block.tsp_fold, block.tsp_core = plan, plan.core
        for owner, _ in plan.sharded:
            if isinstance(owner, Conv1D):
                owner.__class__ = FoldedConv1D
        _lie_together([getattr(owner, leaf) for owner, leaf in plan.sharded], plan.transport.mesh)


def _add_cores(root: nn.Module, config: TSPConfig, wire: Wire) -> None:
    """Attention that is not folded attends across the axis too; transformers reaches it by its attention interface."""
    if INTERFACE not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(INTERFACE, attention_interface)
    for name, module in root.named_modules():
        if not hasattr(module, "tsp_core") and (hasattr(module, "is_causal") or "Attention" in type(module).__name__):
            module.tsp_core = AttentionCore(wire, config.kernel, name, config.schedule)


def check_model(model: nn.Module) -> None:
    """Raises ValueError for what is no model to fold, whatever its blocks."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"TSP folds Hugging Face models (PreTrainedModel); got {type(model).__name__}")
    if hasattr(model, "tsp_state"):
        raise ValueError(f"this {type(model).__name__} is folded already; build a new model for another engine")
    _check_token_mixing(model)


# What a config may switch on that needs more than this rank's tokens, outside of attention's reach.
_REFUSED_SETTINGS = {
    "attn_temperature_tuning": "scales queries by positions counted from the local tokens",
    "output_router_logits": "adds a loss of the router, a product of means over all tokens",
}


def _check_token_mixing(model: PreTrainedModel) -> None:
    """Tokens of different ranks meet in attention only: refuse what mixes them elsewhere, on local tokens."""
    config = model.config.get_text_config()
    for setting, why in _REFUSED_SETTINGS.items():
        if getattr(config, setting, None):
            raise ValueError(
                f"{setting}={getattr(config, setting)} of {type(model).__name__} {why}; set it to False in the config"
            )
    mixer = next((name for name, m in model.named_modules() if isinstance(m, nn.Conv1d)), None)
    if mixer or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{type(model).__name__} mixes tokens outside of attention ({mixer or 'a recurrent state'}); TSP shards "
            "the sequence and exchanges tokens in attention only"
        )


def _check_vocabulary(model: PreTrainedModel, mesh: Mesh) -> None:
    why = vocab.refusal(model.get_input_embeddings(), model.get_output_embeddings(), mesh.size)
    if why:
        raise ValueError(
            f'the vocabulary of {type(model).__name__} cannot be sharded: {why}; set "shard_vocab": false in the '
            '"tsp" section'
        )


def _own_configs(root: nn.Module) -> None:
    """Give the modules their own copies of their configs: another model may share them, and keeps its own attention."""
    memo: dict[int, Any] = {}
    for module in root.modules():  # from the outside in: a copy of a config copies the configs inside it
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            if id(config) not in memo:
                copy.deepcopy(config, memo)._attn_implementation = INTERFACE
            module.config = memo[id(config)]


def _lie_together(parameters: list[nn.Parameter], mesh: Mesh) -> None:
    """The slices of a block in one piece travel without being packed first, as long as nobody moves them."""
    alike = {(p.dtype, p.device) for p in parameters}
    if mesh.size > 1 and len(alike) == 1 and len({id(p) for p in parameters}) == len(parameters):
        lay_together(parameters)


def _shard_vocabulary(model: Any, wire: Wire) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kind: Any = type(embedding)
    embedding.__class__ = vocab.sharded_class(kind, ShardedEmbedding)
    embedding.tsp_mesh = wire.mesh
    if head is not None and not head.weight.is_meta:  # another stage's
        head.tsp_ring = vocab.head_ring(head, wire)
        head.tsp_state = model.tsp_state
        kind = type(head)
        head.__class__ = vocab.sharded_class(kind, vocab.ShardedHead)


def _follow_longest_position(model: Any) -> None:
    """Rotary embeddings that choose their frequencies by the longest position must see that of the whole batch."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if kinds & {"dynamic", "longrope"}:
            kind: Any = type(module)
            module.tsp_state = model.tsp_state
            module.__class__ = _rotary_class(kind)


@functools.cache
def _rotary_class(original: Any) -> Any:
    def forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # One more token at the end carries the longest position in, and is dropped again.
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.tsp_state.agreed.last_position)
        cos, sin = original.forward(self, x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        return cos[..., :-1, :], sin[..., :-1, :]

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
