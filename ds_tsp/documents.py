"""Documents: which tokens of a row may see each other, as boundaries that travel beside the tokens.

Packed documents and padding are both runs of tokens that see nothing outside of themselves. A run is a `Document`; the
documents of a batch are one small int32 tensor [1, 1, n, 3] of (row, start, stop), row -1 standing for all rows. It
takes the place of the 4-D attention mask, which every Hugging Face model hands down to its attention unread, also
through gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ALL_ROWS = -1
Document = tuple[int, int, int]  # row, start, stop


def starts(arguments: dict[str, Tensor], batch: int, length: int) -> Tensor | None:
    """True at the first token of each document, bool [B, S]; None where nothing speaks of documents.

    As in transformers: an attention mask alone decides if there is one, and then padding is cut off; else ``seq_idx``
    or ``cu_seq_lens_q``; else position_ids [., S] that do not rise by one.
    """
    mask, index = arguments.get("attention_mask"), arguments.get("seq_idx")
    cumulative, positions = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    if mask is not None:
        changes = (mask[:, 1:] != 0) != (mask[:, :-1] != 0)
    elif index is not None:
        changes = index[:, 1:] != index[:, :-1]
    elif cumulative is not None:
        first = torch.zeros(1, length + 1, dtype=torch.bool, device=cumulative.device)
        changes = first.index_fill(1, cumulative.long(), True)[:, 1:length]
    elif positions is not None and positions.dim() == 2:
        changes = positions[:, 1:] != positions[:, :-1] + 1
    else:
        return None
    return torch.nn.functional.pad(changes, (1, 0), value=True).expand(batch, length)


def restarting_positions(first: Tensor) -> Tensor:
    """Positions that count from 0 in each document, from the mark of its first token. Shapes: bool [B, S] -> [B, S]."""
    index = torch.arange(first.shape[1], device=first.device).expand(first.shape)
    return index - torch.where(first, index, 0).cummax(dim=1).values


def encode(first: Tensor, padded: int) -> Tensor | None:
    """The documents as a tensor, from the marks of their first tokens, bool [B, S]; what fills S up to `padded` is one.

    None where every row is one document. Reads the marks on the host.
    """
    rows, length = [row.nonzero().flatten().tolist() for row in first.cpu()], first.shape[1]
    if all(row == rows[0] for row in rows):
        if rows[0] == [0]:
            return None
        rows, names = rows[:1], [ALL_ROWS]
    else:
        names = list(range(len(rows)))
    found = [
        (name, start, stop)
        for name, row in zip(names, rows, strict=True)
        for start, stop in zip(row, [*row[1:], length], strict=True)
    ]
    fill = [(ALL_ROWS, length, padded)] if padded > length else []
    return torch.tensor(found + fill, dtype=torch.int32)[None, None]


def whole(padded: int, length: int) -> Tensor:
    """One document of `length` tokens and one of padding: where tokens look ahead, padding must be kept from them."""
    return torch.tensor([(ALL_ROWS, 0, length), (ALL_ROWS, length, padded)], dtype=torch.int32)[None, None]


def is_encoded(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[-1] == 3


def decode(mask: Tensor | None, padded: int) -> tuple[Document, ...]:
    """The documents again; without a mask, one."""
    return ((ALL_ROWS, 0, padded),) if mask is None else tuple(map(tuple, mask[0, 0].tolist()))


def blocks(documents: Sequence[Document], run: tuple[int, int], window: int | None,
           causal: bool) -> Iterator[tuple[slice, slice, slice]]:  # fmt: skip
    """The kernel calls of one run of queries: rows of the batch, queries, keys, all in logical positions.

    Keys outside the document or wholly outside the window are left out, not masked.
    """
    for row, start, stop in documents:
        first, last = max(run[0], start), min(run[1], stop)
        if first < last:
            reach = start if window is None else max(start, first - window + 1)
            rows = slice(None) if row == ALL_ROWS else slice(row, row + 1)
            yield rows, slice(first, last), slice(reach, last if causal else stop)


def pairs(documents: Sequence[Document], queries: tuple[int, int], keys: tuple[int, int], window: int | None,
          causal: bool) -> Iterator[tuple[slice, slice, slice, str]]:  # fmt: skip
    """The kernel calls of one chunk of queries on one chunk of keys, the same or another: rows, queries, keys, kind.

    kind "causal": aligned at the bottom right, a window still to be applied. "full": every query sees every key.
    "flipped": queries leave the window of an earlier chunk's keys one by one, which is causal with both turned round.
    """
    for row, start, stop in documents:
        (x, y), (low, high) = (_within(run, start, stop) for run in (queries, keys))
        if x >= y or low >= high or (causal and low >= y):
            continue
        rows = slice(None) if row == ALL_ROWS else slice(row, row + 1)
        if causal and queries == keys:
            yield rows, slice(x, y), slice(low, high), "causal"
            continue
        all_of_them = y if window is None else min(y, low + window)  # the first query that misses a key
        if x < all_of_them:
            yield rows, slice(x, all_of_them), slice(low, high), "full"
        if window is not None:
            first, last = max(x, low + window), min(y, high + window - 1)
            if first < last:
                yield rows, slice(first, last), slice(first - window + 1, high), "flipped"


def _within(run: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
    return max(run[0], start), min(run[1], stop)
