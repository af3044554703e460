"""``engine.save_checkpoint`` and ``load_checkpoint``: DeepSpeed's own, made safe, and complete enough to go on bit for
bit.

Saving: DeepSpeed writes into a folder beside the tag's place; errors of single ranks are kept until all have come
through, so that none hangs; the folder then takes its place in one step. Loading: every rank checks before anything is
changed, and all raise the same error or none does. Both are bound to the one engine.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from . import masters, universal
from . import tag as tags
from .comm import gather_objects
from .layout import WeightCut
from .loader import resumable
from .mesh import Mesh


def attach(engine: Any) -> None:
    """Give `engine` its save_checkpoint and load_checkpoint; arguments and results are DeepSpeed's.

    Raises ValueError for checkpoint writers that finish later, or on a disk of each node: nobody could tell when such a
    checkpoint is whole.
    """
    writer = engine.checkpoint_engine  # None in an engine without an optimizer, which may load
    if writer is not None and (writer.is_decoupled() or engine.use_node_local_storage()):
        raise ValueError(
            '"checkpoint": a decoupled writer and use_node_local_storage are not supported: a tag takes its name when '
            "all ranks have written to one folder; remove them"
        )
    save, load = engine.save_checkpoint, engine.load_checkpoint
    resumable(engine.training_dataloader)
    engine.module.universal_checkpoint_info = _for_ds_to_universal(engine)

    @functools.wraps(save)
    def save_checkpoint(save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False):  # noqa: B006
        return _save(engine, save, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    @functools.wraps(load)
    def load_checkpoint(load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None):  # fmt: skip
        wanted = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
            "custom_load_fn": custom_load_fn,
        }
        return _load(engine, load, load_dir, tag, wanted)

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    if engine.tsp.size > 1:
        engine._copy_recovery_script = _explain_recovery


_INSTEAD = """#!/usr/bin/env python
import sys

sys.exit("DeepSpeed's {name} puts the parts of one slice together, and these weights lie in slices of a TSP axis. "
         "Load the checkpoint with ds_tsp.initialize and engine.load_checkpoint, then call "
         "ds_tsp.save_pretrained(engine, folder); or convert it: ds_tsp convert FOLDER TARGET")
