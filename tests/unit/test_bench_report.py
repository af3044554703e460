"""``ds_tsp bench`` without processes: the search under a cap, the files it writes, and the command line."""

import csv
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_tsp import cli
from ds_tsp.bench import command, report
from ds_tsp.bench.measure import Result, search
from ds_tsp.bench.schemes import SCHEMES, Settings

COMMON = {"date": "2026-11-29", "commit": "abc", "device": "cpu", "torch": "2", "deepspeed": "0", "transformers": "5",
          "ranks": 2, "dtype": "fp32", "recompute": True, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 9, "layers": 1,
          "vocab": 10}  # fmt: skip
RESULTS = [
    Result("zero3", "train", 64, 2, 10 << 20, 30 << 20, 5 << 20, loss=1.5, seconds=[3.0, 1.0, 2.0]),
    Result("zero3", "forward", 64, 2, 10 << 20, 20 << 20, 1 << 20, seconds=[0.25]),
    Result("tsp", "train", 64, 1, 10 << 20, 15 << 20, 5 << 20),
    Result("tsp", "probe", 128, 1, 10 << 20, 16 << 20, cap_bytes=32 << 20),
    Result("tsp", "longest", 128, 1, 10 << 20, 16 << 20, cap_bytes=32 << 20),
    Result("autotp", "error", error="building: ValueError: no\nheads"),
]


def grid(first: int, limit: int) -> list[int]:
    return [n for n in (first * 2**k * (8 + j) // 8 for k in range(20) for j in range(8)) if n <= limit]


@pytest.mark.parametrize(
    ("peak", "exact"),
    [(lambda n: 100 + 3 * n, True), (lambda n: n * n // 100, True), (lambda n: int(50 * math.sqrt(n)), False),
     (lambda n: 4000 + n // 256 * 100, False)],
    ids=["straight", "square", "root", "steps"],
)  # fmt: skip
@pytest.mark.parametrize("cap", [0, 291, 292, 1000, 5000, 12388, 10**9])
def test_search_finds_the_longest(peak: Callable[[int], int], exact: bool, cap: int) -> None:
    probes: list[int] = []

    def measured(length: int) -> int:
        probes.append(length)
        return peak(length)

    found = search(measured, cap, 64, 4096)
    expected = max((n for n in grid(64, 4096) if peak(n) <= cap), default=0)
    # What the line puts above the cap is not tried: too early a stop where the truth bends below it, but no worse.
    assert found == expected or (not exact and 0.7 * expected <= found < expected)
    assert len(probes) == len(set(probes)) <= 9


def test_search_of_a_straight_line_takes_few_steps() -> None:
    probes: list[int] = []

    def measured(length: int) -> int:
        probes.append(length)
        return 1000 + 7 * length

    # No more than four times as long at once; 2560 would not fit, and is not tried.
    assert search(measured, measured(2500), 64, 1 << 16) == 2304 and probes == [2500, 64, 128, 512, 2048, 2304]


def test_search_ends_where_a_step_fails() -> None:
    assert search(lambda n: None, 10**9, 64, 4096) == 0
    assert search(lambda n: 10 if n < 500 else None, 10**9, 64, 4096) == 128
    assert search(lambda n: 10, 10**9, 64, 40) == 0  # nothing to try


def test_csv_is_appended_to_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    report.append_csv(path, COMMON, RESULTS)
    report.append_csv(path, COMMON, RESULTS[:1])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(RESULTS) + 1 and all(None not in row.values() for row in rows)
    first = rows[0]
    assert first == rows[-1] and first["commit"] == "abc" and first["repeats"] == "3"
    assert [float(first[f"seconds_{name}"]) for name in ("median", "min", "max")] == [2, 1, 3]
    assert float(first["tokens_per_second"]) == 2 * 64 / 2
    assert int(first["peak_bytes"]) == 30 << 20 and int(first["wire_bytes"]) == 5 << 20
    assert rows[2]["seconds_median"] == "nan" and rows[5]["error"] == RESULTS[5].error
    with pytest.raises(ValueError, match="other columns"):
        report.append_csv(path, {**COMMON, "more": 1}, RESULTS)


def test_markdown_names_all_that_was_found() -> None:
    text = report.markdown(COMMON, RESULTS, "ds_tsp bench --lengths 64")
    assert "ds_tsp bench --lengths 64" in text and "commit abc" in text
    assert "| 64 | zero3 | 2 | 2.000 | 1.000 | 3.000 | 64 | 30.0 | 10.0 | 5.0 |" in text
    assert "### Forward only" in text and "| 64 | zero3 | 2 | 0.250 |" in text
    assert "| tsp | 128 | 16.0 |" in text and "below 32 MiB" in text
    assert "- **autotp**: building: ValueError: no heads" in text
    assert "Longest" not in report.markdown(COMMON, RESULTS[:2], "") and "not run" not in report.markdown(
        COMMON, [], ""
    )


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = report.plot(tmp_path, COMMON, RESULTS)
    assert [p.name for p in paths] == ["memory.png", "throughput.png"] and all(p.stat().st_size > 5000 for p in paths)


def test_matplotlib_is_imported_for_plots_only() -> None:
    """It is an extra; and none of the peers is imported with the package."""
    look = "import sys, ds_tsp, ds_tsp.cli; print([m for m in ('matplotlib', 'ds_tsp.bench') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip() == "[]"


def test_without_a_launcher_the_command_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["--local_rank=0", "bench", "--repeats", "1"])
    assert "deepspeed --num_gpus 2 --module ds_tsp bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope"], "invalid choice"),
        (["bench", "--schemes", "nope"], "nope"),
        (["bench", "--repeats", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_named(argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert message in capsys.readouterr().err


def test_settings_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert command.settings_of(command.arguments([], "ds_tsp bench")) == Settings()
    argv = ["--hidden", "64", "--kv-heads", "2", "--dtype", "bf16", "--recompute", "off", "--tsp-recompute", "none",
            "--sequences", "4", "--lengths", "8", "2"]  # fmt: skip
    args = command.arguments(argv, "ds_tsp bench")
    assert args.lengths == [2, 8] and args.schemes == list(SCHEMES)
    wanted = Settings(hidden=64, kv_heads=2, dtype="bf16", recompute=False, tsp_recompute="none", sequences=4)
    assert command.settings_of(args) == wanted


def test_sequences_are_dealt_or_refused() -> None:
    assert [Settings(sequences=n).per_step(d) for n, d in ((None, 1), (None, 4), (8, 4), (8, 1))] == [1, 4, 8, 8]
    with pytest.raises(ValueError, match="--sequences 3 cannot be dealt to 2"):
        Settings(sequences=3).per_step(2)


@pytest.mark.parametrize(
    ("name", "world", "sizes", "refused"),
    [("autotp", 3, {}, "8 query"), ("autotp", 8, {}, ""), ("ulysses", 4, {"heads": 4, "kv_heads": 3}, "kv heads"),
     ("autotp_ulysses", 2, {}, "2 x 2"), ("autotp_ulysses", 4, {}, ""), ("tsp", 3, {}, ""), ("zero3", 3, {}, "")],
)  # fmt: skip
def test_schemes_refuse_by_name(name: str, world: int, sizes: dict[str, int], refused: str) -> None:
    said = SCHEMES[name].refusal(world, Settings(**sizes))
    assert refused in said and bool(said) == bool(refused)
