"""Checkpoints through the real engine: going on bit for bit, opening at another degree, and what happens when it goes
wrong."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import PreTrainedModel

import ds_tsp
from ds_tsp.convert import convert
from tests.harness import run_ranks
from tests.integration.test_data import Rows, _without_workers
from tests.integration.test_training import ds_config
from tests.models import tiny

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}


def model_for(family: str, seed: int) -> PreTrainedModel:
    """A tiny model in which some parameters are frozen; another seed, other weights."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "gptj":  # drops activations outside of its blocks
        sizes |= {"n_layer": 1, "n_head": 4, "n_embd": 24, "rotary_dim": 4, "embd_pdrop": 0.3, "attn_pdrop": 0.0,
                  "resid_pdrop": 0.0}  # fmt: skip
        sizes.pop("num_hidden_layers")
    model = tiny(family, **sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
            if "up_proj" in name or "post_attention" in name:  # one that is cut, and one that is whole
                parameter.requires_grad_(False)
    return model


def engine_for(size: int, stage: int, family: str = "llama", precision: str = "fp32", seed: int = 0, **more: Any):
    model = model_for(family, seed)
    decayed = [p for n, p in model.named_parameters() if "norm" not in n and p.requires_grad]
    others = [p for n, p in model.named_parameters() if "norm" in n and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
    config = ds_config(size, stage, clip=1.0, **PRECISIONS[precision], **more)
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}
    # DeepSpeed refuses fp16 on CPUs without instructions for it; torch computes it all the same.
    with (
        mock.patch("deepspeed.runtime.engine.DeepSpeedDataLoader", _without_workers),
        mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True),
    ):
        engine, _, loader, _ = ds_tsp.initialize(
            model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2, eps=1e-4), training_data=Rows(20), config=config
        )
    return engine, loader


def endless(loader: Any) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from loader


def steps(engine: Any, batches: Iterator[dict[str, Tensor]], count: int) -> list[float]:
    losses = []
    for batch in itertools.islice(batches, count):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def local_weights(engine: Any) -> dict[str, Tensor]:
    """Copies of what this rank holds of each parameter."""
    return {n: getattr(p, "ds_tensor", p).detach().clone() for n, p in engine.module.named_parameters()}


def scaler(engine: Any) -> Any:
    config = getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
    auto = getattr(engine.optimizer, "torch_autocast_gradscaler", None) or engine.torch_autocast_z0_gradscaler
    if auto is not None:
        return auto.state_dict()
    return config and (config.cur_scale, getattr(config, "cur_iter", None))


def resume_job(folder: str, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    results = []
    for number, case in enumerate(cases):
        torch.manual_seed(number)
        engine, loader = engine_for(*case)
        batches, here = endless(loader), f"{folder}/{number}"
        steps(engine, batches, 4)  # an epoch of 20 rows has 5 or 10 batches: the rest crosses its end
        engine.save_checkpoint(here, client_state={"mine": {"epoch": 3}, "rows": [1, 2]})
        expected = (steps(engine, batches, 4), local_weights(engine), random.random(), numpy.random.rand(),
                    scaler(engine), engine.lr_scheduler.get_last_lr(), engine.get_global_grad_norm())  # fmt: skip
        engine.destroy()
        engine, loader = engine_for(*case, seed=1)
        random.seed(5), numpy.random.seed(5), torch.manual_seed(77)
        path, client = engine.load_checkpoint(here)
        assert path.endswith("model_states.pt") and client["mine"] == {"epoch": 3} and client["rows"] == [1, 2]
        assert (engine.global_steps, engine.skipped_steps) == (4, 0)
        embedding, head = engine.module.get_input_embeddings().weight, engine.module.get_output_embeddings().weight
        assert (embedding is head) == (case[2] == "gemma2")
        got = (steps(engine, endless(loader), 4), local_weights(engine), random.random(), numpy.random.rand(),
               scaler(engine), engine.lr_scheduler.get_last_lr(), engine.get_global_grad_norm())  # fmt: skip
        engine.destroy()
        results.append({
            "losses": got[0] == expected[0],
            "weights": [n for n, w in expected[1].items() if not torch.equal(w, got[1][n])],
            "rest": got[2:] == expected[2:],
            "values": (expected[0], got[0], expected[2:], got[2:]),
        })  # fmt: skip
    return results


RESUMED = {  # size, stage, family, precision; 4 ranks. Spans stages, degrees, precisions, ties and dropout
    "fp32": [(2, 0, "llama", "fp32"), (2, 1, "gemma2", "fp32"), (2, 2, "gptj", "fp32"), (2, 3, "gemma2", "fp32"),
             (4, 1, "llama", "fp32"), (4, 3, "llama", "fp32"), (1, 0, "gptj", "fp32"), (1, 3, "llama", "fp32")],
    "half": [(2, 0, "llama", "bf16"), (2, 1, "gemma2", "bf16"), (2, 2, "llama", "bf16"), (2, 3, "gemma2", "bf16"),
             (2, 0, "gemma2", "fp16"), (2, 2, "llama", "fp16"), (2, 3, "llama", "fp16")],
}  # fmt: skip


@pytest.mark.parametrize("which", list(RESUMED))
def test_resume_bit_for_bit(tmp_path: Path, which: str) -> None:
    """4 steps, save, 4 more: the same losses, weights, random numbers, scale and rates as load and 4 steps."""
    for rank, results in enumerate(run_ranks(4, resume_job, str(tmp_path), RESUMED[which])):
        for case, result in zip(RESUMED[which], results, strict=True):
            assert result["losses"] and not result["weights"] and result["rest"], f"rank {rank}, {case}: {result}"
