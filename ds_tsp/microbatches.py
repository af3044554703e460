"""The micro batches of one pipeline step: read where the model begins and ends, agreed on and made known in between.

DeepSpeed gives data to the first and the last stage only, and moves activations of the shape it saw first. So the ranks
of a pipeline exchange beforehand what the others need: shapes, documents, positions, and whether all read the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from .comm import all_reduce
from .data import FACTS, MARK, Agreement, ShardedBatch, agreement, recognise
from .layout import SequenceLayout
from .mesh import Mesh

_ABSENT, _READ, _WRONG, _ENDED = range(4)
_HEADER = ("status", *FACTS, "rows", "length", "documents", "position_dims", "position_0", "position_1", "position_2")
_KNOWN = {"input_ids", "labels", "position_ids"}  # what is left of a batch once documents are encoded
_IGNORED = ("use_cache", "return_dict")


@dataclass
class MicroBatch:
    """What every stage knows of one micro batch. `batch` has tokens and labels on the first and the last stage only.

    items: what the summed loss is divided by, or None for the valid tokens of the batch. layers: what the decoder hands
    to each of its layers beside the hidden states, filled in by the stage.
    """

    batch: ShardedBatch
    agreed: Agreement
    items: Tensor | None = None
    layers: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and local tokens: [B, s] of the [B, s, D] that cross a stage boundary."""
        return self.batch.rows, self.batch.sequence.local_length


@dataclass(frozen=True)
class Drawn:
    """What a rank read, or why it could not."""

    status: int
    batch: ShardedBatch | None = None
    problem: str = ""


def draw(batches: Iterator[Any] | None, count: int, mesh: Mesh, with_loss: bool) -> list[Drawn]:
    """`count` batches, on the first and the last stage; nothing is raised before the ranks have agreed."""
    if 0 < mesh.stage < mesh.stages - 1:
        return [Drawn(_ABSENT)] * count
    return [_draw(batches, mesh, with_loss) for _ in range(count)]


def _draw(batches: Iterator[Any] | None, mesh: Mesh, with_loss: bool) -> Drawn:
    try:
        given = next(batches)  # type: ignore[arg-type]
    except StopIteration:
        return Drawn(_ENDED)
    except TypeError as error:
        return Drawn(_WRONG, problem=f"a pipeline reads its batches from an iterator: {error}")
    if not isinstance(given, dict):
        return Drawn(_WRONG, problem=f"this pipeline takes batches as dicts; got {type(given).__name__}")
    arguments = {k: v for k, v in given.items() if k not in _IGNORED and v is not None}
    batch = recognise(arguments, mesh)
    problem, unknown = batch.problem, sorted(batch.arguments.keys() - _KNOWN)
    if not problem and (unknown or "input_ids" not in batch.arguments):
        problem = f"a pipeline passes on input_ids, labels, positions and documents; the batch has {sorted(arguments)}"
    if not problem and with_loss and batch.shift_labels is None:
        problem = f"the batch has no labels to compute a loss from; it has {sorted(set(arguments) - {MARK})}"
    return Drawn(_WRONG if problem else _READ, batch, problem)


def exchange(drawn: Sequence[Drawn], mesh: Mesh, vocabulary: int, device: torch.device) -> list[MicroBatch]:
    """The micro batches, known on every stage.

    Communication: one all-gather of `len(_HEADER)` integers per micro batch over the ranks of the replica (all stages
    of one data-parallel rank); where there are documents or positions of the user's, and a stage that reads no data,
    one broadcast of those, as integers, along the pipeline.
    Raises ValueError on every rank of the replica if a batch is wrong or not the same on all of them, StopIteration if
    the data ended.
    """
    own = torch.stack([_header(d, mesh, device) for d in drawn])
    ranks = mesh.stages * mesh.size
    gathered = own.new_empty(ranks, *own.shape)
    dist.all_gather_into_tensor(gathered.view(-1), own.view(-1), group=mesh.replica_group)
    table: list[list[list[int]]] = gathered.tolist()
    readers = [r for r in range(ranks) if table[r][0][0] != _ABSENT]
    for micro, one in enumerate(drawn):
        status = {r: table[r][micro][0] for r in readers}
        ended, wrong = ([r for r in readers if status[r] == kind] for kind in (_ENDED, _WRONG))
        if wrong:
            raise ValueError(one.problem or f"{_place(wrong[0], mesh)} was given a wrong batch; see its own error")
        if ended:
            raise StopIteration(f"the data of {_place(ended[0], mesh)} ended at micro batch {micro} of {len(drawn)}")
        differ = [r for r in readers if table[r][micro][1:3] != table[readers[0]][micro][1:3]]
        if differ:
            raise ValueError(
                "the first and the last stage of a pipeline, and all ranks of their TSP groups, must read the same "
                f"batches, but {_place(differ[0], mesh)} read another one than {_place(readers[0], mesh)}. Deal "
                "batches by engine.tsp.dp_rank, not by the global rank"
            )
    # Positions are those of this rank's own tokens, so the header of the first stage's rank at the same place counts.
    headers = [dict(zip(_HEADER, row, strict=True)) for row in table[mesh.rank]]
    agreed = [agreement(row[1 : 1 + len(FACTS)], vocabulary) for row in table[mesh.rank]]
    extra = _broadcast_extra(drawn, headers, mesh, device)
    batches = [d.batch or _stand_in(h, e, mesh) for d, h, e in zip(drawn, headers, extra, strict=True)]
    return [MicroBatch(batch, known) for batch, known in zip(batches, agreed, strict=True)]


