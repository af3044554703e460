"""Who owns which tokens and which rows: all of them once, in order, evenly; and what is packed comes back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_tsp.layout import (
    BlockCut,
    SequenceLayout,
    WeightCut,
    accumulate_dtype,
    cut_bounds,
    head_groups,
    lay_together,
    local_layout,
    pack,
    together,
)

SIZES = st.integers(1, 8)
KINDS = st.sampled_from(["zigzag", "contiguous"])
LAYOUTS = st.builds(SequenceLayout, st.integers(1, 200), SIZES, KINDS)

# ---- tokens


@pytest.mark.parametrize(
    ("layout", "chunk", "padded", "runs"),
    [
        (SequenceLayout(16, 4), 2, 16, [((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 10),)]),
        (SequenceLayout(16, 4, "contiguous"), 4, 16, [((0, 4),), ((4, 8),), ((8, 12),), ((12, 16),)]),
        (SequenceLayout(7, 3), 2, 12, [((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 8),)]),
        (SequenceLayout(7, 3, "contiguous"), 3, 9, [((0, 3),), ((3, 6),), ((6, 9),)]),
        (SequenceLayout(7, 1), 7, 7, [((0, 7),)]),
        (SequenceLayout(1, 2), 1, 4, [((0, 1), (3, 4)), ((1, 3),)]),
    ],
)
def test_examples(layout: SequenceLayout, chunk: int, padded: int, runs: list[tuple[tuple[int, int], ...]]) -> None:
    """Rank r of zigzag holds chunks r and 2P-1-r; the last rank's two chunks are neighbours, so one run."""
    assert (layout.chunk, layout.padded) == (chunk, padded)
    assert [layout.runs(rank) for rank in range(layout.size)] == runs


@given(LAYOUTS)
def test_every_token_is_owned_once(layout: SequenceLayout) -> None:
    owned = [layout.positions(rank) for rank in range(layout.size)]
    assert torch.equal(torch.cat(owned).sort().values, torch.arange(layout.padded))
    assert all(len(positions) == layout.local_length for positions in owned)


@given(LAYOUTS)
def test_padding_is_least(layout: SequenceLayout) -> None:
    assert 0 <= layout.padded - layout.length < layout.num_chunks
    assert layout.padded == layout.num_chunks * layout.chunk == layout.size * layout.local_length
    assert layout.size > 1 or layout.padded == layout.length


@given(LAYOUTS)
def test_chunks_runs_and_positions_tell_the_same(layout: SequenceLayout) -> None:
    for rank in range(layout.size):
        starts = [chunk * layout.chunk for chunk in layout.chunks(rank)]
        by_chunk = [position for start in starts for position in range(start, start + layout.chunk)]
        runs = layout.runs(rank)
        assert layout.positions(rank).tolist() == by_chunk == [p for run in runs for p in range(*run)]
        assert all(one[1] < other[0] for one, other in zip(runs, runs[1:], strict=False)), "runs that touch are one run"


@given(LAYOUTS)
def test_gathered_tokens_are_in_order(layout: SequenceLayout) -> None:
    """Chunks put back where `chunks` says: what gather_sequence does with what each rank sends."""
    x = torch.arange(layout.padded) * 7 + 3
    full = torch.full((layout.num_chunks, layout.chunk), -1)
    for rank in range(layout.size):
        for chunk, tokens in zip(layout.chunks(rank), x[layout.positions(rank)].split(layout.chunk), strict=True):
            full[chunk] = tokens
    assert torch.equal(full.flatten(), x)


@given(LAYOUTS)
def test_zigzag_balances_causal_work(layout: SequenceLayout) -> None:
    work = [(layout.positions(rank) + 1).sum().item() for rank in range(layout.size)]
    if layout.kind == "zigzag":
        assert len(set(work)) == 1
    elif layout.size > 1:
        assert work == sorted(set(work))  # the later the rank, the more keys its queries see


@given(st.integers(1, 50), SIZES, KINDS)
def test_local_layout_pads_nothing(chunk: int, size: int, kind: str) -> None:
    local = chunk * SequenceLayout(1, size, kind).chunks_per_rank
    layout = local_layout(local, size, kind)
    assert (layout.local_length, layout.padded) == (local, layout.length) == (local, local * size)


# ---- rows of weights


@pytest.mark.parametrize(
    ("kv_heads", "size", "groups"), [(8, 4, 4), (4, 8, 4), (6, 4, 2), (1, 8, 1), (3, 4, 1), (4, 16, 4), (5, 5, 5)]
)
def test_head_groups(kv_heads: int, size: int, groups: int) -> None:
    assert head_groups(kv_heads, size) == groups


@pytest.mark.parametrize(
    ("arguments", "bounds"),
    [((12, 4), (0, 3, 6, 9, 12)), ((7, 3), (0, 2, 4, 7)), ((10, 4, 2), (0, 2, 5, 7, 10)), ((5, 1), (0, 5))],
)
def test_bounds_examples(arguments: tuple[int, ...], bounds: tuple[int, ...]) -> None:
    assert cut_bounds(*arguments) == bounds


