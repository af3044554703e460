"""The rank side of harness.py: one process of a pool, which runs job after job in one gloo group."""

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

ANSWER_OK = "ok"
SEED = 1234
GLOO_TIMEOUT = timedelta(seconds=30)  # a collective whose peer never comes ends by itself


@dataclass(frozen=True)
class RankError:
    """What one rank raised; `bases` names the classes of its type, `when` is time.monotonic(), one clock for all."""

    type_name: str
    bases: tuple[str, ...]
    message: str
    traceback: str
    when: float
    output: str = ""


def rank_main(rank: int, world_size: int, port: int, conn: Connection, log_path: str) -> None:
    """Initialise deepspeed.comm, then answer jobs until an empty message or the end of the test process."""
    gc.freeze()  # what the server imported is not garbage; a collection would also copy every page of it
    threading.Thread(target=_die_with, args=(parent_process(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then ends the ranks
    _log_to(log_path)
    _answer(conn, _init_group, rank, world_size, port)
    while job := _next_job(conn):
        os.ftruncate(1, 0)
        _answer(conn, _run_job, job)
    from deepspeed import comm as dist

    dist.destroy_process_group()
    os._exit(0)  # interpreter teardown with gloo threads sometimes aborts


def _log_to(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)  # also what C++ says before it aborts
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=False)


def _die_with(parent: BaseProcess | None) -> None:
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _next_job(conn: Connection) -> bytes:
    try:
        return conn.recv_bytes()
    except EOFError:
        return b""


def _answer(conn: Connection, fn: Callable[..., Any], *args: Any) -> None:
    try:
        answer = pickle.dumps((ANSWER_OK, fn(*args)))
        _forget()
    except BaseException as error:  # a job that exits is a failed job too
        bases = tuple(base.__name__ for base in type(error).__mro__)
        text = "".join(traceback.format_exception(error))
        answer = pickle.dumps(("error", RankError(type(error).__name__, bases, str(error), text, time.monotonic())))
    sys.stdout.flush()
    sys.stderr.flush()
    conn.send_bytes(answer)


def _init_group(rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    from deepspeed import comm as dist
    from torch.distributed import distributed_c10d

    # The shared-memory all-reduce is not under test: it compiles for 45 s and leaves 69 MB per rank in /dev/shm.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    # new_group() does not inherit the timeout of the world: without this, sub-groups wait 30 minutes.
    distributed_c10d.default_pg_timeout = GLOO_TIMEOUT
    dist.init_distributed("gloo", verbose=False, timeout=GLOO_TIMEOUT, rank=rank, world_size=world_size)


def _run_job(job: bytes) -> Any:
    import numpy
    import torch

    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    fn, args, kwargs = pickle.loads(job)
    return fn(*args, **kwargs)


def _forget() -> None:
    """Drop what a job left in globals of torch and DeepSpeed, so that jobs do not see each other."""
    import torch
    from deepspeed import comm as dist
    from deepspeed.utils import groups
    from deepspeed.utils.comms_logging import CommsLogger

    groups._release_process_group_references()  # mpu, mesh_device and every cached group
    autocast = sys.modules["deepspeed.runtime.torch_autocast"]
    autocast.TORCH_AUTOCAST_INITIALIZED, autocast.TORCH_AUTOCAST_DTYPE = False, None  # else a later ZeRO engine scales
    comms_logger = sys.modules["deepspeed.comm.comm"].comms_logger
    vars(comms_logger).clear()
    vars(comms_logger).update(vars(CommsLogger()))
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    gc.collect()
    # Each gloo group has threads that wake up a hundred times a second, idle or not: hundreds of them eat the machine.
    from torch.distributed import distributed_c10d

    world = distributed_c10d.GroupMember.WORLD
    for group in [group for group in distributed_c10d._world.pg_map if group is not world]:
        distributed_c10d.destroy_process_group(group)
    assert dist.is_initialized(), "the job destroyed the process group of its pool"
