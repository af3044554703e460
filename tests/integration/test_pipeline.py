"""Pipeline stages with TSP inside equal the unsharded model."""

from typing import Any

import torch

import ds_tsp
from tests.harness import run_ranks
from tests.integration.test_training import adamw, ds_config, micro_batch, train_reference
from tests.models import tiny


def job(family: str, size: int, stages: int, stage: int, clip: float, accumulate: int) -> Any:
    config = ds_config(size, stage, clip, accumulate)
    module = ds_tsp.pipeline(tiny(family), num_stages=stages, config=config)
    engine, *_ = ds_tsp.initialize(model=module, optimizer=adamw(module), config=config)
    reference = tiny(family).train()
    expected = train_reference(reference, engine.tsp.dp_size, clip, accumulate)
    out = []
    for step in range(5):
        batches = iter([micro_batch(step, micro, engine.tsp.dp_rank) for micro in range(accumulate)])
        loss = engine.train_batch(batches).item()
        norm = engine.get_global_grad_norm()
        out.append((loss, float(norm) if norm is not None else None))
    losses = torch.tensor(expected["losses"]).view(5, -1).mean(1).tolist()
    return out, losses, expected["norms"]


def test_first() -> None:
    for r in run_ranks(4, job, "llama", 2, 2, 1, 0.5, 2):
        print(r)
