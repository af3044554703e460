"""The fold: a block evaluated as the sum, over weight shards that travel, of itself with one shard in place.

    y = sum_g block(x; W_g)

holds for attention (g: head groups) and for the MLP (g: ffn slices) alike, so one autograd function serves both.
Source: TSP, arXiv 2604.26294; METP, doi 10.1631/FITEE.2400602.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from .layout import accumulate_dtype
from .recompute import Graphs, Pair
from .terms import BlockCall, FoldPlan, Parts, core_state, last_gemm_skipped
from .transports import Slice


class _Fold(torch.autograd.Function):
    """y = sum_g block(x; W_g) on this rank's tokens; weights travel, tokens stay.

    Shapes: x, y [B, s, D]. Sharded over: tokens and weights, both over the TSP axis; y is complete, no reduce follows.
    Communication per rank: the transport's, and for attention that of `attend_forward` and `attend_backward`.
    Saved: inputs and own shards, and what `Recompute` says; no weight of another rank.
    Gradient: dW of the own shards arrives summed over the axis, reduce it over dp only. Gradients of shared parameters
    cover local tokens: sum them over the axis (`grad_sync`). Sums are kept in fp32 where tensors are half precision.
    """

    @staticmethod
    def forward(ctx: Any, call: BlockCall, *tensors: Tensor) -> Tensor:
        plan, transport, needs = call.plan, call.plan.transport, ctx.needs_input_grad[1:]
        differentiated = call.grad and any(needs)
        keep = plan.recompute.begin(differentiated, plan.core is not None)
        graphs = keep.graphs
        parts = Parts(plan, tensors if graphs is None else _leaves(tensors, needs), len(call.inputs), needs)
        x, total = tensors[0], _Total(transport.several)
        for t, term in enumerate(transport.travel(parts.own)):
            with term.turn(), core_state(plan.core, x.shape[1], keep.tape, keep.replayed(t)):
                slices = term.arrive()
                if graphs is None:
                    weights = transport.cut.assemble(slices)
                    for tile in call.tiles(x):
                        y = call.run(parts.at(tile), weights, t)
                        transport.after_previous()
                        total.add(y, tile, x.shape[1])
                else:
                    y = _recorded(graphs, call, parts, slices, t)
                    transport.after_previous()
                    total.add(y, slice(None), x.shape[1])
        transport.join(total.sum)
        keep.end()
        if differentiated:
            ctx.call, ctx.n_saved, ctx.keep = call, len(tensors), keep
            ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
            ctx.save_for_backward(*tensors, *keep.pairs())
        call.inputs = []  # saved by the context alone, so that checkpointing can drop them
        return total.sum.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        call, plan, transport = ctx.call, ctx.call.plan, ctx.call.plan.transport
        saved = ctx.saved_tensors  # once: checkpointing unpacks each tensor one time only
        tensors, tape = saved[: ctx.n_saved], saved[ctx.n_saved :]
        graphs, needs = ctx.keep.take_graphs(), ctx.needs_input_grad[1:]
        parts = Parts(plan, _leaves(tensors, needs), len(call.where), needs)
        home = transport.homeward(parts.which) if parts.which else None
        tiled = call.tiles(tensors[0]) if graphs is None else [slice(None)]
        several = transport.several or len(tiled) > 1
        sums = [_Total(several if i else transport.several, ours=False) for i in range(len(needs))]
        for t, term in enumerate(transport.travel(parts.own)):
            targets = parts.targets(t)
            with term.turn():
                slices = term.arrive()
                dw = [_Total(len(tiled) > 1, ours=False) for own in slices for _ in parts.which]
                for tile in tiled:
                    if graphs is None:
                        pair = tuple(tape[2 * t : 2 * t + 2]) or None
                        grads = _computed_again(call, parts.at(tile), slices, t, pair, ctx.autocast, dy[:, tile])
                    else:
                        grads = _from_graph(graphs, parts, slices, t, dy)
                    transport.after_previous()
                    for i, _ in targets:
                        sums[i].add(grads.pop(0), tile if i == 0 else slice(None), tensors[0].shape[1])
                    for total, grad in zip(dw, grads, strict=True):
                        total.add(grad)
                    del grads
                if home is not None:
                    each, flat = len(parts.which), [total.sum for total in dw]
                    home.add(term.members, [flat[j : j + each] for j in range(0, len(flat), each)])
                del dw
        transport.join(*(total.sum for total in sums if total.any))
        found = [total.sum if total.any else None for total in sums]
        if home is not None:
            for i, grad in zip(parts.which, home.finish(), strict=True):
                found[len(parts.inputs) + i] = grad
        return None, *(None if g is None else g.to(x.dtype) for g, x in zip(found, tensors, strict=True))


class _Total:
    """A sum over terms, over tiles, or both. `several`: more than one will be added; else it is the one, as it came.

    Kept in fp32 where the summands are half precision. `ours`: the first summand may become the sum; autograd may hand
    one tensor out as the gradient of two inputs.
    """

    def __init__(self, several: bool, ours: bool = True):
        self.several, self.copies, self.any = several, not ours, False
        self.sum: Tensor

    def add(self, y: Tensor, tile: slice = slice(None), length: int = 0) -> None:  # noqa: B008  a slice is immutable
        """Add to all of the sum, or to the run `tile` of its dim 1, which is `length` long."""
        if tile == slice(None):
            if self.any:
                self.sum += y
            else:
                self.sum = y.to(accumulate_dtype(y.dtype), copy=self.copies) if self.several else y
        else:
            if not self.any:
                dtype = accumulate_dtype(y.dtype) if self.several else y.dtype
                self.sum = y.new_zeros(y.shape[0], length, *y.shape[2:], dtype=dtype)
            self.sum[:, tile].add_(y)
        self.any = True


def _leaves(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]


def _recorded(graphs: Graphs, call: BlockCall, parts: Parts, slices: list[Slice], t: int) -> Tensor:
    """y of a term, its graph kept."""
    with torch.enable_grad():
        leaves = [_leaves(own, parts.needs_sharded) for own in slices]
        weights = call.plan.transport.cut.assemble(leaves)
        flat = [x for own in leaves for x in own]
        every = [*parts.inputs, *parts.shared, *parts.once, *flat]
        y = graphs.record(lambda: call.run(parts, weights, t), every, weights)
    for leaf in flat:  # its place in the graph is wanted, not the weight: the buffer is used again, and ZeRO-3 frees
        leaf.data = leaf.new_empty(0)
    return y


def _from_graph(graphs: Graphs, parts: Parts, slices: list[Slice], t: int, dy: Tensor) -> list[Tensor]:
    """Gradients of the targets, then of each member's slices, through the graph that was kept."""
    cut, each = parts.plan.transport.cut, len(parts.own)
    targets = [(i if i < len(parts.inputs) else i - each, x) for i, x in parts.targets(t)]
    start = len(parts.inputs) + len(parts.shared) + len(parts.once)
    targets += [(start + j * each + i, own[i]) for j, own in enumerate(slices) for i in parts.which]
    grads = graphs.differentiate(t, [i for i, _ in targets], dy, cut.assemble(slices))
    return [torch.zeros_like(x) if grad is None else grad for (_, x), grad in zip(targets, grads, strict=True)]


