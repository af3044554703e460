"""Documents: where they start, what travels, which kernel calls they become."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_tsp import documents
from ds_tsp.documents import ALL_ROWS, blocks, decode, encode, pairs, restarting_positions, starts
from ds_tsp.layout import SequenceLayout


def marks(**arguments: list) -> list[list[int]]:
    tensors = {k: torch.tensor(v) for k, v in arguments.items()}
    batch = max((len(v) for k, v in arguments.items() if k != "cu_seq_lens_q"), default=1)
    first = starts(tensors, batch, 6)
    assert first is not None and first.shape == (batch, 6)
    return [row.nonzero().flatten().tolist() for row in first]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"position_ids": [[0, 1, 2, 0, 1, 2]]}, [[0, 3]]),
        ({"position_ids": [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 1, 2]]}, [[0], [0, 2, 3]]),
        ({"position_ids": [[4, 5, 6, 9, 10, 11]]}, [[0, 3]]),
        ({"seq_idx": [[0, 0, 1, 1, 1, 2]]}, [[0, 2, 5]]),
        ({"cu_seq_lens_q": [0, 1, 4, 6]}, [[0, 1, 4]]),
        ({"attention_mask": [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]}, [[0, 2, 5], [0]]),
        # With a mask, transformers takes positions for what they are, not for packing.
        ({"attention_mask": [[1] * 6], "position_ids": [[0, 1, 2, 0, 1, 2]]}, [[0]]),
    ],
)
def test_where_documents_start(arguments: dict[str, list], expected: list[list[int]]) -> None:
    assert marks(**arguments) == expected


def test_nothing_speaks_of_documents() -> None:
    assert starts({}, 2, 6) is None
    assert starts({"position_ids": torch.zeros(3, 2, 6)}, 2, 6) is None  # mrope: three kinds of positions per token


def test_encoding() -> None:
    same = torch.tensor([[True, False, True, False]] * 2)
    assert decode(encode(same, 6), 6) == ((ALL_ROWS, 0, 2), (ALL_ROWS, 2, 4), (ALL_ROWS, 4, 6))
    other = torch.tensor([[True, False, True, False], [True, False, False, False]])
    assert decode(encode(other, 4), 4) == ((0, 0, 2), (0, 2, 4), (1, 0, 4))
    assert encode(torch.tensor([[True, False]] * 3), 4) is None and decode(None, 4) == ((ALL_ROWS, 0, 4),)
    encoded = encode(same, 6)
    assert (
        documents.is_encoded(encoded)
        and not documents.is_encoded(torch.zeros(1, 1, 6, 6))
        and not documents.is_encoded(None)
    )


def test_positions_restart() -> None:
    assert restarting_positions(torch.tensor([[True, False, True, True, False]])).tolist() == [[0, 1, 0, 0, 1]]


@given(
    st.integers(1, 5), st.integers(1, 30), st.sampled_from(["zigzag", "contiguous"]), st.sets(st.integers(1, 29)),
    st.one_of(st.none(), st.integers(1, 9)), st.booleans(),
)  # fmt: skip
def test_blocks_are_exactly_what_may_be_seen(size, length, layout, cuts, window, causal) -> None:  # type: ignore[no-untyped-def]
    """Each query is in one block; its keys there are those of its document, in reach (causal), or all
    (bidirectional)."""
    window = window if causal else None
    sequence = SequenceLayout(length, size, layout)
    edges = [0, *sorted(c for c in cuts if c < length), sequence.padded]
    found = tuple((ALL_ROWS, a, b) for a, b in zip(edges, edges[1:], strict=False))
    seen: dict[int, set[int]] = {}
    for rank in range(size):
        for run in sequence.runs(rank):
            for _, queries, keys in blocks(found, run, window, causal):
                for i in range(queries.start, queries.stop):
                    assert i not in seen
                    low = keys.start if window is None else max(keys.start, i - window + 1)
                    # A causal block is aligned at its end: query i sees keys up to itself.
                    seen[i] = set(range(low, i + 1 if causal else keys.stop))
                    assert not causal or keys.stop == queries.stop
    for _, a, b in found:
        for i in range(a, b):
            low = a if window is None else max(a, i - window + 1)
            assert seen[i] == set(range(low, i + 1 if causal else b))


@given(
    st.integers(1, 5), st.integers(1, 30), st.sampled_from(["zigzag", "contiguous"]), st.sets(st.integers(1, 29)),
    st.one_of(st.none(), st.integers(1, 12)), st.booleans(),
)  # fmt: skip
def test_pairs_are_exactly_what_may_be_seen(size, length, layout, cuts, window, causal) -> None:  # type: ignore[no-untyped-def]
    """Over all chunks of keys, each query meets each key it may see once, and no other."""
    window = window if causal else None
    sequence = SequenceLayout(length, size, layout)
    edges = [0, *sorted(c for c in cuts if c < length), sequence.padded]
    found = tuple((ALL_ROWS, a, b) for a, b in zip(edges, edges[1:], strict=False))
    chunks = [(i * sequence.chunk, (i + 1) * sequence.chunk) for i in range(sequence.num_chunks)]
    seen: dict[int, list[int]] = {i: [] for i in range(sequence.padded)}
    for mine in chunks:
        for theirs in chunks:
            for _, queries, keys, kind in pairs(found, mine, theirs, window, causal):
                assert queries.start < queries.stop and keys.start < keys.stop
                rows, columns = list(range(queries.start, queries.stop)), list(range(keys.start, keys.stop))
                if kind == "flipped":
                    rows, columns = rows[::-1], columns[::-1]
                for n, i in enumerate(rows):  # aligned at the bottom right, as the kernels do it
                    last = len(columns) if kind == "full" else len(columns) - len(rows) + n + 1
                    first = max(0, last - window) if kind == "causal" and window else 0
                    seen[i] += columns[first:last]
    for _, a, b in found:
        for i in range(a, b):
            low = a if window is None else max(a, i - window + 1)
            assert sorted(seen[i]) == list(range(low, i + 1 if causal else b))
