"""The folded model's outermost layer: a forward that takes the full batch, and the loss over all its tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from . import data, documents
from .comm import Wire, all_reduce
from .config import TSPConfig
from .data import Agreement, ShardedBatch
from .mesh import Mesh
from .recompute import Recompute
from .vocab import LazyLogits

_CAUSAL_LOSSES = ("ForCausalLM", "ForConditionalGeneration")
_REFUSED_ARGUMENTS = {
    "past_key_values": "there is no K/V cache in training",
    "cache": "there is no K/V cache in training",
    "output_attentions": "attention weights are never formed",
    "output_router_logits": "the router's loss is a product of means over all tokens",
}


@dataclass
class ModelState:
    """What a folded model remembers; hangs on it as ``tsp_state``. `batch` and `agreed` are of the forward that runs.

    accumulation: micro-batches per step, told by `initialize`. bidirectional: some attention looks ahead. dropout: some
    activations are dropped in training. loss_taken: the model asked for its loss in this forward.
    """

    mesh: Mesh
    wire: Wire
    recompute: Recompute
    loss_average: str
    gather_logits: bool
    bidirectional: bool
    dropout: bool
    accumulation: int = 1
    batch: ShardedBatch | None = None
    agreed: Agreement | None = None
    loss_taken: bool = False
    reached: bool = False  # every layer was seen to attend across the axis

    @classmethod
    def of(cls, model: PreTrainedModel, config: TSPConfig, wire: Wire, recompute: Recompute) -> ModelState:
        causal = [getattr(m, "is_causal", True) for m in model.modules()] + [getattr(model.config, "is_causal", True)]
        # What is dropped by a function is kept as a number of the module that does it.
        rates = [v for m in model.modules() for n, v in vars(m).items() if "drop" in n and isinstance(v, float)]
        rates += [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
        ahead = not all(c is not False for c in causal)
        return cls(wire.mesh, wire, recompute, config.loss_average, config.gather_logits, ahead, any(rates))


def loss_function(model: Any) -> Callable[..., Tensor]:
    """The model's next-token loss over local tokens, divided by the number of valid tokens of the group's whole
    batch."""
    original, state, kind = model.loss_function, model.tsp_state, getattr(model, "loss_type", None)

    def loss(logits: Tensor | LazyLogits, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
        state.loss_taken = True
        if kind not in (None, *_CAUSAL_LOSSES):  # None: transformers takes the causal one
            raise ValueError(f"{type(model).__name__} has a loss of type {kind}; TSP computes next-token losses only. "
                             "Call it without labels and compute the loss from the outputs")  # fmt: skip
        items = kwargs.pop("num_items_in_batch", None)
        items = _items(state, model.training, logits.device) if items is None else items
        smoothing, targets = kwargs.pop("label_smoothing", 0.0), state.batch.shift_labels
        if isinstance(logits, LazyLogits) and original is ForCausalLMLoss and kwargs.get("ignore_index", -100) == -100:
            local = logits.loss(targets, smoothing) / items
        elif smoothing:
            raise ValueError(f'label_smoothing={smoothing} needs the sharded vocabulary: set "shard_vocab": true')
        else:  # a loss of the user's own: it gets the local logits, whole
            logits = logits.local() if isinstance(logits, LazyLogits) else logits
            local = original(logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=items,
                             shift_labels=targets, **kwargs)  # fmt: skip
        return data.global_sum(local, state.mesh)

    return loss


def _items(state: ModelState, training: bool, device: torch.device) -> float | Tensor:
    """What the sum over valid tokens is divided by.

    "batch": the valid tokens of the group's batch, so that DeepSpeed's average over dp ranks and micro-batches is a
    mean of means, as Hugging Face's. "token": such that this average is the one mean over all tokens.
    """
    assert state.agreed is not None
    valid = state.agreed.valid
    if state.loss_average == "batch" or not training:
        return max(valid, 1)
    if state.accumulation > 1:
        raise ValueError(
            f'"loss_average": "token" with gradient_accumulation_steps={state.accumulation} must know the tokens of '
            "all micro-batches of a step beforehand: take batches from the loader that ds_tsp.initialize returns and "
            "call engine(**batch), or pass num_items_in_batch = tokens of the step / (steps x dp ranks)"
        )
    total = all_reduce(torch.tensor(float(valid), device=device), state.mesh.dp_group, state.mesh.dp_size)
    return (total / state.mesh.dp_size).clamp(min=1 / state.mesh.dp_size)


@functools.cache
def model_class(original: Any) -> Any:
    """`original` with a forward that cuts the full batch, and gives back the global loss or the whole outputs."""
    names = list(inspect.signature(original.forward).parameters)[1:]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, original.forward, {**dict(zip(names, args, strict=False)), **kwargs})

    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ):
        if state_dict is None and self.tsp_state.mesh.size > 1:
            raise ValueError(
                f"save_pretrained would write this rank's slices of {type(self).__name__}; call "
                "ds_tsp.save_pretrained(engine, folder) on every rank, or give it state_dict="
                "ds_tsp.full_state_dict(engine) on rank 0"
            )
        return original.save_pretrained(self, save_directory, is_main_process, state_dict, **kwargs)

    def _set_gradient_checkpointing(
        self: Any, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **kwargs: Any
    ) -> None:
        function = self.tsp_state.recompute.around(gradient_checkpointing_func)
        original._set_gradient_checkpointing(self, enable, function, **kwargs)

    members = {"forward": forward, "save_pretrained": save_pretrained, "__module__": original.__module__,
               "_set_gradient_checkpointing": _set_gradient_checkpointing}  # fmt: skip
    return type(original.__name__, (original,), members)


def _forward(model: Any, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    state: ModelState = model.tsp_state
    for name, why in _REFUSED_ARGUMENTS.items():
        if arguments.pop(name, None):
            raise ValueError(f"{name} was given to {type(model).__name__}, but {why}; leave it out")
    return_dict, keep = arguments.pop("return_dict", None), arguments.pop("logits_to_keep", 0)
    arguments.pop("use_cache", None)
    batch = data.recognise(arguments, state.mesh)
    agreed = data.agree(batch, state.mesh, model.get_input_embeddings().num_embeddings, model.device)
    mask = attention_mask(batch, state)
    state.batch, state.agreed, state.loss_taken = batch, agreed, False
    try:
        with own_dropout(state, model):
            out = original(model, **batch.arguments, attention_mask=mask, use_cache=False, return_dict=True)
    finally:
        state.batch = state.agreed = None
    if not state.reached:
        _check_reach(model)
        state.reached = True
    if batch.shift_labels is not None and not state.loss_taken:
        raise ValueError(f"{type(model).__name__} does not compute its loss by loss_function; call it without labels")
    _finish_outputs(out, state, batch, keep)
    return out.to_tuple() if return_dict is False else out


def attention_mask(batch: ShardedBatch, state: ModelState) -> Tensor | None:
    """What takes the place of the model's attention mask."""
    if batch.mask is None and state.bidirectional and batch.sequence.padded > batch.sequence.length:
        return documents.whole(batch.sequence.padded, batch.sequence.length)
    return batch.mask


