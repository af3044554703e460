"""What travels for one block: the slices of its weights, past every rank, and their gradients, home to their owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from deepspeed import comm as dist
from torch import Tensor
from torch.profiler import record_function

from .comm import InFlight, Wire
from .layout import BlockCut, accumulate_dtype, pack, together

Slice = list[Tensor]  # one rank's slices of the weights of a block


@dataclass(frozen=True)
class Term:
    """One term: the ranks whose slices make it up. Compute inside of `turn`; `arrive` waits for the slices there."""

    members: Sequence[int]
    turn: Callable[[], AbstractContextManager[None]]
    arrive: Callable[[], list[Slice]]


class Transport:
    """Moves the slices of one block over the axis. A subclass says in which order and by which collective.

    `lanes`: terms take turns on the two streams of the wire.
    """

    def __init__(self, cut: BlockCut, wire: Wire):
        self.cut, self.wire, self.mesh = cut, wire, wire.mesh
        self.all = range(len(cut.weights))
        self.lanes = False

    def terms(self) -> list[Sequence[int]]:
        """For each term, in this rank's order, the ranks whose slices make it up."""
        raise NotImplementedError

    def travel(self, own: Slice) -> Iterator[Term]:
        """The terms with their slices, of which `own` is this rank's; the next are on their way while one computes.

        The own slices come as they are, not copied; those of others lie in buffers that a later term overwrites.
        """
        raise NotImplementedError

    def homeward(self, which: Sequence[int]) -> Homeward:
        """Where the caller drops dW of the weights `which` after each term, to pick up its own slice's sum."""
        raise NotImplementedError

    @property
    def several(self) -> bool:
        """Whether there is more than one term to sum over."""
        return len(self.terms()) > 1

    def after_previous(self) -> None:
        """Call inside of a term's turn, before adding to a sum over terms."""
        if self.lanes:
            self.wire.after_other_lane()

    def join(self, *results: Tensor) -> None:
        """Call when all terms have been computed: `results` may then be used."""
        if self.lanes:
            self.wire.join(*results)


class Homeward:
    """Sums dW over the ranks and brings each slice's sum to its owner, in fp32 where the weights are half precision."""

    def __init__(self, transport: Transport, which: Sequence[int]):
        self.cut, self.wire, self.mesh, self.which = transport.cut, transport.wire, transport.mesh, which

    def add(self, members: Sequence[int], grads: Sequence[Slice]) -> None:
        raise NotImplementedError

    def finish(self) -> Slice:
        """dW of the own slice, summed over the axis."""
        raise NotImplementedError


class Broadcast(Transport):
    """Every slice is broadcast by its owner; every rank computes the same term at the same time (attention).

    Communication per rank: received (P-1) slices of weights forward and backward; dW is reduced to its owner.
    Buffers: the own slices packed, unless they lie together already; three terms' slices of other ranks.
    """

    SLOTS = Wire.LANES + 1  # with as many as lanes, a transfer would wait for the kernel that runs, and K/V behind it

    def __init__(self, cut: BlockCut, wire: Wire):
        super().__init__(cut, wire)
        self.lanes = cut.groups > 1

    def terms(self) -> list[Sequence[int]]:
        return [self.cut.members(g) for g in range(self.cut.groups)]

    def travel(self, own: Slice) -> Iterator[Term]:
        terms, wire = self.terms(), self.wire
        if self.mesh.size == 1:
            yield Term(terms[0], nullcontext, lambda: [own])
            return
        packed, lent = _own_in_one_piece(own, wire)
        started: list[list[InFlight]] = []
        for t, members in enumerate(terms):
            while len(started) <= min(t + wire.overlap, len(terms) - 1):
                u = len(started)
                if u >= self.SLOTS:
                    wire.main_after(u - self.SLOTS)  # the last reader of the slot
                started.append(self._start(terms[u], packed, ("weights", u % self.SLOTS), lent))
            yield Term(members, self._turn(t), self._arrive(members, started[t], own))
        wire.give_back_all(lent)

    def _turn(self, t: int) -> Callable[[], AbstractContextManager[None]]:
        return (lambda: self.wire.turn(t)) if self.lanes else nullcontext

    def _start(self, members: Sequence[int], packed: Tensor, slot: Any, lent: dict[Any, Tensor]) -> list[InFlight]:
        sizes = [0 if j == self.mesh.rank else self.cut.numel(j, self.all) for j in members]
        if slot not in lent and any(sizes):
            largest = max(
                sum(self.cut.numel(j, self.all) for j in term if j != self.mesh.rank) for term in self.terms()
            )
            lent[slot] = self.wire.borrow(slot, (largest,), packed)
        parts = lent[slot][: sum(sizes)].split(sizes) if any(sizes) else [packed] * len(members)
        flights = []
        for j, part in zip(members, parts, strict=True):
            flat = packed if j == self.mesh.rank else part
            flights.append(InFlight(flat, self.wire.start(dist.broadcast, flat, self.mesh.ranks[j])))
        return flights

    def _arrive(self, members: Sequence[int], flights: list[InFlight], own: Slice) -> Callable[[], list[Slice]]:
        def arrive() -> list[Slice]:
            flats = [flight.wait() for flight in flights]
            # The own slices are at hand; the packed copy serves the other ranks only.
            return [own if j == self.mesh.rank else self.cut.unpack(flat, j, self.all)
                    for j, flat in zip(members, flats, strict=True)]  # fmt: skip

        return arrive

    def homeward(self, which: Sequence[int]) -> Homeward:
        return (_ReduceHome if self.mesh.size > 1 else _AtHome)(self, which)


