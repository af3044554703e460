"""Checkpoints through the real engine: going on bit for bit, opening at another degree, and what happens when it goes
wrong."""

import argparse
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
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


def model_for(family: str, seed: int, frozen: bool) -> PreTrainedModel:
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
            if frozen and ("up_proj" in name or "post_attention" in name):  # one that is cut, and one that is whole
                parameter.requires_grad_(False)
    return model


def engine_for(size: int, stage: int, family: str = "llama", precision: str = "fp32", seed: int = 0,
               frozen: bool = True, clip: float = 1.0, **more: Any):  # fmt: skip
    model = model_for(family, seed, frozen)
    decayed = [p for n, p in model.named_parameters() if "norm" not in n and p.requires_grad]
    others = [p for n, p in model.named_parameters() if "norm" in n and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
    config = ds_config(size, stage, clip, **PRECISIONS[precision], **more)
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}
    with mock.patch("deepspeed.runtime.engine.DeepSpeedDataLoader", _without_workers):
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


def scale(engine: Any) -> Any:
    config = getattr(engine.optimizer, "loss_scale_config", None) or getattr(engine.optimizer, "loss_scaler", None)
    auto = getattr(engine.optimizer, "torch_autocast_gradscaler", None) or engine.torch_autocast_z0_gradscaler
    if auto is not None:
        return auto.state_dict()
    return config and (config.cur_scale, getattr(config, "cur_iter", None))


# DeepSpeed refuses fp16 on CPUs without instructions for it; torch computes it all the same.
@mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True)
def resume_job(folder: str, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    results = []
    for number, case in enumerate(cases):
        torch.manual_seed(number)
        engine, loader = engine_for(*case)
        batches, here = endless(loader), f"{folder}/{number}"
        steps(engine, batches, 3)  # at P = 2 an epoch of 20 rows has 5 batches: the rest crosses its end
        engine.save_checkpoint(here, client_state={"mine": {"epoch": 3}, "rows": [1, 2]})
        expected = (steps(engine, batches, 3), local_weights(engine), random.random(), numpy.random.rand(),
                    scale(engine), engine.lr_scheduler.get_last_lr(), engine.get_global_grad_norm())  # fmt: skip
        engine.destroy()
        engine, loader = engine_for(*case, seed=1)
        random.seed(5), numpy.random.seed(5), torch.manual_seed(77)
        path, client = engine.load_checkpoint(here)
        assert path.endswith("model_states.pt") and client["mine"] == {"epoch": 3} and client["rows"] == [1, 2]
        assert (engine.global_steps, engine.skipped_steps) == (3, 0)
        embedding, head = engine.module.get_input_embeddings().weight, engine.module.get_output_embeddings().weight
        assert (embedding is head) == (case[2] == "gemma2")
        got = (steps(engine, endless(loader), 3), local_weights(engine), random.random(), numpy.random.rand(),
               scale(engine), engine.lr_scheduler.get_last_lr(), engine.get_global_grad_norm())  # fmt: skip
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
    "half": [(2, 0, "llama", "bf16"), (2, 1, "gemma2", "bf16"), (2, 0, "llama", "autocast"), (2, 3, "gemma2", "bf16"),
             (2, 0, "gemma2", "fp16"), (2, 2, "llama", "fp16"), (2, 3, "llama", "fp16")],
}  # fmt: skip


@pytest.mark.parametrize("which", list(RESUMED))
def test_resume_bit_for_bit(tmp_path: Path, which: str) -> None:
    """3 steps, save, 3 more: the same losses, weights, random numbers, scale and rates as load and 3 steps."""
    for rank, results in enumerate(run_ranks(4, resume_job, str(tmp_path), RESUMED[which])):
        for case, result in zip(RESUMED[which], results, strict=True):
            assert result["losses"] and not result["weights"] and result["rest"], f"rank {rank}, {case}: {result}"


# DeepSpeed refuses fp16 on CPUs without instructions for it; torch computes it all the same.
@mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True)
def reshape_job(source: str, target: str, case: tuple[Any, ...], frozen: bool = True) -> dict[str, Any]:
    """Open `source`, a universal checkpoint (or train two steps), save to `target` at once, then see how it goes on."""
    # No clipping: it would make wrong scales of gradients look alike.
    engine, _ = engine_for(*case, seed=3, frozen=frozen, clip=0.0, checkpoint={"load_universal": True})
    batch = {key: value[None] for key, value in Rows(20)[3].items()}  # the same on every dp rank: dp changes nothing
    if source:
        _, client = engine.load_checkpoint(source)
        assert client["mine"] == 7 and engine.global_steps == 2
    else:
        steps(engine, itertools.repeat(batch), 2)
    if target:
        engine.save_checkpoint(target, client_state={"mine": 7})
    losses = steps(engine, itertools.repeat(batch), 2)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    result = {
        "losses": losses,
        "rest": (engine.lr_scheduler.get_last_lr(), groups, case[3:] == ("fp16",) and scale(engine)),
    }
    engine.destroy()
    return result


