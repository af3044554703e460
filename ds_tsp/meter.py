"""Memory meters: live tensor bytes counted exactly, and one number for progress lines."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Allocation:
    """One allocation and the shape of the tensor it was made for; a storage that is resized gives (bytes,)."""

    bytes: int
    shape: tuple[int, ...]


class LiveBytes(TorchDispatchMode):
    """Bytes of the live tensor storages of this process, each storage once, on any device and for fake tensors too.

    Counts from `tensors`, or from every tensor the garbage collector knows, and follows what operators return, until
    the storage dies or is resized (ZeRO-3 frees parameters by `untyped_storage().resize_(0)`). Of wrappers such as
    DTensor the tensors inside count: the storage of their own has the wrapper's size, but no memory.

    Attributes: start, current, peak (bytes), largest (the largest single allocation seen inside, or None).
    Not seen: scratch inside an operator, buffers that live in C++ only (gloo staging), and, at the start, tensors that
    only an autograd graph holds. Memory that is allocated but never touched does count, unlike in the resident set.
    """

    def __init__(self, tensors: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self._given = tensors
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, weakref.finalize] = {}
        self.start = self.current = self.peak = 0
        self.largest: Allocation | None = None

    def __enter__(self) -> LiveBytes:
        for tensor in _tracked_tensors() if self._given is None else self._given:
            self._see(tensor)
        self._given = None  # or it would keep them alive
        self.start = self.current
        self.reset_peak()
        self._restore_resize = _patch_resize(self._see_storage)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._restore_resize()
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._finalizers.clear()
        self._sizes.clear()

    def reset_peak(self) -> None:
        """Start a new measurement: the peak falls to what is live now, the largest allocation is forgotten."""
        self.peak = self.current
        self.largest = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_wraps, types)):
            return NotImplemented  # the wrapper takes the operator apart, and what it calls inside comes by here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        if _wraps(type(tensor)):
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and wrapper subclasses have no storage
            return
        self._see_storage(storage, tuple(tensor.shape))

    def _see_storage(self, storage: torch.UntypedStorage, shape: tuple[int, ...] | None = None) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = 0
            self._finalizers[key] = weakref.finalize(storage, self._freed, key)
        grown = size - self._sizes[key]
        self._sizes[key] = size
        self.current += grown
        self.peak = max(self.peak, self.current)
        if grown > 0 and (self.largest is None or size > self.largest.bytes):
            self.largest = Allocation(size, (size,) if shape is None else shape)

    def _freed(self, key: int) -> None:
        self.current -= self._sizes.pop(key)
        del self._finalizers[key]


def peak_memory() -> int:
    """Peak bytes of this process, for progress lines.

    On an accelerator: the allocator's peak, that is tensors. On the CPU: the peak resident set since the process
    started, which has the interpreter and the libraries in it (about 450 MB) and never falls; use LiveBytes to compare.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _wraps(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def _tracked_tensors() -> Iterator[Tensor]:
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # not isinstance: that asks proxies and lazy modules for their class
            yield thing
            if thing.is_leaf and thing.grad is not None:  # a gradient that Python never looked at is not tracked
                yield thing.grad


def _patch_resize(seen: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Report every `UntypedStorage.resize_`, which no dispatch mode sees; returns what undoes it."""
    cls: Any = torch.UntypedStorage
    own = vars(cls).get("resize_")
    original = cls.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        seen(storage)
        return result

    def restore() -> None:
        if own is None:
            del cls.resize_
        else:
            cls.resize_ = own

    cls.resize_ = resize_
    return restore
