"""The harness itself: results, tracebacks, hangs, deaths; and a working pool after each of them."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import groups

from tests import harness
from tests.harness import RanksFailed, assert_all_ranks_raise, rank_pids, run_ranks


def ranks_and_sum(scale: int, tensor: torch.Tensor) -> dict[str, Any]:
    total = tensor * (dist.get_rank() + 1) * scale
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "world": dist.get_world_size(), "total": total, "draw": torch.rand(2)}


def raise_on(ranks: tuple[int, ...]) -> None:
    print("about to raise" if dist.get_rank() in ranks else "about to wait")
    if dist.get_rank() in ranks:
        raise ValueError(f"size 6 does not divide 8, rank {dist.get_rank()}")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        os._exit(7) if how == "exit" else os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def mismatched_all_reduce() -> None:
    dist.all_reduce(torch.ones(1000 if dist.get_rank() else 10))


def leave_state() -> int:
    groups.mpu = "left over"
    dist.configure(enabled=True)
    dist.all_reduce(torch.ones(3))
    return os.getpid()


def see_state() -> tuple[Any, bool, int]:
    logger = dist.comm.comms_logger
    return groups.mpu, logger.enabled, len(logger.comms_dict)


def return_local() -> Callable[[], None]:
    return lambda: None


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def assert_works(world_size: int) -> None:
    results = run_ranks(world_size, ranks_and_sum, 2, torch.ones(3))
    assert [result["rank"] for result in results] == list(range(world_size))


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 0.5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order_and_by_value(world_size: int) -> None:
    results = run_ranks(world_size, ranks_and_sum, 2, tensor=torch.arange(6.0)[::2])
    triangle = world_size * (world_size + 1)
    for rank, result in enumerate(results):
        assert (result["rank"], result["world"]) == (rank, world_size)
        assert torch.equal(result["total"], torch.tensor([0.0, 2.0, 4.0]) * triangle)
        assert torch.equal(result["draw"], results[0]["draw"])  # every job starts from one seed
    assert torch.equal(run_ranks(world_size, ranks_and_sum, 2, torch.ones(3))[0]["draw"], results[0]["draw"])


def test_pool_is_kept_and_jobs_do_not_see_each_other() -> None:
    pids = run_ranks(2, leave_state)
    assert pids == rank_pids(2)
    assert run_ranks(2, see_state) == [(None, False, 0)] * 2
    assert pids == rank_pids(2)


def test_one_rank_raises(short_grace: None) -> None:
    with pytest.raises(RanksFailed, match="raise_on: rank 1 raised ValueError: size 6") as caught:
        run_ranks(3, raise_on, (1,))
    assert list(caught.value.exceptions) == [1]
    assert 'raise ValueError(f"size 6 does not divide 8' in caught.value.exceptions[1].traceback
    assert caught.value.exceptions[1].output == "about to raise"
    assert sorted(caught.value.stuck) == [0, 2]
    assert all("in raise_on" in stack for stack in caught.value.stuck.values())
    with pytest.raises(AssertionError, match=r"ranks \[0, 2\] did not raise ValueError"):
        assert_all_ranks_raise(3, raise_on, (1,))
    assert_works(3)


def test_all_ranks_raise() -> None:
    raised = assert_all_ranks_raise(2, raise_on, (0, 1), error=ValueError, match=r"6 does not divide 8, rank \d")
    assert sorted(raised) == [0, 1]
    with pytest.raises(AssertionError, match="raised ValueError, not TypeError"):
        assert_all_ranks_raise(2, raise_on, (0, 1), error="TypeError")
    with pytest.raises(AssertionError, match="'use 1, 2' not in"):
        assert_all_ranks_raise(2, raise_on, (0, 1), match="use 1, 2")
    with pytest.raises(AssertionError, match="no rank raised ValueError"):
        assert_all_ranks_raise(2, raise_on, ())
    assert_works(2)


def test_hang_names_the_rank_and_its_stack() -> None:
    assert_works(2)
    pids = rank_pids(2)
    with pytest.raises(RanksFailed, match=r"ranks \[1\] still ran after 1 s") as caught:
        run_ranks(2, hang_on, 1, timeout=1)
    assert list(caught.value.stuck) == [1]
    assert re.search(r'test_harness.py", line \d+ in hang_on', caught.value.stuck[1])
    assert not any(alive(pid) for pid in pids)
    assert_works(2)


@pytest.mark.parametrize(("how", "message"), [("exit", "exit code 7"), ("abort", "SIGABRT")])
def test_dead_rank_is_reported_at_once(how: str, message: str, short_grace: None) -> None:
    assert_works(2)
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=f"rank 1 raised ProcessDied: the process ended: {message}") as caught:
        run_ranks(2, die_on, 1, how)
    assert time.monotonic() - start < 10
    assert how == "exit" or "in die_on" in caught.value.exceptions[1].output
    assert_works(2)


def test_gloo_abort_is_reported() -> None:
    with pytest.raises(RanksFailed, match="mismatched_all_reduce: rank . raised") as caught:
        run_ranks(2, mismatched_all_reduce)
    assert "Received data size doesn't match" in str(caught.value)
    assert_works(2)


def test_idle_rank_that_died_is_replaced() -> None:
    assert_works(2)
    os.kill(rank_pids(2)[0], signal.SIGKILL)
    time.sleep(0.2)
    assert_works(2)


def test_close_leaves_no_process_and_no_file() -> None:
    assert_works(2)
    pids, folder = rank_pids(2), harness._POOLS[2].folder
    assert all(alive(pid) for pid in pids) and folder.exists()
    harness.close_pools()
    assert not any(alive(pid) for pid in pids) and not folder.exists()
    assert rank_pids(2) == []
    assert_works(2)


def test_result_that_cannot_be_sent_fails_on_all_ranks() -> None:
    assert_all_ranks_raise(2, return_local, error="AttributeError", match="local object")
