"""Checkpoints when it goes wrong: full disks, killed ranks, broken and foreign folders."""

import hashlib
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

import ds_tsp
from ds_tsp.convert import convert
from tests.harness import RanksFailed, run_ranks
from tests.integration.test_training import adamw, ds_config, micro_batch
from tests.models import tiny

DISK = [  # what a save does on disk, in DeepSpeed and in ds_tsp
    (torch, "save"), (deepspeed.runtime.engine, "copyfile"), (os, "makedirs"), (os, "fsync"), (os, "replace"),
    (Path, "rename"), (Path, "write_text"), (shutil, "rmtree"),
]  # fmt: skip


def start(size: int = 2, stage: int = 1, **more: Any) -> Any:
    sizes = {"num_hidden_layers": 1, **more.pop("sizes", {})}
    model = tiny("llama", **sizes)
    engine, *_ = ds_tsp.initialize(model=model, optimizer=adamw(model), config=ds_config(size, stage, **more))
    return engine


def step(engine: Any) -> None:
    engine.backward(engine(**micro_batch(engine.global_steps, 0, engine.tsp.dp_rank)).loss)
    engine.step()


def digest(engine: Any) -> str:
    state = [p.detach().numpy().tobytes() for p in engine.module.parameters()]
    state += [v.numpy().tobytes() for s in engine.basic_optimizer.state.values() for v in s.values()]
    return hashlib.sha256(b"".join(state)).hexdigest()


class Disk(ExitStack):
    """While entered, `fault(operation, its first argument)` is called in place of the n-th operation on disk of this
    process, and of those after it."""

    def __init__(self, n: int, fault: Callable[[str, Any], None]):
        super().__init__()
        self.left, self.fault = n, fault

    def __enter__(self) -> "Disk":
        for owner, name in DISK:
            self.enter_context(mock.patch.object(owner, name, self.watched(getattr(owner, name), name)))
        return super().__enter__()

    def watched(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, (str, Path, int)) for a in args):  # torch pickles tensors by saving to a buffer
                self.left -= 1
                if self.left < 0:
                    self.fault(name, args)
            return original(*args, **kwargs)

        return operation


def full(name: str, args: tuple[Any, ...]) -> None:
    raise OSError(28, "No space left on device")


def failing_disk_job(folder: str, rank: int) -> list[str]:
    """One step after the good checkpoint: save, with an error of `rank` at its first operation, its second, ... until
    there is none left. What `latest` names must load after each."""
    engine, me, seen = start(), dist.get_rank(), list[str]()
    step(engine)
    engine.save_checkpoint(folder, "good")
    good = digest(engine)
    for number in range(60):
        step(engine)
        new, tag = digest(engine), ("good", "other")[number % 2]
        try:
            with Disk(number if me == rank else 10**6, full) as disk:
                engine.save_checkpoint(folder, tag)
            break
        except OSError as error:
            seen.append(str(error))
        engine.load_checkpoint(folder)
        assert me != rank or disk.left < 0
        assert digest(engine) == good or Path(folder, "latest").read_text() == tag and digest(engine) == new, number
        if digest(engine) == new:  # it failed at the very end
            good = new
    assert digest(engine) == new
    engine.destroy()
    return [*seen, str(number)]


@pytest.mark.parametrize("rank", [0, 3])
def test_full_disk(tmp_path: Path, rank: int) -> None:
    """Every rank raises the same error, none hangs, nothing that was saved is lost, and the next save succeeds."""
    results = run_ranks(4, failing_disk_job, str(tmp_path), rank)
    assert all(result == results[0] for result in results)
    *messages, operations = results[0]
    assert int(operations) > (12 if rank == 0 else 2) and len(messages) == int(operations)
    for message in messages:
        assert f"on rank {rank}" in message and "No space left on device" in message and "was not saved" in message
    assert not list(tmp_path.glob(".*.partial"))


def killed_job(folder: str, fault: tuple[int, int] | None, tag: str) -> int:
    """Load what `latest` names, compare it to what was saved, train a step, save; a rank may be killed meanwhile."""
    engine, me = start(), dist.get_rank()
    engine.load_checkpoint(folder)

    def digests(step: int) -> Path:
        return Path(folder, f"digest_{step}_{me}")

    before = engine.global_steps
    if before:
        assert digest(engine) == digests(before).read_text(), f"step {before} was loaded, and is not what was saved"
    step(engine)
    digests(before + 1).write_text(digest(engine))

    def kill(name: str, args: tuple[Any, ...]) -> None:
        if name == "save":
            Path(args[1]).write_bytes(b"half a fi")
        os.kill(os.getpid(), signal.SIGKILL)

    with Disk(fault[1] if fault and fault[0] == me else 10**6, kill) as disk:
        engine.save_checkpoint(folder, tag)
    engine.destroy()
    return 10**6 - disk.left


