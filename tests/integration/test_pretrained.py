"""Out of the engine and in again: files that plain transformers opens, whatever ZeRO holds in parts, and models that
come without weights or in ZeRO's own parts."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import ds_tsp
from ds_tsp import export
from ds_tsp.meter import LiveBytes
from tests.harness import run_ranks
from tests.integration.test_engine import train
from tests.integration.test_training import ds_config
from tests.models import tiny, tokens

SHARDS = "9KB"  # a few tensors in each


def build(family: str, folder: str | None, config: dict[str, Any], **sizes: Any) -> Any:
    """An engine around a model that is loaded by slices, or made on every rank."""
    model = ds_tsp.from_pretrained(folder, config) if folder else tiny(family, **sizes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" not in name)  # what is frozen is in the files as well
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ds_tsp.initialize(model=model, optimizer=torch.optim.SGD(trained, 0.1), config=config)
    return engine


def difference(engine: Any, folder: str) -> float | None:
    """Between the engine's logits and those of the model that plain transformers opens, on rank 0."""
    engine.eval()
    ids = tokens(2, 12)["input_ids"]
    with torch.no_grad():
        logits = engine(input_ids=ids).logits
    engine.train()
    if deepspeed.comm.get_rank():
        return None
    plain, report = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values()), report
    return (plain(input_ids=ids, use_cache=False).logits - logits).abs().max().item()


def round_trip_job(family: str, loaded: str | None, folder: str, size: int, stage: int) -> float | None:
    engine = build(family, loaded, ds_config(size, stage))
    train(engine, 2)
    engine.module.generation_config = GenerationConfig(eos_token_id=2, max_new_tokens=17)
    ds_tsp.save_pretrained(engine, folder, max_shard_size=SHARDS)
    found = difference(engine, folder)
    with (
        pytest.raises(ValueError, match=r"ds_tsp\.save_pretrained\(engine, folder\)") if size > 1 else mock.MagicMock()
    ):
        engine.save_16bit_model(folder) if size > 1 else None
    engine.destroy()
    return found


