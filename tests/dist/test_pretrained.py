"""Loading by slices: what each rank holds, reads and allocates, and every way in which the files can be wrong."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter

import ds_tsp
from ds_tsp import pretrained
from ds_tsp.layout import WeightCut
from ds_tsp.meter import LiveBytes
from tests.dist.test_fold import TOLERANCE, mine
from tests.harness import run_ranks
from tests.models import fp64_throughout, tiny, tokens

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "attention_bias": True, "mlp_bias": True, "intermediate_size": 37},
    "qwen3": {"family": "qwen3"},
    "gemma2": {"family": "gemma2"},  # tied
}


def ds_config(size: int) -> dict[str, Any]:
    return {"tsp": {"size": size}, "train_micro_batch_size_per_gpu": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("saved")
    for name, sizes in MODELS.items():
        tiny(**sizes).double().save_pretrained(root / name, max_shard_size="30KB")
        assert len(list((root / name).glob("*.safetensors"))) > 2
    yield {name: str(root / name) for name in MODELS}


class Reads:
    """Counts the elements that are taken out of files."""

    def __init__(self) -> None:
        self.elements = 0
        self.open = pretrained.safe_open

    def __call__(self, *args: Any) -> Any:
        opened, counts = self.open(*args), self

        class Stored:
            def __init__(self, key: str) -> None:
                self.stored = opened.get_slice(key)
                self.get_shape = self.stored.get_shape

            def __getitem__(self, index: Any) -> torch.Tensor:
                part = self.stored[index]
                counts.elements += part.numel()
                return part

        wrapped = mock.MagicMock(get_slice=Stored, offset_keys=opened.offset_keys)
        wrapped.__enter__.return_value = wrapped
        return wrapped


def load_job(folders: dict[str, str], size: int) -> dict[str, float]:
    errors = {}
    for name, folder in folders.items():
        reads = Reads()
        with fp64_throughout(), mock.patch.object(pretrained, "safe_open", reads):
            model = ds_tsp.from_pretrained(folder, ds_config(size))
            plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            mesh = model.tsp_loaded.mesh
            expected = dict(plain.named_parameters())
            assert [n for n, _ in model.named_parameters()] == list(expected)  # a tied weight once
            for parameter_name, parameter in model.named_parameters():
                assert torch.equal(parameter, mine(expected[parameter_name], parameter, mesh)), parameter_name
            held = sum(p.numel() for p in model.parameters())
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
            assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())  # no views into whole tensors
            assert reads.elements == held < sum(p.numel() for p in plain.parameters()) / size + 1500
            batch = tokens(2, 13)
            errors[name] = (model(**batch).loss - plain(**batch).loss).abs().item()
            ids = batch["input_ids"]
            logits = model(input_ids=ids).logits - plain(input_ids=ids, use_cache=False).logits
            errors[f"{name} logits"] = logits.abs().max().item()
    return errors


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_reads_its_slices(folders: dict[str, str], size: int) -> None:
    """Bit for bit the slices of what plain transformers loads, and no element of a file more."""
    for errors in run_ranks(size, load_job, folders, size):
        assert max(errors.values()) < TOLERANCE, errors


def other_names_job(folder: str) -> list[float]:
    """Files of the base model, without its prefix; and files whose names the caller says how to change."""
    plain, batch, errors = tiny("gemma2"), tokens(2, 9), []
    for name, kwargs in (("base", {}), ("renamed", {"key_mapping": {"^encoder": "model"}})):
        model = ds_tsp.from_pretrained(f"{folder}/{name}", ds_config(2), **kwargs)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        errors.append(abs(model(**batch).loss.item() - plain(**batch).loss.item()))
    return errors


def test_other_names_in_the_files(tmp_path: Path) -> None:
    model = tiny("gemma2")
    model.model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "renamed")
    state = {name.replace("model", "encoder"): p for name, p in model.named_parameters()}
    save_file(state, tmp_path / "renamed/model.safetensors", {"format": "pt"})
    for errors in run_ranks(2, other_names_job, str(tmp_path)):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("cut", ["q_proj", None])
def test_a_slice_of_what_is_converted_is_refused(tmp_path: Path, cut: str | None) -> None:
    """A fused weight in the files, which transformers takes apart: fine if every rank has its parts whole."""
    model = tiny("llama")
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    path = str(tmp_path / "fused.safetensors")
    save_file({fused: torch.zeros(80, 24)}, path)
    parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    converter = WeightConverter("self_attn.qkv_proj.weight", parts, operations=[Chunk(dim=0)])
    load_config: Any = mock.MagicMock(weight_mapping=[converter], sharded_metadata=None)
    cuts = {f"model.layers.0.self_attn.{cut}.weight": WeightCut((40, 24), 0, (0, 20, 40))} if cut else {}
    if cut:
        with pytest.raises(ValueError, match="is converted into .*k_proj.*which cannot be done in slices; load"):
            list(pretrained._slices(model, [path], load_config, cuts, 0))
    else:
        ((key, part),) = pretrained._slices(model, [path], load_config, cuts, 0)
        assert key == fused and part[...].shape == (80, 24)


class RealBytes(LiveBytes):
    """Without the meta device, where a model's whole shapes live."""

    def _see(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super()._see(tensor)


def memory_job(folder: str, size: int) -> tuple[int, int, int]:
    """Peak of live bytes while loading, what is held at the end, and the largest tensor of the model."""
    with mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}), RealBytes(tensors=()) as live:
        model = ds_tsp.from_pretrained(folder, ds_config(size))
        peak = live.peak
    full = [p.tsp_cut.shape if hasattr(p, "tsp_cut") else p.shape for p in model.parameters()]
    return peak, sum(p.nbytes for p in model.parameters()), max(torch.Size(s).numel() for s in full) * 4


