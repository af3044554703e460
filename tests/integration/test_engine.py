"""The engine that ds_tsp.initialize returns is DeepSpeed's own, with what users switch on in it."""

import argparse
import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM

import ds_tsp
from tests.harness import assert_all_ranks_raise, run_ranks
from tests.integration.test_training import ds_config, micro_batch
from tests.models import tiny, tokens


def train(engine: Any, steps: int = 3, norms: list[float] | None = None) -> list[float]:
    losses = []
    for step in range(steps):
        loss = engine(**micro_batch(step, 0, engine.tsp.dp_rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if norms is not None and engine.get_global_grad_norm() is not None:
            norms.append(float(engine.get_global_grad_norm()))
    return losses


def precision_job(precision: str, stage: int, size: int) -> dict[str, Any]:
    """Five steps in a precision, by DeepSpeed's own optimizer and scheduler: against the same engine in fp32."""
    # DeepSpeed refuses fp16 on CPUs without instructions for it; torch computes it all the same.
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        return precision_losses(precision, stage, size)


def precision_losses(precision: str, stage: int, size: int) -> dict[str, Any]:
    losses: dict[str, Any] = {"norms": {"fp32": [], precision: []}}
    for name in ("fp32", precision):
        model = tiny("llama", hidden_size=48)
        sections = {
            "fp32": {},
            "bf16": {"bf16": {"enabled": True}},
            "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
            "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        }
        config = ds_config(size, stage or (name == "fp32"), clip=1.0, **sections[name])  # fp32 keeps no norm at stage 0
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
        engine, optimizer, _, scheduler = ds_tsp.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        assert (
            type(engine) is deepspeed.DeepSpeedEngine
            and scheduler is engine.lr_scheduler
            and optimizer is engine.optimizer
        )
        losses[name] = train(engine, 5, losses["norms"][name])
        engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("precision", "stage", "size"),
    [("bf16", 0, 2), ("bf16", 0, 4), ("bf16", 1, 2), ("bf16", 2, 4), ("bf16", 3, 2), ("fp16", 0, 4), ("fp16", 2, 2),
     ("fp16", 3, 2), ("autocast", 1, 2)],
)  # fmt: skip
def test_precisions(precision: str, stage: int, size: int) -> None:
    for losses in run_ranks(4, precision_job, precision, stage, size):
        assert losses["fp32"][0] != losses[precision][0]
        for a, b in zip(losses["fp32"], losses[precision], strict=True):
            assert abs(a - b) < 2e-2 * abs(a)
        norms = losses["norms"]
        assert len(norms["fp32"]) == 5
        for a, b in zip(norms["fp32"], norms[precision], strict=True):
            assert abs(a - b) < 3e-2 * a


def everything_on_job(folder: str) -> list[float]:
    config = ds_config(
        2,
        1,
        wall_clock_breakdown=True,
        flops_profiler={"enabled": True, "profile_step": 1, "output_file": f"{folder}/flops.txt"},
        comms_logger={"enabled": True, "prof_all": True, "verbose": False},
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "run"},
    )
    model = tiny("llama")
    engine, *_ = ds_tsp.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    losses = train(engine)
    deepspeed.comm.log_summary()
    engine.destroy()
    return losses


def test_everything_switched_on(tmp_path: Path) -> None:
    """csv monitor, flops profiler, comms logger and wall-clock breakdown together; the loss is the group's mean."""
    results = run_ranks(4, everything_on_job, str(tmp_path))
    assert results[0] == results[1] and results[2] == results[3]  # the value is the group's, bit for bit
    reference = tiny("llama")
    expected = [reference(**micro_batch(0, 0, rank)).loss.item() for rank in range(2)]
    assert abs(results[0][0] - expected[0]) < 1e-5 and abs(results[2][0] - expected[1]) < 1e-5
    assert list(tmp_path.rglob("*lr.csv"))  # DeepSpeed itself logs no loss; launchers/train.py does
    assert (tmp_path / "flops.txt").stat().st_size > 0


def ways_job(path: str) -> list[list[float]]:
    """The config as dict, as path, as args.deepspeed_config, and as both."""
    given = [
        {"config": json.loads(Path(path).read_text())},
        {"config": path},
        {"args": argparse.Namespace(deepspeed_config=path, local_rank=-1)},
        {"args": argparse.Namespace(deepspeed_config=path), "config": path},
        {"config_params": path},
    ]
    losses = []
    for ways in given:
        model = tiny("llama", num_hidden_layers=1)
        args = copy.copy(ways.get("args"))
        engine, *_ = ds_tsp.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), **ways)
        losses.append(train(engine, 2))
        assert args == ways.get("args")
        engine.destroy()
    return losses