# Every P, every stage, dp 1, 2 and 4; models loaded by slices and made on every rank; tied and untied.
@pytest.mark.parametrize(
    ("size", "stage", "family", "loads"),
    [(1, 0, "llama", True), (1, 3, "gemma2", True), (2, 0, "gemma2", False), (2, 1, "gemma2", True),
     (2, 2, "llama", False), (2, 3, "gemma2", True), (4, 1, "qwen3", False), (4, 3, "llama", True)],
)  # fmt: skip
def test_files_open_in_plain_transformers(tmp_path: Path, size: int, stage: int, family: str, loads: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    if loads:
        tiny(family).save_pretrained(first, max_shard_size=SHARDS)
    found = run_ranks(4, round_trip_job, family, str(first) if loads else None, str(second), size, stage)
    assert found[0] is not None and found[0] < 1e-5
    index = json.loads((second / "model.safetensors.index.json").read_text())
    plain = tiny(family)
    tied = {"lm_head.weight"} if family == "gemma2" else set()
    assert set(index["weight_map"]) == set(plain.state_dict()) - tied
    assert index["metadata"]["total_parameters"] == plain.num_parameters()
    assert {path.name for path in second.iterdir()} == {
        *index["weight_map"].values(), "model.safetensors.index.json", "config.json", "generation_config.json"
    }  # fmt: skip
    config = json.loads((second / "config.json").read_text())
    assert config["architectures"] == [type(plain).__name__] and config["dtype"] == "float32"
    assert "ds_tsp" not in json.dumps(config)
    assert GenerationConfig.from_pretrained(second).max_new_tokens == 17


def half_job(folder: str) -> float | None:
    engine = build("gemma2", None, ds_config(2, 1, bf16={"enabled": True}), num_hidden_layers=2)
    train(engine, 1)
    ds_tsp.save_pretrained(engine, folder)
    found = difference(engine, folder)
    engine.destroy()
    return found


def test_half_precision_stays_so(tmp_path: Path) -> None:
    assert run_ranks(2, half_job, str(tmp_path))[0] < 0.1
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


class RankBytes(LiveBytes):
    """Real tensors only: `save_pretrained` plans its files with meta tensors."""

    def _see(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super()._see(tensor)


def export_memory_job(folder: str, stage: int) -> int:
    engine = build("llama", None, ds_config(2, stage), hidden_size=96, num_hidden_layers=6)
    train(engine, 1)
    with RankBytes() as live:
        ds_tsp.save_pretrained(engine, folder, max_shard_size="60KB")
        more = live.peak - live.start
    engine.destroy()
    return more


@pytest.mark.parametrize("stage", [1, 3])
def test_one_file_at_a_time_is_in_memory(tmp_path: Path, stage: int) -> None:
    largest = 96 * 53 * 4
    model_bytes = sum(p.nbytes for p in tiny("llama", hidden_size=96, num_hidden_layers=6).parameters())
    first, *others = run_ranks(4, export_memory_job, str(tmp_path), stage)
    assert first < 60_000 + 2 * largest < model_bytes / 4
    assert max(others) < 2 * largest


def disk_job(folder: str) -> list[str]:
    """Saves that fail on rank 0: before the first file, in the second, and while files are moved."""
    engine = build("llama", None, ds_config(2, 1), num_hidden_layers=1)
    ds_tsp.save_pretrained(engine, folder)
    train(engine, 1)
    written, messages = export.save_file, []

    def full(tensors: Any, path: Path, *args: Any) -> None:
        if "00002" in path.name:
            raise OSError(28, "No space left on device")
        written(tensors, path, *args)

    for patch in (
        mock.patch.object(Path, "mkdir", side_effect=PermissionError(13, "Permission denied")),
        mock.patch.object(export, "save_file", full),
    ):
        with patch, pytest.raises(ValueError) as raised:
            ds_tsp.save_pretrained(engine, folder, max_shard_size=SHARDS)
        messages.append(str(raised.value))
    engine.destroy()
    return messages


def test_a_save_that_fails_loses_nothing(tmp_path: Path) -> None:
    for denied, full in run_ranks(2, disk_job, str(tmp_path)):
        assert "failed on rank 0" in denied and "Permission denied" in denied
        assert "failed on rank 0" in full and "No space left" in full
    assert not list(tmp_path.glob(".*"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = tiny("llama", num_hidden_layers=1).state_dict()
    assert all(torch.equal(expected[name], value) for name, value in plain.state_dict().items())


def two_saves_job(folder: str) -> None:
    """An old and a new model, each as one file, and as several of the same names."""
    engine = build("llama", None, ds_config(1, 0), num_hidden_layers=1)
    for name in ("old", "new"):
        ds_tsp.save_pretrained(engine, f"{folder}/{name}-one")
        ds_tsp.save_pretrained(engine, f"{folder}/{name}-several", "20KB")
        train(engine, 1)
    engine.destroy()


def test_a_kill_while_moving_never_leaves_a_wrong_model(tmp_path: Path) -> None:
    """Stopped before any of its steps, it leaves the old model, the new one, or a folder that does not open."""
    run_ranks(1, two_saves_job, str(tmp_path))

    class Killed(BaseException):
        pass

    def weights(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()

    def same(a: Any, b: Any) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    before, after = weights(tmp_path / "old-one"), weights(tmp_path / "new-one")
    assert not same(before, after)
    for old, new in (("several", "one"), ("one", "several"), ("several", "several")):
        for steps in itertools.count():
            target = tmp_path / "target"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(tmp_path / f"old-{old}", target)
            work = shutil.copytree(tmp_path / f"new-{new}", target / ".ds_tsp_unfinished")
            index = work / "model.safetensors.index.json"
            content = json.loads(index.read_text()) if index.exists() else None
            index.unlink(missing_ok=True)
            left = iter(range(steps))

            def counted(method: Any, left: Any = left) -> Any:
                def step(*args: Any, **kwargs: Any) -> Any:
                    if next(left, None) is None:
                        raise Killed
                    return method(*args, **kwargs)

                return step

            patches = [mock.patch.object(Path, name, counted(getattr(Path, name))) for name in ("unlink", "replace")]
            try:
                with patches[0], patches[1]:
                    export._move(work, content)
                break
            except Killed:
                pass
            if list(target.glob("model.safetensors*")):  # else it does not open
                assert same(weights(target), before if steps < 2 else after)
            else:
                with pytest.raises(OSError, match="no file named model.safetensors"):
                    weights(target)
        assert steps > 5 and same(weights(target), after)


def meta_job(family: str, stage: int) -> dict[str, Any]:
    """A model on the meta device: drawn by slices, and trained by an optimizer that was built before."""
    torch.manual_seed(deepspeed.comm.get_rank())
    config = tiny(family, hidden_size=160, vocab_size=100).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    ids = {name: id(parameter) for name, parameter in model.named_parameters()}
    engine, *_ = ds_tsp.initialize(model=model, optimizer=optimizer, config=ds_config(2, stage))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == ids
    weights = ds_tsp.full_state_dict(engine)
    losses = []
    for _ in range(4):
        losses.append(engine(**tokens(2, 12)).loss)
        engine.backward(losses[-1])
        engine.step()
    engine.destroy()
    reference = None
    if weights:
        plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        plain.load_state_dict(weights)
        reference = plain(**tokens(2, 12)).loss.item()
    return {"losses": [loss.item() for loss in losses], "weights": weights, "reference": reference}


@pytest.mark.parametrize(("family", "stage"), [("llama", 0), ("gemma2", 2), ("qwen3", 3)])
def test_meta_model(family: str, stage: int) -> None:
    results = run_ranks(4, meta_job, family, stage)
    losses = results[0]["losses"]
    assert all(result["losses"] == losses for result in results)  # dp ranks hold the same weights
    assert abs(losses[0] - results[0]["reference"]) < 1e-4 and losses[-1] < losses[0]
    for name, weight in results[0]["weights"].items():
        if "norm" not in name:
            half = weight.flatten(1).chunk(2, int("o_proj" in name or "down_proj" in name))
            assert weight.std() == pytest.approx(0.02, rel=0.1) and abs(weight.mean()) < 2e-3, name
            assert not torch.equal(half[0][:50, :50], half[1][:50, :50]), name


def partitioned_job(stage: int, folder: str) -> dict[str, Any]:
    """Built under zero.Init, over the whole world, as scripts for ZeRO-3 do."""
    config = ds_config(2, stage)
    # transformers zeroes padding's row at once, where zero.Init has left no row
    reference = tiny("gemma2", num_hidden_layers=1, pad_token_id=None)
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 4, "zero_optimization": {"stage": 3}}):
        model = AutoModelForCausalLM.from_config(reference.config, attn_implementation="eager")
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            model.load_state_dict(reference.state_dict())
    losses = []
    for given in (model, reference):
        optimizer = torch.optim.SGD(given.parameters(), 0.1)
        engine, *_ = ds_tsp.initialize(model=given, optimizer=optimizer, config=ds_config(2, stage))
        losses.append(train(engine, 3))
        if given is model:
            ds_tsp.save_pretrained(engine, folder)
            assert engine.zero_optimization_stage() == stage and config == ds_config(2, stage)
            weights = ds_tsp.full_state_dict(engine)
            assert not weights or weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
            found = difference(engine, folder)
        engine.destroy()
    return {"losses": losses, "difference": found}


@pytest.mark.parametrize("stage", [1, 3])
def test_model_built_under_zero_init(tmp_path: Path, stage: int) -> None:
    for rank, result in enumerate(run_ranks(4, partitioned_job, stage, str(tmp_path))):
        assert result["losses"][0] == result["losses"][1]
        assert rank or result["difference"] < 1e-5


def mixed_job(what: str) -> str:
    model = tiny("llama", num_hidden_layers=1)
    config = ds_config(2, 0)
    if what == "partly":
        model.model.layers[0] = model.model.layers[0].to("meta")
    elif what == "unset":
        kind = type(model)
        model = model.to("meta")
        model.__class__ = type("Own", (kind,), {"_init_weights": lambda self, module: None})
    else:
        folder = what
        model = ds_tsp.from_pretrained(folder, config)
        config["tsp"]["schedule"] = "metp"
    with pytest.raises(ValueError) as raised:
        ds_tsp.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    return str(raised.value)


def test_what_initialize_refuses(tmp_path: Path) -> None:
    for message in run_ranks(2, mixed_job, "partly"):
        assert "only a part of LlamaForCausalLM is on the meta device: model.embed_tokens.weight is not" in message
    for message in run_ranks(2, mixed_job, "unset"):
        assert "its _init_weights leaves lm_head.weight unset" in message
    tiny("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    for message in run_ranks(2, mixed_job, str(tmp_path)):
        assert "give both the same config" in message


def other_names_job(folder: str, saved: str) -> tuple[float | None, list[str]]:
    """Experts that transformers merges as it loads: whole on every rank here, the attention by slices."""
    plan = {f"layers.*.self_attn.{c}_proj": "rowwise" if c == "o" else "colwise" for c in "qkvo"}
    config = ds_config(2, 0)
    config["tsp"]["plan"] = plan
    engine = build("mixtral", folder, config)
    ds_tsp.save_pretrained(engine, saved)
    found = difference(engine, saved)
    engine.destroy()
    return found


def test_files_with_other_names_than_the_model(tmp_path: Path) -> None:
    tiny("mixtral", num_local_experts=3, num_hidden_layers=1).save_pretrained(tmp_path / "first")
    found, _ = run_ranks(2, other_names_job, str(tmp_path / "first"), str(tmp_path / "second"))
    assert found < 1e-5
    assert AutoConfig.from_pretrained(tmp_path / "second").num_local_experts == 3
