"""From the full batch that every rank of a TSP group was given to this rank's tokens, and back.

Everything that depends on more than one token (the label shift, the number of valid tokens, the longest position) is
computed on the full batch, before the cut.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comm import all_gather_rows, all_reduce, gather_sequence
from .layout import SequenceLayout
from .mesh import Mesh

IGNORE_INDEX = -100  # Hugging Face's and torch's label of a token that does not count


@dataclass
class ShardedBatch:
    """This rank's part of one batch, and what was known only of the whole.

    arguments: the model's keyword arguments, per-token tensors cut to [B, s, ...].
    shift_labels: the label each local token predicts, [B, s], or None. valid: number of tokens that count, in the
    group's whole batch. last_position: the largest position of the whole batch. loss_taken: the model asked for its loss.
    """

    sequence: SequenceLayout
    arguments: dict[str, Any]
    shift_labels: Tensor | None
    valid: int
    last_position: int
    loss_taken: bool = False


def shard(arguments: dict[str, Any], mesh: Mesh, layout: str, vocabulary: int, device: torch.device) -> ShardedBatch:
    """Check that the group agrees on the batch, and cut it.

    Shapes: input_ids, labels, attention_mask [B, S]; inputs_embeds [B, S, D]; position_ids [..., S]; any other tensor
    whose first dims are [B, S] is cut like them. Communication: one all-gather of a few integers per rank.
    Raises ValueError, on every rank of the group, for a batch that is not the same on all, or that is wrong.
    """
    arguments = {k: v for k, v in arguments.items() if v is not None}
    problem = _structural_problem(arguments)
    facts = torch.zeros(len(_FACTS), dtype=torch.int64) if problem else _facts(arguments)
    head = torch.tensor([bool(problem), _structure(arguments)], device=device)
    rows = all_gather_rows(torch.cat([head, facts.to(device)]), mesh).tolist()
    _raise_problems(problem, rows, mesh, arguments, vocabulary)
    known = dict(zip(_FACTS, rows[mesh.rank][2:], strict=True))
    return _cut(arguments, mesh, layout, known)


def gather(x: Tensor, sequence: SequenceLayout, mesh: Mesh) -> Tensor:
    """Local [B, s, ...] of every rank -> [B, S, ...] in the caller's order, without padding, differentiable.

    Gradient: every rank is taken to compute the same loss from the whole tensor, so each one's gradient of its own
    tokens is already complete.
    """
    return _Gather.apply(x, sequence, mesh)


def global_sum(local: Tensor, mesh: Mesh) -> Tensor:
    """The sum of every rank's `local`; its gradient reaches the own part only, since the others send their own."""
    return _GlobalValue.apply(local, mesh)


_FACTS = ("content", "ids_min", "ids_max", "labels_min", "labels_max", "valid", "left_padded", "pad_labels",
          "restarts", "last_position")  # fmt: skip


def _tokens(arguments: dict[str, Any]) -> Tensor | None:
    """The tensor that says what B and S are."""
    return arguments.get("input_ids", arguments.get("inputs_embeds"))


def _structural_problem(arguments: dict[str, Any]) -> str:
    """What is wrong with the batch whatever its values, or ''."""
    tokens = _tokens(arguments)
    if not isinstance(tokens, Tensor):
        return f"the batch needs a tensor input_ids [B, S] or inputs_embeds [B, S, D]; got {sorted(arguments)}"
    wants = 2 if "input_ids" in arguments else 3
    if tokens.dim() != wants:
        return f"input_ids must be [B, S] and inputs_embeds [B, S, D]; got shape {tuple(tokens.shape)}"
    if tokens.numel() == 0:
        return f"the batch is empty: shape {tuple(tokens.shape)}"
    if tokens.requires_grad:
        return "inputs_embeds that require a gradient are not supported: each rank would see a part of it only"
    b, s = tokens.shape[:2]
    for name in ("labels", "shift_labels", "attention_mask"):
        value = arguments.get(name)
        if value is not None and value.shape != (b, s):
            return f"{name} has shape {tuple(value.shape)}, but the tokens have [B, S] = {(b, s)}"
    positions = arguments.get("position_ids")
    if positions is not None and positions.shape[-1] != s:
        return f"position_ids have shape {tuple(positions.shape)}, but there are {s} tokens"
    return ""


def _structure(arguments: dict[str, Any]) -> int:
    """A checksum of names, shapes, dtypes and plain values."""
    described = [
        (k, tuple(v.shape), str(v.dtype)) if isinstance(v, Tensor) else (k, repr(v)) for k, v in sorted(arguments.items())
    ]
    return zlib.crc32(repr(described).encode())


def _checksum(tensor: Tensor) -> Tensor:
    """A position-dependent checksum that costs one pass: int64 arithmetic wraps around, equal input gives equal sums."""
    flat = tensor.detach().flatten()
    values = flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
    weights = torch.arange(1, 2 * values.numel(), 2, device=flat.device)
    return ((values + 0x9E3779B9) * (weights * 0x5851F42D4C957F2D)).sum()


