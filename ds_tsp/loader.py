"""Loaders: batches cut early, batches that know how many tokens their optimizer step has, and a place to go on from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch import Tensor
from torch.utils.data import DistributedSampler

from .comm import all_reduce
from .data import MARK, shard_batch, shifted
from .mesh import Mesh
from .vocab import IGNORE_INDEX


class _Around:
    """A loader that changes another one's batches; length, sampler, epochs and the rest are the other one's."""

    def __init__(self, loader: Any, mesh: Mesh):
        self.loader, self.mesh = loader, mesh

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)


class ShardedLoader(_Around):
    """Batches of `loader`, cut by `shard_batch` as they come: no rank keeps S tokens.

    The loader underneath deals full batches, the same to every rank of a TSP group: give its sampler
    ``engine.tsp.dp_rank`` and ``engine.tsp.dp_size``.
    """

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            yield shard_batch(batch, self.mesh)


class TokenCountingLoader(_Around):
    """Adds ``num_items_in_batch`` to each batch, such that DeepSpeed's average of the losses of an optimizer step, over
    micro-batches and dp ranks, is the mean over all its valid tokens.

    Looks `accumulation` batches ahead. Communication: one all-reduce of a number over dp per optimizer step.
    Raises ValueError if an epoch is not a whole number of steps: the tokens of a step could not be known then.
    """

    def __init__(self, loader: Any, mesh: Mesh, accumulation: int):
        super().__init__(loader, mesh)
        self.accumulation = accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Not iter(): DeepSpeed's loader is its own iterator, and starts anew whenever somebody asks for one.
        batches = (batch for batch in self.loader)
        while window := list(itertools.islice(batches, self.accumulation)):
            if len(window) < self.accumulation:
                raise ValueError(
                    f'"loss_average": "token" needs epochs of whole optimizer steps: this one ends with {len(window)} '
                    f"of {self.accumulation} micro-batches; drop the rest (a sampler or dataset of a multiple), or use "
                    '"loss_average": "batch"'
                )
            items = self._items(window)
            for batch in window:
                yield {**batch, "num_items_in_batch": items}

    def _items(self, window: Iterable[dict[str, Any]]) -> Tensor:
        device = get_accelerator().current_device_name()
        valid = torch.tensor(float(sum(_valid(batch) for batch in window)), device=device)
        shares = self.accumulation * self.mesh.dp_size
        return all_reduce(valid, self.mesh.dp_group, self.mesh.dp_size).clamp(min=1.0) / shares


def _valid(batch: dict[str, Any]) -> int:
    """Tokens of a full batch that count in the loss."""
    if MARK in batch:
        raise ValueError("count tokens before the batch is cut: put ShardedLoader around TokenCountingLoader")
    targets = batch["shift_labels"] if batch.get("shift_labels") is not None else shifted(batch["labels"])
    return int((targets != IGNORE_INDEX).sum())


class ResumableLoader(DeepSpeedDataLoader):
    """DeepSpeed's loader, which counts what it gave out of the epoch and can go on from there.

    After `resume` the next batch is the one that would have come, whether somebody iterates anew or goes on with an
    iterator that he has; the epoch after that one is whole. Skipped samples are not read.
    """

    data_sampler: Any
    _given = 0
    _resumed = False  # the next __iter__ keeps the place

    def __iter__(self) -> Any:
        if self._resumed:
            return self
        self._given = 0
        return super().__iter__()

    def __next__(self) -> Any:
        self._resumed = False
        batch = super().__next__()
        self._given += 1
        return batch

    def position(self) -> dict[str, int]:
        """The epoch of the sampler, and samples given out in it by all data-parallel ranks together."""
        return {"epoch": self.data_sampler.epoch, "samples": self._given * self._step}

    @property
    def _step(self) -> int:
        return self.batch_size * self.data_sampler.num_replicas

    def resume(self, position: dict[str, int]) -> None:
        """Go to `position`, rounded down to a whole batch at another batch size or number of ranks."""
        sampler = self.data_sampler
        sampler.set_epoch(position["epoch"])
        self._given = min(position["samples"] // self._step, len(self))
        self.data_sampler = list(sampler)[self._given * self.batch_size :]
        generator = torch.get_rng_state()
        try:
            super().__iter__()  # draws a seed for workers, which was drawn already when the epoch began
        finally:
            torch.set_rng_state(generator)
            self.data_sampler = sampler
        self._resumed = True


def resumable(loader: Any) -> ResumableLoader | None:
    """DeepSpeed's loader inside of `loader`, turned into a `ResumableLoader`; None if there is none of the usual
    kind."""
    while loader is not None and not isinstance(loader, DeepSpeedDataLoader):
        loader = getattr(loader, "loader", None)
    if loader is None or not isinstance(loader.data_sampler, DistributedSampler):
        return None
    loader.__class__ = ResumableLoader
    return loader