def _computed_again(call: BlockCall, parts: Parts, slices: list[Slice], t: int, pair: Pair | None,
                    autocast: tuple[bool, torch.dtype], dy: Tensor) -> list[Tensor]:  # fmt: skip
    """Gradients of the targets, then of each member's slices: the term is computed again, without its last product."""
    plan, (enabled, dtype) = call.plan, autocast
    leaves = [_leaves(own, parts.needs_sharded) for own in slices]
    with (
        record_function("ds_tsp.recompute"),
        torch.enable_grad(),
        torch.autocast(dy.device.type, dtype=dtype) if enabled else nullcontext(),
        core_state(plan.core, parts.inputs[0].shape[1], replay=pair),
        last_gemm_skipped(plan.rowwise),
    ):
        y = call.run(parts, plan.transport.cut.assemble(leaves), t)
    wanted = [x for _, x in parts.targets(t)] + [own[i] for own in leaves for i in parts.which]
    return list(torch.autograd.grad(y, wanted, dy, materialize_grads=True))


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
        call = BlockCall(self, self.tsp_original.forward, args, kwargs)
        return call.output(_Fold.apply(call, *call.inputs, *self.tsp_fold.parameters()))


@functools.cache
def fold_class(original: Any) -> Any:
    """The folded class of `original`; always the same one."""
    first = list(inspect.signature(original.forward).parameters)[1]
    return type(f"Folded{original.__name__}", (Folded, original),
                {"tsp_original": original, "tsp_first_argument": first, "__module__": original.__module__})  # fmt: skip
