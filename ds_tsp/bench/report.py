"""What a run found, for people and for later: a CSV file, a Markdown table and two plots."""

from __future__ import annotations

import csv
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from .measure import Result
from .schemes import SCHEMES, Settings

MIB = 2**20


def circumstances(settings: Settings) -> dict[str, Any]:
    """What every row of a run has in common: which code, where, of what shape."""
    common = {"date": date.today().isoformat(), "commit": _commit(), "device": _device()}
    common |= {package: version(package) for package in ("torch", "deepspeed", "transformers")}
    return {**common, "ranks": dist.get_world_size(), **asdict(settings)}


def row(common: dict[str, Any], result: Result) -> dict[str, Any]:
    """One line of the CSV file. `sequences` is what the step trained, not what was asked for."""
    measured = asdict(result)
    seconds = measured.pop("seconds")
    fastest, slowest = min(seconds, default=math.nan), max(seconds, default=math.nan)
    measured |= {"repeats": len(seconds), "seconds_median": result.median, "seconds_min": fastest}
    measured |= {"seconds_max": slowest, "tokens_per_second": result.tokens_per_second}
    return {**common, **measured}


def append_csv(path: Path, common: dict[str, Any], results: Sequence[Result]) -> None:
    """A row per result behind those that `path` has. Raises ValueError if its columns are others."""
    rows = [row(common, result) for result in results]
    columns = list(row(common, Result("", "")))
    if path.exists():
        with path.open(newline="") as file:
            there = next(csv.reader(file), [])
        if there != columns:
            raise ValueError(f"{path} has other columns than this version writes; choose another --out")
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def markdown(common: dict[str, Any], results: Sequence[Result], command: str) -> str:
    """A table per mode, one of the longest sequences if they were sought, and the schemes that did not run."""
    named = ("ranks", "dtype", "recompute", "hidden", "heads", "kv_heads", "ffn", "layers", "vocab")
    parts = [
        f"{common['date']}, commit {common['commit']}, {common['device']}; torch {common['torch']}, DeepSpeed "
        f"{common['deepspeed']}, transformers {common['transformers']}",
        f"```bash\n{command}\n```",
        ", ".join(f"{name} {common[name]}" for name in named),
    ]
    for mode, title in {"train": "Forward, backward and step", "forward": "Forward only"}.items():
        header = [
            "tokens",
            "scheme",
            "sequences",
            "s",
            "min",
            "max",
            "tokens/s",
            "peak MiB",
            "start MiB",
            "received MiB",
        ]
        lines = [_cells(r) for r in sorted((r for r in results if r.mode == mode), key=lambda r: r.length)]
        parts += [f"### {title}", _table(header, lines)] if lines else []
    found = [r for r in results if r.mode == "longest"]
    if found:
        lines = [[r.scheme, f"{r.length}", f"{r.peak_bytes / MIB:.1f}"] for r in found]
        parts += [
            f"### Longest sequence below {found[0].cap_bytes / MIB:g} MiB",
            _table(["scheme", "tokens", "peak MiB"], lines),
        ]
    errors = [f"- **{r.scheme}**: {' '.join(r.error.split())}" for r in results if r.error]
    parts += ["### Did not run", "\n".join(errors)] if errors else []
    return "\n\n".join(parts) + "\n"


def plot(folder: Path, common: dict[str, Any], results: Sequence[Result]) -> list[Path]:
    """memory.png and throughput.png, of training against the length."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    quantities = {"memory": (lambda r: r.peak_bytes / MIB, "peak live MiB per rank"),
                  "throughput": (lambda r: r.tokens_per_second, "tokens/s")}  # fmt: skip
    paths, lengths = [], sorted({r.length for r in results if r.mode == "train"})
    for name, (value, label) in quantities.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for scheme in SCHEMES:
            points = sorted((r.length, value(r)) for r in results if r.scheme == scheme and r.mode == "train")
            if points:
                line = {"tsp": "-", "metp": ":"}.get(scheme)
                axes.plot(*zip(*points, strict=True), marker="o", label=scheme, linestyle=line or "--",
                          linewidth=2.5 if line else 1.2)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel=label)
        axes.set_xticks(lengths, map(str, lengths))
        axes.xaxis.minorticks_off()
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter(ScalarFormatter())  # 30, not 3 x 10^1
        axes.set_title(
            f"{common['ranks']} ranks, {common['device']}, {common['dtype']}, hidden {common['hidden']}", size=10
        )
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
        paths.append(folder / f"{name}.png")
        figure.tight_layout()
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _cells(r: Result) -> list[str]:
    times = [f"{t:.3f}" for t in (r.median, min(r.seconds, default=math.nan), max(r.seconds, default=math.nan))]
    sizes = [f"{size / MIB:.1f}" for size in (r.peak_bytes, r.start_bytes, r.wire_bytes)]
    return [f"{r.length}", r.scheme, f"{r.sequences}", *times, f"{r.tokens_per_second:.0f}", *sizes]


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def _commit() -> str:
    """Of the checkout that this package lies in, with a + behind it if files were changed; else 'none'."""
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _device() -> str:
    name = get_accelerator().device_name()
    if name == "cpu":
        return f"cpu {platform.machine()} x{os.cpu_count()}"
    return torch.get_device_module(name).get_device_name()