def count_tokens(micro_batches: Sequence[MicroBatch], mesh: Mesh, device: torch.device) -> None:
    """Set `items` such that DeepSpeed's average over micro batches and dp ranks is the mean over all valid tokens.

    Communication: one all-reduce of a number over dp.
    """
    valid = torch.tensor(float(sum(m.agreed.valid for m in micro_batches)), device=device)
    total = all_reduce(valid, mesh.dp_group, mesh.dp_size).clamp(min=1.0)
    for micro in micro_batches:
        micro.items = total / (len(micro_batches) * mesh.dp_size)


def _place(member: int, mesh: Mesh) -> str:
    return f"rank {member % mesh.size} of the TSP group of stage {member // mesh.size}"


def _plain_positions(sequence: SequenceLayout, mesh: Mesh) -> Tensor:
    return sequence.positions(mesh.rank).clamp(max=sequence.length - 1)[None]


def _own_positions(batch: ShardedBatch, mesh: Mesh) -> Tensor | None:
    """Positions that do not follow from the layout."""
    positions = batch.arguments["position_ids"]
    plain = _plain_positions(batch.sequence, mesh)
    return None if torch.equal(positions.cpu(), plain) else positions


def _header(drawn: Drawn, mesh: Mesh, device: torch.device) -> Tensor:
    status = torch.tensor([drawn.status], device=device)
    if drawn.status != _READ or drawn.batch is None:
        return torch.cat([status, status.new_zeros(len(_HEADER) - 1)])
    batch, positions = drawn.batch, _own_positions(drawn.batch, mesh)
    dims = [] if positions is None else list(positions.shape)
    documents = 0 if batch.mask is None else batch.mask.shape[2]
    numbers = [batch.rows, batch.sequence.length, documents, len(dims), *dims, *[0] * (3 - len(dims))]
    return torch.cat([status, batch.facts.to(device), torch.tensor(numbers, device=device)])


def _broadcast_extra(
    drawn: Sequence[Drawn], headers: Sequence[dict[str, int]], mesh: Mesh, device: torch.device
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Documents and positions of each micro batch, on the stages that read no data."""
    shapes = [(((1, 1, h["documents"], 3) if h["documents"] else None), _position_shape(h)) for h in headers]
    sizes = [torch.Size(shape).numel() for pair in shapes for shape in pair if shape]
    if mesh.stages < 3 or not sizes:
        return [(None, None)] * len(drawn)
    flat = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    if mesh.stage == 0:
        tensors = [t for d in drawn if d.batch for t in (d.batch.mask, _own_positions(d.batch, mesh)) if t is not None]
        flat = torch.cat([t.flatten().to(device, torch.int64) for t in tensors])
    dist.broadcast(flat, mesh.pipe_ranks[0], group=mesh.pipe_group)
    parts = iter(flat.split(sizes))
    found = [tuple(next(parts).view(shape) if shape else None for shape in pair) for pair in shapes]
    return [(None if mask is None else mask.to("cpu", torch.int32), positions) for mask, positions in found]


def _position_shape(header: dict[str, int]) -> tuple[int, ...] | None:
    return tuple(header[f"position_{i}"] for i in range(header["position_dims"])) or None


def _stand_in(header: dict[str, int], extra: tuple[Tensor | None, Tensor | None], mesh: Mesh) -> ShardedBatch:
    """The batch as a stage in the middle knows it: no tokens, no labels."""
    sequence = SequenceLayout(header["length"], mesh.size, mesh.layout)
    mask, positions = extra
    arguments = {"position_ids": _plain_positions(sequence, mesh) if positions is None else positions}
    place, facts = (mesh.size, mesh.rank, mesh.layout), torch.zeros(len(FACTS), dtype=torch.int64)
    return ShardedBatch(place, sequence, arguments, None, mask, facts, rows=header["rows"])
