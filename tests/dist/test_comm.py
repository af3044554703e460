"""What travels over the axis arrives where it should, in order and summed: transports, sequences, slices, groups."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_tsp.comm import (
    Wire,
    all_gather_rows,
    all_reduce,
    broadcast_from_first,
    exchange,
    gather_sequence,
    gather_slices,
    reduce_scatter_sequence,
)
from ds_tsp.data import gather, global_sum
from ds_tsp.layout import BlockCut, SequenceLayout, WeightCut, cut_bounds, lay_together
from ds_tsp.mesh import Mesh
from ds_tsp.transports import Broadcast, Ring, Transport
from tests.harness import assert_all_ranks_raise, run_ranks

SIZES = [1, 2, 3, 4]
TRANSPORTS: dict[str, type[Transport]] = {"broadcast": Broadcast, "ring": Ring}


def block(size: int, groups: int, dtype: torch.dtype = torch.float64) -> tuple[BlockCut, list[Tensor]]:
    """Three weights, cut along either dim and of uneven slices, and their full values, all different."""
    shapes, dims = [(groups * (size + 1), 3), (2, groups * (size + 2)), (groups * size,)], [0, 1, 0]
    cuts = [WeightCut(s, d, cut_bounds(s[d], size, groups)) for s, d in zip(shapes, dims, strict=True)]
    full = [torch.arange(math.prod(s), dtype=dtype).reshape(s) + 100 * i for i, s in enumerate(shapes)]
    return BlockCut(tuple(cuts), size, groups), full


def slices_of(cut: BlockCut, full: list[Tensor], rank: int) -> list[Tensor]:
    return [w.take(x, rank) for w, x in zip(cut.weights, full, strict=True)]


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def travel_job(kind: str, size: int, groups: int) -> list[list[int]]:
    """Each rank visits every slice once, in the order of `terms`; returns that order."""
    mesh = Mesh.create(size)
    cut, full = block(size, groups)
    own = slices_of(cut, full, mesh.rank)
    before, orders, used = [x.clone() for x in own], [], []
    for overlap, together in ((True, False), (False, False), (True, True)):
        if together:  # slices that lie in one piece are sent from where they lie
            lay_together(own)
        transport = TRANSPORTS[kind](cut, Wire(mesh, overlap))
        for _ in range(2):  # the second time in the buffers of the first
            orders.append([])
            for term in transport.travel(own):
                orders[-1].append(list(term.members))
                with term.turn():
                    for j, arrived in zip(term.members, term.arrive(), strict=True):
                        assert same(arrived, slices_of(cut, full, j)), f"slice of rank {j} is not what its owner sent"
                        assert all((a is b) == (j == mesh.rank) for a, b in zip(arrived, own, strict=True))
            transport.join()
            used.append(transport.wire.buffer_bytes)
        assert orders[-1] == [list(members) for members in transport.terms()]
    packed = sum(x.numel() for x in own) * own[0].itemsize if size > 1 else 0
    assert used[0] == used[1] == used[2] == used[3] and used[4] == used[5] == used[0] - packed
    assert all(order == orders[0] for order in orders) and same(own, before)
    return orders[0]


@pytest.mark.parametrize(
    ("kind", "size", "groups", "orders"),
    [
        ("ring", 1, 1, [[[0]]]),
        ("ring", 2, 2, [[[0], [1]], [[1], [0]]]),
        ("ring", 3, 3, [[[0], [2], [1]], [[1], [0], [2]], [[2], [1], [0]]]),
        ("ring", 4, 4, [[[0], [3], [2], [1]], [[1], [0], [3], [2]], [[2], [1], [0], [3]], [[3], [2], [1], [0]]]),
        ("broadcast", 1, 1, [[[0]]]),
        ("broadcast", 2, 1, [[[0, 1]]] * 2),
        ("broadcast", 3, 3, [[[0], [1], [2]]] * 3),
        ("broadcast", 3, 1, [[[0, 1, 2]]] * 3),
        ("broadcast", 4, 2, [[[0, 1], [2, 3]]] * 4),
        ("broadcast", 4, 4, [[[0], [1], [2], [3]]] * 4),
    ],
)
def test_slices_pass_every_rank(kind: str, size: int, groups: int, orders: list[Any]) -> None:
    assert run_ranks(size, travel_job, kind, size, groups) == orders


def homeward_job(kind: str, size: int, groups: int, which: tuple[int, ...], half: bool) -> None:
    """Rank r's dW of a slice is (r + 1) times its values; in half precision, numbers that bf16 sums get wrong."""
    mesh = Mesh.create(size)
    cut, full = block(size, groups)
    transport = TRANSPORTS[kind](cut, Wire(mesh))
    for _ in range(2):  # nothing is left over from one backward to the next
        home = transport.homeward(which)
        for members in transport.terms():
            grads = [[slices_of(cut, full, j)[i] * (mesh.rank + 1) for i in which] for j in members]
            if half:
                value = 256.0 if mesh.rank == 0 else 1.0  # 256 + 1 is 256 in bf16
                grads = [[torch.full(g.shape, value, dtype=torch.bfloat16) for g in slice_] for slice_ in grads]
            kept = [[g.clone() for g in slice_] for slice_ in grads]
            home.add(members, grads)
            assert all(same(a, b) for a, b in zip(grads, kept, strict=True)), "autograd still owns these"
        total = home.finish()
        own = slices_of(cut, full, mesh.rank)
        expected = [own[i] * (size * (size + 1) // 2) for i in which]
        if half:
            # One rank sums nothing, and keeps its bf16.
            dtype = torch.float32 if size > 1 else torch.bfloat16
            expected = [torch.full(x.shape, 255.0 + size, dtype=dtype) for x in expected]
        assert same(total, expected), f"rank {mesh.rank} got {total}, not {expected}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_gradients_come_home_summed(kind: str, size: int) -> None:
    """Of all weights and of some, as when the others are frozen; in fp32 where weights are bf16."""
    for groups in {size} if kind == "ring" else {1, size}:
        for which in ((0, 1, 2), (1,), (0, 2)):
            run_ranks(size, homeward_job, kind, size, groups, which, False)
        if size > 1:  # one rank has nothing to add up
            run_ranks(size, homeward_job, kind, size, groups, (0, 1, 2), True)


def exchange_job(size: int, distance: int) -> None:
    mesh = Mesh.create(size)
    sent = torch.full((mesh.rank + 1, 2), float(mesh.rank))
    source = (mesh.rank - distance) % size
    got = exchange(sent, (source + 1, 2), mesh, distance)
    assert torch.equal(got, torch.full((source + 1, 2), float(source)))


@pytest.mark.parametrize("size", SIZES)
def test_exchange_goes_ahead(size: int) -> None:
    for distance in range(1, size + 1):
        run_ranks(size, exchange_job, size, distance)


def sequence_job(size: int, length: int, kind: str, strided: bool) -> None:
    mesh = Mesh.create(size)
    layout = SequenceLayout(length, size, kind)
    mine = layout.positions(mesh.rank)
    full = torch.arange(2 * layout.padded * 6, dtype=torch.float64).reshape(2, layout.padded, 2, 3) + 1
    local = full[:, mine]
    if strided:  # dims of attention are transposed when they come here
        local = local.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(gather_sequence(local, layout, mesh), full)
    assert torch.equal(local, full[:, mine])
    summed = reduce_scatter_sequence(full * 10.0**mesh.rank, layout, mesh)
    assert torch.equal(summed, full[:, mine] * sum(10.0**rank for rank in range(size)))
    # Transposed: <gather(x_0 .. x_p), sum of y_r> is the sum over ranks of <x_r, reduce_scatter(y)>.
    y = torch.sin(full * (mesh.rank + 1))
    left = (gather_sequence(local, layout, mesh) * y).sum()
    right = (local * reduce_scatter_sequence(y, layout, mesh)).sum()
    left, right = (all_reduce(v, mesh.group, mesh.size) for v in (left, right))
    torch.testing.assert_close(left, right, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", SIZES)
def test_sequence_is_gathered_and_scattered_in_order(size: int, kind: str) -> None:
    for length in (1, 7, 16):
        run_ranks(size, sequence_job, size, length, kind, length == 16)


def data_gather_job(size: int, length: int, kind: str) -> None:
    """Every rank differentiates the same function of the whole; each gets the gradient of its own tokens, once."""
    mesh = Mesh.create(size)
    layout = SequenceLayout(length, size, kind)
    whole = torch.randn(2, length, 3, dtype=torch.float64)
    mine = layout.positions(mesh.rank)
    local = whole[:, mine.clamp(max=length - 1)].requires_grad_()
    full = gather(local, layout, mesh)
    assert torch.equal(full, whole) and full.is_contiguous()
    weight = torch.randn(2, length, 3, dtype=torch.float64)
    (full.sin() * weight).sum().backward()
    expected = (whole.cos() * weight)[:, mine.clamp(max=length - 1)]
    expected[:, mine >= length] = 0  # padding was dropped
    torch.testing.assert_close(local.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", SIZES)
def test_gradient_of_gather(size: int, kind: str) -> None:
    for length in (1, 7, 16):
        run_ranks(size, data_gather_job, size, length, kind)


def small_collectives_job(size: int) -> None:
    mesh = Mesh.create(size)
    everyone = size * (size + 1) / 2
    base = torch.arange(6.0).reshape(2, 3)
    for x in (base * (mesh.rank + 1), (base * (mesh.rank + 1)).t(), base.new_tensor(float(mesh.rank + 1))):
        before = x.clone()
        total = all_reduce(x, mesh.group, mesh.size)
        assert torch.equal(total, before * (everyone / (mesh.rank + 1))), "the sum was dropped"
        assert torch.equal(x, before) and total.data_ptr() != x.data_ptr(), "the input was reduced in place"
    rows = all_gather_rows(torch.tensor([mesh.rank, 7]), mesh)
    assert rows.tolist() == [[rank, 7] for rank in range(size)]
    tensor = torch.full((3,), float(mesh.rank + 5))
    broadcast_from_first(tensor, mesh)
    assert tensor.tolist() == [5.0] * 3
    local = torch.tensor(float(mesh.rank + 1), requires_grad=True)
    total = global_sum(local, mesh)
    total.backward()
    assert total.item() == everyone and local.grad == 1


@pytest.mark.parametrize("size", SIZES)
def test_small_collectives(size: int) -> None:
    run_ranks(size, small_collectives_job, size)


def gather_slices_job(size: int) -> list[Tensor] | None:
    mesh = Mesh.create(size)
    own = torch.full((2, mesh.rank + 1), float(mesh.rank)).t()  # not contiguous, of another shape on each rank
    return gather_slices(own, [(rank + 1, 2) for rank in range(size)], mesh)


@pytest.mark.parametrize("size", SIZES)
def test_gather_slices_of_uneven_shapes(size: int) -> None:
    first, *others = run_ranks(size, gather_slices_job, size)
    assert others == [None] * (size - 1)
    assert same(first, [torch.full((rank + 1, 2), float(rank)) for rank in range(size)])


def mesh_job(size: int) -> dict[str, Any]:
    mesh = Mesh.create(size, "contiguous")
    me = torch.tensor([2.0 ** torch.distributed.get_rank()])  # a sum of these tells who took part
    mpu = (mesh.get_model_parallel_rank(), mesh.get_model_parallel_world_size(), mesh.get_data_parallel_rank(),
           mesh.get_data_parallel_world_size())  # fmt: skip
    assert mpu == (mesh.rank, mesh.size, mesh.dp_rank, mesh.dp_size) and mesh.layout == "contiguous"
    assert (mesh.get_model_parallel_group(), mesh.get_data_parallel_group()) == (mesh.group, mesh.dp_group)
    return {
        "place": (mesh.rank, mesh.dp_rank),
        "tsp": (mesh.ranks, int(all_reduce(me, mesh.group, mesh.size))),
        "dp": (mesh.dp_ranks, int(all_reduce(me, mesh.dp_group, mesh.dp_size))),
    }


@pytest.mark.parametrize(
    ("size", "tsp", "dp"),
    [
        (1, [(0,), (1,), (2,), (3,)], [(0, 1, 2, 3)]),
        (2, [(0, 1), (2, 3)], [(0, 2), (1, 3)]),
        (4, [(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]),
    ],
)
def test_mesh_groups(size: int, tsp: list[tuple[int, ...]], dp: list[tuple[int, ...]]) -> None:
    """TSP ranks are neighbours, data-parallel ranks hold equal slices; a sum over each group is over its ranks."""
    for rank, got in enumerate(run_ranks(4, mesh_job, size)):
        axis, replicas = (next(ranks for ranks in axes if rank in ranks) for axes in (tsp, dp))
        assert got["place"] == (axis.index(rank), replicas.index(rank))
        assert got["tsp"] == (axis, sum(2**r for r in axis))
        assert got["dp"] == (replicas, sum(2**r for r in replicas))


@pytest.mark.parametrize("size", [0, 3, 8])
def test_mesh_refuses(size: int) -> None:
    assert_all_ranks_raise(4, mesh_job, size, match=f"tsp.size={size} does not divide world size 4")
