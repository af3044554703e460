"""Pipeline stages with TSP inside equal the unsharded model: losses, norms and weights of five steps, by any route."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_tsp
from tests.harness import run_ranks
from tests.integration.test_training import STEPS, adamw, ds_config, micro_batch, train_reference
from tests.models import tiny, tokens

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


def batch_of(rows: int, length: int, seed: int, kind: str = "plain") -> dict[str, Tensor]:
    batch = tokens(rows, length, seed=seed)
    if kind == "packed":
        cut = length // 3
        positions = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(rows, -1)
        batch["position_ids"] = positions.contiguous()
        batch["labels"] = batch["labels"].index_fill(1, torch.tensor([cut]), -100)
    elif kind == "padded":
        mask = torch.ones_like(batch["input_ids"])
        mask[0, length // 2 :] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    return batch


# Rows and lengths change between calls, and inside of one; evaluation and training take turns.
CALLS = [
    ("eval", [batch_of(2, 21, 1), batch_of(2, 21, 2)]),
    ("train", [batch_of(3, 13, 3), batch_of(3, 13, 4)]),
    ("eval", [batch_of(5, 31, 5), batch_of(5, 31, 6, "packed")]),
    ("train", [batch_of(1, 40, 7, "packed"), batch_of(4, 9, 8, "padded")]),
    ("train", [batch_of(1, 7, 9), batch_of(1, 7, 10)]),
    ("eval", [batch_of(2, 21, 1)]),
]


@functools.cache
def expected_calls(family: str, layers: int) -> dict[str, Any]:
    model = tiny(family, num_hidden_layers=layers)
    optimizer, losses = adamw(model), []
    for kind, batches in CALLS:
        model.train(kind == "train")
        with torch.set_grad_enabled(kind == "train"):
            loss = torch.stack([model(**batch, use_cache=False).loss for batch in batches]).mean()
        losses.append(loss.item())
        if kind == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"losses": losses, "weights": dict(model.state_dict())}


def calls_job(expected: dict[str, Any], family: str, layers: int, size: int, stages: int) -> dict[str, float]:
    engine = pipeline_engine(tiny(family, num_hidden_layers=layers), ds_config(size, 1, 0.0, 2), stages)
    errors = []
    for (kind, batches), loss in zip(CALLS, expected["losses"], strict=True):
        if kind == "train":
            got = engine.train_batch(iter(batches))
        else:
            got = engine.eval_batch(iter(batches), num_micro_batches=len(batches))
        errors.append(abs(got.item() - loss))
    weights = ds_tsp.full_state_dict(engine)
    difference = max([(weights[n] - v).abs().max().item() for n, v in expected["weights"].items()] if weights else [0.0])
    return {"loss": max(errors), "weights": difference}


@pytest.mark.parametrize(("family", "size", "stages"), [("llama", 2, 4), ("mistral", 4, 2)])
def test_other_lengths_and_rows_between_calls(family: str, size: int, stages: int) -> None:
    """Four stages: two of them read no data. Windows that end within the sequence; packed and padded batches."""
    layers = 5 if stages == 4 else 2
    for rank, errors in enumerate(run_ranks(WORLD, calls_job, expected_calls(family, layers), family, layers, size, stages)):
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"
