"""What travels over the TSP axis: weight slices, their gradients, and runs of tokens. All through ``deepspeed.comm``.

A transport moves the slices of one block past every rank, one term at a time, and takes the weight gradients home. The
next term's weights are in flight while the caller computes with this term's. A broadcast or a ring hop is a collective
of the whole group, issued in the same order on every rank, so neither can deadlock and the comms logger sees both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from .layout import BlockCut, SequenceLayout, accumulate_dtype, pack
from .mesh import Mesh

Slice = list[Tensor]  # one rank's slices of the weights of a block


@dataclass(frozen=True)
class InFlight:
    """A tensor that is right only after ``wait``; keeps alive what the transfer still reads."""

    tensor: Tensor
    work: Any
    source: Tensor | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


def hop(tensor: Tensor, shape: tuple[int, ...], mesh: Mesh, distance: int = 1) -> InFlight:
    """Send contiguous `tensor` to the rank `distance` ahead on the ring; a tensor of `shape` arrives from behind."""
    if distance % mesh.size == 0:
        return InFlight(tensor, None)
    out = tensor.new_empty(shape)
    send_splits, receive_splits = [0] * mesh.size, [0] * mesh.size
    send_splits[(mesh.rank + distance) % mesh.size] = tensor.numel()
    receive_splits[(mesh.rank - distance) % mesh.size] = out.numel()
    flat = (out.view(-1), tensor.view(-1))
    work = dist.all_to_all_single(*flat, receive_splits, send_splits, group=mesh.group, async_op=True)
    return InFlight(out, work, tensor)


class Transport:
    """Moves the slices of one block over the axis. A subclass says in which order and by which collective."""

    def __init__(self, cut: BlockCut, mesh: Mesh):
        self.cut, self.mesh = cut, mesh
        self.all = range(len(cut.weights))

    def terms(self) -> list[Sequence[int]]:
        """For each term, in this rank's order, the ranks whose slices make it up."""
        raise NotImplementedError

    def travel(self, own: Slice) -> Iterator[tuple[Sequence[int], list[Slice]]]:
        """Yield each term's members and their slices. The own slices are yielded as they are, not copied."""
        raise NotImplementedError

    def homeward(self, which: Sequence[int]) -> Homeward:
        """Where the caller drops dW of the weights `which` after each term, to pick up its own slice's sum."""
        raise NotImplementedError


class Homeward:
    """Sums dW over the ranks and brings each slice's sum to its owner, in fp32 where the weights are half precision."""

    def __init__(self, transport: Transport, which: Sequence[int]):
        self.cut, self.mesh, self.which = transport.cut, transport.mesh, which

    def add(self, members: Sequence[int], grads: Sequence[Slice]) -> None:
        raise NotImplementedError

    def finish(self) -> Slice:
        """dW of the own slice, summed over the axis."""
        raise NotImplementedError

    def _pack(self, grads: Slice) -> Tensor:
        return pack(grads, accumulate_dtype(grads[0].dtype))


class Broadcast(Transport):
    """Every slice is broadcast by its owner; every rank computes the same term at the same time (attention).

    Communication per rank: received (P-1) slices of weights forward and backward; dW is reduced to its owner.
    """

    def terms(self) -> list[Sequence[int]]:
        return [self.cut.members(g) for g in range(self.cut.groups)]

    def travel(self, own: Slice) -> Iterator[tuple[Sequence[int], list[Slice]]]:
        terms = self.terms()
        if self.mesh.size == 1:
            yield terms[0], [own]
            return
        packed = pack(own)
        ahead = self._start(terms[0], packed)
        for t, members in enumerate(terms):
            arriving, ahead = ahead, self._start(terms[t + 1], packed) if t + 1 < len(terms) else []
            flats = [flight.wait() for flight in arriving]
            # The own slices are at hand; the packed copy serves the other ranks only.
            yield members, [own if j == self.mesh.rank else self.cut.unpack(flat, j, self.all)
                            for j, flat in zip(members, flats, strict=True)]  # fmt: skip

    def _start(self, members: Sequence[int], packed: Tensor) -> list[InFlight]:
        flights = []
        for j in members:
            buffer = packed if j == self.mesh.rank else packed.new_empty(self.cut.numel(j, self.all))
            work = dist.broadcast(buffer, self.mesh.ranks[j], group=self.mesh.group, async_op=True)
            flights.append(InFlight(buffer, work))
        return flights

    def homeward(self, which: Sequence[int]) -> Homeward:
        return (_ReduceHome if self.mesh.size > 1 else _AtHome)(self, which)


class _AtHome(Homeward):
    """One rank: the only term's dW is the sum already, so it is neither copied nor cast."""

    def add(self, members: Sequence[int], grads: Sequence[Slice]) -> None:
        self.own = grads[0]

    def finish(self) -> Slice:
        return self.own


class _ReduceHome(Homeward):
    def __init__(self, transport: Transport, which: Sequence[int]):
        super().__init__(transport, which)
        self.flights: list[InFlight] = []
        self.own: Tensor | None = None

    def add(self, members: Sequence[int], grads: Sequence[Slice]) -> None:
        self._land()  # at most one term's buffers are in flight
        for j, grad in zip(members, grads, strict=True):
            flat = self._pack(grad)
            if j == self.mesh.rank:
                self.own = flat
            work = dist.reduce(flat, self.mesh.ranks[j], group=self.mesh.group, async_op=True)
            self.flights.append(InFlight(flat, work))

    def _land(self) -> None:
        while self.flights:
            self.flights.pop().wait()

    def finish(self) -> Slice:
        self._land()
        assert self.own is not None
        return self.cut.unpack(self.own, self.mesh.rank, self.which)


