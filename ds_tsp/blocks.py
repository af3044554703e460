"""Which blocks of a Hugging Face model are folded, and how: read from its tensor-parallel plan, checked, told as
data."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .attention import AttentionCore
from .comm import Wire
from .config import TSPConfig
from .layout import BlockCut, WeightCut, cut_bounds, head_groups
from .recompute import Recompute
from .terms import FoldPlan, Slot
from .transports import Broadcast, Ring

_FOLDED_STYLES = ("colwise", "rowwise")
_WHOLE_STYLES = ("replicate", "replicated_with_grad_allreduce")
_EXAMPLE = 'for example {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}'


class CannotFold(ValueError):
    """Why a block is not a sum over shards of its weights."""


def plan_model(model: PreTrainedModel, config: TSPConfig, wire: Wire, recompute: Recompute) -> dict[str, FoldPlan]:
    """Module name -> how it is folded. Raises ValueError naming the module that cannot be, and why."""
    return plan_blocks(model, find_blocks(model, config.plan), config, wire, recompute)


def plan_blocks(root: nn.Module, found: Mapping[str, dict[str, str]], config: TSPConfig, wire: Wire,
                recompute: Recompute) -> dict[str, FoldPlan]:  # fmt: skip
    """`plan_model` for the blocks of any module: name -> {name of a child: style}."""
    plans = {}
    for name, styles in found.items():
        block = root.get_submodule(name)
        try:
            plans[name] = _plan_block(block, name, styles, config, wire, recompute)
        except CannotFold as why:
            raise ValueError(
                f"{name} ({type(block).__name__}) cannot be folded because {why}; to leave it whole, give tsp.plan "
                f"with the linear layers of the other blocks only, {_EXAMPLE}"
            ) from None
    return plans


def _transformers_plan(model: PreTrainedModel) -> Mapping[str, str]:
    """The plan that ships with the model family, less the vocabulary's two ends, which stay whole."""
    config = model.config
    plan = getattr(config, "base_model_tp_plan", None) or getattr(config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no base_model_tp_plan; say in tsp.plan which linear layers are cut, {_EXAMPLE}"
        )
    return {key: style for key, style in plan.items() if not style.startswith("embedding_")}


def find_blocks(model: PreTrainedModel, own: Mapping[str, str] | None) -> dict[str, dict[str, str]]:
    """Block name -> {name of a child: style}. A key of the plan matches names with or without the base model's prefix.

    Raises ValueError if a key of the user's `own` plan matches nothing, or if no block matches.
    """
    plan = _transformers_plan(model) if own is None else own
    patterns = {key: re.compile(re.escape(key).replace(r"\*", r"[^.]+")) for key in plan}
    prefix = f"{model.base_model_prefix}."
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    blocks: dict[str, dict[str, str]] = {}
    unused = set(plan)
    for name in names:
        for key, pattern in patterns.items():
            if pattern.fullmatch(name) or pattern.fullmatch(name.removeprefix(prefix)):
                unused.discard(key)
                parent, _, child = name.rpartition(".")
                blocks.setdefault(parent, {})[child] = plan[key]
    if own is not None and unused:
        lost = sorted(unused)[0]
        close = difflib.get_close_matches(lost, {re.sub(r"\.\d+\.", ".*.", name) for name in names}, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"tsp.plan: no module of {type(model).__name__} matches {lost!r}{hint}")
    blocks = {name: styles for name, styles in blocks.items() if set(styles.values()) - set(_WHOLE_STYLES)}
    if not blocks:
        raise ValueError(f"no block of {type(model).__name__} matched the plan {dict(plan)}; name its linear layers in "
                         f"tsp.plan, {_EXAMPLE}")  # fmt: skip
    return blocks


def find_blocks_inside(root: nn.Module, own: Mapping[str, str] | None) -> dict[str, dict[str, str]]:
    """Blocks of Hugging Face decoder layers anywhere inside of a module: block name -> {name of a child: style}.

    Each block's config tells its family's plan; of its keys what follows the number of the layer is matched.
    """
    blocks: dict[str, dict[str, str]] = {}
    for name, block in root.named_modules():
        plan = own or getattr(getattr(block, "config", None), "base_model_tp_plan", None) or {}
        for key, style in plan.items():
            owner, _, child = key.rpartition(".")
            inner = re.sub(r"^.*\*\.?", "", owner)  # "self_attn" of "layers.*.self_attn"
            if inner and f".{name}".endswith(f".{inner}") and hasattr(block, child):
                blocks.setdefault(name, {})[child] = style
    return {name: styles for name, styles in blocks.items() if set(styles.values()) - set(_WHOLE_STYLES)}


