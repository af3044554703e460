"""Opens a checkpoint in DeepSpeed's universal format at any degree: each rank takes its slices of whole tensors.

    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, ...   {"param": the whole tensor}, under the unsharded model's name
    <tag>/zero/<parameter>/step.pt                    the optimizer's step
    <tag>/zero/optimizer_state.pt                     param_groups, loss scaler
    <tag>/mp_rank_00_model_states.pt                  counters, scheduler, buffers, client state

`convert` writes it from a checkpoint of any degree and stage; DeepSpeed's ds_to_universal.py from ZeRO 1 to 3.
DeepSpeed's own loader knows no stage 0, leaves frozen parameters as they are, and at stage 3 gives every parameter
group the hyperparameters of the first one; so this one fills the engine's tensors itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import masters
from .layout import WeightCut
from .mesh import Mesh

WEIGHT, STEP = "fp32", "step"
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "dynamic_loss_scale")
# What DeepSpeed keeps to itself of a model-states file; the rest is returned as the client state.
_ENGINE_STATES = ("module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler",
                  "random_ltd", "lr_scheduler", "optimizer")  # fmt: skip


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape in the unsharded model."""
    cut: WeightCut | None = getattr(parameter, "tsp_cut", None)
    return masters.shape(parameter) if cut is None else cut.shape


def read(folder: Path, name: str, key: str, shape: tuple[int, ...]) -> Any:
    """One whole tensor, mapped and not read, or a number such as the step.

    Raises ValueError naming the file if it is missing, or holds another model's tensor.
    """
    path = folder / "zero" / name / f"{key}.pt"
    try:
        held = torch.load(path, weights_only=False, map_location="cpu", mmap=True)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the universal checkpoint holds no {key} of {name}") from None
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    tensor = held["param"] if isinstance(held, dict) else held
    if scalar(tensor):
        return tensor
    if tuple(tensor.shape) != shape and tensor.numel() == torch.Size(shape).numel() and tensor.dim() == 1:
        tensor = tensor.view(shape)  # ds_to_universal.py leaves it flat
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{path} holds {key} of shape {tuple(tensor.shape)}, but {name} of this model has {shape}")
    return tensor


def scalar(value: Any) -> bool:
    """Whether a state is one number for the whole parameter."""
    return not isinstance(value, Tensor) or value.dim() == 0


def check(folder: Path, engine: Any, optimizer_states: bool) -> None:
    """Raises ValueError naming the first file that does not fit the engine. Changes nothing."""
    if not _model_states(folder):
        raise ValueError(f"{folder} has no *mp_rank_00_model_states.pt: it is not a universal checkpoint")
    for name, parameter in masters.named(engine).items():
        read(folder, name, WEIGHT, whole_shape(parameter))
    path, groups = folder / "zero" / "optimizer_state.pt", masters.groups(engine)
    if optimizer_states and groups:
        if not path.is_file():
            raise ValueError(f"{path} is missing: the checkpoint holds no optimizer; load_module_only=True needs none")
        saved = len(torch.load(path, weights_only=False, map_location="cpu")["param_groups"])
        if saved != len(groups):
            raise ValueError(f"{path} has {saved} parameter group(s), but this engine's optimizer has {len(groups)}")


def restore(folder: Path, engine: Any, optimizer_states: bool, scheduler: bool, module_only: bool) -> tuple[str, Any]:
    """Fill the engine from a checkpoint that passed `check`; returns what DeepSpeed's load_checkpoint returns.

    Each rank maps one parameter's files at a time and copies its own elements.
    """
    path = _model_states(folder)[0]
    states = torch.load(path, weights_only=False, map_location="cpu")
    optimizer_states = optimizer_states and not module_only and bool(masters.groups(engine))
    _call(engine.optimizer, "checkpoint_event_prologue")  # ZeRO-3: everything partitioned, then as it was
    _call(engine.optimizer, "partition_all_parameters")  # the same of an engine that does not train
    _tensors(folder, engine, optimizer_states)
    _call(engine.optimizer, "checkpoint_event_epilogue")
    buffers, saved = dict(engine.module.named_buffers()), states.get("module") or {}
    for name in states.get("buffer_names") or ():
        if name in buffers and name in saved:
            buffers[name].copy_(saved[name])
    if optimizer_states:
        _hyperparameters(folder, engine)
    if not module_only:
        if scheduler and engine.lr_scheduler is not None and states.get("lr_scheduler") is not None:
            engine.lr_scheduler.load_state_dict(states["lr_scheduler"])
        engine.global_steps, engine.skipped_steps = states["global_steps"], states["skipped_steps"]
        engine.global_samples = states.get("global_samples", engine.global_steps * engine.train_batch_size())
        engine.loaded_checkpoint_mp_world_size = states["mp_world_size"]
        engine.loaded_checkpoint_dp_world_size = states["dp_world_size"]
    return str(path), {k: v for k, v in states.items() if k not in _ENGINE_STATES}


def _call(optimizer: Any, name: str) -> None:
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


def _model_states(folder: Path) -> list[Path]:
    return sorted(folder.glob("*mp_rank_00_model_states.pt"))


@torch.no_grad()
def _tensors(folder: Path, engine: Any, optimizer_states: bool) -> None:
    mesh: Mesh = engine.tsp
    kept: dict[int, masters.Piece] = {id(parameter): piece for parameter, piece in masters.pieces(engine)}
    common = _common_step(folder) if optimizer_states else None
    for name, parameter in masters.named(engine).items():
        shape, piece = whole_shape(parameter), kept.get(id(parameter))
        weight = _slice(read(folder, name, WEIGHT, shape), parameter, mesh)
        masters.put(parameter, weight, mesh.dp_rank)
        if piece is None:
            continue
        piece.within(piece.flat).copy_(piece.of(weight))
        if not optimizer_states:
            continue
        state = masters.base(engine).state[piece.flat]
        if common is not None:
            state[STEP] = common.clone() if isinstance(common, Tensor) else common  # torch counts it up in place
        for key in sorted({path.stem for path in (folder / "zero" / name).glob("*.pt")} - {WEIGHT}):
            value = read(folder, name, key, shape)
            if scalar(value):
                state[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            if key not in state:
                state[key] = torch.zeros_like(piece.flat)
            piece.within(state[key]).copy_(piece.of(_slice(value, parameter, mesh)))


def _slice(whole: Tensor, parameter: nn.Parameter, mesh: Mesh) -> Tensor:
    cut: WeightCut | None = getattr(parameter, "tsp_cut", None)
    return whole if cut is None else cut.take(whole, mesh.rank)


def _common_step(folder: Path) -> Any:
    """The step that ds_to_universal.py keeps once for all parameters at stage 3."""
    common = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False, map_location="cpu", mmap=True)
    states = (common.get("optimizer_state_dict") or {}).get("state") or {}
    return next((state[STEP] for state in states.values() if STEP in state), None)


def _hyperparameters(folder: Path, engine: Any) -> None:
    common = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False, map_location="cpu")
    for group, saved in zip(masters.base(engine).param_groups, common["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})
    scaler = getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)
    source = common.get("loss_scaler")
    if engine.fp16_enabled() and source is not None and scaler is not None:
        values = source if isinstance(source, dict) else vars(source)
        for name in _SCALER:
            if name in values and hasattr(scaler, name):
                setattr(scaler, name, values[name])
