"""Run a function on every rank of a gloo group; bring back results, tracebacks or the stacks of ranks that hang.

    results = run_ranks(4, job, 3, flag=True)  # job(3, flag=True) on 4 ranks; results in rank order
    assert_all_ranks_raise(4, job, -1, error=ValueError, match="must be >= 0")  # on ALL ranks, and none hangs

`job` is a module-level function of a test module; `deepspeed.comm` is initialised when it runs (see harness_rank.py).
What a rank prints is kept and shown when it fails, never otherwise.
Ranks are forked from a server that has imported torch, DeepSpeed and Transformers once, and one pool per world size
stays up for many jobs. A failure ends its pool, as other ranks may sit in a collective; the next call starts a new one.
"""

import atexit
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness_rank import ANSWER_OK, RankError, rank_main

ENV = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # one per rank, and each leaves a semaphore behind
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",  # the host's own name need not resolve in a sandbox
}
GRACE_S = 5.0  # after the first error: how long the other ranks have to fail by themselves
START_TIMEOUT_S = 240.0  # the first start imports everything, on a cold page cache
MAX_LOG_LINES = 80
MAX_THREADS = 60  # gloo groups that a job leaks keep theirs; a fresh pool is cheap
PRELOAD = [
    "numpy", "pytest", "hypothesis", "torch", "deepspeed", "deepspeed.comm", "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # 4 s of torch._inductor, at the first engine with ZeRO
    "transformers", "transformers.masking_utils",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.mistral.modeling_mistral",
]  # fmt: skip

_POOLS: "dict[int, _Pool]" = {}


class RanksFailed(Exception):
    """`exceptions`: what each failing rank raised, most telling first; `stuck`: stacks of unfinished ranks."""

    def __init__(self, headline: str, exceptions: dict[int, RankError], stuck: dict[int, str]) -> None:
        super().__init__(_report(headline, exceptions, stuck))
        self.exceptions = exceptions
        self.stuck = stuck


@dataclass(frozen=True)
class _Rank:
    rank: int
    process: multiprocessing.process.BaseProcess
    conn: Connection
    log_path: Path


@dataclass(frozen=True)
class _Pool:
    ranks: tuple[_Rank, ...]
    folder: Path


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
    """`fn(*args, **kwargs)` on each of `world_size` ranks; the results in rank order, tensors sent by value.

    Raises: RanksFailed when a rank raises, dies, or has not finished after `timeout` seconds.
    """
    __tracebackhide__ = True
    job = pickle.dumps((fn, args, kwargs))  # not ForkingPickler: that one shares tensors by file descriptor
    try:
        pool = _pool(world_size)
        for rank in pool.ranks:
            rank.conn.send_bytes(job)
        return _collect(pool, getattr(fn, "__name__", str(fn)), timeout)
    except BaseException:  # also KeyboardInterrupt: the ranks are in an unknown state
        _close(world_size, gently=False)
        raise


def assert_all_ranks_raise(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    error: type[BaseException] | str = ValueError,
    match: str = "",
    timeout: float = 120.0,
    **kwargs: Any,
) -> dict[int, RankError]:
    """Assert that `fn` raises `error` (or a subclass) with a message in which `match` is found, on every rank."""
    __tracebackhide__ = True
    name = error if isinstance(error, str) else error.__name__
    try:
        run_ranks(world_size, fn, *args, timeout=timeout, **kwargs)
    except RanksFailed as failed:
        silent = [rank for rank in range(world_size) if rank not in failed.exceptions]
        assert not silent, f"ranks {silent} did not raise {name}\n{failed}"
        for rank, raised in failed.exceptions.items():
            assert name in raised.bases, f"rank {rank} raised {raised.type_name}, not {name}\n{failed}"
            assert re.search(match, raised.message), f"rank {rank}: {match!r} not in {raised.message!r}\n{failed}"
        return failed.exceptions
    raise AssertionError(f"no rank raised {name}")


def close_pools() -> None:
    """End every rank of every pool."""
    for world_size in list(_POOLS):
        _close(world_size, gently=True)


def rank_pids(world_size: int) -> list[int]:
    """Process ids of the pool's ranks, empty when there is no pool."""
    return [rank.process.pid for rank in _POOLS[world_size].ranks] if world_size in _POOLS else []


def start_server() -> None:
    """Start the server that imports everything and forks the ranks, without waiting for its imports."""
    for name, value in ENV.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = "1"  # not a default: a server that started OpenMP threads must not fork
    forkserver.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def _pool(world_size: int) -> _Pool:
    pool = _POOLS.get(world_size)
    if pool is not None and not all(_usable(rank) for rank in pool.ranks):
        _close(world_size, gently=False)
        pool = None
    if pool is None:
        pool = _POOLS[world_size] = _start(world_size)
        _collect(pool, "start of the pool", START_TIMEOUT_S)
    return pool


