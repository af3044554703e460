"""Training through the real engine equals training the unsharded model: losses, norms and weights of five steps."""

import functools
from typing import Any

import pytest
import torch
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor, nn

import ds_tsp
from ds_tsp.layout import together
from tests.harness import run_ranks
from tests.models import tiny, tokens

STEPS = 5
LENGTH = 21
LR = 1e-3


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay by name, as training scripts do it: on matrices, not on norms."""
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if "norm" in n]},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model), lr=LR, weight_decay=0.0, eps=1e-4)


def ds_config(size: int, stage: int, clip: float = 0.0, accumulate: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "tsp": {"size": size},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 10**5,
            "allgather_bucket_size": 10**5,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 10**4,
        },
        **more,
    }


def micro_batch(step: int, micro: int, dp_rank: int) -> dict[str, Tensor]:
    return tokens(2, LENGTH, seed=1000 * step + 10 * micro + dp_rank)


def train_reference(model: nn.Module, dp: int, clip: float, accumulate: int, make=micro_batch) -> dict[str, Any]:
    """The same steps on the unsharded model in one process: the mean over micro-batches of each one's mean loss."""
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            row = [model(**make(step, micro, rank)).loss for rank in range(dp)]
            (torch.stack(row).mean() / accumulate).backward()
            losses.append([loss.item() for loss in row])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        norms.append(norm.item())
        optimizer.step()
    return {"losses": losses, "norms": norms}


def train_engine(engine: Any, accumulate: int, make=micro_batch) -> dict[str, Any]:
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(accumulate):
            loss = engine(**make(step, micro, engine.tsp.dp_rank)).loss
            engine.backward(loss)
            # At stage 0 in fp32 DeepSpeed keeps no norm; what it clips by is what its helper returns.
            kept = None
            if engine.zero_optimization_stage() == 0 and engine.is_gradient_accumulation_boundary():
                kept = clip_grad_norm_(engine.module.parameters(), float("inf"), mpu=engine.mpu)
            engine.step()
            losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm() if kept is None else kept))
    return {"losses": losses, "norms": norms}


@functools.cache
def expected_run(family: str, layers: int, dp: int, clip: float, accumulate: int) -> dict[str, Any]:
    """The unsharded run: losses, norms and final weights. Computed once, in the test process."""
    model = tiny(family, num_hidden_layers=layers).train()
    return {**train_reference(model, dp, clip, accumulate), "weights": dict(model.state_dict())}


def training_job(expected: dict[str, Any], size: int, stage: int, clip: float, accumulate: int, family: str,
                 layers: int, checkpointing: Any) -> dict[str, float]:  # fmt: skip
    model = tiny(family, num_hidden_layers=layers)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    engine, *_ = ds_tsp.initialize(model=model, optimizer=adamw(model), config=ds_config(size, stage, clip, accumulate))
    got = train_engine(engine, accumulate)
    errors = {
        "loss": max(abs(a - row[engine.tsp.dp_rank]) for a, row in zip(got["losses"], expected["losses"], strict=True)),
        "norm": max(abs(a - b) for a, b in zip(got["norms"], expected["norms"], strict=True)),
        "weights": 0.0,
    }
    weights = ds_tsp.full_state_dict(engine)
    if torch.distributed.get_rank() == 0:
        assert list(weights) == list(expected["weights"])
        errors["weights"] = max((weights[n] - v).abs().max().item() for n, v in expected["weights"].items())
    else:
        assert not weights
    engine.destroy()
    return errors


def assert_same_run(size: int, stage: int, clip: float, accumulate: int, family: str = "llama", layers: int = 2,
                    checkpointing: bool | None = None) -> None:  # fmt: skip
    expected = expected_run(family, layers, 4 // size, clip, accumulate)
    results = run_ranks(4, training_job, expected, size, stage, clip, accumulate, family, layers, checkpointing)
    for rank, errors in enumerate(results):
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"


@pytest.mark.parametrize(("clip", "accumulate"), [(0.0, 1), (0.5, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_equals_unsharded(size: int, stage: int, clip: float, accumulate: int) -> None:
    assert_same_run(size, stage, clip, accumulate, layers=1)  # 24 runs: more layers are tested below


def together_job(stage: int) -> list[bool]:
    """Whether the slices of each block lie in one piece after two steps."""
    model = tiny("llama")
    engine, *_ = ds_tsp.initialize(model=model, optimizer=adamw(model), config=ds_config(2, stage))
    for step in range(2):
        engine.backward(engine(**micro_batch(step, 0, engine.tsp.dp_rank)).loss)
        engine.step()
    plans = [m.tsp_fold for m in model.modules() if hasattr(m, "tsp_fold")]
    found = [together([getattr(owner, leaf) for owner, leaf in plan.sharded]) is not None for plan in plans]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_slices_travel_from_where_they_lie(stage: int) -> None:
    assert run_ranks(4, together_job, stage) == [[True] * 4] * 4


def norms_only_job(size: int, stage: int) -> tuple[float, float]:
    """Only replicated weights are trained: each counts once in the norm, however many ranks hold it."""
    model, reference = tiny("llama"), tiny("llama")
    for m in (model, reference):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_("norm" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ds_tsp.initialize(model=model, optimizer=torch.optim.SGD(trained, 0.0), config=ds_config(size, stage))
    engine.backward(engine(**tokens(2, LENGTH)).loss)
    engine.step()
    engine_norm = float(engine.get_global_grad_norm())
    engine.destroy()
    reference(**tokens(2, LENGTH)).loss.backward()
    return engine_norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf")).item()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_norm_of_replicated_weights(size: int, stage: int) -> None:
    for got, expected in run_ranks(4, norms_only_job, size, stage):
        assert abs(got - expected) < 1e-5 * expected


def lengths_job(stage: int) -> dict[str, float]:
    """Each dp rank trains on sequences of a length, and a number of rows, of its own."""

    def make(step: int, micro: int, dp_rank: int) -> dict[str, Tensor]:
        return tokens(1 + 2 * dp_rank, 9 + 5 * step + 22 * dp_rank, seed=step)

    model = tiny("llama")
    engine, *_ = ds_tsp.initialize(model=model, optimizer=adamw(model), config=ds_config(2, stage))
    expected, got = train_reference(tiny("llama").train(), 2, 0.0, 1, make), train_engine(engine, 1, make)
    engine.destroy()
    return {
        "loss": max(abs(a - row[engine.tsp.dp_rank]) for a, row in zip(got["losses"], expected["losses"], strict=True)),
        "norm": max(abs(a - b) for a, b in zip(got["norms"], expected["norms"], strict=True)),
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_other_lengths_on_other_dp_ranks(stage: int) -> None:
    for rank, errors in enumerate(run_ranks(4, lengths_job, stage)):
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradient_checkpointing(stage: int, reentrant: bool) -> None:
    assert_same_run(2, stage, 0.5, 1, checkpointing=reentrant)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("stage", [1, 3])
def test_other_families(family: str, stage: int) -> None:
    """Per-head norms, and tied embeddings with a scale and softcaps."""
    assert_same_run(4, stage, 0.5, 1, family)