"""


def _explain_recovery(save_path: str) -> None:
    """Where DeepSpeed puts its scripts beside a checkpoint that they cannot read, and stop with a wrong reason: the way
    that works."""
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        with open(os.path.join(save_path, name), "w") as file:
            file.write(_INSTEAD.format(name=name))


def _save(engine: Any, save: Callable[..., Any], save_dir: Any, tag: Any, client_state: Any, save_latest: bool,
          exclude_frozen: bool) -> bool:  # fmt: skip
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    if engine.checkpoint_engine is None:
        raise ValueError(
            "DeepSpeed saves no checkpoint of an engine without an optimizer; ds_tsp.full_state_dict has the weights"
        )
    save_dir, tag = str(save_dir), str(f"global_step{engine.global_steps}" if tag is None else tag)
    told = gather_objects((save_dir, tag))
    if any(other != told[0] for other in told):
        raise ValueError(f"all ranks must save to one folder and tag, but were told {sorted(set(told))}")
    if engine.micro_steps % engine.gradient_accumulation_steps() and dist.get_rank() == 0:
        logger.warning("save_checkpoint between the micro-batches of a step: their gradients are not saved")
    first, errors = dist.get_rank() == 0, list[str]()
    with _errors_kept(engine, errors):
        if first:
            _attempt(errors, tags.clear, save_dir, tag)
        save(save_dir, tags.partial(tag), client_state, save_latest=False, exclude_frozen_parameters=exclude_frozen)
    everyones = gather_objects((errors, engine.tsp.stage, _table(engine), _groups(engine), _rank_state(engine)))
    _raise_together([told[0] for told in everyones], save_dir, tag)
    if first:
        facts = _facts(engine, exclude_frozen)
        # A weight that is tied over a pipeline is on two stages; the first one's stands for both.
        facts["parameters"] = {name: told for _, _, table, _, _ in reversed(everyones) for name, told in table.items()}
        facts["groups"] = list({stage: groups for _, stage, _, groups, _ in everyones}.values())
        work = Path(save_dir, tags.partial(tag)) / tags.RANKS
        _attempt(errors, torch.save, [state for *_, state in everyones], work)
        if not errors:
            _attempt(errors, tags.sync, work)
            _attempt(errors, tags.commit, save_dir, tag, facts, "latest" if save_latest else None)
    _raise_together(gather_objects(errors), save_dir, tag)
    return True


def _attempt(errors: list[str], action: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        action(*args, **kwargs)
    except Exception as error:
        where = next((f" of {a}" for a in reversed(args) if isinstance(a, (str, Path))), "")
        errors.append(f"{getattr(action, '__name__', action)}{where}: {type(error).__name__}: {error}")


@contextmanager
def _errors_kept(engine: Any, errors: list[str]) -> Iterator[None]:
    """Whatever DeepSpeed's save does on disk keeps its error in `errors`: a rank that raised would leave the others in
    a barrier."""
    writer = engine.checkpoint_engine
    write, makedirs, script = writer.save, writer.makedirs, engine._copy_recovery_script

    def save(state_dict: Any, path: str) -> None:
        before = len(errors)
        _attempt(errors, write, state_dict, path)
        if len(errors) == before:
            _attempt(errors, tags.sync, path)

    writer.save = save
    writer.makedirs = lambda *args, **kwargs: _attempt(errors, makedirs, *args, **kwargs)
    engine._copy_recovery_script = lambda path: _attempt(errors, script, path)
    try:
        yield
    finally:
        del writer.save, writer.makedirs
        engine._copy_recovery_script = script  # which `attach` may have put there


def _raise_together(everyones: list[list[str]], save_dir: str, tag: str) -> None:
    failed = {rank: errors[0] for rank, errors in enumerate(everyones) if errors}
    if not failed:
        return
    if dist.get_rank() == 0:  # make room; what cannot be removed now goes before the next save
        _attempt([], tags.clear, save_dir, tag)
    rank, error = next(iter(failed.items()))
    raise OSError(
        f"checkpoint {tag!r} was not saved to {save_dir}: on rank {rank}, {error}"
        + (f" (so on ranks {sorted(failed)})" if len(failed) > 1 else "")
        + "; the checkpoint that the file latest names there is whole"
    )


def _load(engine: Any, load: Callable[..., Any], load_dir: Any, tag: Any, wanted: dict[str, Any]) -> Any:
    whole = engine.load_universal_checkpoint()
    if dist.get_rank() == 0:
        _attempt([], _settle, str(load_dir), tag)
    dist.barrier()
    problem, folder, facts = "", None, {}
    try:
        folder = _find(str(load_dir), tag, "latest_universal" if whole else "latest")
        if folder is not None:
            facts = _check(engine, folder, whole, wanted)
    except ValueError as error:
        problem = str(error)
    everyones = gather_objects((problem, folder))
    if problem := next((p for p, _ in everyones if p), ""):
        raise ValueError(problem)
    if any(other != folder for _, other in everyones):
        raise ValueError(f"the ranks found different checkpoints: {sorted({str(f) for _, f in everyones})}")
    if folder is None:
        return load(load_dir, tag)  # DeepSpeed's own answer where nothing was saved yet
    module_only = wanted["load_module_only"]
    if whole:
        states, schedule = wanted["load_optimizer_states"], wanted["load_lr_scheduler_states"]
        result = universal.restore(folder, engine, states, schedule, module_only)
    elif wanted["load_optimizer_states"] and not module_only and _partitioned_without_zero(engine):
        # DeepSpeed saves this optimizer as ZeRO's, a file per dp rank, and then loads the first one's for all.
        path, client = load(load_dir, tag, **{**wanted, "load_optimizer_states": False})
        engine._load_zero_checkpoint(load_dir, str(folder.relative_to(load_dir)))
        client.pop("optimizer", None)
        result = path, client
    else:
        result = load(load_dir, tag, **wanted)
    if not module_only:
        _go_on(engine, folder, facts)
    return result


def _latest(load_dir: str, name: str) -> str | None:
    path = Path(load_dir, name)
    return path.read_text().strip() if path.is_file() else None


def _settle(load_dir: str, tag: Any) -> None:
    for name in (tag,) if tag is not None else (_latest(load_dir, "latest"), _latest(load_dir, "latest_universal")):
        if name is not None:
            tags.settle(Path(load_dir, str(name)))


def _find(load_dir: str, tag: Any, latest: str) -> Path | None:
    """The folder to load; None where there is no `latest`, as DeepSpeed has it."""
    name = _latest(load_dir, latest) if tag is None else str(tag)
    if name is None and latest == "latest_universal":
        raise ValueError(
            f'"load_universal": {Path(load_dir, latest)} does not exist; write the universal checkpoint first: '
            f"ds_tsp convert {load_dir} {Path(load_dir, 'universal')}"
        )
    return None if name is None else Path(load_dir, name)


def _check(engine: Any, folder: Path, whole: bool, wanted: dict[str, Any]) -> dict[str, Any]:
    """What the checkpoint says of itself. Raises ValueError for one that this engine cannot load."""
    if whole and folder.is_dir() and not (folder / tags.FACTS).is_file():  # ds_to_universal.py's
        universal.check(folder, engine, wanted["load_optimizer_states"] and not wanted["load_module_only"])
        return {}
    facts = tags.read_facts(folder)
    if whole and facts["kind"] != "universal":
        raise ValueError(f'"load_universal" is set, but {folder} is not universal; {_how_to_convert(folder)}')
    if facts["kind"] == "universal" and not whole:
        raise ValueError(f'{folder} is universal; set "checkpoint": {{"load_universal": true}} to load it')
    _check_parameters(engine, folder, facts, wanted)
    if not whole:
        _check_degree(engine, folder, facts, wanted)
    every = list(facts["files"].items())
    tags.check_files(folder, every[dist.get_rank() :: dist.get_world_size()])
    if whole:
        universal.check(folder, engine, wanted["load_optimizer_states"] and not wanted["load_module_only"])
    return facts


def _how_to_convert(folder: Path) -> str:
    return (
        f"to open it at another degree: ds_tsp convert {folder} {folder}_universal, then load with "
        '"checkpoint": {"load_universal": true}'
    )


def _check_parameters(engine: Any, folder: Path, facts: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Names and whole shapes; a custom_load_fn may do with them what it likes."""
    if wanted["custom_load_fn"] is not None:
        return
    mine, saved = _table(engine), facts["parameters"]
    for name in mine:
        if name in saved and mine[name]["shape"] != saved[name]["shape"]:
            raise ValueError(
                f"{folder / tags.FACTS}: {name} was saved with shape {saved[name]['shape']}, but this "
                f"{_model(engine)} has {mine[name]['shape']}: it is a checkpoint of another model or vocabulary"
            )
    missing = sorted(mine.keys() - saved.keys())
    extra = sorted(saved.keys() - mine.keys()) if engine.tsp.stages == 1 else []
    if wanted["load_module_strict"] and (missing or extra):
        lacks = f"it lacks {len(missing)} parameter(s) of this model, such as {missing[0]}" if missing else ""
        more = f"it has {len(extra)} that this model has not, such as {extra[0]}" if extra else ""
        raise ValueError(
            f"{folder / tags.FACTS} is a checkpoint of a {facts['model']}, this model is a {_model(engine)}: "
            + " and ".join(filter(None, (lacks, more)))
        )


