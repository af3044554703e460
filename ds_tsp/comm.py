"""Collectives over the TSP axis, all through ``deepspeed.comm``, and how a model's transfers run: ahead of their use,
into buffers that its layers share, on two streams.

A ring hop is a collective of the whole group, like every other transfer, issued in the same order on every rank: none
of them can deadlock, and the comms logger sees them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.profiler import record_function

from .layout import SequenceLayout
from .mesh import Mesh


@dataclass(frozen=True)
class InFlight:
    """A tensor that is right only after ``wait``; keeps alive what the transfer still reads."""

    tensor: Tensor
    work: Any = None
    source: Tensor | None = None

    def wait(self) -> Tensor:
        """Orders the current stream behind the transfer; on a CPU, blocks. The host never waits for an accelerator."""
        if self.work is not None:
            with record_function("ds_tsp.wire"):
                self.work.wait()
        return self.tensor


class _Idle:
    """Stands for a stream where the device has none: everything is in order already."""

    def wait_stream(self, other: Any) -> None:
        """As that of torch.cuda.Stream."""


class Wire:
    """How one model's transfers run. One object per model, shared by all its blocks.

    `overlap`: transfers start ahead of their use. The results are the same without, bit for bit.

    Buffers are lent under a name to one block at a time, and grow to the largest that was asked for. So a model has one
    set of them, and not one per layer. `buffer_bytes` is what they take.

    Terms of an attention block take turns on two streams ("lanes"): the exchange of K/V of one runs under the kernel of
    the other. Transfers of weights start from the main stream, which waits for no kernel but the one that last read
    the buffer. On a CPU, and without overlap, there is one stream and the same code runs on it.
    """

    LANES = 2

    def __init__(self, mesh: Mesh, overlap: bool = True) -> None:
        self.mesh, self.overlap, self.lane = mesh, overlap, 0
        self._kept: dict[Any, Tensor] = {}
        self._lent: dict[Any, Tensor] = {}
        self._streams: list[Any] = []

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.numel() * buffer.itemsize for buffer in self._kept.values())

    def borrow(self, name: Any, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous tensor of `shape` with whatever is in it. Give it back when its last reader has been started."""
        numel, key = math.prod(shape), (name, dtype or like.dtype, like.device)
        buffer = self._kept.pop(key, None)
        if buffer is None or buffer.numel() < numel:
            del buffer  # first, so that the two never live at once
            buffer = like.new_empty(numel, dtype=key[1])
        self._lent[key] = buffer
        return buffer[:numel].view(*shape)

    def give_back(self, name: Any, buffer: Tensor) -> None:
        """After an error nothing is given back, since a transfer may still write to it."""
        key = (name, buffer.dtype, buffer.device)
        self._kept[key] = self._lent.pop(key)

    def give_back_all(self, lent: Mapping[Any, Tensor]) -> None:
        for name, buffer in lent.items():
            self.give_back(name, buffer)

    @contextmanager
    def turn(self, term: int) -> Iterator[None]:
        """What runs inside runs on the lane of `term`, behind what the main stream was given so far."""
        accelerator = get_accelerator()
        main = self._main()
        if not self._streams:
            make = accelerator.Stream if self.overlap else None
            self._streams = [_Idle() if make is None else make() for _ in range(self.LANES)]
        self.lane = term % self.LANES
        stream = self._streams[self.lane]
        stream.wait_stream(main)
        try:
            with accelerator.stream(None if isinstance(stream, _Idle) else stream):
                yield
        finally:
            self.lane = 0

    def after_other_lane(self) -> None:
        """Order this lane behind all that the other one was given: for sums over terms."""
        self._streams[self.lane].wait_stream(self._streams[1 - self.lane])

    def main_after(self, term: int) -> None:
        """Order the main stream behind the lane of `term`."""
        if self._streams:
            self._main().wait_stream(self._streams[term % self.LANES])

    def join(self, *results: Tensor) -> None:
        """Order the main stream behind both lanes; `results` were allocated on a lane and are used on the main one."""
        for term in range(self.LANES):
            self.main_after(term)
        for tensor in results:
            if tensor.device.type != "cpu" and not isinstance(self._main(), _Idle):
                tensor.record_stream(self._main())

    def _main(self) -> Any:
        stream = get_accelerator().current_stream() if self.overlap else None
        return _Idle() if stream is None else stream

    def start(self, collective: Callable[..., Any], *args: Any) -> Any:
        """Start `collective` over the group; the handle to wait for, None if it is done."""
        with record_function("ds_tsp.wire"):
            return collective(*args, group=self.mesh.group, async_op=self.overlap)

    def hop(self, tensor: Tensor, out: Tensor) -> InFlight:
        """Send contiguous `tensor` to the next rank of the ring; what the rank behind sends arrives in `out`."""
        if self.mesh.size == 1:
            return InFlight(tensor)
        flat, splits = (out.view(-1), tensor.view(-1)), _splits(tensor, out, self.mesh, 1)
        return InFlight(out, self.start(dist.all_to_all_single, *flat, *splits), tensor)


