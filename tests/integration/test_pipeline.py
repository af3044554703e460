"""Pipeline stages with TSP inside equal the unsharded model: losses, norms and weights of five steps, by any route."""

import functools
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_tsp
from tests.harness import run_ranks
from tests.integration.test_training import STEPS, adamw, ds_config, micro_batch, train_reference
from tests.models import tiny

WORLD = 8


def pipeline_engine(model: Any, config: dict[str, Any], stages: int = 2, **more: Any) -> Any:
    module = ds_tsp.pipeline(model, num_stages=stages, config=config, **more)
    engine, *_ = ds_tsp.initialize(model=module, optimizer=adamw(module), config=config)
    return engine


@functools.cache
def expected_run(family: str, tied: bool, clip: float, accumulate: int) -> dict[str, Any]:
    model = tiny(family, tie_word_embeddings=tied).train()
    run = train_reference(model, 2, clip, accumulate)
    return {
        "losses": torch.tensor(run["losses"]).view(STEPS, -1).mean(1).tolist(),
        "norms": run["norms"],
        "weights": dict(model.state_dict()),
    }


def training_job(expected: dict[str, Any], family: str, tied: bool, clip: float, accumulate: int, stage: int,
                 schedule: str, interval: int) -> dict[str, float]:  # fmt: skip
    config = ds_config(2, stage, clip, accumulate)
    config["tsp"]["schedule"] = schedule
    model = tiny(family, tie_word_embeddings=tied)
    engine = pipeline_engine(model, config, activation_checkpoint_interval=interval)
    errors = {"loss": 0.0, "norm": 0.0, "weights": 0.0}
    for step in range(STEPS):
        batches = iter([micro_batch(step, micro, engine.tsp.dp_rank) for micro in range(accumulate)])
        loss = engine.train_batch(batches).item()
        errors["loss"] = max(errors["loss"], abs(loss - expected["losses"][step]))
        if clip or stage:  # plain fp32 DeepSpeed has no norm unless it clips
            norm = float(engine.get_global_grad_norm())
            errors["norm"] = max(errors["norm"], abs(norm - expected["norms"][step]))
    weights = ds_tsp.full_state_dict(engine)
    if torch.distributed.get_rank() == 0:
        assert list(weights) == list(expected["weights"])
        assert not tied or weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
        errors["weights"] = max((weights[n] - v).abs().max().item() for n, v in expected["weights"].items())
    else:
        assert not weights
    return errors


# Each ZeRO stage meets each schedule, tied and untied; accumulation, clipping and checkpointing are dealt out over them.
@pytest.mark.parametrize(
    ("stage", "tied", "schedule", "family", "clip", "accumulate", "interval"),
    [
        (0, False, "tsp", "llama", 0.5, 2, 0),
        (0, False, "metp", "qwen3", 0.0, 1, 1),
        (0, True, "tsp", "qwen3", 0.5, 1, 2),
        (0, True, "metp", "gemma2", 0.5, 1, 0),
        (1, False, "tsp", "qwen3", 0.5, 1, 0),
        (1, False, "metp", "llama", 0.5, 8, 0),
        (1, True, "tsp", "gemma2", 0.5, 2, 1),
        (1, True, "metp", "llama", 0.0, 1, 0),
    ],
)
def test_training_equals_unsharded(stage: int, tied: bool, schedule: str, family: str, clip: float, accumulate: int,
                                   interval: int) -> None:  # fmt: skip
    expected = expected_run(family, tied, clip, accumulate)
    job = (family, tied, clip, accumulate, stage, schedule, interval)
    for rank, errors in enumerate(run_ranks(WORLD, training_job, expected, *job)):
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"