def _plan_block(block: nn.Module, name: str, styles: dict[str, str], config: TSPConfig, wire: Wire,
                recompute: Recompute) -> FoldPlan:  # fmt: skip
    mesh = wire.mesh
    linears = _linear_layers(block, styles)
    last = next(child for child in linears if styles[child] == "rowwise")
    # Conv1D, the linear layer of GPT-2's time, keeps its weight transposed.
    dims = {child: int((child == last) != isinstance(m, Conv1D)) for child, m in linears.items()}
    widths = {child: m.weight.shape[dims[child]] for child, m in linears.items()}
    attention = hasattr(block, "is_causal") or "Attention" in type(block).__name__
    _check_dropout(block)
    if attention and config.plan is not None and len(linears) == 2:
        # Only the family's own plan knows whether such a layer keeps each head's q, k and v together.
        raise CannotFold(
            f"q, k and v are one layer ({next(iter(linears))}), whose rows are not known to be sorted by head"
        )
    if attention:
        groups = head_groups(_check_heads(block, widths), mesh.size)
    elif len(set(widths.values())) > 1:
        raise CannotFold(f"its layers do not share one ffn width: {widths}")
    places: list[tuple[Slot, int]] = [
        ((module, leaf), dims[child] if leaf == "weight" else 0)
        for child, module in linears.items()
        for leaf, _ in module.named_parameters(recurse=False)
        if not (child == last and leaf == "bias")
    ]
    places += [((block, child), 0) for child in styles if isinstance(getattr(block, child), nn.Parameter)]
    cuts = []
    for (owner, leaf), dim in places:
        shape = tuple(getattr(owner, leaf).shape)
        try:
            cuts.append(WeightCut(shape, dim, cut_bounds(shape[dim], mesh.size, groups if attention else 1)))
        except ValueError as error:
            raise CannotFold(f"of a {leaf} of shape {shape}: {error}") from None
    slots = tuple(slot for slot, _ in places)
    cut = BlockCut(tuple(cuts), mesh.size, groups if attention else mesh.size)
    return FoldPlan(
        name=name,
        transport=Broadcast(cut, wire) if attention else Ring(cut, wire),
        sharded=slots,
        shared=_shared_slots(block, slots, linears[last], attention),
        once=((linears[last], "bias"),) if linears[last].bias is not None else (),
        rowwise=linears[last],
        core=AttentionCore(wire, config.kernel, name, config.schedule) if attention else None,
        recompute=recompute,
    )


def _linear_layers(block: nn.Module, styles: dict[str, str]) -> dict[str, Any]:
    odd = {child: style for child, style in styles.items() if style not in (*_FOLDED_STYLES, *_WHOLE_STYLES)}
    if odd:
        raise CannotFold(f"its plan has {odd}, and only colwise and rowwise linear layers are sums over shards")
    linears: dict[str, Any] = {}
    for child in (c for c, style in styles.items() if style in _FOLDED_STYLES):
        module = getattr(block, child)
        if isinstance(module, nn.Parameter) and styles[child] == "colwise":  # one value per head, as attention sinks
            continue
        if getattr(type(module), "forward", None) not in (nn.Linear.forward, Conv1D.forward):
            raise CannotFold(f"{child} is a {type(module).__name__}, not an nn.Linear")
        linears[child] = module
    if [styles[c] for c in linears].count("rowwise") != 1 or len(linears) < 2:
        raise CannotFold(f"it needs colwise layers and one rowwise layer at its end; the plan has {styles}")
    return linears


def _check_dropout(block: nn.Module) -> None:
    rates = {name or "itself": m.p for name, m in block.named_modules() if isinstance(m, nn.Dropout)}
    # What a block drops by a function it keeps as a number: attention_dropout, residual_dropout, attn_pdrop ...
    rates |= {n: v for n, v in vars(block).items() if isinstance(v, float) and ("dropout" in n or "pdrop" in n)}
    if any(rates.values()):
        raise CannotFold(f"it drops activations inside ({rates}); set the rate to 0 in the model's config")


def _check_heads(block: nn.Module, widths: dict[str, int]) -> int:
    """The number of kv heads; every width must be a whole number of them."""
    config: Any = getattr(block, "config", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if kv_heads is None:
        raise CannotFold("its config tells neither num_key_value_heads nor num_attention_heads")
    if getattr(config, "num_kv_shared_layers", None):
        raise CannotFold("later layers read its K/V (num_kv_shared_layers), and a term has those of one head group")
    uneven = {child: width for child, width in widths.items() if width % kv_heads}
    if uneven:
        raise CannotFold(f"the widths {uneven} are not a whole number of its {kv_heads} kv heads")
    return kv_heads


def _shared_slots(block: nn.Module, cut: tuple[Slot, ...], last: nn.Module, attention: bool) -> tuple[Slot, ...]:
    """Parameters outside the plan that every term uses whole: in attention, norms of one head's width."""
    head = getattr(block, "head_dim", None)
    shared: list[Slot] = []
    for owner_name, owner in block.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            if owner is last or any(owner is module and leaf == name for module, name in cut):
                continue
            # A parameter of the block itself is one value per head, even where a head is as wide as there are heads.
            if not attention or owner is block or tuple(parameter.shape) != (head,):
                raise CannotFold(
                    f"{owner_name or leaf} has a parameter of shape {tuple(parameter.shape)} that the plan does not "
                    "cut, and every term would need it whole"
                )
            shared.append((owner, leaf))
    return tuple(shared)
