"""Who owns which tokens and which slices of a weight: pure arithmetic, no processes.

Letters (capital: global, lower case: one rank's part): B batch, S sequence, D model width, H query heads, K kv heads,
E head width, F ffn width, V vocabulary, P TSP size. A chunk is a run of c tokens; a term is one summand of a folded
block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.profiler import record_function


@dataclass(frozen=True)
class SequenceLayout:
    """How S tokens are dealt to P ranks.

    ``zigzag`` cuts the padded sequence into 2P chunks; rank r holds chunks r and 2P-1-r, in that order, so that causal
    attention costs every rank the same. ``contiguous`` gives rank r the r-th of P chunks. Padding goes to the end,
    where a causal model never looks back from a real token.
    """

    length: int
    size: int
    kind: str = "zigzag"

    @property
    def chunks_per_rank(self) -> int:
        # One rank needs no balancing: a single chunk is one kernel call and no padding.
        return 2 if self.kind == "zigzag" and self.size > 1 else 1

    @property
    def num_chunks(self) -> int:
        return self.chunks_per_rank * self.size

    @property
    def chunk(self) -> int:
        return -(-self.length // self.num_chunks)

    @property
    def padded(self) -> int:
        return self.chunk * self.num_chunks

    @property
    def local_length(self) -> int:
        return self.chunk * self.chunks_per_rank

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of `rank`, in the order in which it holds them."""
        return (rank,) if self.chunks_per_rank == 1 else (rank, self.num_chunks - 1 - rank)

    def runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Maximal runs [start, stop) of consecutive positions that `rank` holds; each is one kernel call."""
        merged: list[tuple[int, int]] = []
        for chunk in self.chunks(rank):
            start, stop = chunk * self.chunk, (chunk + 1) * self.chunk
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, stop))
        return tuple(merged)

    def positions(self, rank: int) -> Tensor:
        """Position of each local token in the padded sequence, int64 [s]."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.runs(rank)])


def local_layout(local_length: int, size: int, kind: str) -> SequenceLayout:
    """The layout in which every rank holds `local_length` tokens and nothing is padded."""
    return SequenceLayout(local_length * size, size, kind)


def head_groups(kv_heads: int, size: int) -> int:
    """G: number of terms of an attention block; each is a whole number of kv heads held by size/G neighbours."""
    return math.gcd(kv_heads, size)


def cut_bounds(total: int, size: int, groups: int = 1) -> tuple[int, ...]:
    """The P+1 bounds that cut `total` rows into P slices; a group of size/groups slices is exactly total/groups rows.

    Slices are total/P each where P divides, else they differ by one row inside a group.
    Raises ValueError if `groups` does not divide both, or if a slice would be empty.
    """
    if total % groups or size % groups:
        raise ValueError(f"{groups} head groups divide neither {total} rows nor {size} ranks evenly")
    rows, members = total // groups, size // groups
    if rows < members:
        raise ValueError(f"{total} rows cannot be cut into {size} slices of at least one row; use a smaller tsp.size")
    return tuple(total * i // size for i in range(size + 1))


@dataclass(frozen=True)
class WeightCut:
    """One weight of full `shape`, cut along `dim` at `bounds` into P slices."""

    shape: tuple[int, ...]
    dim: int
    bounds: tuple[int, ...]

    def slice_shape(self, rank: int) -> tuple[int, ...]:
        rows = self.bounds[rank + 1] - self.bounds[rank]
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def take(self, full: Tensor, rank: int) -> Tensor:
        """The slice of `rank`, a copy that does not keep `full` alive."""
        rows = self.bounds[rank + 1] - self.bounds[rank]
        return full.narrow(self.dim, self.bounds[rank], rows).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class BlockCut:
    """The sharded weights of one block, and how they are put into one buffer to travel.

    A slice of the block is the list of the slices of its weights, always in the order of `weights`. `groups` is the
    number of terms; the term g is made of the slices of ranks ``members(g)``.
    """

    weights: tuple[WeightCut, ...]
    size: int
    groups: int

    def members(self, group: int) -> range:
        each = self.size // self.groups
        return range(group * each, (group + 1) * each)

    @cached_property
    def _numels(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(math.prod(w.slice_shape(r)) for w in self.weights) for r in range(self.size))

    def numel(self, rank: int, which: Sequence[int]) -> int:
        """Elements of the slice of `rank`, counting the weights `which`."""
        return sum(self._numels[rank][i] for i in which)

    def unpack(self, flat: Tensor, rank: int, which: Sequence[int]) -> list[Tensor]:
        """Views of `flat` as the slices of `rank` of the weights `which`."""
        parts = flat.split([self._numels[rank][i] for i in which])
        return [part.view(self.weights[i].slice_shape(rank)) for i, part in zip(which, parts, strict=True)]

    def assemble(self, slices: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The weights of one term from the slices of its members; a single member's slices are used as they are."""
        if len(slices) == 1:
            return list(slices[0])
        return [torch.cat(parts, dim=w.dim) for w, parts in zip(self.weights, zip(*slices, strict=True), strict=True)]


def pack(tensors: Sequence[Tensor], into: Tensor) -> Tensor:
    """Copy `tensors` one after another into flat `into`, in its dtype; returns it."""
    with record_function("ds_tsp.pack"):
        for tensor, part in zip(tensors, into.split([t.numel() for t in tensors]), strict=True):
            part.view(tensor.shape).copy_(tensor)
    return into


def together(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of `tensors` if they lie one behind the other in memory, else None."""
    first, place = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == place):
            return None
        place += tensor.numel()
    return first.detach().as_strided((place - first.storage_offset(),), (1,), first.storage_offset())


def lay_together(tensors: Sequence[Tensor]) -> None:
    """Give `tensors` of one dtype a common storage in which they lie one behind the other."""
    plain = [t.detach() for t in tensors]
    flat = pack(plain, plain[0].new_empty(sum(t.numel() for t in plain)))
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.data = part.view(tensor.shape)


TILE_ELEMENTS = 2**18, 2**23  # least and most of what is computed for one tile of tokens: 1 and 32 MiB in fp32


def tiles(tokens: int, elements: int, width: int) -> Iterator[slice]:
    """Runs of `tokens` rows for what is `width` wide and exists for one run at a time.

    A tile has a quarter of `elements`, those of the hidden states, within `TILE_ELEMENTS`; one row at least.
    """
    least, most = TILE_ELEMENTS
    height = max(1, min(max(elements // 4, least), most) // width)
    return (slice(start, min(start + height, tokens)) for start in range(0, tokens, height))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over terms and ranks are kept: fp32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
