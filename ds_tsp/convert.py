"""From a checkpoint of one degree to DeepSpeed's universal format, which `load_universal` opens at any other.

Reads the files of all ranks of any (P, dp, ZeRO stage); maps them, and puts one tensor together at a time.
"""

from __future__ import annotations

import math
import shutil
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import tag as tags
from .layout import WeightCut
from .universal import WEIGHT, scalar

Slices = Callable[[str], dict[str, Any]]  # parameter name -> {state: this TSP rank's flattened slice, or a number}
_COMMON = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version", "zero_stage")
_FILE_ONLY = {"optimizer": None, "param_shapes": None, "frozen_param_shapes": None, "frozen_param_fragments": None}


def main(argv: Sequence[str], prog: str = "ds_tsp convert") -> None:
    """The command line of `convert`."""
    parser = ArgumentParser(prog=prog, description=convert.__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "input", help="the folder of one tag, or the folder that save_checkpoint was given (its latest)"
    )
    parser.add_argument("output", help="folder of the universal checkpoint; its parent gets the file latest_universal")
    args = parser.parse_args(argv)
    print(convert(args.input, args.output))


def convert(source: str, target: str) -> Path:
    """Write the universal checkpoint `target` from `source`, a tag or the `latest` one of a folder; returns its folder.

    Needs no model and no ranks. `target` takes its name when it is whole. Raises ValueError naming the file if `source`
    is not a whole checkpoint of ds_tsp.
    """
    folder, out = Path(source), Path(target)
    if (folder / "latest").is_file() and not (folder / tags.FACTS).is_file():
        folder = folder / (folder / "latest").read_text().strip()
    tags.settle(folder)
    facts = tags.read_facts(folder)
    if facts["kind"] != "ranks":
        raise ValueError(f"{folder} is a universal checkpoint already; load it with load_universal")
    tags.check_files(folder, facts["files"].items())
    root, name = str(out.parent), out.name
    out.parent.mkdir(parents=True, exist_ok=True)
    tags.clear(root, name)
    work = out.parent / tags.partial(name)
    _write(folder, work, facts)
    tags.commit(root, name, {**facts, "kind": "universal"}, "latest_universal")
    return out


def _write(folder: Path, work: Path, facts: dict[str, Any]) -> None:
    stages = [[_Rank(folder, stage, rank, facts) for rank in range(facts["tsp"])] for stage in range(facts["stages"])]
    for name, told in facts["parameters"].items():
        shape = tuple(told["shape"])
        cut = None if told["bounds"] is None else WeightCut(shape, told["dim"], tuple(told["bounds"]))
        ranks = stages[told["stage"]]
        parts = [rank.slices(told["name"], told["trained"]) for rank in (ranks if cut else ranks[:1])]
        home = work / "zero" / name
        home.mkdir(parents=True)
        for key, first in parts[0].items():
            if scalar(first):
                torch.save(first, home / f"{key}.pt")
                continue
            held = [part[key] for part in parts]
            if cut is None:
                whole = first.reshape(shape)
            else:
                whole = torch.cat([x.reshape(cut.slice_shape(i)) for i, x in enumerate(held)], dim=cut.dim)
            whole = whole if whole.dtype == torch.float64 else whole.float()
            torch.save({"param": whole.clone(), "cat_dim": told["dim"] or 0}, home / f"{key}.pt")
    torch.save(stages[0][0].common(), work / "zero" / "optimizer_state.pt")
    states = stages[0][0].model
    module = states["module"] or {}  # a pipeline's buffers are not saved: models compute theirs
    buffers = {k: module[k] for k in states.get("buffer_names") or () if k in module}
    torch.save({**states, **_FILE_ONLY, "module": buffers}, work / "mp_rank_00_model_states.pt")
    shutil.copy2(folder / tags.RANKS, work / tags.RANKS)