def shifted(labels: Tensor) -> Tensor:
    """The label that each token predicts: that of the next one; the last predicts none. Shapes: [B, S] -> [B, S]."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _targets(arguments: dict[str, Any]) -> Tensor | None:
    if "shift_labels" in arguments:
        return arguments["shift_labels"]
    return shifted(arguments["labels"]) if "labels" in arguments else None


def _facts(arguments: dict[str, Any]) -> Tensor:
    """The values of `_FACTS`, computed where the batch lies, read by the host once, after the exchange."""
    tokens = _tokens(arguments)
    assert tokens is not None
    zero = torch.zeros((), dtype=torch.int64, device=tokens.device)
    facts = dict.fromkeys(_FACTS, zero)
    tensors = [v for _, v in sorted(arguments.items()) if isinstance(v, Tensor)]
    facts["content"] = torch.stack([_checksum(t).to(tokens.device) * (2 * i + 1) for i, t in enumerate(tensors)]).sum()
    if "input_ids" in arguments:
        facts["ids_min"], facts["ids_max"] = tokens.aminmax()
    targets, mask, positions = _targets(arguments), arguments.get("attention_mask"), arguments.get("position_ids")
    if targets is not None:
        counted = targets != IGNORE_INDEX
        facts["valid"] = counted.sum()
        facts["labels_min"], facts["labels_max"] = torch.where(counted, targets, zero).aminmax()
        if mask is not None:
            facts["pad_labels"] = (counted & (mask == 0)).sum()
    if mask is not None:
        facts["left_padded"] = ((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).sum()
    if positions is None:
        facts["last_position"] = zero + tokens.shape[1] - 1
    else:
        facts["restarts"] = (positions.diff(dim=-1) != 1).sum()
        facts["last_position"] = positions.max()
    return torch.stack([facts[name].to(torch.int64) for name in _FACTS])


def _raise_problems(
    problem: str, rows: list[list[int]], mesh: Mesh, arguments: dict[str, Any], vocabulary: int
) -> None:
    """Raise what any rank found. Every rank sees the same rows, so all of the group raise or none does."""
    bad = [r for r, row in enumerate(rows) if row[0]]
    if bad:
        raise ValueError(problem or f"rank {bad[0]} of the TSP group was given a wrong batch; see its own error")
    differ = [r for r, row in enumerate(rows) if row[1:3] != rows[0][1:3]]
    if differ:
        shapes = {k: list(v.shape) for k, v in arguments.items() if isinstance(v, Tensor)}
        raise ValueError(
            f"the ranks of a TSP group must be given the same batch, but rank(s) {differ} of the group got another one "
            f"than its rank 0; this is rank {mesh.rank}, with {shapes}. Deal batches by engine.tsp.dp_rank, "
            "not by the global rank"
        )
    facts = dict(zip(_FACTS, rows[mesh.rank][2:], strict=True))
    for kind, name in (("ids", "input_ids"), ("labels", "labels")):
        low, high = facts[f"{kind}_min"], facts[f"{kind}_max"]
        if low < 0 or high >= vocabulary:
            allowed = f"0 .. {vocabulary - 1}" + (f" or {IGNORE_INDEX}" if kind == "labels" else "")
            raise ValueError(f"{name} must lie in {allowed} (the model's vocabulary); got {low} .. {high}")
    if facts["left_padded"]:
        raise ValueError("attention_mask has padding before real tokens; only padding at the end is supported: pad right")
    if facts["pad_labels"]:
        raise ValueError(
            f"{facts['pad_labels']} labels are predicted from padded tokens; set the labels of padding to {IGNORE_INDEX}"
        )
    if facts["restarts"]:
        raise ValueError("position_ids must rise by one from token to token; packed documents are not supported")


def _cut(arguments: dict[str, Any], mesh: Mesh, layout: str, known: dict[str, int]) -> ShardedBatch:
    tokens = _tokens(arguments)
    assert tokens is not None
    batch, length = tokens.shape[:2]
    sequence = SequenceLayout(length, mesh.size, layout)
    index = sequence.positions(mesh.rank).to(tokens.device)
    # Padding repeats the last token: a valid id, a valid position, and nobody looks at it.
    padding, index = index >= length, index.clamp(max=length - 1)
    targets = _targets(arguments)
    if targets is not None:
        targets = targets[:, index].masked_fill(padding, IGNORE_INDEX)
    positions = arguments.get("position_ids")
    local = {k: _take(v, (batch, length), index) for k, v in arguments.items() if k not in ("attention_mask", "shift_labels")}
    if targets is not None:
        local["labels"] = targets  # asks the model for its loss; what is compared are the shifted labels
    local["position_ids"] = index[None] if positions is None else positions[..., index]
    return ShardedBatch(sequence, local, targets, known["valid"], known["last_position"])


def _take(value: Any, tokens: tuple[int, int], index: Tensor) -> Any:
    per_token = isinstance(value, Tensor) and value.shape[:2] == tokens
    return value[:, index] if per_token else value


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: SequenceLayout, mesh: Mesh) -> Tensor:
        ctx.sequence, ctx.mesh = sequence, mesh
        return gather_sequence(x, sequence, mesh)[:, : sequence.length].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        sequence: SequenceLayout = ctx.sequence
        index = sequence.positions(ctx.mesh.rank).to(grad.device)
        padded = torch.nn.functional.pad(grad.movedim(1, -1), (0, sequence.padded - sequence.length)).movedim(-1, 1)
        return padded[:, index], None, None


class _GlobalValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: Mesh) -> Tensor:
        return all_reduce(local, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        return grad, None