def _model(engine: Any) -> str:
    return type(engine.module).__name__


def _check_degree(engine: Any, folder: Path, facts: dict[str, Any], wanted: dict[str, Any]) -> None:
    here, differ = _facts(engine, False), []
    module_only = wanted["load_module_only"] or not wanted["load_optimizer_states"]
    for key, label in (("tsp", "tsp.size"), ("stages", "pipeline stages"), ("dp", "data-parallel size"),
                       ("zero", "ZeRO stage"), ("precision", "precision")):  # fmt: skip
        same = facts[key] == here[key]
        if key == "dp":
            whole = facts["zero"] == 0 and not _partitioned_without_zero(engine)
            same |= whole or (module_only and facts["zero"] != 3)
        if key == "zero":
            same |= {facts[key], here[key]} == {1, 2} or (module_only and 3 not in (facts[key], here[key]))
        if not same:
            differ.append(f"{label} {facts[key]}, here {here[key]}")
    mine = _table(engine)
    cuts = [n for n, told in facts["parameters"].items() if n in mine and told["bounds"] != mine[n]["bounds"]]
    if cuts and not differ:
        differ.append(f"{cuts[0]} cut at {facts['parameters'][cuts[0]]['bounds']}, here at {mine[cuts[0]]['bounds']}")
    if facts["zero"] == 3 and engine.optimizer is not None and not masters.groups(engine):
        raise ValueError(f"DeepSpeed loads {folder} only into an engine that trains; {_how_to_convert(folder)}")
    if differ:
        raise ValueError(f"{folder} was saved with {'; '.join(differ)}; {_how_to_convert(folder)}")


