"""LiveBytes against programs whose live bytes are known by hand."""

import gc
import resource

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from ds_tsp.meter import Allocation, LiveBytes, peak_memory

N = 1000
F32 = 4 * N  # bytes of one fp32 tensor of N elements


def test_allocation_views_and_free() -> None:
    with LiveBytes([]) as meter:
        base = torch.empty(N)
        assert meter.current == F32
        view = base.view(10, -1).t()[::2]  # of the same storage
        assert meter.current == F32
        del base
        assert meter.current == F32
        copy = view.contiguous()
        assert meter.current == F32 + F32 // 2
        del view
        assert meter.current == F32 // 2
        del copy
        assert (meter.start, meter.current, meter.peak) == (0, 0, F32 + F32 // 2)


def test_starts_from_given_tensors_and_sees_them_die() -> None:
    given = [torch.empty(N), torch.empty(2 * N, dtype=torch.bfloat16)]
    with LiveBytes([given[0], given[0][1:], given[1]]) as meter:
        assert meter.start == meter.current == meter.peak == 2 * F32
        assert meter.largest is None
        given.pop()
        assert meter.current == F32
        given[0].mul_(2).unsqueeze(0)
        assert (meter.current, meter.peak) == (F32, 2 * F32)


def live_at_start() -> int:
    with LiveBytes() as meter:
        return meter.start


def test_starts_from_all_live_tensors_and_their_gradients() -> None:
    gc.collect()
    before = live_at_start()
    weight = torch.empty(N, requires_grad=True)
    held = {"deep": [weight[5:]]}
    assert live_at_start() - before == F32
    weight.sum().backward()  # the gradient is expanded from one element, then made contiguous
    assert live_at_start() - before == 2 * F32
    del weight, held
    assert live_at_start() == before


def test_storage_resize_is_seen_and_the_patch_is_undone() -> None:
    original = vars(torch.UntypedStorage).get("resize_")
    tensor = torch.empty(N)
    with LiveBytes([tensor]) as meter:
        tensor.untyped_storage().resize_(0)
        assert (meter.current, meter.peak) == (0, F32)
        other = torch.empty(N)
        assert (meter.current, meter.peak) == (F32, F32)
        tensor.untyped_storage().resize_(2 * F32)
        assert (meter.current, meter.peak) == (3 * F32, 3 * F32)
        assert meter.largest == Allocation(2 * F32, (2 * F32,))
        other.resize_(3 * N)  # this one is an operator
        assert meter.current == 5 * F32
    assert vars(torch.UntypedStorage).get("resize_") is original
    with pytest.raises(KeyError), LiveBytes([]):
        raise KeyError
    assert vars(torch.UntypedStorage).get("resize_") is original


def test_parameter_data_swap_as_in_zero_3() -> None:
    weight = torch.nn.Parameter(torch.empty(N))
    with LiveBytes([weight]) as meter:
        weight.data = torch.empty(0)
        assert meter.current == 0
        weight.data = torch.empty(N)
        assert (meter.current, meter.peak) == (F32, F32)


def test_backward() -> None:
    leaf = torch.ones(N, requires_grad=True)
    with LiveBytes([leaf]) as meter:
        loss = leaf.exp().sum()  # exp saves its result
        assert meter.current == 2 * F32 + 4
        loss.backward()
        assert meter.peak == 3 * F32 + 8  # leaf, saved result, gradient; loss and its gradient
        assert meter.current == 2 * F32 + 4
        del loss
        assert meter.current == 2 * F32
        leaf.grad = None
        assert meter.current == F32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp().exp().exp()  # sin saves x, which is live anyway; each exp saves its result

    leaf = torch.zeros(N, requires_grad=True)
    with LiveBytes([leaf]) as meter:
        plain = chain(leaf)
        assert meter.current == 4 * F32
        del plain
        assert meter.current == F32
        meter.reset_peak()
        kept = checkpoint(chain, leaf, use_reentrant=reentrant)
        assert meter.current == 2 * F32
        kept.backward(torch.ones(N))
        # leaf, result, its gradient; the recomputed results; at least one gradient on the way
        assert 3 * F32 + 3 * F32 + F32 <= meter.peak <= 3 * F32 + 4 * F32 + 2 * F32
        assert meter.current == 3 * F32


def test_peak_of_backward_is_the_profilers() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(17, 90), torch.nn.ReLU(), torch.nn.Linear(90, 33))
    inputs = torch.randn(50, 17)
    net(inputs).sum().backward()  # gradients exist before both measurements

    with LiveBytes() as meter:
        net(inputs).sum().backward()
    with profile(profile_memory=True) as recorded:
        net(inputs).sum().backward()

    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    # The allocator also sees the scratch of an operator: never less, and little more.
    assert meter.peak - meter.start <= peak <= 1.1 * (meter.peak - meter.start)


def test_largest_and_reset_peak() -> None:
    with LiveBytes([]) as meter:
        small = torch.empty(3, N)
        big = torch.empty(5, 2, N)
        torch.empty(N)
        assert meter.largest == Allocation(10 * F32, (5, 2, N))
        del big
        meter.reset_peak()
        assert (meter.peak, meter.largest) == (3 * F32, None)
        small.t().contiguous()
        assert (meter.peak, meter.largest) == (6 * F32, Allocation(3 * F32, (N, 3)))


def test_nested_meters_and_reuse() -> None:
    with LiveBytes([]) as outer:
        first = torch.empty(N)
        with LiveBytes([]) as inner:
            second = torch.empty(N)
            first.untyped_storage().resize_(0)
        assert (inner.peak, outer.peak, outer.current) == (F32, 2 * F32, F32)
        second.untyped_storage().resize_(0)
        assert (inner.current, outer.current) == (F32, 0)


def test_fake_tensors_count_like_real_ones() -> None:
    with FakeTensorMode(), LiveBytes([]) as meter:
        huge = torch.empty(1 << 20, 1 << 20)
        total = huge.sum()
        assert meter.current == (1 << 42) + 4
        del huge, total
        assert (meter.current, meter.peak) == (0, (1 << 42) + 4)


def test_wrappers_count_as_what_they_hold() -> None:
    """TwoTensor is made like DTensor: a tensor of two others, with a storage of its own that is not there."""
    with LiveBytes([]) as meter:
        pair = TwoTensor(torch.ones(N), torch.ones(N))
        assert meter.current == 2 * F32
        double = pair * 2
        assert meter.current == 4 * F32
        del pair
        assert meter.current == 2 * F32
        del double
        assert (meter.current, meter.peak) == (0, 4 * F32)
    pair = TwoTensor(torch.ones(N), torch.ones(N))
    with LiveBytes() as everything:
        start = everything.start
        del pair
        gc.collect()
        assert everything.current == start - 2 * F32


def test_peak_memory_is_the_peak_resident_set() -> None:
    before = peak_memory()
    assert before == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 50 * 2**20 < before < 2**40
    grown = torch.ones(before // 4 + (16 << 20))  # 4 bytes each: more than everything so far
    assert peak_memory() - before > 32 << 20
    del grown
    assert peak_memory() > before
