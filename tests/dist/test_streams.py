"""The order of what terms do on two streams, on a CPU: streams that keep vector clocks stand for those of a GPU."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_tsp import comm, kernels, schedules, transports
from ds_tsp.comm import Wire
from ds_tsp.terms import BlockCall
from tests.dist.test_fold import folded_pair, gradient_errors
from tests.harness import run_ranks
from tests.models import fp64_throughout, tokens

Clock = dict[int, int]  # for each stream, how many of its operations are known to be done


class Stream:
    """What is put on it is done in order, and after whatever it waited for."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def tick(self) -> Clock:
        """One operation; the clock at which it is done."""
        self.clock[id(self)] = self.clock.get(id(self), 0) + 1
        return dict(self.clock)

    def after(self, clock: Clock) -> None:
        self.clock = {s: max(self.clock.get(s, 0), clock.get(s, 0)) for s in self.clock | clock}

    def wait_stream(self, other: "Stream") -> None:
        self.after(other.clock)


class Device:
    """An accelerator with streams, whose collectives run on a stream of their own, in the order of their start."""

    def __init__(self) -> None:
        self.current = self.main = Stream()
        self.collectives = Stream()
        self.written: dict[int, tuple[int, Clock]] = {}  # storage -> the last one to write it: stream, clock
        self.read: dict[int, list[tuple[int, Clock]]] = {}  # storage -> who has read it since
        self.faults: list[str] = []
        self.kernels: list[tuple[int, Clock]] = []  # of attention
        self.exchanges: list[Clock] = []  # of K/V, what each had to wait for
        self.Stream = Stream

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def use(self, what: str, stream: Stream, reads: Any = (), writes: Any = ()) -> None:
        """Whoever wrote before, and before a write whoever read, must be known to be done."""
        clock = stream.tick()
        for tensors, writing in ((reads, False), (writes, True)):
            for storage in {t.untyped_storage().data_ptr() for t in tensors}:
                earlier = [self.written[storage]] if storage in self.written else []
                earlier += self.read.pop(storage, []) if writing else []
                self.faults += [what for who, then in earlier if clock.get(who, 0) < then[who]]
                if writing:
                    self.written[storage] = id(stream), clock
                else:
                    self.read.setdefault(storage, []).append((id(stream), clock))

    def collective(self, what: str, reads: Any = (), writes: Any = ()) -> Clock:
        self.collectives.wait_stream(self.current)
        self.use(what, self.collectives, reads, writes)
        return dict(self.collectives.clock)

    def patches(self) -> Iterator[Any]:
        start, run, attend, pack, gather = Wire.start, BlockCall.run, kernels.attend, transports.pack, schedules.gather_sequence

        def started(wire: Wire, collective: Any, *args: Any) -> Any:
            name, work = collective.__name__, start(wire, collective, *args)
            if name == "all_to_all_single":
                clock = self.collective(name, reads=[args[1]], writes=[args[0]])
            elif name == "broadcast" and args[1] == wire.mesh.ranks[wire.mesh.rank]:
                clock = self.collective(name, reads=[args[0]])
            else:
                clock = self.collective(name, writes=[args[0]])
            return _Handle(work, lambda: self.current.after(clock))

        def ran(call: BlockCall, parts: Any, weights: list[Tensor], t: int) -> Tensor:
            self.use(f"term {t}", self.current, reads=weights)
            return run(call, parts, weights, t)

        def attended(*args: Any) -> Any:
            self.kernels.append((id(self.current), self.current.tick()))
            return attend(*args)

        def packed(tensors: list[Tensor], into: Tensor) -> Tensor:
            self.use("pack", self.current, writes=[into])
            return pack(tensors, into)

        def gathered(*args: Any) -> Tensor:
            self.exchanges.append(self.collective("K/V"))
            self.current.after(self.collectives.clock)
            return gather(*args)

        yield mock.patch.object(comm, "get_accelerator", lambda: self)
        yield mock.patch.object(Wire, "start", started)
        yield mock.patch.object(BlockCall, "run", ran)
        yield mock.patch.object(kernels, "attend", attended)
        yield mock.patch.object(transports, "pack", packed)
        yield mock.patch.object(schedules, "gather_sequence", gathered)


class _Handle:
    def __init__(self, work: Any, then: Any) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.then()


def streams_job(size: int, policy: str, slots: int) -> dict[str, Any]:
    with fp64_throughout(), mock.patch.object(transports.Broadcast, "SLOTS", slots):
        reference, model, mesh = folded_pair(
            "llama", size, tsp={"recompute": policy}, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2
        )
        device, batch = Device(), tokens(2, 19)
        reference(**batch).loss.backward()
        with ExitStack() as stack:
            for patch in device.patches():
                stack.enter_context(patch)
            loss = model(**batch).loss
            hidden = _hidden(device, size)
            loss.backward()
        known = device.main.clock
        late = [s for s in model.tsp_state.wire._streams if known.get(id(s), 0) < s.clock[id(s)]]
        return {
            "errors": gradient_errors(reference, model, mesh),
            "faults": device.faults,
            "hidden": hidden,
            "late": len(late),
        }


def _hidden(device: Device, size: int) -> int:
    """How many exchanges of K/V in forward did not have to wait for the kernels of the term before."""
    each = len(device.kernels) // len(device.exchanges)
    hidden = 0
    for t, exchange in enumerate(device.exchanges):
        if t % size:  # the first term of a block has none before it
            stream, done = device.kernels[t * each - 1]
            hidden += exchange.get(stream, 0) < done[stream]
    return hidden


def check(results: list[dict[str, Any]], hidden: int) -> None:
    for result in results:
        assert not result["faults"] and not result["late"]
        assert max(result["errors"].values()) < 1e-10
        assert result["hidden"] == hidden


def test_terms_take_turns_without_a_race() -> None:
    """Buffers are not overwritten under a reader, sums are in order, and K/V of a term pass while the other computes."""
    for size in (2, 4):
        for policy in ("selective", "none"):
            check(run_ranks(size, streams_job, size, policy, transports.Broadcast.SLOTS), hidden=2 * (size - 1))


def test_two_buffers_would_hide_less() -> None:
    """Why there are three."""
    (first, *_) = run_ranks(4, streams_job, 4, "selective", 2)
    assert not first["faults"] and first["hidden"] < 2 * 3


def test_a_missing_wait_is_seen() -> None:
    results = run_ranks(4, unordered_job, 4)
    assert all(result["faults"] for result in results)


def unordered_job(size: int) -> dict[str, Any]:
    with mock.patch.object(Wire, "main_after", lambda wire, term: None):
        return streams_job(size, "selective", 1)
