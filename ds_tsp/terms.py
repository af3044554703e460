"""One term of a folded block: the original forward, with slices of the weights where the parameters are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from .attention import AttentionCore
from .layout import tiles
from .recompute import Pair, Recompute
from .transports import Transport

Slot = tuple[nn.Module, str]  # a parameter's place: the module that owns it and its name there


@dataclass(frozen=True)
class FoldPlan:
    """How one block is folded. Hangs on the block as ``tsp_fold``.

    sharded: weights cut over the axis, in the order of the transport's cut. shared: parameters that every term uses
    whole (per-head norms). once: added by one term only (the rowwise bias). rowwise: the block's last linear layer.
    """

    name: str
    transport: Transport
    sharded: tuple[Slot, ...]
    shared: tuple[Slot, ...]
    once: tuple[Slot, ...]
    rowwise: nn.Linear
    core: AttentionCore | None
    recompute: Recompute

    def parameters(self) -> list[Tensor]:
        return [getattr(module, name) for slots in (self.sharded, self.shared, self.once) for module, name in slots]


@contextmanager
def _in_place_of(slots: Sequence[Slot], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put `tensors` where the parameters are while a term runs. Modules read them by name, so no copy and no hook."""
    kept = [module._parameters[name] for module, name in slots]
    try:
        for (module, name), tensor in zip(slots, tensors, strict=True):
            module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (module, name), parameter in zip(slots, kept, strict=True):
            module._parameters[name] = parameter


class _LastGemm(torch.autograd.Function):
    """A linear layer whose output nobody reads: only its gradients are wanted, so the product is not computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None):
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat = dy.flatten(0, -2)
        dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if needs_x else None
        dw = (flat.t() @ x.flatten(0, -2).to(dy.dtype)).to(weight.dtype) if needs_weight else None
        return dx, dw, flat.sum(0) if needs_bias else None


class FoldedConv1D(Conv1D):
    """GPT-2's linear layer, for any width of its weight: its own forward goes by the width it was built with."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.mT, self.bias)


@contextmanager
def last_gemm_skipped(rowwise: nn.Linear) -> Iterator[None]:
    def forward(x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight = rowwise.weight.mT if isinstance(rowwise, Conv1D) else rowwise.weight
        return _LastGemm.apply(x, weight, rowwise.bias)

    kept = rowwise.__dict__.get("forward")  # a wrapper that somebody else put on the instance
    rowwise.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del rowwise.forward
        if kept is not None:
            rowwise.forward = kept  # type: ignore[method-assign]


@contextmanager
def core_state(
    core: AttentionCore | None, tokens: int, tape: list[Pair] | None = None, replay: Pair | None = None
) -> Iterator[None]:
    """Set `tape` or `replay` of the block's core while a term runs."""
    if core is None:
        yield
        return
    kept = (core.tokens, core.tape, core.replay)
    core.tokens, core.tape, core.replay = tokens, tape, replay
    try:
        yield
    finally:
        core.tokens, core.tape, core.replay = kept


class Parts:
    """The tensors of one call of a block, which autograd sees as one flat list, and which of them want gradients.

    own: this rank's slices. which: those of the sharded weights that want gradients.
    """

    def __init__(self, plan: FoldPlan, tensors: Sequence[Tensor], n_inputs: int, needs: Sequence[bool]):
        a = n_inputs + len(plan.sharded)
        b = a + len(plan.shared)
        self.plan, self.needs, flat = plan, needs, list(tensors)
        self.inputs, self.shared, self.once = flat[:n_inputs], flat[a:b], flat[b:]
        self.own = [x.detach() for x in flat[n_inputs:a]]
        self.needs_sharded = needs[n_inputs:a]
        self.which = [i for i, need in enumerate(self.needs_sharded) if need]

    def at(self, tile: slice) -> Parts:
        """The same for a run of tokens of the first input [B, s, ...]."""
        if tile == slice(None):
            return self
        part, x = copy.copy(self), self.inputs[0]
        part.inputs = [x.detach()[:, tile].requires_grad_(x.requires_grad), *self.inputs[1:]]
        return part

    def targets(self, t: int) -> list[tuple[int, Tensor]]:
        """The tensors beside the slices that term `t` gives gradients to, with their places in the flat list."""
        after = len(self.inputs) + len(self.own)
        found = list(enumerate(self.inputs))
        found += [(after + i, x) for i, x in enumerate([*self.shared, *(self.once if t == 0 else [])])]
        return [(i, x) for i, x in found if self.needs[i]]


class BlockCall:
    """One call of a folded block: its arguments, with the tensors to differentiate taken out of the structure."""

    def __init__(self, block: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.block, self.original = block, original
        self.plan: FoldPlan = block.tsp_fold
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.grad = torch.is_grad_enabled()
        self.where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and (i == 0 or x.requires_grad)]
        self.inputs = [leaves[i] for i in self.where]
        self.leaves = [None if i in self.where else x for i, x in enumerate(leaves)]
        self.rest: tuple[Any, ...] | None = None

    def run(self, parts: Parts, weights: Sequence[Tensor], t: int) -> Tensor:
        """Term `t`: the original forward with the given weights in place."""
        leaves, plan = list(self.leaves), self.plan
        for i, x in zip(self.where, parts.inputs, strict=True):
            leaves[i] = x
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        once = parts.once if t == 0 else [torch.zeros_like(x) for x in parts.once]
        with _in_place_of(plan.sharded + plan.shared + plan.once, [*weights, *parts.shared, *once]):
            out = self.original(self.block, *args, **kwargs)
        if isinstance(out, tuple):
            out, *rest = out
            if any(x is not None for x in rest):
                raise ValueError(f"{plan.name} cannot be folded because it returns more than its output: {out!r:.80}")
            self.rest = tuple(rest)
        return out

    def tiles(self, x: Tensor) -> list[slice]:
        """Runs of tokens to compute one after another: an MLP knows one token at a time, and its inside is wide."""
        alone = len(self.where) == 1 and not any(isinstance(leaf, Tensor) for leaf in self.leaves)
        if self.plan.core is not None or not alone or x.dim() != 3:
            return [slice(None)]
        bounds = self.plan.transport.cut.weights[0].bounds
        widest = max(high - low for low, high in itertools.pairwise(bounds))
        found = list(tiles(x.shape[1], x.numel(), widest * x.shape[0]))
        return found if len(found) > 1 else [slice(None)]

    def output(self, y: Tensor) -> Any:
        return y if self.rest is None else (y, *self.rest)
