"""Measures schemes in turn: live bytes and traffic of one step, seconds of many, the longest sequence under a cap."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ..meter import LiveBytes
from .isolation import Globals
from .schemes import Scheme, Settings
from .wire import agreement_group, received_bytes

MODES = ("train", "forward")  # a whole optimizer step; forward to the loss, without gradients
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # relative


@dataclass
class Result:
    """What one scheme did at one length, in one of `MODES`, or while a sequence was sought that fits ("probe",
    "longest"), or "error". Bytes are the fullest rank's, but `wire_bytes` the mean of what a rank receives. seconds:
    of each repeat, the slowest rank's."""

    scheme: str
    mode: str
    length: int = 0
    sequences: int = 0
    start_bytes: int = 0
    peak_bytes: int = 0
    wire_bytes: int = 0
    cap_bytes: int = 0
    loss: float = math.nan
    seconds: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def median(self) -> float:
        return median(self.seconds) if self.seconds else math.nan

    @property
    def tokens_per_second(self) -> float:
        return self.sequences * self.length / self.median


@dataclass
class Contestant:
    """A scheme of this run, and what it takes to run it beside the others. others: live bytes before it was built."""

    scheme: Scheme
    agreement: Any  # a group of the world in which no scheme's collective can be half done
    globals: Globals = field(default_factory=Globals)
    runner: Any = None
    others: int = 0
    loss: float = math.nan
    error: str = ""

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """This scheme's globals are in place inside. What a rank raises inside is kept, and ends the scheme on all."""
        error, when = "", 0.0
        try:
            with self.globals.active():
                yield
        except Exception as raised:
            error, when = f"{what}: {type(raised).__name__}: {raised}", time.time()
            traceback.clear_frames(raised.__traceback__)  # they hold tensors, which would count as live from here on
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (when, error), group=self.agreement)
        failed = [(*said, rank) for rank, said in enumerate(told) if said[1]]
        if failed:
            _, error, rank = min(failed)  # the first; the others may have waited for it in vain
            self.error, self.runner = f"{error} (rank {rank})", None

    def reduced(self, op: Any, *values: float) -> list[float]:
        """Over the world."""
        tensor = torch.tensor(values, dtype=torch.float64, device=get_accelerator().current_device_name())
        dist.all_reduce(tensor, op=op, group=self.agreement)
        return tensor.tolist()


def measure(
    schemes: Sequence[Scheme], settings: Settings, lengths: Sequence[int], repeats: int, cap: int | None = None,
    log: Callable[[str], None] = lambda line: None, limit: int = 1 << 16,
) -> list[Result]:  # fmt: skip
    """Every scheme at every length in both modes; with `cap` bytes, the longest sequence of up to `limit` tokens too.

    The schemes live side by side in this process. First each is built and weighed while the others rest, then all are
    timed, taking turns. Collective over the world; every rank gets the same results.
    """
    agreement, short = agreement_group(), 64 * dist.get_world_size()
    results: list[Result] = []
    contestants = [Contestant(scheme, agreement) for scheme in schemes]
    for one in contestants:
        log(f"{one.scheme.name}: building")
        _build(one, settings, short, next((other.loss for other in contestants if other.runner), math.nan))
        for mode in MODES:
            _settle(one, settings, mode, short)
            for length in lengths:
                log(f"{one.scheme.name}: {mode}, {length} tokens, weighed")
                results += weigh(one, settings, mode, length)
            if cap is not None and mode == "train" and one.runner is not None:
                results += longest(one, settings, lengths[0], cap, limit, log)
    by_case = {(r.scheme, r.mode, r.length): r for r in results}
    for mode in MODES:
        for one in contestants:
            _settle(one, settings, mode, short)
        for length in lengths:
            for repeat in range(repeats):
                log(f"{mode}, {length} tokens, round {repeat + 1} of {repeats}")
                # To and fro: no scheme always follows the same one.
                for one in contestants[:: -1 if repeat % 2 else 1]:
                    taken = seconds(one, settings, mode, length)
                    if one.runner is not None:
                        by_case[one.scheme.name, mode, length].seconds += taken
    return results + [Result(one.scheme.name, "error", error=one.error) for one in contestants if one.error]


def _build(one: Contestant, settings: Settings, length: int, expected: float) -> None:
    """Build it, unless it cannot run here. Its loss of the first sequences must be what the others found."""
    one.error = one.scheme.refusal(dist.get_world_size(), settings)
    if one.error:
        return
    gc.collect()
    with LiveBytes() as meter:
        one.others = meter.start
    loss = math.nan
    with one.turn("building"):
        one.runner = one.scheme.build(settings)
        # As many sequences as ranks: the same ones for all schemes, whatever a step of theirs is.
        loss = one.runner.forward(one.runner.place(settings.batch(dist.get_world_size(), length))).item()
    one.loss = one.reduced(dist.ReduceOp.SUM, loss)[0] / dist.get_world_size()
    if one.runner is not None and abs(one.loss - expected) > LOSS_TOLERANCE[settings.dtype] * expected:
        one.error, one.runner = f"its loss of the first sequences is {one.loss:.5f}, not {expected:.5f}", None