@given(kv_heads=st.integers(1, 12), width=st.integers(1, 12), size=SIZES)
def test_bounds_cover_in_order_and_keep_heads_whole(kv_heads: int, width: int, size: int) -> None:
    groups, total = head_groups(kv_heads, size), kv_heads * width
    members, rows = size // groups, total // groups
    if rows < members:
        with pytest.raises(ValueError, match=f"{total} rows cannot be cut into {size} slices.*smaller tsp.size"):
            cut_bounds(total, size, groups)
        return
    bounds = cut_bounds(total, size, groups)
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, total, size)
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert total % size or set(sizes) == {total // size}
    edges = bounds[::members]  # where one group ends and the next begins
    assert edges == tuple(range(0, total + 1, rows)) and all(edge % width == 0 for edge in edges)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, 4), "4 head groups divide neither 10 rows nor 4 ranks"),
        ((12, 6, 4), "4 head groups divide neither 12 rows nor 6 ranks"),
        ((3, 4), "3 rows cannot be cut into 4 slices of at least one row; use a smaller tsp.size"),
        ((4, 8, 4), "4 rows cannot be cut into 8 slices"),
    ],
)
def test_bounds_refuse(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_bounds(*arguments)


# ---- slices in a buffer


@st.composite
def block_cuts(draw: st.DrawFn) -> BlockCut:
    groups, members = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size, weights = groups * members, []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        shape[dim] = groups * draw(st.integers(members, members + 5))
        weights.append(WeightCut(tuple(shape), dim, cut_bounds(shape[dim], size, groups)))
    return BlockCut(tuple(weights), size, groups)


def fulls(cut: BlockCut) -> list[torch.Tensor]:
    return [torch.arange(math.prod(w.shape)).reshape(w.shape) + 1000 * i for i, w in enumerate(cut.weights)]


@given(block_cuts(), st.data())
def test_slices_travel_packed_and_come_back(cut: BlockCut, data: st.DataObject) -> None:
    which = data.draw(st.lists(st.sampled_from(range(len(cut.weights))), min_size=1, unique=True).map(sorted))
    full = fulls(cut)
    for rank in range(cut.size):
        own = [cut.weights[i].take(full[i], rank) for i in which]
        flat = pack(own, own[0].new_empty(cut.numel(rank, which)))
        assert flat.shape == (cut.numel(rank, which),) and flat.dtype == torch.int64
        assert torch.equal(flat, torch.cat([w.flatten() for w in own]))
        back = cut.unpack(flat, rank, which)
        for i, got, expected in zip(which, back, own, strict=True):
            assert got.shape == cut.weights[i].slice_shape(rank) and torch.equal(got, expected)
            assert got.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr(), "views, not copies"


@given(block_cuts())
def test_terms_are_whole_groups_and_together_the_weight(cut: BlockCut) -> None:
    assert [rank for group in range(cut.groups) for rank in cut.members(group)] == list(range(cut.size))
    full, terms = fulls(cut), []
    for group in range(cut.groups):
        slices = [[w.take(x, rank) for w, x in zip(cut.weights, full, strict=True)] for rank in cut.members(group)]
        terms.append(cut.assemble(slices))
        assert len(slices) > 1 or all(a is b for a, b in zip(terms[-1], slices[0], strict=True)), "no copy of one slice"
    for i, weight in enumerate(cut.weights):
        parts = [term[i] for term in terms]
        assert len({part.shape for part in parts}) == 1
        assert torch.equal(torch.cat(parts, weight.dim), full[i])


def test_a_slice_does_not_keep_the_whole_alive() -> None:
    full = torch.arange(24.0).reshape(4, 6).t()  # not contiguous
    part = WeightCut((6, 4), 0, (0, 2, 6)).take(full, 1)
    assert torch.equal(part, full[2:6]) and part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.numel() * 4
    part.zero_()
    assert full.count_nonzero() == 23


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pack_takes_logical_order_and_the_dtype_asked_for(dtype: torch.dtype) -> None:
    strided, scalar = torch.arange(6.0).reshape(2, 3).t(), torch.tensor(9.0)
    into = torch.empty(7, dtype=dtype)
    assert pack([strided, scalar], into) is into and into.tolist() == [0, 3, 1, 4, 2, 5, 9]


def test_tensors_that_lie_together_are_one_without_a_copy() -> None:
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor([7.0]), torch.arange(4.0).reshape(2, 2)]
    assert together(tensors) is None
    before = [t.clone() for t in tensors]
    lay_together(tensors)
    flat = together(tensors)
    assert flat is not None and flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 0, 1, 2, 3]
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    tensors[2].mul_(2)
    assert flat[-1] == 6, "a view, not a copy"
    assert together(tensors[1:]) is not None and together(tensors[1:])[0] == 7  # from the middle of a storage
    assert together([tensors[0], tensors[2]]) is None  # a gap
    assert together([tensors[1], tensors[0]]) is None  # another order
    assert together([tensors[0].t(), tensors[1]]) is None  # strided


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_sums_are_kept_in(dtype: str, expected: str) -> None:
    assert accumulate_dtype(getattr(torch, dtype)) == getattr(torch, expected)
