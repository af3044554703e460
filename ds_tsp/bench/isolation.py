"""Keeps what schemes register in globals of DeepSpeed and transformers apart, so that several live in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.module_inject import layers
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Process groups and the mpu, of the last engine that was made; Ulysses' groups; whether AutoTP trains; and the
# attention that Ulysses puts in the place of sdpa, for every model of the process.
_GROUP = re.compile("_[A-Z_]+|mpu|mesh_device|expert_tensor_parallel_world_size")
_PLACES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (groups, tuple(name for name in vars(groups) if _GROUP.fullmatch(name))),
    (parallel_state_sp, tuple(name for name in vars(parallel_state_sp) if _GROUP.fullmatch(name))),
    (layers, ("DEEPSPEED_AUTOTP_MODE",)),
    (layers.TensorParallel_Layer, ("tp_overlap_comm",)),
    (ALL_ATTENTION_FUNCTIONS, ("_local_mapping",)),
)


class Globals:
    """One scheme's values of these globals: in place while `active`, put away otherwise. They begin as they are now."""

    def __init__(self) -> None:
        self._values = _read()

    @contextmanager
    def active(self) -> Iterator[None]:
        outside = _read()
        _write(self._values)
        try:
            yield
        finally:
            self._values = _read()
            _write(outside)


def _read() -> list[Any]:
    values = [getattr(owner, name) for owner, names in _PLACES for name in names]
    return [dict(value) if isinstance(value, dict) else value for value in values]


def _write(values: list[Any]) -> None:
    for (owner, name), value in zip(((o, n) for o, names in _PLACES for n in names), values, strict=True):
        setattr(owner, name, value)
