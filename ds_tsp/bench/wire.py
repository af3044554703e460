"""Below deepspeed.comm: bytes that collectives bring to this rank, whoever calls them, and a group to agree in.

Not every scheme communicates through deepspeed.comm, so its logger would miss some of them. All of them end in a
method of torch's ProcessGroup; those are wrapped while the counter is active. This module and `schemes`, which drives
other people's code, are the only ones of ds_tsp that may know torch.distributed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, new_group
from torch.utils._pytree import tree_leaves


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tensors) if isinstance(x, Tensor))


def _exchanged(group: Any, output: Tensor, _input: Tensor, splits: Any, *rest: Any) -> Fraction:
    rows = splits[group.rank()] if splits else Fraction(len(output), group.size())
    return _bytes(output) * (1 - Fraction(rows) / max(len(output), 1))


# What one call brings to a rank: (group, arguments) -> bytes. Of rooted collectives the mean over the group's ranks, of
# an all-reduce that of a reduce-scatter and an all-gather: the least that any algorithm can move.
_Received = Callable[..., Fraction | int]
_of_first: _Received = lambda group, first, *rest: _bytes(first) * Fraction(group.size() - 1, group.size())  # noqa: E731
_of_second: _Received = lambda group, first, second, *rest: _of_first(group, second)  # noqa: E731
_RECEIVED: dict[str, _Received] = {
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), _of_first),
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), lambda *arguments: 2 * _of_first(*arguments)),
    **dict.fromkeys(("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced",
                     "all_gather_single", "all_gather_single_coalesced"), _of_first),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
                     "reduce_scatter_single", "reduce_scatter_single_coalesced"), _of_second),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _exchanged),
    "alltoall": lambda group, outputs, *rest: _bytes(outputs) - _bytes(outputs[group.rank()]),
    **dict.fromkeys(("recv", "recv_anysource"), lambda group, tensors, *rest: _bytes(tensors)),
}  # fmt: skip


def agreement_group() -> ProcessGroup:
    """The whole world once more, with more patience than any other group has: a rank that has failed waits here until
    those which it left alone in a collective have run into their timeout."""
    return new_group(timeout=timedelta(hours=3))


@contextlib.contextmanager
def received_bytes() -> Iterator[Counter[str]]:
    """Counts bytes per operation until it ends; the total is ``sum(counter.values())``.

    Not seen: what C++ sends without Python, such as torch's functional collectives; no scheme here uses them in a step.
    """
    counter: Counter[str] = Counter()
    originals = {name: vars(ProcessGroup)[name] for name in _RECEIVED if name in vars(ProcessGroup)}

    def counted(name: str, original: Any) -> Any:
        def call(group: Any, *arguments: Any, **options: Any) -> Any:
            counter[name] += _RECEIVED[name](group, *arguments)  # type: ignore[assignment]  # a fraction of a byte
            return original(group, *arguments, **options)

        return call

    for name, original in originals.items():
        setattr(ProcessGroup, name, counted(name, original))
    try:
        yield counter
    finally:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)
