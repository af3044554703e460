"""A folded model from Hugging Face files: each rank reads its slices only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from deepspeed import comm as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations import is_deepspeed_zero3_enabled

from .comm import agree, broadcast_from_first
from .config import TSPConfig, load_config, parse
from .inject import Loaded, ModelPlan, fold, plan_fold
from .layout import WeightCut
from .materialise import cut_meta, new_seed, own_random
from .mesh import Mesh, init_distributed

_WHOLE = "load the model with transformers' from_pretrained and give it to ds_tsp.initialize"
_REFUSED = {
    "device_map": "the model is loaded into host memory, and DeepSpeed moves it; leave it out",
    "tp_plan": 'the "tsp" section of config says how the model is cut; leave it out',
    "tp_size": 'the "tsp" section of config says how the model is cut; leave it out',
    "device_mesh": 'the "tsp" section of config says how the model is cut; leave it out',
    "distributed_config": 'the "tsp" section of config says how the model is cut; leave it out',
    "quantization_config": "quantised layers cannot be folded; leave it out",
    "gguf_file": f"only safetensors files can be read in slices; {_WHOLE}",
    "state_dict": f"it is whole already; {_WHOLE}",
    "ignore_mismatched_sizes": f"slices of another shape say nothing; {_WHOLE}",
    "output_loading_info": "the report is in transformers' log; leave it out",
}
# What names the files, and is asked for by the config and by the weights alike.
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def from_pretrained(name_or_path: str | PathLike[str], config: Any, **kwargs: Any) -> PreTrainedModel:
    """The causal language model of a Hugging Face folder or hub name, folded, for ``ds_tsp.initialize``.

    Each rank reads only its slices of the safetensors files, and the parts that every rank has. `config` is the
    DeepSpeed config that `initialize` will get; `kwargs` are those of ``AutoModelForCausalLM.from_pretrained``. What
    the files lack is initialised as transformers does, and warned of; dtype is that of the checkpoint unless given.
    Memory per rank: 1/P of what is cut, and one tensor. Communication: small messages, and what is not cut.
    Raises ValueError on every rank, whichever of them fails: files that are missing, damaged or of another model.
    """
    settings = load_config(config)
    for key in kwargs:
        if kwargs[key] not in (None, False) and key in _REFUSED:
            raise ValueError(f"ds_tsp.from_pretrained cannot take {key}={kwargs[key]!r}: {_REFUSED[key]}")
    if is_deepspeed_zero3_enabled():
        raise ValueError("a transformers HfDeepSpeedConfig with ZeRO-3 is alive, which makes transformers build models "
                         "under zero.Init; ds_tsp.from_pretrained needs none: delete it first")  # fmt: skip
    init_distributed()
    tsp = parse(settings, dist.get_world_size())
    mesh = Mesh.create(tsp.size, tsp.layout)
    seed = new_seed()
    what, model, error = f"ds_tsp.from_pretrained({str(name_or_path)!r})", None, None
    try:  # nothing in here waits for another rank
        model, plan = _load(str(name_or_path), tsp, mesh, seed, kwargs)
    except Exception as failure:
        error = failure
    # Where the files hold both of two tied weights, transformers compares them: here, of this rank's slices.
    tied = "" if model is None else (
        f"tied are {sorted(model.all_tied_weights_keys.items())}, as far as the files' own values agree; say which is "
        "meant by tie_word_embeddings=False"
    )  # fmt: skip
    agree(what, error, tied)
    assert model is not None
    fold(model, plan, tsp)
    for tensor in (*(p for p in model.parameters() if not hasattr(p, "tsp_cut")), *model.buffers()):
        broadcast_from_first(tensor.data, mesh)  # what the files lacked was drawn by each rank
    loaded: Any = model
    loaded.tsp_loaded = Loaded(tsp, mesh)
    return model


def _load(
    name: str, tsp: TSPConfig, mesh: Mesh, seed: int, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, ModelPlan]:
    """transformers' own from_pretrained, of a subclass that meets it at two points: where the model is built, on the
    meta device, and its files are found; and where it initialises what was not in them.
    """
    asked = {key: value for key, value in kwargs.items() if not (key in ("dtype", "torch_dtype") and value == "auto")}
    config, rest = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **asked)
    more = {key: kwargs[key] for key in (*_HUB, "dtype", "torch_dtype", "trust_remote_code") if key in kwargs}
    remote = {key: kwargs[key] for key in ("trust_remote_code", "code_revision") if key in kwargs}
    with torch.device("meta"):  # only to know its class; a text model inside another has another config, too
        probe = AutoModelForCausalLM.from_config(config, **remote)
    kind: Any = type(probe)
    plans: list[ModelPlan] = []

    def load(model: Any, state_dict: Any, files: list[str], load_config: Any, expected_keys: Any = None) -> Any:
        plan = plan_fold(model, tsp, mesh)
        slices = dict(_slices(model, files, load_config, plan.cuts, mesh.rank))
        cut_meta(model, plan.cuts, mesh.rank)
        plans.append(plan)
        return kind._load_pretrained_model(model, slices, None, load_config, expected_keys)

    def initialise_missing(self: Any, is_quantized: bool) -> None:
        with own_random(self, plans[0].cuts, mesh.rank, seed):
            kind._initialize_missing_keys(self, is_quantized)

    members = {"_load_pretrained_model": staticmethod(load), "_initialize_missing_keys": initialise_missing}
    sliced: Any = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})
    model = sliced.from_pretrained(name, config=probe.config, **{**rest, **more})
    model.__class__ = kind
    return model, plans[0]


@dataclass(frozen=True)
class _Slice:
    """A tensor in a file, or the slice of it that this rank holds; read, as by transformers, by ``[...]``."""

    file: str
    key: str
    cut: WeightCut | None
    rank: int

    def __getitem__(self, everything: Any) -> Tensor:
        # The file is mapped for this tensor only, and copied from: pages of other tensors do not add up.
        with safe_open(self.file, "pt") as opened:
            stored = opened.get_slice(self.key)
            if self.cut is None:
                return stored[...].clone()
            low, high = self.cut.bounds[self.rank : self.rank + 2]
            return stored[(*[slice(None)] * self.cut.dim, slice(low, high))].clone(
                memory_format=torch.contiguous_format
            )


def _slices(
    model: PreTrainedModel, files: list[str], load_config: Any, cuts: dict[str, WeightCut], rank: int
) -> Iterator[tuple[str, _Slice]]:
    """What this rank reads of each tensor in the files. Raises ValueError naming the file and what is wrong with it."""
    mapping = load_config.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    whole, prefix = model.state_dict(), model.base_model_prefix
    for file in files:
        for key, shape in _header(file, load_config.sharded_metadata).items():
            name, pattern = rename_source_key(key, renamings, converters, prefix, whole)
            if name not in whole and key in whole:  # as transformers: it should not have been renamed
                name, pattern = rename_source_key(key, [], [], prefix, whole)
            if pattern is None and name in whole and tuple(whole[name].shape) != shape:
                raise ValueError(f"{file} holds {key} of shape {shape}, but {type(model).__name__} has {name} of shape "
                                 f"{tuple(whole[name].shape)}; files and config are of different models")  # fmt: skip
            if pattern is not None:
                first, *others = next(c.target_patterns for c in converters if pattern in c.source_patterns)
                made = {name, *(name.replace(first, other) for other in others)}
                if made & cuts.keys():
                    raise ValueError(f"{key} in {file} is converted into {', '.join(sorted(made))} while it is loaded, "
                                     f"which cannot be done in slices; {_WHOLE}")  # fmt: skip
            yield key, _Slice(file, key, cuts.get(name), rank)


def _header(file: str, index: dict[str, Any] | None) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a file, after a look at whether it is complete."""
    if not file.endswith(".safetensors"):
        raise ValueError(f"{file} is no safetensors file, and cannot be read in slices; convert it: "
                         "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)")  # fmt: skip
    try:
        with safe_open(file, "pt") as opened:
            shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.offset_keys()}
    except FileNotFoundError:
        raise ValueError(f"{file} is missing, which the index names; copy or download it again") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} cannot be read: {error}; it is damaged or not complete: copy or download it again"
        ) from error
    listed = {key for key, name in (index or {}).get("weight_map", {}).items() if name == os.path.basename(file)}
    if listed - shapes.keys():
        raise ValueError(f"{file} has no {min(listed - shapes.keys())}, which the index says is there; the index and "
                         "the file are of different saves")  # fmt: skip
    return shapes
