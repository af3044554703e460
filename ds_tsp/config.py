"""The "tsp" section of a DeepSpeed config: load the config as DeepSpeed does, check it, give a `TSPConfig`.

Pure: needs no process group, so every rank raises the same `ValueError` before the first collective.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from os import PathLike
from typing import Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from pydantic import BaseModel, ConfigDict, Field, ValidationError

_SECTION = "tsp"
_NOT_MISSPELT = {_SECTION, "tp"}  # "tp" is DeepSpeed's own name for tensor_parallel in an inference config
_TRAIN, _MICRO, _GAS = _BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_CONFLICTS = {  # other schemes that would divide the same ranks: path of the key -> what to do with it
    ("tensor_parallel", "autotp_size"): "TSP already shards the weights; remove the tensor_parallel section",
    ("sequence_parallel_size",): "TSP already shards the sequence; remove sequence_parallel_size",
}

_PARTITIONED = (
    ("pipeline", "pipe_partitioned"),
    ("pipeline", "grad_partitioned"),
    ("activation_checkpointing", "partition_activations"),
)


class TSPConfig(DeepSpeedConfigModel):
    """The "tsp" section, checked and frozen; `docs/config.md` describes each key."""

    model_config = ConfigDict(frozen=True)

    size: int = Field(ge=1, strict=True)  # strict: true, "4" and 4.0 are mistakes, not sizes
    schedule: Literal["tsp", "metp"] = "tsp"
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    kernel: Literal["auto", "flash_attn", "sdpa", "reference"] = "auto"
    overlap: bool = Field(True, strict=True)
    recompute: Literal["none", "selective", "full"] = "selective"
    shard_vocab: bool = Field(True, strict=True)
    loss_average: Literal["batch", "token"] = "batch"
    gather_logits: bool = Field(True, strict=True)
    plan: dict[str, Literal["colwise", "rowwise", "replicate"]] | None = None

    def __init__(self, /, **data: Any) -> None:
        # Not DeepSpeedConfigModel's: that drops every "auto" (layout="auto" would pass) and swallows a key named
        # "strict".
        BaseModel.__init__(self, **data)


def load_config(config: dict[str, Any] | str | PathLike[str] | None = None, args: Any = None) -> dict[str, Any]:
    """The DeepSpeed config as a dict of its own, from `config` or from `args.deepspeed_config`.

    Either is a dict, the path of a JSON file or base64, read by DeepSpeed's loader. Both may be given when they hold
    the same content (`deepspeed.initialize` asserts there: hide `args.deepspeed_config` from it).
    Raises: ValueError when neither or two different ones are given, or when one cannot be read.
    """
    names = ("deepspeed_config", "deepscale_config")  # the second is deprecated, but initialize honours it
    sources = {"config": config} | {f"args.{name}": getattr(args, name, None) for name in names}
    contents = {_label(name, source): _read(name, source) for name, source in sources.items() if source is not None}
    if not contents:
        raise ValueError(
            'no DeepSpeed config: pass config={...} or config="ds.json" to ds_tsp.initialize, '
            "or start the script with --deepspeed_config ds.json and pass its args"
        )
    (first, loaded), *others = contents.items()
    for other, content in others:
        if content != loaded:
            keys = sorted(str(key) for key in loaded | content if loaded.get(key) != content.get(key))
            raise ValueError(f"{first} and {other} differ in {', '.join(map(_show, keys))}; pass only one of them")
    return loaded


def parse(config: dict[str, Any], world_size: int, stages: int = 1) -> TSPConfig:
    """The "tsp" section of a loaded DeepSpeed config, checked against the world and against DeepSpeed's own keys.

    world = P x dp x `stages` of a pipeline.
    Raises: ValueError with the numbers and the fix; `docs/config.md` lists every message.
    """
    _check_section_name(config, world_size)
    section = config[_SECTION]
    if not isinstance(section, dict) or not section:
        raise ValueError(f'"tsp" must be a section such as "tsp": {{"size": {world_size}}}, not {_show(section)}')
    try:
        tsp = TSPConfig(**{str(key): value for key, value in section.items()})
    except ValidationError as error:
        raise ValueError("\n".join(_readable(item, world_size) for item in error.errors())) from None
    if stages < 1 or world_size % stages:
        choice = _one_of(_divisors(world_size))
        raise ValueError(f"{stages} pipeline stages do not divide world size {world_size}; use {choice}")
    if world_size // stages % tsp.size:
        within = f"the {world_size // stages} ranks of each of {stages} stages of " if stages > 1 else ""
        choice = _one_of(_divisors(world_size // stages))
        raise ValueError(f"tsp.size={tsp.size} does not divide {within}world size {world_size}; use {choice}")
    _check_conflicts(config, tsp.size)
    _check_batch(config, tsp.size, world_size, stages)
    return tsp


def pipeline_settings(config: dict[str, Any], size: int) -> tuple[dict[str, Any], list[str]]:
    """`config` for a pipeline engine, and the keys that had to be switched off for it.

    DeepSpeed takes what crosses a stage boundary to be the same on all ranks of the model axis, and by default sends
    1/P of it from each. With TSP each rank's activations are its own tokens'. Raises ValueError if the config insists.
    """
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else int(zero or 0)  # true: DeepSpeed's old way to say 1
    if stage not in (0, 1):
        raise ValueError(
            f"zero_optimization.stage={_show(stage)}: DeepSpeed's pipeline engine allows 0 and 1 only (ZeRO-2 and "
            "ZeRO-3 are incompatible with pipeline parallelism: micro batches accumulate into whole gradients)"
        )
    if size == 1:
        return config, []
    off = []
    for section, key in _PARTITIONED:
        given = config.get(section) or {}
        if given.get(key) is True:
            raise ValueError(
                f"{section}.{key}=true cannot be used with tsp.size={size}: it cuts activations as if all ranks of "
                "the TSP axis held the same, and each holds those of its own tokens; set it to false"
            )
        if section == "pipeline":  # true unless said otherwise
            off += [f"{section}.{key}"] if key not in given else []
            config = {**config, section: {**given, key: False}}
    return config, off


def _read(name: str, source: Any) -> dict[str, Any]:
    try:
        content = source if isinstance(source, dict) else os.fspath(source)
    except TypeError as error:
        raise ValueError(f"{name} must be a dict, a path or base64, not {type(source).__name__}") from error
    try:
        loaded, problem = load_ds_config(content), 'holds no JSON object; expected {"tsp": {"size": 2}, ...}'
    except (OSError, ValueError) as error:
        loaded, problem = None, f"cannot be read as JSON: {error}"
    if isinstance(loaded, dict) and loaded:
        return _copy(loaded)
    if not isinstance(content, dict) and not os.path.exists(content):  # some wrong paths decode as base64 of nonsense
        problem = f"does not exist, and is not base64 of a JSON object; cwd {os.getcwd()}"
    raise ValueError(f"{_label(name, source)} {problem}")


def _copy(value: Any) -> Any:
    # Containers only: a deepcopy fails on process groups. Plain dicts, since OrderedDicts (base64) compare by order
    # too.
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _check_section_name(config: dict[str, Any], world_size: int) -> None:
    present = _SECTION in config
    for key in filter(_is_misspelt, config):
        also = f'; "{_SECTION}" is there too: remove one of them' if present else ""
        raise ValueError(f'unknown section {_show(key)}: did you mean "{_SECTION}"?{also}')
    for key, value in config.items():
        if key != _SECTION and isinstance(value, dict) and _SECTION in value:
            raise ValueError(f'"{_SECTION}" is inside {_show(key)}; move it to the top level of the config')
    if not present:
        sizes = ", ".join(map(str, _divisors(world_size)))
        raise ValueError(
            f'the config has no "tsp" section; add "tsp": {{"size": P}} where P divides the world size '
            f"({sizes} for world {world_size}), or call deepspeed.initialize for plain DeepSpeed"
        )


def _is_misspelt(key: Any) -> bool:
    name = str(key).lower()
    begins = any(word.startswith(_SECTION) for word in re.split("[^a-z0-9]+", name))
    return key not in _NOT_MISSPELT and (begins or bool(difflib.get_close_matches(name, [_SECTION])))


def _check_conflicts(config: dict[str, Any], size: int) -> None:
    for path, fix in _CONFLICTS.items():
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value not in (None, 0, 1, "auto"):  # DeepSpeed reads "auto" as off
            raise ValueError(f"tsp.size={size} and {'.'.join(path)}={_show(value)} exclude each other: {fix}")


def _check_batch(config: dict[str, Any], size: int, world_size: int, stages: int = 1) -> None:
    """Accepts what DeepSpeedConfig._configure_train_batch_size accepts for dp ranks."""
    given = {key: config[key] for key in _BATCH_KEYS if config.get(key) is not None}
    if "auto" in given.values():  # the Hugging Face Trainer fills these in later
        return
    dp = world_size // size // stages
    dp_text = f"dp={dp} (world size {world_size} / tsp.size {size}" + (f" / {stages} stages)" if stages > 1 else ")")
    for key, value in given.items():
        if not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{key}={_show(value)} must be a positive integer")
    train = given.pop(_TRAIN, None)
    if train is None:
        if _MICRO not in given:
            raise ValueError(f"the config gives no batch size; set {_MICRO}, or {_TRAIN} to a multiple of {dp_text}")
        return
    unit = dp * math.prod(given.values())
    unit_text = "".join(f"{key}={value} x " for key, value in given.items()) + dp_text
    if len(given) < 2:  # the missing one absorbs any whole factor
        if train % unit:
            nearest = [batch for batch in (train // unit * unit, train // unit * unit + unit) if batch]
            raise ValueError(f"{_TRAIN}={train} is not a multiple of {unit_text} = {unit}; use {_one_of(nearest)}")
    elif train != unit:
        trap = f"; {train} counts the world size, but the {size} ranks of a TSP group share one batch"
        counted_world = train * dp == unit * world_size
        steps, rest = divmod(train, given[_MICRO] * dp)
        other = f" or {_GAS}={steps}" if not rest else ""
        raise ValueError(
            f"{_TRAIN}={train}, but {unit_text} = {unit}{trap if counted_world else ''}; use {_TRAIN}={unit}{other}"
        )


def _readable(item: Any, world_size: int) -> str:
    """One line for one item of pydantic's errors()."""
    key, *inner = item["loc"]
    name = f"{_SECTION}.{key}" + "".join(f"[{_show(part)}]" for part in inner if part != "[key]")
    allowed = list(TSPConfig.model_fields)
    if item["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(key.lower(), allowed, n=1)
        hint = f" did you mean {_show(nearest[0])}?" if nearest else ""
        return f"unknown key {name}={_show(item['input'])}:{hint} allowed keys: {', '.join(allowed)}"
    if item["type"] == "missing":
        sizes = ", ".join(map(str, _divisors(world_size)))
        return f'{name} is missing; add "{key}": P where P divides the world size ({sizes} for world {world_size})'
    if item["type"] == "value_error":
        return f"{name}={_show(item['input'])}: {item['ctx']['error']}"
    rule = item["msg"].replace("Input should", "should").replace("'", '"')
    return f"{name}={_show(item['input'])} {rule}"


def _label(name: str, source: Any) -> str:
    if isinstance(source, dict):
        return f"{name} (a dict)"
    text = str(source)
    return f'{name}="{text if len(text) <= 200 else text[:60] + "..."}"'  # base64 is long


def _show(value: Any) -> str:
    return json.dumps(value, default=repr)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _one_of(numbers: list[int]) -> str:
    *head, last = map(str, numbers)
    return f"{', '.join(head)} or {last}" if head else last