@pytest.mark.parametrize("size", [2, 4])
def test_memory_is_the_slices_and_one_tensor(tmp_path: Path, size: int) -> None:
    """Also where a slice is cast while it is read. A mapped tensor counts as a whole one."""
    tiny("llama", hidden_size=96, num_hidden_layers=6).save_pretrained(tmp_path, max_shard_size="200KB")
    for peak, held, largest in run_ranks(size, memory_job, str(tmp_path), size):
        assert held < peak < held + 1.5 * largest + 20_000  # buffers, and what is cast


def half_job(folder: str) -> None:
    model = ds_tsp.from_pretrained(folder, ds_config(2), dtype=torch.bfloat16)
    plain = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, mine(plain[name], parameter, model.tsp_loaded.mesh))


def test_dtype_is_cast(folders: dict[str, str]) -> None:
    run_ranks(2, half_job, folders["qwen3"])


def rewrite(folder: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change what a one-file folder holds."""
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def missing_job(folder: str) -> dict[str, Any]:
    torch.manual_seed(deepspeed.comm.get_rank())
    model = ds_tsp.from_pretrained(folder, ds_config(2))
    mesh = model.tsp_loaded.mesh
    batch = tokens(2, 9)
    return {
        "head": model.lm_head.weight.detach(), "embedding": model.model.embed_tokens.weight.detach(),
        "norm": model.model.norm.weight.detach(), "padding": model.model.embed_tokens.padding_idx,
        "q": torch.equal(model.model.layers[0].self_attn.q_proj.weight,
                         mine(load_file(f"{folder}/model.safetensors")["model.layers.0.self_attn.q_proj.weight"],
                              model.model.layers[0].self_attn.q_proj.weight, mesh)),
        "loss": model(**batch).loss.item(),
    }  # fmt: skip


def test_what_the_files_lack_is_initialised(tmp_path: Path) -> None:
    """Slices are not copies of each other, equal places of all groups are, and padding's row is zero on its owner.
    Tensors that no model has are left alone."""
    tiny("llama", hidden_size=160, vocab_size=100, pad_token_id=60).save_pretrained(tmp_path)
    lacking = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    rewrite(str(tmp_path), lambda tensors: [tensors.pop(name) for name in lacking])
    rewrite(str(tmp_path), lambda tensors: tensors.update(unheard_of=torch.zeros(3)))
    results = run_ranks(4, missing_job, str(tmp_path))
    for a, b in ((results[0], results[2]), (results[1], results[3])):
        assert torch.equal(a["head"], b["head"]) and torch.equal(a["embedding"], b["embedding"])
    first, second = results[:2]
    for end in ("head", "embedding"):
        assert first[end].shape == second[end].shape and not torch.equal(first[end][0], second[end][0])
    for result in results:
        assert result["q"] and result["padding"] == 60 and result["loss"] == first["loss"]
        assert 0.018 < result["head"].std() < 0.022
        assert torch.equal(result["norm"], torch.ones(160))
    assert first["embedding"].abs().sum(1).min() > 0
    assert (second["embedding"].abs().sum(1) == 0).nonzero().tolist() == [[10]]


def errors_job(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What each load raises; the ranks stay in step all along."""
    messages = []
    for folder, kwargs in cases:
        with pytest.raises(ValueError) as raised:
            ds_tsp.from_pretrained(folder, ds_config(2), **kwargs)
        messages.append(str(raised.value))
    return messages


def test_wrong_files_are_named_on_all_ranks(folders: dict[str, str], tmp_path: Path) -> None:
    first, second, *_ = sorted(path.name for path in Path(folders["llama"]).glob("*.safetensors"))

    def broken(name: str, change: Callable[[Path], Any]) -> str:
        folder = tmp_path / name
        shutil.copytree(folders["llama"], folder)
        change(folder)
        return str(folder)

    def truncate(folder: Path) -> None:
        path = folder / second
        os.truncate(path, path.stat().st_size - 5)

    def configure(folder: Path, **values: Any) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    def binary(folder: Path) -> None:
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        torch.save({}, folder / "pytorch_model.bin")

    def other_index(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = first
        path.write_text(json.dumps(index))

    cases: list[tuple[str, dict[str, Any], str]] = [
        (broken("missing", lambda f: (f / second).unlink()), {}, f"{second} is missing"),
        (broken("truncated", truncate), {}, f"{second} cannot be read.*damaged or not complete"),
        (broken("vocabulary", lambda f: configure(f, vocab_size=54)), {}, r"\(53, 24\).*\(54, 24\).*different models"),
        (broken("width", lambda f: configure(f, head_dim=12)), {}, r"k_proj\.bias of shape \(20,\).*\(24,\)"),
        (broken("binary", binary), {}, r"pytorch_model\.bin is no safetensors file.*convert it"),
        (broken("index", other_index), {}, r"has no model\.layers\.7\.mlp\.up_proj\.weight, which the index says"),
        (
            broken("family", lambda f: configure(f, model_type="opt", architectures=None)),
            {},
            "opt|OPT",
        ),
        (str(tmp_path / "nowhere"), {}, "nowhere"),
        (folders["llama"], {"device_map": "auto"}, "device_map='auto': .*leave it out"),
    ]
    results = run_ranks(2, errors_job, [(folder, kwargs) for folder, kwargs, _ in cases])
    assert results[0] == results[1]
    for message, (_, _, match) in zip(results[0], cases, strict=True):
        assert re.search(match, message), f"{match!r} not in {message!r}"


def one_rank_fails_job(folder: str) -> str:
    """A file that one rank alone cannot read: the others are told, and the next load works."""

    def unreadable(*args: Any) -> Any:
        raise OSError("Stale file handle")

    patch = mock.patch.object(pretrained, "safe_open", unreadable)
    with pytest.raises(ValueError) as raised:
        with patch if deepspeed.comm.get_rank() == 2 else mock.MagicMock():
            ds_tsp.from_pretrained(folder, ds_config(4))
    ds_tsp.from_pretrained(folder, ds_config(4))
    return str(raised.value)


def test_an_error_of_one_rank_is_everyones(folders: dict[str, str]) -> None:
    for message in run_ranks(4, one_rank_fails_job, folders["qwen3"]):
        assert "failed on rank 2" in message and "Stale file handle" in message


def ties_job(folder: str) -> list[str]:
    """Both ends are in the file and differ in a row of the last rank only: the ranks would tie differently."""
    return errors_job([(folder, {})])


def test_ranks_agree_on_what_is_tied(tmp_path: Path) -> None:
    tiny("gemma2").save_pretrained(tmp_path)

    def untie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1] += 1

    rewrite(str(tmp_path), untie)
    for (message,) in run_ranks(2, ties_job, str(tmp_path)):
        assert "tie_word_embeddings" in message
