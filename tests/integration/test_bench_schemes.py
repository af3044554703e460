"""``ds_tsp bench``: every scheme does the same work, whatever ran before; rows are complete; what fails is named.

Losses are those of AdamW with a large eps, so a gradient of the wrong scale shows in the second one already.
"""

import csv
import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import groups
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_tsp.bench import command, isolation
from ds_tsp.bench.measure import MODES, Result, measure
from ds_tsp.bench.schemes import SCHEMES, Runner, Scheme, Settings, zero3
from ds_tsp.bench.wire import received_bytes
from tests.dist.test_wire import RECEIVED, logged
from tests.harness import run_ranks

TINY = Settings(hidden=32, heads=4, kv_heads=4, ffn=48, layers=2, vocab=64)
LENGTH, CAP = 96, 1_000_000  # on two ranks more than `hidden` tokens each: ALST has two tiles
ON_TWO = [name for name in SCHEMES if name != "autotp_ulysses"]


def losses_job(names: list[str], settings: Settings) -> dict[str, list[float]]:
    """All schemes live at the same time and take turns; the loss of a forward, and of three steps."""
    world, found = dist.get_world_size(), {}
    isolated = {name: isolation.Globals() for name in names}
    runners: dict[str, Runner] = {}
    for name in names:
        with isolated[name].active():
            runners[name] = SCHEMES[name].build(settings)
    for turn in range(4):
        for name, runner in runners.items():
            with isolated[name].active():
                batches = runner.place(settings.batch(settings.per_step(runner.d), LENGTH))
                loss = runner.step(batches) if turn else runner.forward(batches)
            total = loss.double()
            dist.all_reduce(total)
            found.setdefault(name, []).append(total.item() / world)
    assert groups.mpu is None and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward  # nothing is left behind
    return found


def agree(found: dict[str, list[float]]) -> None:
    first = found["zero3"]
    assert first[0] == pytest.approx(first[1], abs=1e-5) and first[1] > first[2] > first[3]  # it does train
    for name, losses in found.items():
        assert losses == pytest.approx(first, abs=2e-5), name


def test_two_ranks_train_alike_in_any_order() -> None:
    """Two sequences a step for all: one per rank, or two micro-batches."""
    settings = dataclasses.replace(TINY, sequences=2)
    forth, _ = run_ranks(2, losses_job, ON_TWO, settings)
    some = [name for name in ON_TWO[::-1] if name not in ("fsdp2", "alst", "metp")]
    back, _ = run_ranks(2, losses_job, some, settings)
    agree(forth)
    assert {name: pytest.approx(losses, abs=1e-7) for name, losses in back.items()} == {n: forth[n] for n in some}


def test_four_ranks_train_alike() -> None:
    """AutoTP x Ulysses first: what it registers must not reach the others. kv heads fewer than ranks, too."""
    settings = dataclasses.replace(TINY, sequences=4, kv_heads=2, recompute=False)
    names = ["autotp_ulysses", "zero3", "ulysses", "tsp"]
    agree(run_ranks(4, losses_job, names, settings)[0])


def wire_job() -> dict[str, Any]:
    """Bytes that each kind of collective brings to this rank; fp32 tensors of 12 elements."""
    world, rank, x = dist.get_world_size(), dist.get_rank(), torch.ones(12)
    whole, counts = torch.ones(12 * world), {}
    ring_in, ring_out = [0] * world, [0] * world
    ring_in[(rank + 1) % world] = ring_out[(rank - 1) % world] = 12

    calls = {
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_reduce": lambda: dist.all_reduce(x),
        "gather": lambda: dist.all_gather_into_tensor(whole, x),
        "list": lambda: dist.all_gather(list(whole.chunk(world)), x),
        "scatter": lambda: dist.reduce_scatter_tensor(x, whole),
        "exchange": lambda: dist.all_to_all_single(torch.empty(12), x),
        "hop": lambda: dist.all_to_all_single(torch.empty(12), x, ring_out, ring_in),
        "send": lambda: dist.recv(x, src=0) if rank else dist.send(x, dst=1),
    }
    for name, call in calls.items():
        with received_bytes() as counter:
            call()
        counts[name] = float(sum(counter.values()))
    with received_bytes() as nothing:
        dist.barrier()
    return {
        **counts,
        "barrier": sum(nothing.values()),
        "patched": "call" in str(torch.distributed.ProcessGroup.allreduce),
    }


def test_received_bytes_of_each_collective() -> None:
    for rank, got in enumerate(run_ranks(2, wire_job)):
        own = 12 * 4
        assert got == {
            "broadcast": own / 2, "reduce": own / 2, "all_reduce": own, "gather": own, "list": own, "scatter": own,
            "exchange": own / 2, "hop": own, "send": own * rank, "barrier": 0, "patched": False,
        }  # fmt: skip