def _usable(rank: _Rank) -> bool:
    tasks = Path(f"/proc/{rank.process.pid}/task")
    return rank.process.is_alive() and (not tasks.exists() or len(list(tasks.iterdir())) < MAX_THREADS)


def _start(world_size: int) -> _Pool:
    start_server()
    context = multiprocessing.get_context("forkserver")
    folder = Path(tempfile.mkdtemp(prefix="ds_tsp_ranks_"))
    port = _free_port()
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        log_path = folder / f"rank{rank}.log"
        args = (rank, world_size, port, theirs, str(log_path))
        process = context.Process(target=rank_main, args=args, name=f"rank{rank}of{world_size}", daemon=True)
        process.start()
        theirs.close()  # so that a dead rank reads as end of file here
        ranks.append(_Rank(rank, process, ours, log_path))
    return _Pool(tuple(ranks), folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _close(world_size: int, gently: bool) -> None:
    pool = _POOLS.pop(world_size, None)
    if pool is None:
        return
    for rank in pool.ranks:
        if gently and rank.process.is_alive():
            rank.conn.send_bytes(b"")
    for rank in pool.ranks:
        if gently:
            rank.process.join(5)
        rank.process.kill()
        rank.process.join()
        rank.conn.close()
    shutil.rmtree(pool.folder, ignore_errors=True)


def _collect(pool: _Pool, what: str, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, RankError] = {}
    give_up = time.monotonic() + timeout
    waiting = list(pool.ranks)
    while waiting and time.monotonic() < give_up:
        for rank in _ready(waiting, give_up - time.monotonic()):
            kind, value = _receive(rank)
            if kind != ANSWER_OK and not errors:
                give_up = min(give_up, time.monotonic() + GRACE_S)
            (results if kind == ANSWER_OK else errors)[rank.rank] = value
        waiting = [rank for rank in pool.ranks if rank.rank not in results and rank.rank not in errors]
    if not waiting and not errors:
        return [results[rank] for rank in range(len(pool.ranks))]
    # A death explains the errors its peers get from their collectives, so it comes first; then by time.
    errors = dict(sorted(errors.items(), key=lambda item: (item[1].type_name != "ProcessDied", item[1].when)))
    raise RanksFailed(_headline(what, timeout, errors, waiting), errors, _stacks(waiting))


def _ready(waiting: Iterable[_Rank], timeout: float) -> list[_Rank]:
    owner = {handle: rank for rank in waiting for handle in (rank.conn, rank.process.sentinel)}
    return list({rank.rank: rank for rank in map(owner.get, wait(list(owner), max(timeout, 0.0)))}.values())


def _receive(rank: _Rank) -> tuple[str, Any]:
    try:
        if rank.conn.poll(0):  # a rank may answer and then die: the answer counts
            kind, value = pickle.loads(rank.conn.recv_bytes())
            return kind, value if kind == ANSWER_OK else replace(value, output=_log(rank))
    except (EOFError, ConnectionResetError):
        pass
    rank.process.join(5)
    code = rank.process.exitcode
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    error = RankError("ProcessDied", ("ProcessDied",), f"the process ended: {how}", "", time.monotonic(), _log(rank))
    return "died", error


def _stacks(ranks: Iterable[_Rank]) -> dict[int, str]:
    alive = [rank for rank in ranks if rank.process.is_alive()]
    for rank in alive:
        if rank.log_path.exists():  # else it has no signal handler yet, and SIGUSR1 would kill it
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.3)  # the handler writes the log, there is no answer to wait for
    return {rank.rank: _log(rank) for rank in alive}


def _log(rank: _Rank) -> str:
    if not rank.log_path.exists():
        return "(not started)"
    lines = rank.log_path.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines[-MAX_LOG_LINES:] if not line.startswith("Extension modules:"))


def _headline(what: str, timeout: float, errors: dict[int, RankError], waiting: list[_Rank]) -> str:
    if errors:
        rank, first = next(iter(errors.items()))
        return f"{what}: rank {rank} raised {first.type_name}: {first.message}"
    return f"{what}: ranks {[rank.rank for rank in waiting]} still ran after {timeout:g} s"


def _report(headline: str, exceptions: dict[int, RankError], stuck: dict[int, str]) -> str:
    lines, shown = [headline], {}
    for rank, error in exceptions.items():
        key = (error.type_name, error.message)
        same_as = shown.setdefault(key, rank)
        lines.append(f"--- rank {rank}: {error.type_name}" + (f", as rank {same_as}" if same_as != rank else ""))
        if same_as == rank:
            lines += [error.traceback, error.output and f"--- rank {rank} wrote:\n{error.output}"]
    for rank, stack in stuck.items():
        lines.append(f"--- rank {rank} had not finished; what it wrote, and its stack:\n{stack}")
    return "\n".join(filter(None, lines))


atexit.register(close_pools)  # also when the test session's fixture never ran