def _partitioned_without_zero(engine: Any) -> bool:
    """Whether the optimizer is cut over dp although ZeRO is off, as that of a pipeline in bf16."""
    return hasattr(engine.optimizer, "bf16_groups") and not engine.zero_optimization()


def _facts(engine: Any, exclude_frozen: bool) -> dict[str, Any]:
    mesh: Mesh = engine.tsp
    loader = resumable(engine.training_dataloader)
    return {
        "kind": "ranks",
        "model": _model(engine),
        "tsp": mesh.size,
        "dp": mesh.dp_size,
        "stages": mesh.stages,
        "zero": engine.zero_optimization_stage(),
        "precision": "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
        "frozen_excluded": exclude_frozen,
        "data": None if loader is None else loader.position(),
    }


def _table(engine: Any) -> dict[str, dict[str, Any]]:
    """Each parameter of this rank by its name in the unsharded model: whole shape, how it is cut, and where
    DeepSpeed's files have it: the pipeline stage and its name there."""
    there = {id(p): name for name, p in engine.module.named_parameters()}
    trained = {id(p) for group in masters.groups(engine) for p in group}
    table = {}
    for name, parameter in masters.named(engine).items():
        cut: WeightCut | None = getattr(parameter, "tsp_cut", None)
        table[name] = {
            "shape": list(universal.whole_shape(parameter)),
            "dim": None if cut is None else cut.dim,
            "bounds": None if cut is None else list(cut.bounds),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "trained": id(parameter) in trained,
            "stage": engine.tsp.stage,
            "name": there[id(parameter)],
        }
    return table


def _groups(engine: Any) -> list[list[str]]:
    """The names in DeepSpeed's files of each group's trained parameters, in the optimizer's order."""
    there = {id(p): name for name, p in engine.module.named_parameters()}
    return [[there[id(p)] for p in group] for group in masters.groups(engine)]


def _for_ds_to_universal(engine: Any) -> dict[str, Any]:
    """What DeepSpeed's ds_to_universal.py must know of the cuts; it matches names by regular expressions."""
    trained = {told["name"]: told for told in _table(engine).values() if told["trained"]}

    def patterns(dim: int | None) -> list[str]:
        return [name.replace(".", r"\.") + "$" for name, told in trained.items() if told["dim"] == dim]

    return {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": patterns(None),
        "parameter_with_row_parallelism_patterns": patterns(1),
    }


def _rank_state(engine: Any) -> dict[str, Any]:
    """What a rank needs to go on as if nothing had happened, and DeepSpeed does not save."""
    scaler, accelerator = _grad_scaler(engine), get_accelerator()
    return {
        "torch": torch.get_rng_state(),
        "accelerator": None if accelerator.device_name() == "cpu" else accelerator.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "grad_scaler": None if scaler is None else scaler.state_dict(),
    }


def _go_on(engine: Any, folder: Path, facts: dict[str, Any]) -> None:
    """Random generators and the loader's place; at another degree the latter only, by the number of samples."""
    loader, path = resumable(engine.training_dataloader), folder / tags.RANKS
    if loader is not None and facts.get("data") is not None:
        loader.resume(facts["data"])
    if not path.is_file():
        return
    states, here = torch.load(path, weights_only=False), _facts(engine, False)
    state, scaler = states[dist.get_rank() % len(states)], _grad_scaler(engine)
    if scaler is not None and state["grad_scaler"]:
        scaler.load_state_dict(state["grad_scaler"])
    if all(facts[key] == here[key] for key in ("tsp", "dp", "stages")):
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        if state["accelerator"] is not None and get_accelerator().device_name() != "cpu":
            get_accelerator().set_rng_state(state["accelerator"])


def _grad_scaler(engine: Any) -> Any:
    """That of torch_autocast in fp16, which DeepSpeed forgets."""
    mine = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return mine if mine is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)
