"""Checkpoints of pipelines: another number of stages, another P, and none: the universal names are the unsharded
model's."""

from pathlib import Path
from typing import Any

import pytest

import ds_tsp
from ds_tsp.convert import convert
from tests.harness import run_ranks
from tests.integration.test_checkpoint import assert_same_tensors, universal_tensors
from tests.integration.test_training import adamw, ds_config, micro_batch
from tests.models import tiny

pytest.importorskip("ds_tsp.pipeline")


def pipeline_job(source: str, target: str, stages: int, size: int, zero: int, more: dict[str, Any]) -> list[float]:
    """Open `source` (or train two steps), save to `target` at once, train two steps more."""
    model: Any = tiny("gemma2")
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    config = ds_config(size, zero, **more, checkpoint={"load_universal": True})
    if stages > 1:
        model = ds_tsp.pipeline(model, num_stages=stages, config=config)
    engine, *_ = ds_tsp.initialize(model=model, optimizer=adamw(model), config=config)
    number = 0

    def step() -> float:
        nonlocal number
        batch, number = micro_batch(number, 0, 0), number + 1
        if stages > 1:
            return engine.train_batch(iter([batch])).item()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    if source:
        engine.load_checkpoint(source)
        number = engine.global_steps
    else:
        step(), step()
    engine.save_checkpoint(target)
    assert number == 2
    return [step(), step()]


CHAINS = {  # precision, then (stages, P, ZeRO stage) one after another, on 4 ranks
    "fp32": ({}, [(2, 2, 1), (1, 4, 3), (2, 1, 0), (1, 2, 0)]),
    "bf16": ({"bf16": {"enabled": True}}, [(2, 2, 1), (1, 4, 2), (2, 1, 1)]),
}


@pytest.mark.parametrize("chain", list(CHAINS))
def test_pipelines(tmp_path: Path, chain: str) -> None:
    """Tied weights on two stages, a frozen one on the first. Every whole tensor stays the same, bit for bit."""
    more, places = CHAINS[chain]
    source, first, tensors = "", [], {}
    for number, place in enumerate(places):
        saved = str(tmp_path / str(number))
        results = run_ranks(4, pipeline_job, source, saved, *place, more)
        source = str(tmp_path / f"{number}_universal")
        whole = universal_tensors(convert(saved, f"{source}/tag"))
        first, tensors = first or results[0], tensors or whole
        assert_same_tensors(whole, tensors, str(place))
        for losses in results:
            worst = max(abs(a - b) for a, b in zip(losses, first, strict=True))
            assert worst < (1e-6 if chain == "fp32" else 2e-2), f"{place}: {losses}, at first {first}"


def resume_job(folder: str, zero: int, more: dict[str, Any]) -> bool:
    def start(model: Any) -> Any:
        module = ds_tsp.pipeline(model, num_stages=2, config=config)
        return ds_tsp.initialize(model=module, optimizer=adamw(module), config=config)[0]

    def step(engine: Any, number: int) -> float:
        return engine.train_batch(iter([micro_batch(number, 0, engine.tsp.dp_rank)])).item()

    config = ds_config(1, zero, 0.5, **more)
    engine = start(tiny("gemma2"))
    step(engine, 0)
    engine.save_checkpoint(folder, client_state={"mine": 1})
    expected = [step(engine, 1), step(engine, 2)]
    engine = start(tiny("gemma2").config)
    _, client = engine.load_checkpoint(folder)
    assert client["mine"] == 1 and "optimizer" not in client
    return [step(engine, 1), step(engine, 2)] == expected


@pytest.mark.parametrize(("zero", "precision"), [(0, "bf16"), (1, "fp32")])
def test_pipelines_resume(tmp_path: Path, zero: int, precision: str) -> None:
    """Bit for bit; DeepSpeed itself fails to load a bf16 pipeline without ZeRO."""
    assert run_ranks(4, resume_job, str(tmp_path), zero, CHAINS[precision][0]) == [True] * 4