def test_kill_at_random_moments(tmp_path: Path) -> None:
    """SIGKILL of one rank at the n-th thing it does on disk while it saves, ten times: what `latest` names is what was
    saved, at the same step or the next, also where an existing tag is written again."""
    operations = run_ranks(2, killed_job, str(tmp_path), None, "a")
    moments = [(rank, n) for rank in (0, 1) for n in range(operations[rank])]
    for number, fault in enumerate(random.Random(1).sample(moments, 10)):
        with pytest.raises(RanksFailed) as failed:
            run_ranks(2, killed_job, str(tmp_path), fault, ("a", f"new{number}")[number % 2])
        raised = {rank: error.type_name for rank, error in failed.value.exceptions.items()}
        assert raised.pop(fault[0]) == "ProcessDied" and "AssertionError" not in raised.values(), failed.value
    run_ranks(2, killed_job, str(tmp_path), None, "a")
    assert not list(tmp_path.glob(".a.*"))


def broken(folder: Path, name: str, change: Callable[[Path], None]) -> str:
    """A copy of the good checkpoint in which one thing is changed."""
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    change(copy)
    return str(copy)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def save_job(folder: str) -> None:
    engine = start()
    step(engine)
    engine.save_checkpoint(folder, "tag")
    engine.destroy()


ENGINES: dict[str, dict[str, Any]] = {
    "same": {},
    "P = 4": {"size": 4},
    "stage 3": {"stage": 3},
    "bf16": {"bf16": {"enabled": True}},
    "vocabulary": {"sizes": {"vocab_size": 59}},
    "layers": {"sizes": {"num_hidden_layers": 2}},
    "tied": {"sizes": {"tie_word_embeddings": True}},
    "universal": {"size": 4, "stage": 0, "checkpoint": {"load_universal": True}},
    "universal vocabulary": {"stage": 0, "sizes": {"vocab_size": 59}, "checkpoint": {"load_universal": True}},
}


def refusals_job(cases: list[tuple[str, str, str]]) -> list[str]:
    messages = []
    for name, settings in ENGINES.items():
        engine = start(**settings)
        before = [getattr(p, "ds_tensor", p).detach().clone() for p in engine.module.parameters()]
        for kind, folder, _ in cases:
            if kind == name:
                with pytest.raises(ValueError) as error:
                    engine.load_checkpoint(folder)
                messages.append(str(error.value))
        after = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and engine.global_steps == 0
        engine.destroy()
    return messages


def test_refusals(tmp_path: Path) -> None:
    """One ValueError, the same on all ranks, that names the file or folder and the difference; nothing is changed."""
    good = tmp_path / "good"
    run_ranks(4, save_job, str(good))
    universal = convert(str(good), str(tmp_path / "universal" / "tag"))
    (universal.parent / "latest").write_text("tag")

    def change(name: str, action: Callable[[Path], None], folder: Path = good) -> str:
        return broken(folder, name, action)

    shard, weight = "tag/zero_pp_rank_1_mp_rank_00_optim_states.pt", "tag/zero/model.norm.weight/fp32.pt"
    cases = [
        ("same", change("no shard", lambda f: (f / shard).unlink()), rf"{shard} is missing"),
        ("same", change("short", lambda f: truncate(f / "tag/mp_rank_01_model_states.pt")), r"\d bytes, but \d"),
        ("same", change("plain", lambda f: (f / "tag/ds_tsp.json").unlink()), "was not saved by ds_tsp"),
        ("same", change("no json", lambda f: (f / "tag/ds_tsp.json").write_text("{")), "ds_tsp.json cannot be read"),
        ("same", change("nothing", lambda f: (f / "latest").write_text("gone")), "there is no checkpoint .*gone"),
        ("same", str(universal.parent), "is universal; set .*load_universal"),
        ("P = 4", str(good), "saved with tsp.size 2, here 4; data-parallel size 2, here 1; .*ds_tsp convert"),
        ("stage 3", str(good), "saved with ZeRO stage 1, here 3; .*ds_tsp convert"),
        ("bf16", str(good), "saved with precision fp32, here bf16; "),
        ("vocabulary", str(good), r"embed_tokens.weight was saved with shape \[53, 24\], but .* has \[59, 24\]"),
        ("layers", str(good), "lacks 9 parameter.s. of this model, such as model.layers.1"),
        ("tied", str(good), "has 1 that this model has not, such as lm_head.weight"),
        ("universal", str(good), "latest_universal does not exist.* ds_tsp convert"),
        ("universal", change("whole short", lambda f: truncate(f / weight), universal.parent), "fp32.pt has .* bytes"),
        ("universal", change("whole lacks", lambda f: (f / weight).unlink(), universal.parent), "fp32.pt is missing"),
        ("universal vocabulary", str(universal.parent), r"shape \[53, 24\], but .* has \[59, 24\]"),
    ]  # fmt: skip
    results = run_ranks(4, refusals_job, cases)
    assert all(result == results[0] for result in results) and len(results[0]) == len(cases)
    for (_, folder, expected), message in zip(cases, results[0], strict=True):
        assert re.search(expected, message), f"{expected!r} not in {message!r}"
        assert folder in message