def universal_tensors(folder: Path) -> dict[str, Any]:
    found = {str(p.relative_to(folder)): torch.load(p, weights_only=False) for p in folder.glob("zero/*/*.pt")}
    return {name: held["param"] if isinstance(held, dict) else held for name, held in found.items()}


def assert_same_tensors(got: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert got.keys() == expected.keys()
    differ = [name for name, tensor in got.items() if not torch.equal(tensor, expected[name])]
    assert got and not differ, f"{what}: {differ}"


CHAINS = {  # world, family, precision, tolerance, then (P, stage) one after another
    "tied": (8, "gemma2", "fp32", 1e-6, [(2, 1), (8, 3), (1, 2), (4, 0), (2, 3), (1, 0), (8, 1), (4, 2)]),
    "bf16": (4, "llama", "bf16", 4e-3, [(2, 1), (4, 0), (1, 3), (2, 2)]),
    "fp16": (4, "llama", "fp16", 1e-3, [(2, 2), (4, 0), (1, 3)]),
}


@pytest.mark.parametrize("chain", list(CHAINS))
def test_another_degree(tmp_path: Path, chain: str) -> None:
    """From degree to degree and stage to stage: every whole tensor stays the same, bit for bit, and training goes on as
    in the first run. Heads (2 kv, P = 4 and 8), vocabulary (53) and ffn (36) are cut unevenly; some weights are frozen.
    """
    world, family, precision, tolerance, places = CHAINS[chain]
    source, first, tensors = "", {}, {}
    for number, (size, stage) in enumerate(places):
        saved, case = str(tmp_path / str(number)), (size, stage, family, precision)
        results = run_ranks(world, reshape_job, source, saved, case)
        source = str(tmp_path / f"{number}_universal")
        whole = universal_tensors(convert(saved, f"{source}/tag"))
        first, tensors = first or results[0], tensors or whole
        assert_same_tensors(whole, tensors, str(case))
        for result in results:
            # In half precision DeepSpeed's own steps differ a little between stage 0 and the others, at any P.
            compared = slice(2 if precision == "fp32" else 1)
            pairs = zip(result["losses"][compared], first["losses"][compared], strict=True)
            worst = max(abs(a - b) for a, b in pairs)
            assert worst < tolerance and result["rest"] == first["rest"], f"{case}: {result}, at first {first}"


@pytest.mark.parametrize("stage", [1, 3])
def test_ds_to_universal(tmp_path: Path, stage: int) -> None:
    """DeepSpeed's own script writes the same tensors as `convert`, and they open at another degree and stage."""
    saved, out = tmp_path / "saved", tmp_path / "theirs"
    first = run_ranks(4, reshape_job, "", str(saved), (2, stage, "llama"), frozen=False)[0]
    arguments = {"input_folder": str(saved / "global_step2"), "output_folder": str(out / "tag"), "strict": True,
                 "num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False,
                 "inject_missing_state": False}  # fmt: skip
    ds_to_universal.main(argparse.Namespace(**arguments))
    theirs, ours = (
        universal_tensors(out / "tag"),
        universal_tensors(convert(str(saved), str(tmp_path / "ours" / "tag"))),
    )
    assert_same_tensors(theirs, {name: ours[name] for name in theirs}, "ds_to_universal")
    for result in run_ranks(4, reshape_job, str(out), "", (4, 3 - stage), frozen=False):
        worst = max(abs(a - b) for a, b in zip(result["losses"], first["losses"], strict=True))
        assert worst < 1e-6 and result["rest"] == first["rest"]


def recovery_job(folder: str) -> None:
    engine, _ = engine_for(2, 1, "llama", "fp32")
    for tag in ("first", "second"):  # each save puts the scripts there anew
        engine.save_checkpoint(folder, tag=tag)
    engine.destroy()


def test_deepspeeds_scripts_name_what_works(tmp_path: Path) -> None:
    run_ranks(4, recovery_job, str(tmp_path))
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        ran = subprocess.run([sys.executable, tmp_path / name, str(tmp_path), "out"], capture_output=True, text=True)
        assert ran.returncode and "ds_tsp.save_pretrained(engine, folder)" in ran.stderr and name in ran.stderr
