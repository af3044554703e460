"""From the full batch that every rank of a TSP group was given to this rank's tokens, and back.

Everything that depends on more than one token (the label shift, the number of valid tokens, the documents, the longest
position) is computed on the full batch, before the cut.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import documents
from .comm import all_gather_rows, all_reduce, gather_sequence
from .layout import SequenceLayout
from .mesh import Mesh
from .vocab import IGNORE_INDEX

MARK = "tsp_batch"  # the key under which a batch that is cut already carries its ShardedBatch

# What one look at the full batch tells; every rank of a group must find the same. Read by the host once.
FACTS = ("structure", "content", "ids_min", "ids_max", "labels_min", "labels_max", "valid", "pad_labels", "holes",
          "last_position")  # fmt: skip
_DOCUMENT_KEYS = ("attention_mask", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class ShardedBatch:
    """This rank's part of one batch, and what was known only of the whole.

    place: (size, rank, layout) it was cut for. tokens: [B, s], or [B, s, D] embeddings. arguments: the other keyword
    arguments, per-token tensors cut to [B, s, ...]. shift_labels: the label each local token predicts, [B, s], or None.
    mask: the encoded `documents`, or None. facts: int64 [len(FACTS)], where the batch lies. problem: what is wrong
    with the batch whatever its values. rows: B.
    """

    place: tuple[int, int, str]
    sequence: SequenceLayout
    arguments: dict[str, Any]
    shift_labels: Tensor | None
    mask: Tensor | None
    facts: Tensor
    problem: str = ""
    rows: int = 0

    def to(self, *args: Any, **kwargs: Any) -> ShardedBatch:
        """As Tensor.to, for code that moves every value of a batch."""
        arguments = {k: v.to(*args, **kwargs) if isinstance(v, Tensor) else v for k, v in self.arguments.items()}
        labels = None if self.shift_labels is None else self.shift_labels.to(*args, **kwargs)
        return replace(self, arguments=arguments, shift_labels=labels)


@dataclass(frozen=True)
class Agreement:
    """What the whole group knows of its batch, after the exchange."""

    valid: int
    last_position: int


def cut(arguments: dict[str, Any], mesh: Mesh) -> ShardedBatch:
    """This rank's part of a full batch. No communication; what is wrong is kept until the ranks agree on it.

    Shapes: input_ids, labels, shift_labels, attention_mask, seq_idx [B, S]; inputs_embeds [B, S, D]; position_ids
    [..., S]; cu_seq_lens [n + 1]; any other tensor whose first dims are [B, S] is cut like them.
    """
    arguments = {k: v for k, v in arguments.items() if v is not None}
    place, problem = (mesh.size, mesh.rank, mesh.layout), _structural_problem(arguments)
    if problem:
        facts = torch.zeros(len(FACTS), dtype=torch.int64)
        return ShardedBatch(place, SequenceLayout(1, mesh.size, mesh.layout), {}, None, None, facts, problem)
    tokens = _tokens(arguments)
    batch, length = tokens.shape[:2]
    sequence = SequenceLayout(length, mesh.size, mesh.layout)
    index = sequence.positions(mesh.rank).to(tokens.device)
    # Padding repeats the last token: a valid id, a valid position, and nobody looks at it.
    padding, index = index >= length, index.clamp(max=length - 1)
    first, targets = documents.starts(arguments, batch, length), _targets(arguments)
    facts = _facts(arguments, targets)
    mask = None if first is None else documents.encode(first, sequence.padded)
    positions = arguments.get("position_ids")
    if positions is None and mask is not None and "attention_mask" not in arguments:
        positions = documents.restarting_positions(first)  # type: ignore[arg-type]
    local = {k: _take(v, (batch, length), index) for k, v in arguments.items() if k not in _DOCUMENT_KEYS}
    local.pop("shift_labels", None)
    local["position_ids"] = index[None] if positions is None else positions[..., index]
    if targets is not None:
        targets = targets[:, index].masked_fill(padding, IGNORE_INDEX)
        local["labels"] = targets  # asks the model for its loss; what is compared are the shifted labels
    return ShardedBatch(place, sequence, local, targets, mask, facts, rows=batch)


def shard_batch(batch: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """A full batch, cut early: for loaders that need not keep S tokens on every rank.

    `mesh` is ``engine.tsp``. Returns this rank's tensors, [B, s, ...], and under `MARK` what ``engine(**batch)`` needs
    to recognise them; a batch that was cut already comes back as it is. Every rank of the TSP group passes the same
    batch. Raises ValueError if the batch was cut for another place.
    """
    if MARK in batch:
        _check_place(batch[MARK], mesh)
        return batch
    sharded = cut(batch, mesh)
    if sharded.problem:
        raise ValueError(sharded.problem)
    return {**sharded.arguments, MARK: sharded}


def recognise(arguments: dict[str, Any], mesh: Mesh) -> ShardedBatch:
    """The batch that a call of the model was given: cut already by `shard_batch`, or full and cut here."""
    sharded = arguments.pop(MARK, None)
    if sharded is None:
        return cut(arguments, mesh)
    problem = ""
    try:
        _check_place(sharded, mesh)
        known = sharded.arguments.keys()
        other = [k for k, v in arguments.items() if k in known and _shape(v) != _shape(sharded.arguments[k])]
        if other:
            problem = f"{other} of a batch that was cut by shard_batch have another shape since; pass it on as it is"
    except ValueError as error:
        problem = str(error)
    # What was left out since (labels, for example) is left out. The loss goes by the labels that were cut.
    kept = {k: v for k, v in sharded.arguments.items() if k in arguments or k == "position_ids"}
    labels = sharded.shift_labels if "labels" in arguments else None
    return replace(sharded, arguments={**kept, **arguments}, shift_labels=labels, problem=problem)


def agree(batch: ShardedBatch, mesh: Mesh, vocabulary: int, device: torch.device) -> Agreement:
    """Compare the batch over the group. Communication: one all-gather of `len(FACTS)` + 1 integers per rank.

    Raises ValueError, on every rank of the group, for a batch that is not the same on all, or that is wrong.
    """
    head = torch.tensor([bool(batch.problem)], dtype=torch.int64, device=device)
    rows = all_gather_rows(torch.cat([head, batch.facts.to(device)]), mesh).tolist()
    bad = [r for r, row in enumerate(rows) if row[0]]
    if bad:
        raise ValueError(batch.problem or f"rank {bad[0]} of the TSP group was given a wrong batch; see its own error")
    differ = [r for r, row in enumerate(rows) if row[1:3] != rows[0][1:3]]
    if differ:
        shapes = {k: list(v.shape) for k, v in batch.arguments.items() if isinstance(v, Tensor)}
        raise ValueError(
            f"the ranks of a TSP group must be given the same batch, but rank(s) {differ} of the group got another one "
            f"than its rank 0; this is rank {mesh.rank}, whose part is {shapes}. Deal batches by engine.tsp.dp_rank, "
            "not by the global rank"
        )
    return agreement(rows[mesh.rank][1:], vocabulary)


def agreement(row: list[int], vocabulary: int) -> Agreement:
    """What follows from one rank's facts, once all are known to be the same. Raises ValueError if they are wrong."""
    facts = dict(zip(FACTS, row, strict=True))
    _check_values(facts, vocabulary)
    return Agreement(facts["valid"], facts["last_position"])


