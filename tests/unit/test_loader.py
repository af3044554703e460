"""The place in the data: after a resume comes the batch that would have come."""

import itertools
from typing import Any

import pytest
import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader

from ds_tsp.loader import ResumableLoader, resumable


def loader(replicas: int = 2, rank: int = 1, batch: int = 2, workers: int = 0) -> Any:
    plain = DeepSpeedDataLoader(
        dataset=list(range(22)), batch_size=batch, pin_memory=False, local_rank=0, tput_timer=None,
        num_local_io_workers=workers, data_parallel_world_size=replicas, data_parallel_rank=rank,
    )  # fmt: skip
    return resumable(plain)


def take(batches: Any, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(batches, count)]


def endless(batches: Any) -> Any:
    while True:
        yield from batches


@pytest.mark.parametrize("given", [1, 4, 6])  # an epoch has 6 batches
@pytest.mark.parametrize("repeating", [False, True])
def test_goes_on(given: int, repeating: bool) -> None:
    """In a new loop, and in an iterator that was made before; the epochs after it are whole."""
    first = loader()
    first.data_sampler.set_epoch(3)
    batches = endless(first)
    take(batches, given)
    place = first.position()
    expected = take(batches, 15)
    second = loader()
    batches = RepeatingLoader(second) if repeating else None
    generator = torch.get_rng_state()
    second.resume(place)
    assert torch.equal(torch.get_rng_state(), generator)  # the seed for workers was drawn when the epoch began
    assert place == {"epoch": 3, "samples": given * 4} and second.data_sampler.epoch == 3 and second.position() == place
    assert take(batches or endless(second), 15) == expected


def test_another_number_of_ranks() -> None:
    """What all ranks together had seen is skipped, and nothing is left out."""
    old = [loader(2, rank) for rank in range(2)]
    seen = sum((take(each, 3) for each in old), [])
    new = [loader(3, rank, batch=1) for rank in range(3)]
    for each in new:
        each.resume(old[0].position())
    rest = [i for each in new for batch in each for i in batch.tolist()]
    assert len(sum(seen, [])) == 12 and set(sum(seen, []) + rest) == set(range(22))
    assert len(rest) == 12  # 10 are left, and two are repeated so that every rank has as many


def test_only_the_usual_loaders() -> None:
    class Around:
        def __init__(self, inner: Any):
            self.loader = inner

    inner = loader()
    assert type(inner) is ResumableLoader and resumable(Around(Around(inner))) is inner
    assert resumable(None) is None and resumable([1, 2]) is None
