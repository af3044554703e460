"""The unsharded model, written as Hugging Face files: gathered one tensor at a time, a file at a time on rank 0."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .checkpoint import gather_tensor
from .comm import agree
from .universal import whole_shape

_UNFINISHED = ".ds_tsp_unfinished"


def save_pretrained(engine: Any, folder: str | PathLike[str], max_shard_size: int | str = "5GB") -> None:
    """Write the unsharded model as safetensors files, with their index and the configs, for plain ``from_pretrained``.

    Collective: every rank calls it. One tensor at a time is gathered onto rank 0, which holds the tensors of one file,
    of `max_shard_size` or of one larger tensor. Files are finished in a folder inside of `folder` and then moved; what
    was there before stays until then, and a `folder` in which the moving was interrupted does not open at all.
    Tied weights are written once; dtypes are those of the engine's parameters.
    Raises ValueError on every rank if rank 0 cannot write.
    """
    model, mesh, work = engine.module, engine.tsp, Path(folder) / _UNFINISHED
    names = _saved_names(model)
    sizes = {name: _as_meta(entry) for name, entry in names.items()}
    pattern = SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")
    split = split_torch_state_dict_into_shards(sizes, filename_pattern=pattern, max_shard_size=max_shard_size)
    index = {"metadata": {"total_parameters": sum(t.numel() for t in sizes.values()), **split.metadata},
             "weight_map": split.tensor_to_filename}  # fmt: skip

    def on_first_rank(action: Callable[..., Any], *args: Any) -> None:
        error: Exception | None = None
        try:
            if dist.get_rank() == 0:
                action(*args)
        except Exception as failure:
            error = failure
            if action is not _move:  # else it holds what is finished
                shutil.rmtree(work, ignore_errors=True)
        agree(f"ds_tsp.save_pretrained(engine, {str(folder)!r})", error)

    on_first_rank(_begin, model, work)
    for file, held in split.filename_to_tensors.items():
        tensors = {name: gather_tensor(names[name], mesh) for name in held}
        on_first_rank(save_file, tensors, work / file, {"format": "pt"})
        del tensors
    on_first_rank(_move, work, index if split.is_sharded else None)


def _saved_names(model: Any) -> dict[str, Tensor]:
    """Name in the files -> parameter or buffer of the model, tied ones once, by the name that transformers expects."""
    ignored, tied = set(model._keys_to_ignore_on_save or ()), model.all_tied_weights_keys
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = {name: parameters.get(name, entry) for name, entry in model.state_dict(keep_vars=True).items()}
    kept: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in tied):
        kept.setdefault(id(state[name]), name)
    names = {name: entry for name, entry in state.items() if kept[id(entry)] == name and name not in ignored}
    # Some families have other names in their files than in the model. Shapes are enough to find out which.
    stands_for = {name: _as_meta(entry) for name, entry in names.items()}
    renamed = revert_weight_conversion(model, dict(stands_for))
    origin = {id(tensor): name for name, tensor in stands_for.items()}
    if all(id(tensor) in origin for tensor in renamed.values()) and len(renamed) == len(names):
        return {name: names[origin[id(tensor)]] for name, tensor in renamed.items()}
    return names  # what is merged in the model stays so in the files, which transformers opens as well


def _as_meta(entry: Any) -> Tensor:
    """The whole tensor of which `entry` is this rank's part, without its values."""
    return torch.empty(whole_shape(entry), dtype=entry.dtype, device="meta")


def _begin(model: Any, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)  # of a save that was interrupted
    work.mkdir(parents=True)
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = model.dtype, [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, work, config=config)
    config.save_pretrained(work)
    if model.can_generate():
        model.generation_config.save_pretrained(work)


def _move(work: Path, index: dict[str, Any] | None) -> None:
    """Put the finished files in place. What makes a folder open, its index or its only file, goes first and comes
    last."""
    last = SAFE_WEIGHTS_NAME if index is None else SAFE_WEIGHTS_INDEX_NAME
    if index is not None:
        (work / last).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for old in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME):
        (work.parent / old).unlink(missing_ok=True)
    for old_shard in work.parent.glob("model-?????-of-?????.safetensors"):
        old_shard.unlink()
    for path in sorted(work.iterdir(), key=lambda path: path.name == last):
        path.replace(work.parent / path.name)
    work.rmdir()
