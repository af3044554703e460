"""The output layer and the cross-entropy over a vocabulary cut into P slices.

The slices travel like those of an MLP, O = f(AB)C again, and logits exist only for local tokens, one slice and one tile
of rows at a time. Source: METP, doi 10.1631/FITEE.2400602.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .comm import Wire
from .layout import BlockCut, WeightCut, accumulate_dtype, tiles
from .transports import Ring

IGNORE_INDEX = -100  # Hugging Face's and torch's label of a token that does not count


@dataclass(frozen=True)
class LossRequest:
    """What the head is to compute instead of logits: cross-entropy of `targets` [n], summed over those not ignored."""

    targets: Tensor
    steps: tuple[Callable[[Tensor], Tensor], ...]
    label_smoothing: float = 0.0


class LazyLogits:
    """Stands for the logits while the model's own code scales, caps or casts them; records what it does.

    The loss applies the record to one tile of logits at a time. What is not elementwise is refused.
    """

    def __init__(self, hidden: Tensor, head: ShardedHead, steps: tuple[Callable[[Tensor], Tensor], ...] = ()):
        self.hidden, self.head, self.steps = hidden, head, steps
        self.shape = torch.Size([*hidden.shape[:-1], head.out_features])
        self.dtype, self.device = hidden.dtype, hidden.device

    def _then(self, step: Callable[[Tensor], Tensor]) -> LazyLogits:
        return LazyLogits(self.hidden, self.head, (*self.steps, step))

    def __mul__(self, other: Any) -> LazyLogits:
        return self._then(lambda z: z * _scalar(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> LazyLogits:
        return self._then(lambda z: z / _scalar(other))

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits:
        return self._then(lambda z: z.to(*args, **kwargs))

    def tanh(self) -> LazyLogits:
        return self._then(torch.tanh)

    def contiguous(self) -> LazyLogits:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.tanh, torch.mul, torch.div) or not isinstance(args[0], cls) or kwargs:
            raise _not_elementwise(getattr(func, "__name__", str(func)))
        rest = tuple(_scalar(x) for x in args[1:])
        return args[0]._then(lambda z: func(z, *rest))

    def __getattr__(self, name: str) -> Any:
        raise _not_elementwise(name)

    def __getitem__(self, index: Any) -> Any:
        raise _not_elementwise("indexing")

    __setitem__ = __getitem__

    def local(self) -> Tensor:
        """The local logits after all, [B, s, V]."""
        z = nn.Module.__call__(self.head, self.hidden)
        for step in self.steps:
            z = step(z)
        return z

    def loss(self, targets: Tensor, label_smoothing: float) -> Tensor:
        """Cross-entropy summed over the local tokens; see `_RingCrossEntropy`."""
        return nn.Module.__call__(self.head, self.hidden, LossRequest(targets.flatten(), self.steps, label_smoothing))

    def float(self) -> LazyLogits:  # last: it hides the builtin from what follows in the class
        return self._then(lambda z: z.float())


def _scalar(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise _not_elementwise(f"a factor of shape {tuple(value.shape)}")
    return value


def _not_elementwise(what: str) -> AttributeError:
    return AttributeError(
        f"the model asked its logits for {what}, but with a sharded vocabulary they exist only slice by slice and can "
        'be scaled, capped by tanh and cast; set "shard_vocab": false in the "tsp" section'
    )


class ShardedHead(nn.Linear):
    """The output layer of which this rank holds a slice of the rows (the vocabulary)."""

    tsp_state: Any  # .mesh, and .batch with the shift_labels of the forward that is running
    tsp_ring: Ring

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # While the model computes its loss the logits stay unborn; the weight is needed, and under ZeRO-3 fetched,
        # later.
        batch = self.tsp_state.batch
        if batch is not None and batch.shift_labels is not None:
            return LazyLogits(args[0] if args else kwargs["input"], self)
        return super().__call__(*args, **kwargs)

    def forward(self, input: Tensor, request: LossRequest | None = None) -> Tensor:
        parameters = [self.weight] if self.bias is None else [self.weight, self.bias]
        if request is None:
            return _RingLinear.apply(self.tsp_ring, input, *parameters)
        return _RingCrossEntropy.apply(self.tsp_ring, request, input, *parameters)


def head_ring(head: nn.Linear, wire: Wire) -> Ring:
    """How the slices of the output layer travel; its parameters are cut already."""
    cuts: list[WeightCut] = [getattr(p, "tsp_cut") for p in head.parameters(recurse=False)]  # noqa: B009
    return Ring(BlockCut(tuple(cuts), wire.mesh.size, wire.mesh.size), wire)


def _slices(ring: Ring, parameters: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """The slices as they pass by, and whose they are."""
    for term in ring.travel(list(parameters)):
        (j,), (own,) = term.members, term.arrive()
        yield j, own


def _bounds(ring: Ring, j: int) -> tuple[int, int]:
    bounds = ring.cut.weights[0].bounds
    return bounds[j], bounds[j + 1]


class _RingLinear(torch.autograd.Function):
    """Whole logits of the local tokens, when the caller wants them.

    Shapes: x [B, s, D], weight [v, D] -> [B, s, V]. Communication per rank: forward P-1 hops of the weight, backward
    P-1 hops of the weight and P of dW. Gradient: dW arrives summed over the axis; reduce it over dp only.
    """

    @staticmethod
    def forward(ctx: Any, ring: Ring, x: Tensor, *parameters: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], ring.cut.weights[0].bounds[-1])
        for j, own in _slices(ring, parameters):
            low, high = _bounds(ring, j)
            out[..., low:high] = F.linear(x, *own)
        ctx.ring = ring
        ctx.save_for_backward(x, *parameters)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor):
        ring, (x, *parameters) = ctx.ring, ctx.saved_tensors
        rows = x.flatten(0, -2)
        dx, home = _zero_dx(rows), ring.homeward(range(len(parameters)))
        for j, own in _slices(ring, parameters):
            low, high = _bounds(ring, j)
            dz = dout[..., low:high].flatten(0, -2)
            dx += dz @ own[0]
            home.add((j,), [[dz.mT @ rows, dz.sum(0)][: len(own)]])
        return None, dx.to(x.dtype).view_as(x), *(g.to(x.dtype) for g in home.finish())


def _zero_dx(rows: Tensor) -> Tensor:
    """Where dx [n, D] is summed over slices of the vocabulary: in fp32 where x is half precision."""
    return torch.zeros_like(rows, dtype=accumulate_dtype(rows.dtype))


class _RingCrossEntropy(torch.autograd.Function):
    """Cross-entropy of the local tokens, summed; the slices of the head travel, whole logits never exist.

    With z = steps(x W^T + b): loss = sum over valid tokens of lse(z) - (1 - a) z_target - a mean(z), a the smoothing.

    Shapes: x [B, s, D], weight [v, D], targets [B s] -> scalar in fp32 (fp64 for fp64).
    Live logits: [row tile, V/P], see `layout.tiles`.
    Communication per rank: forward P-1 hops of the weight, backward P-1 hops of the weight and P of dW.
    Saved: x, the own slice, lse. Gradient: dW arrives summed over the axis; reduce it over dp only.
    """

    @staticmethod
    def forward(ctx: Any, ring: Ring, request: LossRequest, x: Tensor, *parameters: Tensor) -> Tensor:
        rows, a = x.flatten(0, -2), request.label_smoothing
        dtype, n = accumulate_dtype(x.dtype), rows.shape[0]
        highest = rows.new_full((n,), -torch.inf, dtype=dtype)
        total, at_target, summed = (rows.new_zeros(n, dtype=dtype) for _ in range(3))
        for j, own in _slices(ring, parameters):
            low, high = _bounds(ring, j)
            inside, column = _columns(request.targets, low, high)
            for tile in tiles(rows.shape[0], rows.numel(), high - low):
                z = _logits(rows[tile], own, request).to(dtype)
                at_target[tile].add_(z.gather(1, column[tile, None])[:, 0].where(inside[tile], 0))
                if a:
                    summed[tile].add_(z.sum(1))
                now = torch.maximum(highest[tile], z.amax(1))
                total[tile] = total[tile] * (highest[tile] - now).exp() + (z - now[:, None]).exp_().sum(1)
                highest[tile] = now
        lse = highest + total.log()
        valid = request.targets != IGNORE_INDEX
        loss = (lse - (1 - a) * at_target - a / ring.cut.weights[0].bounds[-1] * summed).where(valid, 0).sum()
        ctx.ring, ctx.request = ring, request
        ctx.save_for_backward(x, lse, *parameters)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor):
        ring, request, a = ctx.ring, ctx.request, ctx.request.label_smoothing
        x, lse, *parameters = ctx.saved_tensors
        rows, size = x.flatten(0, -2), ring.cut.weights[0].bounds[-1]
        weight = torch.where(request.targets != IGNORE_INDEX, dloss, 0)[:, None]
        which = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need]
        dx, home = _zero_dx(rows), ring.homeward(which) if which else None
        for j, own in _slices(ring, parameters):
            low, high = _bounds(ring, j)
            inside, column = _columns(request.targets, low, high)
            sums = [torch.zeros_like(p, dtype=lse.dtype) for p in own]
            for tile in tiles(rows.shape[0], rows.numel(), high - low):
                with torch.enable_grad():
                    z = _linear(rows[tile], own).requires_grad_()
                    capped = _after(z, request)
                grad = (capped.detach().to(lse.dtype) - lse[tile, None]).exp_()
                share = inside[tile].to(grad.dtype) * (a - 1)
                grad.scatter_add_(1, column[tile, None], share[:, None]).sub_(a / size).mul_(weight[tile])
                dz = torch.autograd.grad(capped, z, grad.to(capped.dtype))[0] if request.steps else grad.to(z.dtype)
                dx[tile].add_(dz @ own[0])
                sums[0] += dz.mT @ rows[tile]
                if len(sums) > 1:
                    sums[1] += dz.sum(0)
            if home is not None:
                home.add((j,), [[sums[i] for i in which]])
        grads: list[Tensor | None] = [None] * len(parameters)
        if home is not None:
            for i, grad in zip(which, home.finish(), strict=True):
                grads[i] = grad.to(parameters[i].dtype)
        return None, None, dx.to(x.dtype).view_as(x), *grads


def _linear(rows: Tensor, own: list[Tensor]) -> Tensor:
    return F.linear(rows.detach(), *(p.detach() for p in own))


def _after(z: Tensor, request: LossRequest) -> Tensor:
    return functools.reduce(lambda value, step: step(value), request.steps, z)


def _logits(rows: Tensor, own: list[Tensor], request: LossRequest) -> Tensor:
    return _after(_linear(rows, own), request)


def _columns(targets: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in a slice, and in which of its columns (any, where they do not)."""
    return (targets >= low) & (targets < high), (targets - low).clamp(0, high - low - 1)


@functools.cache
def sharded_class(original: Any, sharded: Any) -> Any:
    """`original` with the plain layer under it replaced by `sharded`: its own forward still comes first."""
    bases = (sharded,) if issubclass(sharded, original) else (original, sharded)
    return type(f"Sharded{original.__name__}", bases, {"__module__": original.__module__})


def refusal(embedding: Any, head: Any, size: int) -> str:
    """Why these two layers cannot be cut by the vocabulary, or ''."""
    if not isinstance(embedding, nn.Embedding):
        return f"the input embedding is a {type(embedding).__name__}, not an nn.Embedding"
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            return f"the input embedding has {option}={getattr(embedding, option)}"
    if head is not None and (not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward):
        return f"the output layer is a {type(head).__name__}, not an nn.Linear"
    rows = min(m.weight.shape[0] for m in (embedding, head) if m is not None)
    return f"a vocabulary of {rows} has no row for some of {size} ranks" if rows < size else ""
