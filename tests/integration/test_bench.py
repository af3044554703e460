"""The benchmark measures what it says: its rows, their memory and its table, at tiny sizes; no clock is judged."""

import csv
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from launchers import bench
from tests.harness import run_ranks

TINY = ["--hidden_size=32", "--num_attention_heads=4", "--num_key_value_heads=2", "--intermediate_size=48",
        "--num_hidden_layers=2", "--vocab_size=64", "--length=256", "--repeats=2", "--sizes", "1", "2"]  # fmt: skip
NAMES = ["unsharded", "unsharded + ckpt", "folded P=1", "folded P=2", "folded P=1 + ckpt"]


def measure_job(scope: str, dtype: str) -> list[bench.Row]:
    args = bench.arguments(TINY)
    return bench.measure(args, scope, bench.DTYPES[dtype], bench.meshes(args.sizes))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("scope", bench.SCOPES)
def test_rows(scope: str, dtype: str) -> None:
    per_rank = run_ranks(2, measure_job, scope, dtype)
    assert per_rank[0] == per_rank[1]  # every rank knows the slowest and the fullest
    rows = {row.case.name: row for row in per_rank[0]}
    assert list(rows) == NAMES
    for row in rows.values():
        assert len(row.seconds) == 2 and all(len(times) == 3 and min(times) > 0 for times in row.seconds)
        assert min(row.weights, row.forward_peak, row.backward_peak) > 0
    one, two = rows["folded P=1"], rows["folded P=2"]
    assert rows["unsharded"].weights == one.weights
    assert two.weights < 0.6 * one.weights
    assert two.forward_peak < 0.75 * one.forward_peak
    assert two.backward_peak < 0.75 * one.backward_peak
    assert rows["unsharded + ckpt"].forward_peak < rows["unsharded"].forward_peak  # it does checkpoint
    assert rows["folded P=1 + ckpt"].forward_peak < one.forward_peak


def gradient_job() -> list[float]:
    """The largest gradient each case gives the input norm's weight: equal work, whatever the case."""
    args = bench.arguments(TINY)
    axes, found = bench.meshes(args.sizes), []
    for case in bench.cases(args.sizes):
        work = bench.build(case, args, "model", torch.float32, axes.get(case.size))
        if work is not None:
            module, forward, backward = work
            backward(forward())
            found.append(module.get_parameter("model.layers.0.input_layernorm.weight").grad.abs().max().item())
    return found


def test_all_cases_do_the_same_work() -> None:
    found, _ = run_ranks(2, gradient_job)
    assert len(found) == len(NAMES)
    assert found == pytest.approx([found[0]] * len(NAMES), rel=1e-4)


def main_job(path: str) -> None:
    argv = ["bench.py", *TINY, "--csv", path]
    # The ranks of the pool live on.
    with mock.patch.object(sys, "argv", argv), mock.patch.object(bench.dist, "destroy_process_group"):
        bench.main()


def test_main_writes_the_table(tmp_path: Path) -> None:
    run_ranks(2, main_job, str(tmp_path / "bench.csv"))
    with open(tmp_path / "bench.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == list(bench.HEADER)
    assert [line[:3] for line in lines] == [[scope, "fp32", name] for scope in bench.SCOPES for name in NAMES]
    assert all(float(cell) > 0 for line in lines for cell in line[3:])


def breakdown_job() -> list[dict[str, dict[str, float]]]:
    args = bench.arguments([*TINY, "--length", "64"])
    return {name: bench.breakdown(work, 2) for name, work in bench.breakdown_cases(args).items() if work is not None}


def test_breakdown_accounts_for_all_of_the_time() -> None:
    found, other = run_ranks(2, breakdown_job)
    assert list(found) == ["unsharded", "unsharded + ckpt", "folded P=1", "folded P=2"] and list(other) == [
        "folded P=2"
    ]
    for name, spent in found.items():
        assert sum(spent[kind] for kind in bench.KINDS if kind in spent) == pytest.approx(spent["all"])
        assert min(spent["kernel"], spent["GEMM"], spent["other"], spent["Python"]) > 0
        assert ("recompute" in spent) == (name != "unsharded")
        assert ("wire" in spent) == ("packing" in spent) == (name == "folded P=2")
