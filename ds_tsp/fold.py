"""The fold: a block evaluated as the sum, over weight shards that travel, of itself with one shard in place.

    y = sum_g block(x; W_g)

holds for attention (g: head groups) and for the MLP (g: ffn slices) alike, so one autograd function serves both.
Source: TSP, arXiv 2604.26294; METP, doi 10.1631/FITEE.2400602.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from .attention import AttentionCore
from .comm import Transport
from .layout import accumulate_dtype

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
def _last_gemm_skipped(rowwise: nn.Linear) -> Iterator[None]:
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
def _core_state(core: AttentionCore | None, tokens: int, **state: Any) -> Iterator[None]:
    """Set `tape` or `replay` of the block's core while a term runs."""
    if core is None:
        yield
        return
    kept = (core.tokens, core.tape, core.replay)
    core.tokens, core.tape, core.replay = tokens, state.get("tape"), state.get("replay")
    try:
        yield
    finally:
        core.tokens, core.tape, core.replay = kept


class _Call:
    """One call of a folded block: its arguments, with the tensors to differentiate taken out of the structure."""

    def __init__(self, block: Folded, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.block, self.original = block, original
        self.plan: FoldPlan = block.tsp_fold
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.grad = torch.is_grad_enabled()
        self.where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and (i == 0 or x.requires_grad)]
        self.inputs = [leaves[i] for i in self.where]
        self.leaves = [None if i in self.where else x for i, x in enumerate(leaves)]
        self.rest: tuple[Any, ...] | None = None

    def run(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], shared: Sequence[Tensor],
            once: Sequence[Tensor]) -> Tensor:  # fmt: skip
        """One term: the original forward with the given weights in place."""
        leaves = list(self.leaves)
        for i, x in zip(self.where, inputs, strict=True):
            leaves[i] = x
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        plan = self.plan
        with _in_place_of(plan.sharded + plan.shared + plan.once, [*weights, *shared, *once]):
            out = self.original(self.block, *args, **kwargs)
        if isinstance(out, tuple):
            out, *rest = out
            if any(x is not None for x in rest):
                raise ValueError(f"{plan.name} cannot be folded because it returns more than its output: {out!r:.80}")
            self.rest = tuple(rest)
        return out

    def output(self, y: Tensor) -> Any:
        return y if self.rest is None else (y, *self.rest)