class _AtHome(Homeward):
    """One rank: the only term's dW is the sum already, so it is neither copied nor cast."""

    def add(self, members: Sequence[int], grads: Sequence[Slice]) -> None:
        self.own = grads[0]

    def finish(self) -> Slice:
        return self.own


class _ReduceHome(Homeward):
    """Buffers: dW of two terms, one on its way while the next is computed."""

    def __init__(self, transport: Transport, which: Sequence[int]):
        super().__init__(transport, which)
        self.flights: list[list[tuple[Any, InFlight]]] = []
        self.terms = 0
        self.own: Tensor | None = None

    def add(self, members: Sequence[int], grads: Sequence[Slice]) -> None:
        if len(self.flights) == Wire.LANES:
            self._land()
        flights: list[tuple[Any, InFlight]] = []
        for j, grad in zip(members, grads, strict=True):
            name, numel = ("dW", self.terms % Wire.LANES, j % len(members)), self.cut.numel(j, self.which)
            dtype = accumulate_dtype(grad[0].dtype)
            if j == self.mesh.rank:  # not a buffer: it becomes the gradient
                self.own = flat = pack(grad, grad[0].new_empty(numel, dtype=dtype))
            else:
                flat = pack(grad, self.wire.borrow(name, (numel,), grad[0], dtype))
            flights.append((name, InFlight(flat, self.wire.start(dist.reduce, flat, self.mesh.ranks[j]))))
        self.flights.append(flights)
        self.terms += 1

    def _land(self) -> None:
        """Wait for the oldest term, and give its buffers back."""
        for name, flight in self.flights.pop(0):
            flat = flight.wait()
            if flat is not self.own:
                self.wire.give_back(name, flat)

    def finish(self) -> Slice:
        while self.flights:
            self._land()
        assert self.own is not None
        return self.cut.unpack(self.own, self.mesh.rank, self.which)


class Ring(Transport):
    """Slices go round a ring: at step t rank p computes with slice p-t, while slice p-t-1 is on its way (MLP).

    Communication per rank: P-1 hops of weights forward and backward. dW of a slice rides one step behind the slice,
    from rank to rank, and takes a last hop home: P hops.
    Buffers: the own slice packed, unless it lies together already; two slices of other ranks.
    """

    def terms(self) -> list[Sequence[int]]:
        return [((self.mesh.rank - t) % self.mesh.size,) for t in range(self.mesh.size)]

    def travel(self, own: Slice) -> Iterator[Term]:
        size, wire = self.mesh.size, self.wire
        if size == 1:
            yield Term((0,), nullcontext, lambda: [own])
            return
        flat, lent = _own_in_one_piece(own, wire)
        largest = max(self.cut.numel(j, self.all) for j in range(size))
        for t, (j,) in enumerate(self.terms()):
            ahead = None
            if t < size - 1:
                name = ("slice", t % 2)
                if name not in lent:
                    lent[name] = wire.borrow(name, (largest,), flat)
                ahead = wire.hop(flat, lent[name][: self.cut.numel((j - 1) % size, self.all)])
            slices = own if t == 0 else self.cut.unpack(flat, j, self.all)
            yield Term((j,), nullcontext, lambda slices=slices: [slices])  # type: ignore[misc]
            flat = flat if ahead is None else ahead.wait()
        wire.give_back_all(lent)

    def homeward(self, which: Sequence[int]) -> Homeward:
        return (_RingHome if self.mesh.size > 1 else _AtHome)(self, which)


class _RingHome(Homeward):
    """Buffers: two, one with the sum that leaves, one for the sum that arrives and to which the next dW is added."""

    def __init__(self, transport: Transport, which: Sequence[int]):
        super().__init__(transport, which)
        self.riding: InFlight | None = None
        self.lent: list[Tensor] = []

    def add(self, members: Sequence[int], grads: Sequence[Slice]) -> None:
        (j,), (grad,), size = members, grads, self.mesh.size
        dtype = accumulate_dtype(grad[0].dtype)
        if self.riding is None:
            largest = max(self.cut.numel(rank, self.which) for rank in range(size))
            self.lent = [self.wire.borrow(("dW", i), (largest,), grad[0], dtype) for i in range(2)]
            flat = pack(grad, self.lent[0][: self.cut.numel(j, self.which)])
        else:
            flat = self.riding.wait()
            with record_function("ds_tsp.pack"):
                for part, dw in zip(self.cut.unpack(flat, j, self.which), grad, strict=True):
                    part += dw
        numel, step = self.cut.numel((j - 1) % size, self.which), (self.mesh.rank - j) % size
        # The last hop brings the own slice's sum, which becomes the gradient: not into a buffer.
        out = flat.new_empty(numel) if step == size - 1 else self.lent[1 - step % 2][:numel]
        self.riding = self.wire.hop(flat, out)

    def finish(self) -> Slice:
        assert self.riding is not None
        own = self.cut.unpack(self.riding.wait(), self.mesh.rank, self.which)
        for i, buffer in enumerate(self.lent):
            self.wire.give_back(("dW", i), buffer)
        return own


def _own_in_one_piece(own: Slice, wire: Wire) -> tuple[Tensor, dict[Any, Tensor]]:
    """The own slices as one flat tensor, and the buffer that it took, by name; none if they lie together already.

    Raises ValueError if the dtypes differ: the receiver takes all slices to be of one.
    """
    dtypes = {t.dtype for t in own}
    if len(dtypes) > 1:
        raise ValueError(f"weights of a block must have one dtype to travel together; got {[t.dtype for t in own]}")
    flat = together(own)
    if flat is not None:
        return flat, {}
    buffer = pack(own, wire.borrow("own", (sum(t.numel() for t in own),), own[0]))
    return buffer, {"own": buffer}