def step_wire_job() -> dict[str, Any]:
    """A step of FSDP2 and of TSP as counted here; that of TSP as DeepSpeed's logger counts it, too."""
    found, logger = {}, sys.modules["deepspeed.comm.comm"].comms_logger
    for name in ("fsdp2", "tsp"):
        with isolation.Globals().active():
            runner = SCHEMES[name].build(TINY)
            batches = runner.place(TINY.batch(TINY.per_step(runner.d), LENGTH))
            runner.step(batches)
            logger.enabled = logger.prof_all = True
            dist.reset_log()
            with received_bytes() as counter:
                runner.step(batches)
            logs = sum(RECEIVED[op](2) * count for op, count in logged().items() if op in RECEIVED)
            logger.enabled = logger.prof_all = False
            found[name] = (float(sum(counter.values())), float(counter["allreduce"]), float(logs))
    return found


def test_received_bytes_of_a_step() -> None:
    results = run_ranks(2, step_wire_job)
    h, ffn, vocab = TINY.hidden, TINY.ffn, TINY.vocab
    layers = TINY.layers * (4 * h * h + 3 * h * ffn + 2 * h)
    whole = layers + 2 * vocab * h + h
    for found in results:
        # A rank lacks half of what it gathers: all in forward, the layers again in backward; and half of all gradients.
        assert found["fsdp2"][0] == 4 * (whole + layers + whole) / 2
    # The logger does not tell of which group an all-reduce was: here that of the loss, and of the norms' gradients.
    norms = (2 * TINY.layers + 1) * h
    assert all(f["tsp"][1] == 4 * (1 + norms) for f in results)
    assert sum(f["tsp"][0] - f["tsp"][1] for f in results) == sum(f["tsp"][2] for f in results) > 0


def broken(settings: Settings) -> Runner:
    raise ValueError("there is no such head")


class BreaksOnOneRank(Runner):
    def __init__(self, settings: Settings) -> None:
        super().__init__(torch.nn.Identity(), 1, lambda ids: [{}], lambda engine, batch: torch.zeros(()))
        if dist.get_rank() == 1:
            raise RuntimeError("out of something")


def other_work(settings: Settings) -> Runner:
    return zero3(dataclasses.replace(settings, seed=settings.seed + 1))


def measure_job() -> list[Result]:
    """The failing ones stand between the others."""
    bad = [Scheme("broken", "", broken), Scheme("one rank", "", BreaksOnOneRank), Scheme("other", "", other_work)]
    schemes = [SCHEMES["zero3"], *bad, SCHEMES["autotp_ulysses"], SCHEMES["fsdp2"], SCHEMES["tsp"]]
    return measure(schemes, TINY, [LENGTH, 2 * LENGTH], 2, CAP, limit=4 * LENGTH)


def test_rows_are_complete_and_failures_named() -> None:
    results, others = run_ranks(2, measure_job)
    assert repr(results) == repr(others)  # every rank knows the slowest, the fullest and the failed
    errors = {r.scheme: r.error for r in results if r.error}
    assert set(errors) == {"broken", "one rank", "other", "autotp_ulysses"}
    assert "there is no such head" in errors["broken"] and "out of something (rank 1)" in errors["one rank"]
    assert "its loss" in errors["other"] and "2 x 2" in errors["autotp_ulysses"]
    rows = {(r.scheme, r.mode, r.length): r for r in results if r.mode in MODES}
    good = {"zero3", "fsdp2", "tsp"}
    assert set(rows) == {(name, mode, length) for name in good for mode in MODES for length in (LENGTH, 2 * LENGTH)}
    for (name, mode, _), r in rows.items():
        assert len(r.seconds) == 2 and min(r.seconds) > 0 and r.tokens_per_second > 0 and r.wire_bytes > 0
        assert r.sequences == (2 if name in ("zero3", "fsdp2") else 1)
        assert r.start_bytes < r.peak_bytes and r.loss == pytest.approx(rows["zero3", mode, LENGTH].loss, abs=1e-4)
    states = (
        4 * 3 * (2 * (4 * 32 * 32 + 3 * 32 * 48) + 2 * 64 * 32) / 2
    )  # parameters and two of Adam's, of half the model
    buffers = 45_000  # of tsp: its shared ones for weights and their gradients
    for name, more in (("fsdp2", 0), ("tsp", buffers)):  # what else is live: norms whole, the batch
        assert states + more / 2 < rows[name, "train", LENGTH].start_bytes < 1.1 * states + more
    found = {r.scheme: r for r in results if r.mode == "longest"}
    assert set(found) == good
    for name, best in found.items():
        probes = {r.length: r.peak_bytes for r in results if r.scheme == name and r.mode == "probe"}
        assert best.length == max((n for n, peak in probes.items() if peak <= CAP), default=0)
    assert found["tsp"].length > found["zero3"].length


def main_job(folder: str) -> None:
    argv = ["--schemes", "fsdp2", "tsp", "--lengths", "64", "--repeats", "1", "--hidden", "32", "--heads", "4",
            "--ffn", "48", "--vocab", "64", "--layers", "1", "--out", folder]  # fmt: skip
    # The ranks of the pool live on.
    with mock.patch.object(command.dist, "destroy_process_group"):
        command.main(argv)


def test_main_writes_its_files(tmp_path: Path) -> None:
    run_ranks(2, main_job, str(tmp_path / "out"))
    with (tmp_path / "out" / "bench.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["scheme"], row["mode"]) for row in rows] == [(n, m) for n in ("fsdp2", "tsp") for m in MODES]
    assert "--lengths 64" in (tmp_path / "out" / "bench.md").read_text()