def _work(one: Contestant, settings: Settings, mode: str, length: int) -> Callable[[], Any]:
    """One step or one forward of sequences of that length, which lie ready."""
    batches = one.runner.place(settings.batch(settings.per_step(one.runner.d), length))
    work = one.runner.step if mode == "train" else one.runner.forward
    return lambda: work(batches)


def _settle(one: Contestant, settings: Settings, mode: str, length: int) -> None:
    """Two steps whose cost is nobody's: the optimizer's state is made in the first one, and ZeRO-3 records in which
    order it fetches parameters; it does so again after steps of the other mode."""
    if one.runner is not None:
        with one.turn(f"{mode}, {length} tokens"):
            work = _work(one, settings, mode, length)
            work()
            work()


def weigh(one: Contestant, settings: Settings, mode: str, length: int) -> list[Result]:
    """Bytes of one step: live before it, at its peak, received. None of the other schemes' counts. [] if it failed."""
    if one.runner is None:
        return []
    start = peak = received = 0
    with one.turn(f"{mode}, {length} tokens"):
        work = _work(one, settings, mode, length)
        gc.collect()
        with received_bytes() as wire, LiveBytes() as meter:
            work()
        start, peak, received = meter.start - one.others, meter.peak - one.others, round(sum(wire.values()))
    if one.runner is None:
        return []
    start, peak = map(int, one.reduced(dist.ReduceOp.MAX, start, peak))
    received = round(one.reduced(dist.ReduceOp.SUM, received)[0] / dist.get_world_size())
    sequences = settings.per_step(one.runner.d)
    return [Result(one.scheme.name, mode, length, sequences, start, peak, received, loss=one.loss)]


def seconds(one: Contestant, settings: Settings, mode: str, length: int) -> list[float]:
    """Of one step, on the slowest rank. [] if it failed."""

    def clock() -> float:
        get_accelerator().synchronize()
        return time.perf_counter()

    if one.runner is None:
        return []
    taken = 0.0
    with one.turn(f"{mode}, {length} tokens"):
        work = _work(one, settings, mode, length)
        dist.barrier(group=one.agreement)
        start = clock()
        work()
        taken = clock() - start
    return [] if one.runner is None else one.reduced(dist.ReduceOp.MAX, taken)


def longest(
    one: Contestant, settings: Settings, first: int, cap: int, limit: int, log: Callable[[str], None]
) -> list[Result]:
    """The probes of a search for the longest sequence whose training step stays below `cap`, and what it found.

    A scheme that fails at some length, for want of memory as a rule, has found the longest one below.
    """
    probes: list[Result] = []

    def peak(length: int) -> int | None:
        log(f"{one.scheme.name}: does a step of {length} tokens fit?")
        probes.extend(weigh(one, settings, "train", length))
        return probes[-1].peak_bytes if one.runner is not None else None

    found = search(peak, cap, first, limit)
    best = next((p for p in probes if p.length == found), Result(one.scheme.name, "train", 0))
    for probe in probes:
        probe.mode, probe.cap_bytes = "probe", cap
    summary = Result(
        one.scheme.name, "longest", found, best.sequences, best.start_bytes, best.peak_bytes, cap_bytes=cap
    )
    return [*probes, summary]


def search(peak: Callable[[int], int | None], cap: int, first: int, limit: int) -> int:
    """The longest length of a grid whose `peak` is at most `cap`; 0 if none is. Peaks must not fall with the length.

    The grid is first x 2^k x (1 + j / 8), up to `limit`. A long step is dear and peaks are nearly straight lines, so
    after two lengths the line through the nearest ones says where to look next, and a length that it puts 2% above the
    cap is not tried. `peak` gives None when the step failed: nothing longer is tried then.
    """
    grid = []
    octave = first
    while octave <= limit:
        grid += [octave * (8 + j) // 8 for j in range(8) if octave * (8 + j) // 8 <= limit]
        octave *= 2
    seen: dict[int, int] = {}
    low, high, at = -1, len(grid), 0  # grid[low] fits, grid[high] does not
    while high - low > 1:
        value = peak(grid[at])
        if value is None:
            return grid[low] if low >= 0 else 0
        seen[grid[at]] = value
        low, high = (at, high) if value <= cap else (low, at)
        if len(seen) == 1:
            at = min(low + 8, high - 1)  # double; or there is nothing shorter
            continue
        a, b = sorted(sorted(seen, key=lambda length: abs(length - grid[at]))[:2])
        slope = max((seen[b] - seen[a]) / (b - a), 1e-9)
        fitting = [i for i in range(low + 1, high) if seen[b] + slope * (grid[i] - b) <= cap * 1.02]
        if not fitting:
            break
        at = min(fitting[-1], low + 16)  # no more than four times as long at once
    return grid[low] if low >= 0 else 0
