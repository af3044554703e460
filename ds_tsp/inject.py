"""Turns a Hugging Face model into its folded self, in place: class swap of blocks, parameters cut to this rank's
slices.

Nothing outside the model changes, but for one new name in transformers' attention interface.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from . import vocab
from .attention import INTERFACE, AttentionCore, attention_interface
from .blocks import plan_model
from .comm import broadcast_from_first
from .config import TSPConfig
from .embedding import ShardedEmbedding
from .fold import FoldedConv1D, FoldPlan, fold_class
from .layout import WeightCut, cut_bounds
from .mesh import Mesh
from .model import ModelState, loss_function, model_class


def inject(model: nn.Module, config: TSPConfig, mesh: Mesh) -> list[type[nn.Module]]:
    """Fold `model` over the axis of `mesh`; returns the folded block classes.

    Parameters keep their names, identity, ``requires_grad`` and place in optimizers; those of folded blocks, and the
    vocabulary's two ends, hold 1/P of their elements from here on and carry their `WeightCut` as ``tsp_cut``. All ranks
    start from the weights and buffers of the group's first rank, as DeepSpeed does over data-parallel ranks.
    Communication: one broadcast of the model. Raises ValueError naming the module that cannot be folded, before it.
    """
    check_model(model)
    assert isinstance(model, PreTrainedModel)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; materialise the model before ds_tsp.initialize")
    folded = fold_model(model, config, mesh)
    kind: Any = type(model)
    model.__class__ = model_class(kind)
    return folded


def fold_model(model: PreTrainedModel, config: TSPConfig, mesh: Mesh) -> list[type[nn.Module]]:
    """All of `inject` but the outermost ``forward``.

    Parts on the meta device belong to other stages of a pipeline: they are checked like the others, so that every rank
    finds the same faults, and left alone.
    """
    plans = plan_model(model, config, mesh)
    if config.shard_vocab:
        _check_vocabulary(model, mesh)
    equalise(model, mesh)
    own_configs(model)
    folded: Any = model
    folded.tsp_state = ModelState.of(model, config, mesh)
    classes = fold_blocks(model, plans, mesh)
    add_cores(model, config, mesh)
    if config.shard_vocab:
        _shard_vocabulary(folded, mesh)
    _follow_longest_position(folded)
    folded.loss_function = loss_function(model)
    return classes


def fold_blocks(root: nn.Module, plans: dict[str, FoldPlan], mesh: Mesh) -> list[type[nn.Module]]:
    """Swap the classes of the planned blocks of `root` and cut their parameters; returns the new classes."""
    for name, plan in plans.items():
        block: Any = root.get_submodule(name)
        if plan.rowwise.weight.is_meta:
            continue
        kind: Any = type(block)
        block.__class__ = fold_class(kind)
        block.tsp_fold, block.tsp_core = plan, plan.core
        for cut, (owner, leaf) in zip(plan.transport.cut.weights, plan.sharded, strict=True):
            _shard_parameter(getattr(owner, leaf), cut, mesh)
            if isinstance(owner, Conv1D):
                owner.__class__ = FoldedConv1D
    classes = {type(root.get_submodule(name)) for name, plan in plans.items() if not plan.rowwise.weight.is_meta}
    return sorted(classes, key=lambda c: c.__name__)


def add_cores(root: nn.Module, config: TSPConfig, mesh: Mesh) -> None:
    """Attention that is not folded attends across the axis too; transformers reaches it by its attention interface."""
    if INTERFACE not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(INTERFACE, attention_interface)
    for name, module in root.named_modules():
        if not hasattr(module, "tsp_core") and (hasattr(module, "is_causal") or "Attention" in type(module).__name__):
            module.tsp_core = AttentionCore(mesh, config.kernel, name, config.schedule)


def check_model(model: nn.Module) -> None:
    """Raises ValueError for what is no model to fold, whatever its blocks."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"TSP folds Hugging Face models (PreTrainedModel); got {type(model).__name__}")
    if hasattr(model, "tsp_state"):
        raise ValueError(f"this {type(model).__name__} is folded already; build a new model for another engine")
    _check_token_mixing(model)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ValueError(f"{name} was built under deepspeed.zero.Init; build the model outside of it")


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


def equalise(root: nn.Module, mesh: Mesh) -> None:
    """Make parameters and buffers those of the group's first rank; the collective needs them on the accelerator."""
    for tensor in [*root.parameters(), *root.buffers()]:
        if mesh.size > 1 and not tensor.is_meta:
            staged = tensor.data.to(get_accelerator().current_device_name()).contiguous()
            broadcast_from_first(staged, mesh)
            tensor.data.copy_(staged)


def own_configs(root: nn.Module) -> None:
    """Give the modules their own copies of their configs: another model may share them, and keeps its own attention."""
    memo: dict[int, Any] = {}
    for module in root.modules():  # from the outside in: a copy of a config copies the configs inside it
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            if id(config) not in memo:
                copy.deepcopy(config, memo)._attn_implementation = INTERFACE
            module.config = memo[id(config)]


def _shard_parameter(parameter: nn.Parameter, cut: WeightCut, mesh: Mesh) -> None:
    marked: Any = parameter
    marked.data = cut.take(parameter.data, mesh.rank)
    marked.grad = None
    marked.tsp_cut = cut
    # DeepSpeed counts the norm of a parameter on every rank of the axis if it is marked as sharded, else once in all.
    marked.model_parallel = marked.tensor_model_parallel = True


def _shard_vocabulary(model: Any, mesh: Mesh) -> None:
    """Cut the embedding and the head; tied, they are one parameter, cut once."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for module in (embedding, head):
        for parameter in () if module is None else module.parameters(recurse=False):
            if not hasattr(parameter, "tsp_cut") and not parameter.is_meta:
                cut = WeightCut(tuple(parameter.shape), 0, cut_bounds(parameter.shape[0], mesh.size))
                _shard_parameter(parameter, cut, mesh)
    kind: Any = type(embedding)
    embedding.__class__ = vocab.sharded_class(kind, ShardedEmbedding)
    embedding.tsp_mesh = mesh
    if head is not None and not head.weight.is_meta:
        head.tsp_ring = vocab.head_ring(head, mesh)
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