def _check_reach(model: Any) -> None:
    """A layer that attends by itself, not through transformers' attention interface, sees its local tokens only."""
    cores = [m.tsp_core for m in model.modules() if getattr(m, "tsp_core", None) is not None]
    # A model may run its layers more than once: what counts is how many it has.
    longest = max((len(m) for m in model.modules() if isinstance(m, nn.ModuleList)), default=0)
    called, layers = sum(core.called for core in cores), min(model.config.get_text_config().num_hidden_layers, longest)
    if called < layers:
        raise ValueError(
            f"{type(model).__name__} has {layers} layers, but only {called} attended through transformers' attention "
            "interface; the others would see this rank's tokens only: TSP cannot run this model"
        )


def _finish_outputs(out: Any, state: ModelState, batch: ShardedBatch, keep: int | Tensor) -> None:
    """No logits beside a loss; else whole ones in order, or this rank's part as it is with ``gather_logits`` off."""
    for name in ("logits", "last_hidden_state"):
        if out.get(name) is not None:
            if batch.shift_labels is not None:
                out[name] = None
            elif state.gather_logits:
                out[name] = data.gather(out[name], batch.sequence, state.mesh)
    if out.get("logits") is not None and not (isinstance(keep, int) and keep == 0):
        if not state.gather_logits:
            raise ValueError('logits_to_keep counts from the end of the whole sequence; it needs "gather_logits": true')
        out["logits"] = out["logits"][:, slice(-keep, None) if isinstance(keep, int) else keep]
    if out.get("hidden_states") is not None:
        out["hidden_states"] = tuple(data.gather(h, batch.sequence, state.mesh) for h in out["hidden_states"])


@contextmanager
def own_dropout(state: ModelState, model: nn.Module) -> Iterator[None]:
    """Let each rank of the axis drop other activations, though all were seeded alike; the caller's generator moves by
    one draw. Checkpointing keeps the state it finds in here, so a recompute drops the same ones.
    """
    if not (state.dropout and model.training and state.mesh.size > 1):
        yield
        return
    seed = int(torch.randint(2**62, ()).item())
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + state.mesh.rank)
        yield