def test_config_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config(2, 0)))
    for losses in run_ranks(2, ways_job, str(path)):
        assert all(other == losses[0] for other in losses)


def refused_job(what: str) -> None:
    model, config = tiny("llama"), ds_config(2, 0)
    more: dict[str, Any] = {}
    if what == "size":
        config["tsp"]["size"] = 3
    elif what == "section":
        config["tps"] = config.pop("tsp")
    elif what == "mpu":
        more["mpu"] = object()
    elif what == "model":
        model = torch.nn.Linear(4, 4)
    elif what == "plan":
        config["tsp"]["plan"] = {"layers.*.mlp.up_prj": "colwise"}
    elif what == "twice":
        ds_tsp.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    elif what == "batch":
        config["train_batch_size"] = 8
    elif what == "kernel":
        config["tsp"]["kernel"] = "flash_attn"
    engine, *_ = ds_tsp.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config, **more
    )
    engine(**tokens(2, 12))


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("size", "tsp.size=3 does not divide world size 4; use 1, 2 or 4"),
        ("section", 'did you mean "tsp"'),
        ("mpu", "ds_tsp makes the process groups"),
        ("model", "got Linear"),
        ("plan", r"layers\.\*\.mlp\.up_prj.*did you mean 'model\.layers\.\*\.mlp\.up_proj'"),
        ("twice", "folded already"),
        ("batch", "train_batch_size"),
        ("kernel", "flash_attn.*pip install"),
    ],
)
def test_wrong_input_is_refused_on_all_ranks(what: str, match: str) -> None:
    assert_all_ranks_raise(4, refused_job, what, match=match)


def ranks_differ_job(size: int) -> dict[str, Any]:
    """Every rank builds other weights, as an unseeded script does: rank 0's count, as with plain DeepSpeed."""
    torch.manual_seed(deepspeed.comm.get_rank())
    first = tiny("llama")
    model = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(deepspeed.comm.get_rank())
    names = [n for n, _ in model.named_parameters()]
    frozen = {n for n in names if "k_proj" in n}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    ids = {n: id(p) for n, p in model.named_parameters()}
    engine, *_ = ds_tsp.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), config=ds_config(size, 0)
    )
    assert {n: id(p) for n, p in model.named_parameters()} == ids
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
    assert isinstance(model, type(first)) and type(model).__name__ == type(first).__name__
    weights = ds_tsp.full_state_dict(engine)
    same = all(torch.equal(weights[n], v) for n, v in first.state_dict().items()) if weights else None
    loss = engine(**tokens(2, 12)).loss.item() - first(**tokens(2, 12)).loss.item()
    engine.destroy()
    return {"same": same, "loss": abs(loss)}


@pytest.mark.parametrize("size", [2, 4])
def test_rank_zeros_weights_count(size: int) -> None:
    results = run_ranks(4, ranks_differ_job, size)
    assert [r["same"] for r in results] == [True, None, None, None]
    assert max(r["loss"] for r in results) < 1e-5


def test_state_dict_opens_in_plain_transformers(tmp_path: Path) -> None:
    """Tied weights stay tied, under ZeRO-3 too; the reloaded model gives the engine's numbers."""
    for rank, difference in enumerate(run_ranks(4, reload_job, str(tmp_path))):
        assert difference is None if rank else difference < 1e-5


def reload_job(folder: str) -> float | None:
    model = tiny("gemma2")
    engine, *_ = ds_tsp.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=ds_config(2, 3)
    )
    train(engine, 2)
    weights = ds_tsp.full_state_dict(engine)
    engine.eval()
    with torch.no_grad():
        loss = engine(**tokens(2, 12)).loss.item()
    if not weights:
        return None
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    for save in (engine.module.save_pretrained, engine.save_16bit_model):
        with pytest.raises(ValueError, match=r"ds_tsp\.save_pretrained\(engine, folder\)"):
            save(folder)
    engine.module.save_pretrained(folder, state_dict=weights)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert type(plain).__name__ == "Gemma2ForCausalLM"
    return abs(plain(**tokens(2, 12)).loss.item() - loss)
