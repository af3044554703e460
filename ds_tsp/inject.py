"""Turns a Hugging Face model into its folded self, in place: class swap of blocks, parameters cut to this rank's slices.

Nothing outside the model changes, but for one new name in transformers' attention interface.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import data
from .attention import INTERFACE, attention_interface
from .blocks import plan_model
from .comm import broadcast_from_first
from .config import TSPConfig
from .data import ShardedBatch
from .fold import Folded, fold_class
from .layout import WeightCut
from .mesh import Mesh

_CAUSAL_LOSSES = ("ForCausalLM", "ForConditionalGeneration")
_REFUSED_ARGUMENTS = {
    "past_key_values": "there is no K/V cache in training",
    "cache": "there is no K/V cache in training",
    "output_attentions": "attention weights are never formed",
}


@dataclass
class ModelState:
    """What a folded model remembers; hangs on it as ``tsp_state``. `batch` is the one in forward right now."""

    mesh: Mesh
    layout: str
    batch: ShardedBatch | None = None


def inject(model: nn.Module, config: TSPConfig, mesh: Mesh) -> list[type[Folded]]:
    """Fold `model` over the axis of `mesh`; returns the folded block classes.

    Parameters keep their names, identity, ``requires_grad`` and place in optimizers; those of folded blocks hold 1/P of
    their elements from here on and carry their `WeightCut` as ``tsp_cut``. All ranks start from the weights and buffers
    of the group's first rank, as DeepSpeed does over data-parallel ranks.
    Communication: one broadcast of the model. Raises ValueError naming the module that cannot be folded, before it.
    """
    _check_model(model)
    assert isinstance(model, PreTrainedModel)
    plans = plan_model(model, config, mesh)
    for tensor in [*model.parameters(), *model.buffers()]:
        _equalise(tensor.data, mesh)
    _own_config(model)
    if INTERFACE not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(INTERFACE, attention_interface)
    for name, plan in plans.items():
        block: Any = model.get_submodule(name)
        block.__class__ = fold_class(type(block))
        block.tsp_fold, block.tsp_core = plan, plan.core
        for cut, (owner, leaf) in zip(plan.transport.cut.weights, plan.sharded, strict=True):
            _shard_parameter(getattr(owner, leaf), cut, mesh)
    folded: Any = model
    folded.tsp_state = ModelState(mesh, config.layout)
    _follow_longest_position(folded)
    _wrap_loss(folded)
    folded.__class__ = _root_class(type(model))
    return sorted({type(model.get_submodule(name)) for name in plans}, key=lambda c: c.__name__)  # type: ignore


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"TSP folds Hugging Face models (PreTrainedModel); got {type(model).__name__}")
    if hasattr(model, "tsp_state"):
        raise ValueError(f"this {type(model).__name__} is folded already; build a new model for another engine")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ValueError(f"{name} was built under deepspeed.zero.Init; build the model outside of it")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; materialise the model before ds_tsp.initialize")


def _equalise(tensor: Tensor, mesh: Mesh) -> None:
    """Make `tensor` that of the group's first rank; the collective needs it on the accelerator."""
    if mesh.size == 1:
        return
    staged = tensor.to(get_accelerator().current_device_name()).contiguous()
    broadcast_from_first(staged, mesh)
    tensor.copy_(staged)


def _own_config(model: PreTrainedModel) -> None:
    """Give the model its own copy of its config: another model may share it, and keeps its own attention."""
    memo: dict[int, Any] = {}
    own = copy.deepcopy(model.config, memo)
    own._attn_implementation = INTERFACE
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in memo:
            module.config = memo[id(config)]


def _shard_parameter(parameter: nn.Parameter, cut: WeightCut, mesh: Mesh) -> None:
    marked: Any = parameter
    marked.data = cut.take(parameter.data, mesh.rank)
    marked.grad = None
    marked.tsp_cut = cut
    # DeepSpeed counts the norm of a parameter on every rank of the axis if it is marked as sharded, else once in all.
    marked.model_parallel = marked.tensor_model_parallel = True


def _follow_longest_position(model: Any) -> None:
    """Rotary embeddings that choose their frequencies by the longest position must see that of the whole batch."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if kinds & {"dynamic", "longrope"}:
            module.tsp_state = model.tsp_state
            module.__class__ = _rotary_class(type(module))


@functools.cache
def _rotary_class(original: Any) -> Any:
    def forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # One more token at the end carries the longest position in, and is dropped again.
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.tsp_state.batch.last_position)
        cos, sin = original.forward(self, x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        return cos[..., :-1, :], sin[..., :-1, :]

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


def _wrap_loss(model: Any) -> None:
    """The model's own loss over local tokens, divided by the number of valid tokens of the group's whole batch."""
    original, state = model.loss_function, model.tsp_state
    kind = getattr(model, "loss_type", None)

    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
        if kind not in _CAUSAL_LOSSES:
            raise ValueError(f"{type(model).__name__} has a loss of type {kind}; TSP computes next-token losses only. "
                             "Call it without labels and compute the loss from the outputs")  # fmt: skip
        batch: ShardedBatch = state.batch
        batch.loss_taken = True
        kwargs.setdefault("num_items_in_batch", max(batch.valid, 1))
        kwargs["shift_labels"] = batch.shift_labels
        return data.global_sum(original(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs), state.mesh)

    model.loss_function = loss_function


@functools.cache
def _root_class(original: Any) -> Any:
    """`original` with a forward that cuts the full batch, and gives back the global loss or the whole outputs."""
    names = list(inspect.signature(original.forward).parameters)[1:]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _sharded_forward(self, original.forward, {**dict(zip(names, args, strict=False)), **kwargs})

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


def _sharded_forward(model: Any, original: Any, arguments: dict[str, Any]) -> Any:
    state: ModelState = model.tsp_state
    for name, why in _REFUSED_ARGUMENTS.items():
        if arguments.pop(name, None):
            raise ValueError(f"{name} was given to {type(model).__name__}, but {why}; leave it out")
    return_dict, keep = arguments.pop("return_dict", None), arguments.pop("logits_to_keep", 0)
    arguments.pop("use_cache", None)
    embedding = model.get_input_embeddings()
    batch = data.shard(arguments, state.mesh, state.layout, embedding.num_embeddings, model.device)
    state.batch = batch
    try:
        out = original(model, **batch.arguments, use_cache=False, return_dict=True)
    finally:
        state.batch = None
    with_loss = batch.shift_labels is not None
    if with_loss and not batch.loss_taken:
        raise ValueError(f"{type(model).__name__} does not compute its loss by loss_function; call it without labels")
    for name in ("logits", "last_hidden_state"):
        if out.get(name) is not None:
            out[name] = None if with_loss else data.gather(out[name], batch.sequence, state.mesh)
    if out.get("logits") is not None and not (isinstance(keep, int) and keep == 0):
        out["logits"] = out["logits"][:, slice(-keep, None) if isinstance(keep, int) else keep]
    if out.get("hidden_states") is not None:
        out["hidden_states"] = tuple(data.gather(h, batch.sequence, state.mesh) for h in out["hidden_states"])
    return out.to_tuple() if return_dict is False else out