class Ring(Transport):
    """Slices go round a ring: at step t rank p computes with slice p-t, while slice p-t-1 is on its way (MLP).

    Communication per rank: P-1 hops of weights forward and backward. dW of a slice rides one step behind the slice,
    from rank to rank, and takes a last hop home: P hops.
    """

    def terms(self) -> list[Sequence[int]]:
        return [((self.mesh.rank - t) % self.mesh.size,) for t in range(self.mesh.size)]

    def travel(self, own: Slice) -> Iterator[tuple[Sequence[int], list[Slice]]]:
        last = self.mesh.size - 1
        flat = pack(own) if last else None
        for t, (j,) in enumerate(self.terms()):
            ahead = None
            if t < last:
                assert flat is not None
                ahead = hop(flat, (self.cut.numel((j - 1) % self.mesh.size, self.all),), self.mesh)
            yield (j,), [own if t == 0 else self.cut.unpack(flat, j, self.all)]  # type: ignore[arg-type]
            flat = ahead.wait() if ahead else None

    def homeward(self, which: Sequence[int]) -> Homeward:
        return (_RingHome if self.mesh.size > 1 else _AtHome)(self, which)


class _RingHome(Homeward):
    def __init__(self, transport: Transport, which: Sequence[int]):
        super().__init__(transport, which)
        self.riding: InFlight | None = None

    def add(self, members: Sequence[int], grads: Sequence[Slice]) -> None:
        (j,), (grad,) = members, grads
        flat = self._pack(grad)
        if self.riding is not None:
            flat += self.riding.wait()
        self.riding = hop(flat, (self.cut.numel((j - 1) % self.mesh.size, self.which),), self.mesh)

    def finish(self) -> Slice:
        assert self.riding is not None
        return self.cut.unpack(self.riding.wait(), self.mesh.rank, self.which)


def gather_sequence(x: Tensor, layout: SequenceLayout, mesh: Mesh) -> Tensor:
    """Every rank's tokens in logical order.

    Shapes: x [B, s, ...] -> [B, S, ...], S padded. Communication per rank: received (P-1) * x.numel() elements.
    """
    if mesh.size == 1:
        return x
    gathered = x.new_empty(mesh.size, *x.shape)
    # Flat on both sides: gloo takes the concatenated form only.
    dist.all_gather_into_tensor(gathered.view(-1), x.contiguous().view(-1), group=mesh.group)
    full = x.new_empty(x.shape[0], layout.num_chunks, layout.chunk, *x.shape[2:])
    for rank in range(mesh.size):
        held = gathered[rank].unflatten(1, (-1, layout.chunk))
        for i, chunk in enumerate(layout.chunks(rank)):
            full[:, chunk] = held[:, i]
    return full.flatten(1, 2)


def reduce_scatter_sequence(full: Tensor, layout: SequenceLayout, mesh: Mesh) -> Tensor:
    """The sum over ranks of each one's [B, S, ...], of which this rank gets its own tokens: [B, s, ...].

    The transpose of `gather_sequence`. Communication per rank: received (P-1)/P * full.numel() elements.
    """
    if mesh.size == 1:
        return full
    chunked = full.unflatten(1, (layout.num_chunks, layout.chunk))
    shape = (full.shape[0], layout.chunks_per_rank, layout.chunk, *full.shape[2:])
    parts = full.new_empty(mesh.size, *shape)
    for rank in range(mesh.size):
        for i, chunk in enumerate(layout.chunks(rank)):
            parts[rank, :, i] = chunked[:, chunk]
    mine = full.new_empty(shape)
    dist.reduce_scatter_tensor(mine.view(-1), parts.view(-1), group=mesh.group)
    return mine.flatten(1, 2)


def all_reduce(tensor: Tensor, group: Any, size: int) -> Tensor:
    """The sum over the `size` ranks of `group`, in a new tensor; `tensor` is left as it is."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    if size > 1:
        dist.all_reduce(total, group=group)
    return total


def all_gather_rows(row: Tensor, mesh: Mesh) -> Tensor:
    """Each rank's 1-D `row`, stacked: [P, n]."""
    rows = row.new_empty(mesh.size, row.numel())
    if mesh.size == 1:
        return rows.copy_(row[None])
    dist.all_gather_into_tensor(rows.view(-1), row, group=mesh.group)
    return rows


def broadcast_from_first(tensor: Tensor, mesh: Mesh) -> None:
    """Overwrite contiguous `tensor` with that of the first rank of the axis."""
    if mesh.size > 1:
        dist.broadcast(tensor, mesh.ranks[0], group=mesh.group)


def gather_slices(own: Tensor, cut_shapes: Sequence[tuple[int, ...]], mesh: Mesh) -> list[Tensor] | None:
    """Slices of any shape, collected on the first rank of the axis, one after another; None elsewhere."""
    if mesh.rank:
        dist.send(own.contiguous(), mesh.ranks[0], group=mesh.group)
        return None
    slices = [own]
    for rank in range(1, mesh.size):
        slices.append(own.new_empty(cut_shapes[rank]))
        dist.recv(slices[-1], mesh.ranks[rank], group=mesh.group)
    return slices


def gather_objects(value: Any) -> list[Any]:
    """The `value` of every rank of the world, in rank order: for saving and loading, where ranks tell each other how it
    went."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