class _Fold(torch.autograd.Function):
    """y = sum_g block(x; W_g) on this rank's tokens; weights travel, tokens stay.

    Shapes: x, y [B, s, D]. Sharded over: tokens and weights, both over the TSP axis; y is complete, no reduce follows.
    Communication per rank: the transport's, and for attention that of `attend_forward` and `attend_backward`.
    Saved: inputs and own shards; for attention each term's output and lse. Projections are recomputed.
    Gradient: dW of the own shards arrives summed over the axis, reduce it over dp only. Gradients of shared parameters
    cover local tokens: sum them over the axis (`grad_sync`). Sums are kept in fp32 where tensors are half precision.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        plan, n = call.plan, len(call.inputs)
        inputs, sharded, shared, once = _split(plan, tensors, n)
        tape: list[tuple[Tensor, Tensor]] | None = [] if call.grad and any(ctx.needs_input_grad) else None
        total: Tensor | None = None
        terms, nothing = plan.transport.terms(), [torch.zeros_like(x) for x in once]
        with _core_state(plan.core, inputs[0].shape[1], tape=tape):
            for t, (_, slices) in enumerate(plan.transport.travel(sharded)):
                weights = plan.transport.cut.assemble(slices)
                y = call.run(inputs, weights, shared, once if t == 0 else nothing)
                if len(terms) > 1:
                    total = y.to(accumulate_dtype(y.dtype)) if total is None else total.add_(y)
        if tape is not None:
            ctx.call, ctx.n_saved = call, len(tensors)
            ctx.autocast = torch.is_autocast_enabled(y.device.type), torch.get_autocast_dtype(y.device.type)
            ctx.save_for_backward(*tensors, *(x for pair in tape for x in pair))
        call.inputs = []  # saved by the context alone, so that checkpointing can drop them
        return y if total is None else total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        call, plan = ctx.call, ctx.call.plan
        saved = ctx.saved_tensors  # once: checkpointing unpacks each tensor one time only
        tensors, tape = saved[: ctx.n_saved], saved[ctx.n_saved :]
        needs = ctx.needs_input_grad[1:]
        n_inputs = len(call.where)
        inputs, sharded, shared, once = _split(
            plan, [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)], n_inputs
        )
        need_sharded = needs[n_inputs : n_inputs + len(sharded)]
        which = [i for i, need in enumerate(need_sharded) if need]
        home = plan.transport.homeward(which) if which else None
        sums: list[Tensor | None] = [None] * len(needs)
        whole = [(i, x) for i, x in enumerate([*inputs, *sharded, *shared, *once]) if needs[i]]
        whole = [(i, x) for i, x in whole if not n_inputs <= i < n_inputs + len(sharded)]
        first_once = len(needs) - len(once)
        one_term = len(plan.transport.terms()) == 1  # nothing is summed: no fp32 copies
        enabled, dtype = ctx.autocast
        nothing = [torch.zeros_like(x) for x in once]
        for t, (members, slices) in enumerate(plan.transport.travel([x.detach() for x in sharded])):
            leaves = [
                [x.detach().requires_grad_(need) for x, need in zip(s, need_sharded, strict=True)] for s in slices
            ]
            targets = [(i, x) for i, x in whole if t == 0 or i < first_once]
            pair = tuple(tape[2 * t : 2 * t + 2]) or None
            autocast = torch.autocast(dy.device.type, dtype=dtype) if enabled else nullcontext()
            with (
                torch.enable_grad(),
                autocast,
                _core_state(plan.core, inputs[0].shape[1], replay=pair),
                _last_gemm_skipped(plan.rowwise),
            ):
                weights = plan.transport.cut.assemble(leaves)
                y = call.run(inputs, weights, shared, once if t == 0 else nothing)
            wanted = [x for _, x in targets] + [s[i] for s in leaves for i in which]
            grads = torch.autograd.grad(y, wanted, dy, materialize_grads=True)
            del y, weights
            for (i, x), grad in zip(targets, grads[: len(targets)], strict=True):
                # Not in place: autograd may hand one tensor out as the gradient of two inputs.
                before = sums[i]
                first = grad if one_term else grad.to(accumulate_dtype(x.dtype))
                sums[i] = first if before is None else before + grad
            if home is not None:
                dw = grads[len(targets) :]
                home.add(members, [list(dw[j : j + len(which)]) for j in range(0, len(dw), len(which))])
            del grads
        if home is not None:
            for i, grad in zip(which, home.finish(), strict=True):
                sums[n_inputs + i] = grad
        return None, *(None if g is None else g.to(x.dtype) for g, x in zip(sums, tensors, strict=True))


def _split(plan: FoldPlan, tensors: Sequence[Tensor], n_inputs: int) -> tuple[list[Tensor], ...]:
    """Inputs, sharded, shared and once, from the flat list that autograd sees."""
    a = n_inputs + len(plan.sharded)
    b = a + len(plan.shared)
    return list(tensors[:n_inputs]), list(tensors[n_inputs:a]), list(tensors[a:b]), list(tensors[b:])


class Folded(nn.Module):
    """Mixin of every folded block. The block's class is ``class Folded<Original>(Folded, Original)``, so parameter
    names and ``isinstance`` survive; ``tsp_fold`` holds the `FoldPlan`.
    """

    tsp_original: type[nn.Module]
    tsp_first_argument: str
    tsp_fold: FoldPlan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # ZeRO-3's backward hook looks for positional tensors only; without one it fires before the block's backward.
        if not args and self.tsp_first_argument in kwargs:
            args = (kwargs.pop(self.tsp_first_argument),)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = _Call(self, self.tsp_original.forward, args, kwargs)
        return call.output(_Fold.apply(call, *call.inputs, *self.tsp_fold.parameters()))


@functools.cache
def fold_class(original: Any) -> Any:
    """The folded class of `original`; always the same one."""
    first = list(inspect.signature(original.forward).parameters)[1]
    return type(f"Folded{original.__name__}", (Folded, original),
                {"tsp_original": original, "tsp_first_argument": first, "__module__": original.__module__})  # fmt: skip
