"""Pipeline stages with TSP inside equal the unsharded model: losses, norms and weights of five steps, by any route."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.pipe import p2p
from torch import Tensor
from transformers import AutoModelForCausalLM

import ds_tsp
from ds_tsp.meter import LiveBytes
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


def sent_job() -> list[int]:
    """Bytes that each rank sends to other stages in one step, the second of two alike; and DeepSpeed's two switches."""
    engine = pipeline_engine(tiny("llama"), ds_config(2, 1, 0.0, 3))
    sent: list[int] = []
    send = p2p.send

    def counted(tensor: Tensor, to: int, **more: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return send(tensor, to, **more)

    with mock.patch.object(p2p, "send", counted):
        for step in range(2):
            sent.clear()
            engine.train_batch(iter([micro_batch(step, micro, engine.tsp.dp_rank) for micro in range(3)]))
    return [*sent, engine.is_pipe_partitioned, engine.is_grad_partitioned]


def test_only_local_activations_cross_a_boundary() -> None:
    """B x s x D elements of 4 bytes for each micro batch, forward and back: 21 tokens are padded to 24, 12 a rank."""
    assert run_ranks(WORLD, sent_job) == [[2 * 12 * 24 * 4] * 3 + [False, False]] * WORLD


class RealBytes(LiveBytes):
    """Tensors with memory behind them only."""

    def _see(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            super()._see(tensor)


def built_job(stages: int, meta: bool) -> dict[str, Any]:
    config = tiny("llama", num_hidden_layers=6).config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    whole = sum(p.numel() for p in empty.parameters()) * 4
    with RealBytes([]) as live:
        module = ds_tsp.pipeline(empty if meta else config, stages, ds_config(2, 0), "type:decoderlayer")
    own = sum(p.numel() for p in module.parameters()) * 4
    engine, *_ = ds_tsp.initialize(model=module, optimizer=adamw(module), config=ds_config(2, 0))
    loss = engine.train_batch(iter([micro_batch(0, 0, 0)])).item()
    return {"peak": live.peak / whole, "own": own / whole, "layers": len(module.forward_funcs), "loss": loss,
            "weights": ds_tsp.full_state_dict(engine)}  # fmt: skip


def test_from_a_config_no_rank_makes_another_stages_layers() -> None:
    """Nor from a model on the meta device; the weights are the same, at any number of stages."""
    two, four = run_ranks(WORLD, built_job, 2, False), run_ranks(WORLD, built_job, 4, True)
    assert [r["layers"] for r in two] == [4] * 4 + [5] * 4
    assert max(r["own"] for r in two) < 0.55 and max(r["peak"] for r in two) < 0.6
    assert max(r["own"] for r in four) < 0.35 and max(r["peak"] for r in four) < 0.4
    assert len({r["loss"] for r in two}) == 1 and abs(two[0]["loss"] - four[0]["loss"]) < 1e-5
    assert list(two[0]["weights"]) == list(four[0]["weights"])
    for name, weight in two[0]["weights"].items():
        assert (weight - four[0]["weights"][name]).abs().max() < 1e-5
        assert weight.std() > 0.01 or "norm" in name