def gather(x: Tensor, sequence: SequenceLayout, mesh: Mesh) -> Tensor:
    """Local [B, s, ...] of every rank -> [B, S, ...] in the caller's order, without padding, differentiable.

    Gradient: every rank is taken to compute the same loss from the whole tensor, so each one's gradient of its own
    tokens is already complete.
    """
    return _Gather.apply(x, sequence, mesh)


def global_sum(local: Tensor, mesh: Mesh) -> Tensor:
    """The sum of every rank's `local`; its gradient reaches the own part only, since the others send their own."""
    return _GlobalSum.apply(local, mesh)


def shifted(labels: Tensor) -> Tensor:
    """The label that each token predicts: that of the next one; the last predicts none. Shapes: [B, S] -> [B, S]."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _tokens(arguments: dict[str, Any]) -> Tensor:
    """The tensor that says what B and S are."""
    return arguments.get("input_ids", arguments.get("inputs_embeds"))  # type: ignore[return-value]


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _check_place(batch: ShardedBatch, mesh: Mesh) -> None:
    place = (mesh.size, mesh.rank, mesh.layout)
    if batch.place != place:
        raise ValueError(f"this batch was cut for (size, rank, layout) {batch.place}, but is given to {place}")


def _structural_problem(arguments: dict[str, Any]) -> str:
    """What is wrong with the batch whatever its values, or ''."""
    tokens: Any = _tokens(arguments)
    if not isinstance(tokens, Tensor):
        return f"the batch needs a tensor input_ids [B, S] or inputs_embeds [B, S, D]; got {sorted(arguments)}"
    if tokens.dim() != (2 if "input_ids" in arguments else 3):
        return f"input_ids must be [B, S] and inputs_embeds [B, S, D]; got shape {tuple(tokens.shape)}"
    if tokens.numel() == 0:
        return f"the batch is empty: shape {tuple(tokens.shape)}"
    if tokens.requires_grad:
        return "inputs_embeds that require a gradient are not supported: each rank would see a part of it only"
    b, s = tokens.shape[:2]
    for name in ("labels", "shift_labels", "attention_mask", "seq_idx"):
        value = arguments.get(name)
        if value is not None and _shape(value) != (b, s):
            return f"{name} has shape {_shape(value)}, but the tokens have [B, S] = {(b, s)}"
    positions, cumulative = arguments.get("position_ids"), arguments.get("cu_seq_lens_q")
    if positions is not None and positions.shape[-1] != s:
        return f"position_ids have shape {_shape(positions)}, but there are {s} tokens"
    if cumulative is not None and b != 1:
        return f"cu_seq_lens_q describe one row of packed documents, but there are {b} rows"
    return ""


def _structure(arguments: dict[str, Any]) -> int:
    """A checksum of names, shapes, dtypes and plain values."""
    described = [
        (k, _shape(v), str(v.dtype)) if isinstance(v, Tensor) else (k, repr(v)) for k, v in sorted(arguments.items())
    ]
    return zlib.crc32(repr(described).encode())


def _checksum(tensor: Tensor) -> Tensor:
    """A position-dependent checksum that costs one pass: int64 arithmetic wraps around, equal input gives equal
    sums."""
    flat = tensor.detach().flatten()
    values = flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
    weights = torch.arange(1, 2 * values.numel(), 2, device=flat.device)
    return ((values + 0x9E3779B9) * (weights * 0x9E3779B1)).sum()


def _targets(arguments: dict[str, Any]) -> Tensor | None:
    if "shift_labels" in arguments:
        return arguments["shift_labels"]
    return shifted(arguments["labels"]) if "labels" in arguments else None


def _facts(arguments: dict[str, Any], targets: Tensor | None) -> Tensor:
    """The values of `FACTS`, computed where the batch lies."""
    tokens, mask = _tokens(arguments), arguments.get("attention_mask")
    zero = torch.zeros((), dtype=torch.int64, device=tokens.device)
    facts = dict.fromkeys(FACTS, zero)
    facts["structure"] = zero + _structure(arguments)
    tensors = [v for _, v in sorted(arguments.items()) if isinstance(v, Tensor)]
    facts["content"] = torch.stack([_checksum(t).to(tokens.device) * (2 * i + 1) for i, t in enumerate(tensors)]).sum()
    if "input_ids" in arguments:
        facts["ids_min"], facts["ids_max"] = tokens.aminmax()
    if targets is not None:
        counted = targets != IGNORE_INDEX
        facts["valid"] = counted.sum()
        facts["labels_min"], facts["labels_max"] = torch.where(counted, targets, zero).aminmax()
        if mask is not None:
            facts["pad_labels"] = (counted & (mask == 0)).sum()
    if mask is not None:
        rises = (mask[:, 1:] != 0) & (mask[:, :-1] == 0)
        facts["holes"] = (rises.sum(1) + (mask[:, 0] != 0) > 1).sum()
    positions = arguments.get("position_ids")
    facts["last_position"] = zero + tokens.shape[1] - 1 if positions is None else positions.max()
    return torch.stack([facts[name].to(torch.int64) for name in FACTS])


def _check_values(facts: dict[str, int], vocabulary: int) -> None:
    """Every rank of the group has found the same facts, so all of them raise or none does."""
    for kind, name in (("ids", "input_ids"), ("labels", "labels")):
        low, high = facts[f"{kind}_min"], facts[f"{kind}_max"]
        if low < 0 or high >= vocabulary:
            allowed = f"0 .. {vocabulary - 1}" + (f" or {IGNORE_INDEX}" if kind == "labels" else "")
            raise ValueError(f"{name} must lie in {allowed} (the model's vocabulary); got {low} .. {high}")
    if facts["holes"]:
        raise ValueError(
            f"attention_mask of {facts['holes']} row(s) has padding between real tokens; pad at one end or both"
        )
    if facts["pad_labels"]:
        raise ValueError(
            f"{facts['pad_labels']} labels are predicted from padded tokens; set the labels of padding, and that of "
            f"the first real token after padding, to {IGNORE_INDEX}"
        )


def _take(value: Any, tokens: tuple[int, int], index: Tensor) -> Any:
    per_token = isinstance(value, Tensor) and value.shape[:2] == tokens
    return value[:, index] if per_token else value


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: SequenceLayout, mesh: Mesh) -> Tensor:
        ctx.sequence, ctx.mesh = sequence, mesh
        return gather_sequence(x, sequence, mesh)[:, : sequence.length].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        sequence: SequenceLayout = ctx.sequence
        index = sequence.positions(ctx.mesh.rank).to(grad.device)
        padded = torch.nn.functional.pad(grad.movedim(1, -1), (0, sequence.padded - sequence.length)).movedim(-1, 1)
        return padded[:, index], None, None


class _GlobalSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: Mesh) -> Tensor:
        return all_reduce(local, mesh.group, mesh.size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        return grad, None