def _splits(tensor: Tensor, out: Tensor, mesh: Mesh, distance: int) -> tuple[list[int], list[int]]:
    """Of an all-to-all in which each rank sends to the rank `distance` ahead only: what is received, what is sent."""
    received, sent = [0] * mesh.size, [0] * mesh.size
    sent[(mesh.rank + distance) % mesh.size] = tensor.numel()
    received[(mesh.rank - distance) % mesh.size] = out.numel()
    return received, sent


def exchange(tensor: Tensor, shape: tuple[int, ...], mesh: Mesh, distance: int) -> Tensor:
    """Send contiguous `tensor` to the rank `distance` ahead on the ring; a tensor of `shape` arrives from behind."""
    if distance % mesh.size == 0:
        return tensor
    out = tensor.new_empty(shape)
    dist.all_to_all_single(out.view(-1), tensor.view(-1), *_splits(tensor, out, mesh, distance), group=mesh.group)
    return out


def gather_sequence(x: Tensor, layout: SequenceLayout, mesh: Mesh) -> Tensor:
    """Every rank's tokens in logical order.

    Shapes: x [B, s, ...] -> [B, S, ...], S padded.
    Communication per rank: received (P-1) * x.numel() elements.
    """
    if mesh.size == 1:
        return x
    raw = x.new_empty(mesh.size, *x.shape)
    with record_function("ds_tsp.wire"):
        # Flat on both sides: gloo takes the concatenated form only.
        dist.all_gather_into_tensor(raw.view(-1), x.contiguous().view(-1), group=mesh.group)
    with record_function("ds_tsp.pack"):
        full = x.new_empty(x.shape[0], layout.padded, *x.shape[2:])
        chunks = full.unflatten(1, (layout.num_chunks, layout.chunk))
        for rank in range(mesh.size):
            held = raw[rank].unflatten(1, (-1, layout.chunk))
            for i, chunk in enumerate(layout.chunks(rank)):
                chunks[:, chunk] = held[:, i]
    return full


def reduce_scatter_sequence(full: Tensor, layout: SequenceLayout, mesh: Mesh) -> Tensor:
    """The sum over ranks of each one's [B, S, ...], of which this rank gets its own tokens: [B, s, ...].

    The transpose of `gather_sequence`.
    Communication per rank: received (P-1)/P * full.numel() elements.
    """
    if mesh.size == 1:
        return full
    shape = (full.shape[0], layout.local_length, *full.shape[2:])
    with record_function("ds_tsp.pack"):
        chunked = full.unflatten(1, (layout.num_chunks, layout.chunk))
        parts = full.new_empty(mesh.size, *shape)
        for rank in range(mesh.size):
            held = parts[rank].unflatten(1, (-1, layout.chunk))
            for i, chunk in enumerate(layout.chunks(rank)):
                held[:, i] = chunked[:, chunk]
    mine = full.new_empty(shape)
    with record_function("ds_tsp.wire"):
        dist.reduce_scatter_tensor(mine.view(-1), parts.view(-1), group=mesh.group)
    return mine


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
    """Overwrite `tensor`, wherever it lies, with that of the first rank of the axis; the collective needs it on the
    accelerator."""
    if mesh.size > 1:
        staged = tensor.to(get_accelerator().current_device_name()).contiguous()
        dist.broadcast(staged, mesh.ranks[0], group=mesh.group)
        tensor.copy_(staged)


def from_first_rank(value: Any) -> Any:
    """A small picklable `value` of the world's first rank, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def agree(what: str, error: Exception | None, fact: str = "") -> None:
    """All ranks of the world go on from here, or all raise. Collective; for what is done rarely.

    Raises ValueError on every rank: with the `error` of the first rank that has one, or if their `fact`, a short text
    that ends in the fix, is not the same.
    """
    told = gather_objects((None if error is None else f"{error}" or type(error).__name__, fact))
    for rank, (text, _) in enumerate(told):
        if text is not None:
            raise ValueError(f"{what} failed on rank {rank}: {text}") from error
    for rank, (_, other) in enumerate(told):
        if other != told[0][1]:
            raise ValueError(f"{what}: ranks 0 and {rank} differ: {told[0][1]}; {other}")


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


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8,
           torch.bool)  # fmt: skip


def send_named(name: str, tensor: Tensor, to: int) -> None:
    """Send a tensor with its name, dtype and shape to the global rank `to`, which calls `receive_named`."""
    device, text = get_accelerator().current_device_name(), list(name.encode())
    head = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *text]
    dist.send(torch.tensor([len(head)], device=device), to)
    dist.send(torch.tensor(head, device=device), to)
    if tensor.numel():
        dist.send(tensor.to(device).contiguous(), to)


def receive_named(source: int) -> tuple[str, Tensor]:
    """What the global rank `source` sent by `send_named`, on the CPU."""
    device = get_accelerator().current_device_name()
    length = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(length, source)
    numbers = length.new_empty(int(length))
    dist.recv(numbers, source)
    dtype, dims, *rest = numbers.tolist()
    tensor = torch.empty(rest[:dims], dtype=_DTYPES[dtype], device=device)
    if tensor.numel():
        dist.recv(tensor, source)
    return bytes(rest[dims:]).decode(), tensor.cpu()


def gather_objects(value: Any) -> list[Any]:
    """The `value` of every rank of the world, in rank order: for saving and loading, where ranks tell each other how it
    went."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