class _Rank:
    """The files of one TSP rank of one pipeline stage: those of its dp ranks, and where in them each parameter's slice
    lies. Names are those of the files."""

    def __init__(self, folder: Path, stage: int, rank: int, facts: dict[str, Any]):
        self.folder, self.rank, self.dp = folder, rank, facts["dp"]
        self.groups: list[list[str]] = facts["groups"][stage]
        index = stage * facts["tsp"] + rank  # to DeepSpeed stages and TSP ranks are one axis
        end = f"mp_rank_{index:02d}_model_states.pt"
        names = [f"zero_pp_rank_{d}_{end}" for d in range(self.dp)] if facts["zero"] == 3 else [end]
        self.models = [_load(folder / name) for name in names]
        self.model = self.models[0]
        names = [f"zero_pp_rank_{d}_mp_rank_{index:02d}_optim_states.pt" for d in range(self.dp)]
        # A pipeline in bf16 has such files at stage 0, too.
        names = [f"bf16_{n}" for n in names] if (folder / f"bf16_{names[0]}").is_file() else names
        self.optimizers = []
        if any(self.groups) and (folder / names[0]).is_file():
            self.optimizers = [_load(folder / name)["optimizer_state_dict"] for name in names]
        self.partitioned = facts["zero"] == 3
        self.find = self._stage3() if self.partitioned else self._stage12() if self.optimizers else self._stage0()

    def slices(self, name: str, trained: bool) -> dict[str, Any]:
        """Each state of the parameter; of one that is not trained its weight."""
        if trained:
            return self.find(name)
        if not self.partitioned:
            return {WEIGHT: self._weight(name)}
        parts = [model["frozen_param_fragments"][name] for model in self.models]
        return {WEIGHT: _join(parts, math.prod(self.model["frozen_param_shapes"][name]))}

    def _weight(self, name: str) -> Tensor:
        if self.model["module"] is not None:
            return self.model["module"][name]
        first, rest = name.split(".", 1)  # a pipeline keeps each layer in a file, a tied one with its layers
        tied = first == "tied_modules"
        number, rest = ("*", rest.split(".", 1)[1]) if tied else (f"{int(first):02d}", rest)
        files = sorted(self.folder.glob(f"layer_{number}-model_{self.rank:02d}-model_states.pt"))
        return next(layer[rest] for layer in map(_load, files) if rest in layer)

    def common(self) -> dict[str, Any]:
        """What the optimizer keeps once: hyperparameters, and the loss scaler."""
        state = self.optimizers[0] if self.optimizers else self.model["optimizer"] or {}
        kept = {key: state[key] for key in _COMMON if key in state}
        if "cur_scale" in state:  # stage 0 keeps the scaler's numbers side by side
            kept["loss_scaler"] = {k: v for k, v in state.items() if not isinstance(v, (dict, list, Tensor))}
        return {**kept, "param_groups": _base(state).get("param_groups", [])}

    def _stage12(self) -> Slices:
        def find(name: str) -> dict[str, Any]:
            parts = []
            for state in self.optimizers:
                for group, held in enumerate(state["param_slice_mappings"]):
                    if name in held:
                        flats = {WEIGHT: state["single_partition_of_fp32_groups"][group], **_states(state, group)}
                        parts.append(_narrow(flats, held[name].start, held[name].numel))
            return {key: _join([part[key] for part in parts]) for key in parts[0]}

        return find

    def _stage3(self) -> Slices:
        places: dict[str, tuple[int, int, int]] = {}
        for sub, shapes in enumerate(self.model["param_shapes"]):
            offset = 0
            for name, shape in shapes.items():
                places[name] = (sub, offset, math.prod(shape))
                offset += -(-places[name][2] // self.dp)

        def find(name: str) -> dict[str, Any]:
            sub, offset, numel = places[name]
            parts = [
                _narrow({WEIGHT: state["fp32_flat_groups"][sub], **_states(state, sub)}, offset, -(-numel // self.dp))
                for state in self.optimizers
            ]
            return {key: _join([part[key] for part in parts], numel) for key in parts[0]}

        return find

    def _stage0(self) -> Slices:
        state = self.model["optimizer"] or {}
        flats: dict[str, tuple[Tensor, int, int]] = {}  # the master, its number in the optimizer, the offset in it
        for group, names in enumerate(self.groups):
            offset = 0
            for i, name in enumerate(names):
                weight = self._weight(name)
                if "fp32_groups_flat" in state:
                    flats[name] = (state["fp32_groups_flat"][group], group, offset)
                    offset += weight.numel()
                else:
                    master = state["fp32_groups"][group][i] if "fp32_groups" in state else weight
                    flats[name] = (master, len(flats), 0)

        def find(name: str) -> dict[str, Any]:
            flat, index, start = flats[name]
            return _narrow({WEIGHT: flat, **_states(state, index)}, start, self._weight(name).numel())

        return find


def _load(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, weights_only=False, map_location="cpu", mmap=True)
    except RuntimeError:  # written without the zip format ("checkpoint_serialization": false)
        return torch.load(path, weights_only=False, map_location="cpu")


def _base(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the torch optimizer inside of one of DeepSpeed's."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        if key in state:
            return state[key]
    return state


def _states(state: dict[str, Any], index: int) -> dict[str, Any]:
    base = _base(state)
    if not isinstance(base, dict):
        raise ValueError('an elastic checkpoint ("elastic_checkpoint": true) cannot be converted; save without it')
    return base.get("state", {}).get(index, {})


def _narrow(flats: dict[str, Any], start: int, numel: int) -> dict[str, Any]:
    """The elements of one parameter; what has none of its own, as the step, is kept as it is."""
    found, length = {}, flats[WEIGHT].numel()
    for key, value in flats.items():
        if scalar(value):
            found[key] = value
        elif value.numel() < min(length, start + numel):
            raise ValueError(f"optimizer state {key!r} of shape {tuple(value.shape)} is not one number per weight")
        else:
            found[key] = value.detach().reshape(-1)[start : start + numel]
    return found


def _join(parts: list[Any], numel: int | None = None) -> Any:
    """The fragments of all dp ranks one after another, without the padding at their end."""
    if scalar(parts[0]):
        return parts[0]
    return torch.cat([part.detach().reshape(-1) for part in parts])[:numel]
