"""Which blocks of a model are folded and how, and every reason why one is not, by name. No process group."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from ds_tsp.blocks import find_blocks, plan_model
from ds_tsp.comm import Wire
from ds_tsp.config import TSPConfig
from ds_tsp.fold import FoldPlan
from ds_tsp.layout import cut_bounds
from ds_tsp.mesh import Mesh
from ds_tsp.recompute import Recompute
from ds_tsp.transports import Broadcast, Ring
from tests.models import tiny

QKVO = "q_proj.weight k_proj.weight v_proj.weight o_proj.weight"
QKV_BIASED = "q_proj.weight q_proj.bias k_proj.weight k_proj.bias v_proj.weight v_proj.bias"
GATED = "gate_proj.weight up_proj.weight down_proj.weight"
PLAIN = "up_proj.weight down_proj.weight"
NORMS = "q_norm.weight k_norm.weight"
LAYER_NORMS = "q_layernorm.weight q_layernorm.bias k_layernorm.weight k_layernorm.bias"
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def mesh_of(size: int) -> Mesh:
    ranks = tuple(range(size))
    return Mesh(size=size, rank=0, group=None, ranks=ranks, dp_size=1, dp_rank=0, dp_group=None, dp_ranks=(0,))


def planned(model: nn.Module, own: dict[str, str] | None = None, size: int = 4) -> dict[str, FoldPlan]:
    return plan_model(model, TSPConfig(size=size, plan=own), Wire(mesh_of(size)), Recompute())


def told(block: nn.Module, plan: FoldPlan) -> tuple[str, ...]:
    names = {module: name for name, module in block.named_modules()}
    return tuple(
        " ".join(f"{names[module]}.{leaf}" for module, leaf in slots)
        for slots in (plan.sharded, plan.shared, plan.once)
    )


# ---- what is folded: attention and MLP as (cut, used whole by every term, added by one term)

FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, str, str], tuple[str, str, str]]] = {
    "llama": ({}, (QKVO, "", ""), (GATED, "", "")),
    "mistral": ({}, (QKVO, "", ""), (GATED, "", "")),
    "qwen2": ({}, (f"{QKV_BIASED} o_proj.weight", "", ""), (GATED, "", "")),
    "qwen3": ({}, (QKVO, NORMS, ""), (GATED, "", "")),
    "gemma2": ({}, (QKVO, "", ""), (GATED, "", "")),
    "gemma3_text": ({}, (QKVO, NORMS, ""), (GATED, "", "")),
    "exaone4": ({}, (QKVO, NORMS, ""), (GATED, "", "")),
    "cohere": ({"attention_bias": True}, (f"{QKV_BIASED} o_proj.weight", "", "o_proj.bias"), (GATED, "", "")),
    "granite": ({}, (QKVO, "", ""), (GATED, "", "")),
    "olmo": ({}, (QKVO, "", ""), (GATED, "", "")),
    "smollm3": ({}, (QKVO, "", ""), (GATED, "", "")),
    "nemotron": ({}, (QKVO, "", ""), (PLAIN, "", "")),
    "arcee": (
        {"mlp_bias": True},
        (QKVO, "", ""),
        ("up_proj.weight up_proj.bias down_proj.weight", "", "down_proj.bias"),
    ),
    "starcoder2": (
        {},
        (f"{QKV_BIASED} o_proj.weight", "", "o_proj.bias"),
        ("c_fc.weight c_fc.bias c_proj.weight", "", "c_proj.bias"),
    ),
    "phi": (
        {"hidden_size": 32, "head_dim": 8, "qk_layernorm": True},
        (f"{QKV_BIASED} dense.weight", LAYER_NORMS, "dense.bias"),
        ("fc1.weight fc1.bias fc2.weight", "", "fc2.bias"),
    ),
    "gpt_neox": (
        {},
        ("query_key_value.weight query_key_value.bias dense.weight", "", "dense.bias"),
        ("dense_h_to_4h.weight dense_h_to_4h.bias dense_4h_to_h.weight", "", "dense_4h_to_h.bias"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, size: int) -> None:
    sizes, attention, mlp = FAMILIES[family]
    model = tiny(family, **sizes)
    plans = planned(model, size=size)
    layers, first = ("gpt_neox.layers", "attention") if family == "gpt_neox" else ("model.layers", "self_attn")
    assert set(plans) == {f"{layers}.{i}.{kind}" for i in (0, 1) for kind in (first, "mlp")}
    kv_heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    for name, plan in plans.items():
        block, is_mlp = model.get_submodule(name), name.endswith("mlp")
        assert (plan.name, told(block, plan)) == (name, mlp if is_mlp else attention)
        last, _ = plan.sharded[-1]
        assert plan.rowwise is last and all(slot == (last, "bias") for slot in plan.once)
        cut = plan.transport.cut
        assert type(plan.transport) is (Ring if is_mlp else Broadcast) and (plan.core is None) == is_mlp
        groups = {1: 1, 3: 1, 4: min(kv_heads, 4)}[size]
        assert (cut.size, cut.groups) == (size, size if is_mlp else groups)
        for (module, leaf), weight in zip(plan.sharded, cut.weights, strict=True):
            shape = tuple(getattr(module, leaf).shape)
            assert (weight.shape, weight.dim) == (shape, 1 if module is last else 0)
            assert weight.bounds == cut_bounds(shape[weight.dim], size, 1 if is_mlp else groups)


def test_planning_changes_nothing() -> None:
    model = tiny("qwen3")
    before = {name: (type(m), list(m.__dict__)) for name, m in model.named_modules()}
    weights = {name: p.clone() for name, p in model.named_parameters()}
    planned(model)
    assert before == {name: (type(m), list(m.__dict__)) for name, m in model.named_modules()}
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


# ---- the user's plan

MLP = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
ATTENTION = {f"layers.*.self_attn.{x}_proj": "rowwise" if x == "o" else "colwise" for x in "qkvo"}


def cuts(plans: dict[str, FoldPlan]) -> dict[str, Any]:
    return {name: plan.transport.cut for name, plan in plans.items()}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_own_plan_with_or_without_the_base_models_prefix(prefix: str) -> None:
    model, own = tiny("llama"), {prefix + key: style for key, style in (ATTENTION | MLP).items()}
    assert cuts(planned(model, own)) == cuts(planned(model))


@pytest.mark.parametrize(
    ("own", "blocks"),
    [
        (MLP, ["0.mlp", "1.mlp"]),
        (ATTENTION, ["0.self_attn", "1.self_attn"]),
        ({key.replace("*", "1"): style for key, style in MLP.items()}, ["1.mlp"]),
        (ATTENTION | {"layers.*.self_attn.q_norm": "replicate"}, ["0.self_attn", "1.self_attn"]),
    ],
)
def test_own_plan_folds_what_it_names(own: dict[str, str], blocks: list[str]) -> None:
    assert list(planned(tiny("qwen3"), own)) == [f"model.layers.{block}" for block in blocks]


def test_star_is_one_name() -> None:
    """As in transformers: * does not reach over a dot, and a key is a whole name."""
    with pytest.raises(ValueError, match=r"no module of LlamaForCausalLM matches '\*\.up_proj'"):
        find_blocks(tiny("llama"), {"*.up_proj": "colwise"})
    with pytest.raises(ValueError, match="matches 'up_proj'"):
        find_blocks(tiny("llama"), {"up_proj": "colwise"})


@pytest.mark.parametrize(
    ("family", "own", "message"),
    [
        ("llama", MLP | {"layers.*.mlp.up_prj": "colwise"},
         "tsp.plan: no module of LlamaForCausalLM matches 'layers.*.mlp.up_prj'; "
         "did you mean 'model.layers.*.mlp.up_proj'?"),
        ("llama", MLP | {"transformer.h.*.attn.c_attn": "colwise"}, "matches 'transformer.h.*.attn.c_attn'"),
        ("qwen3", {"layers.*.self_attn.q_norm": "replicate"},
         "no block of Qwen3ForCausalLM matched the plan {'layers.*.self_attn.q_norm': 'replicate'}"),
        ("llama", {}, "no block of LlamaForCausalLM matched the plan {}"),
        ("gpt2", None, "GPT2LMHeadModel has no base_model_tp_plan; say in tsp.plan which linear layers are cut, for "),
    ],
)  # fmt: skip
def test_plans_that_match_nothing(family: str, own: dict[str, str] | None, message: str) -> None:
    with pytest.raises(ValueError) as info:
        planned(tiny(family), own)
    assert message in str(info.value)


# ---- blocks that cannot be folded

LAYER = "model.layers.0"
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, str] | None, str, str]] = {
    "fused qkv": ("phi3", {}, None, f"{LAYER}.self_attn (Phi3Attention)", "'qkv_proj': 'colwise_gather_output'"),
    "fused gate and up": ("glm", {}, None, f"{LAYER}.mlp (GlmMLP)", "'gate_up_proj': 'colwise_gather_output'"),
    "fused gate and up, user's": (
        "glm", {}, {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"},
        f"{LAYER}.mlp (GlmMLP)", "its layers do not share one ffn width: {'gate_up_proj': 72, 'down_proj': 36}",
    ),
    "norm over the width": (
        "olmo2", {}, None, f"{LAYER}.self_attn (Olmo2Attention)", "'q_proj': 'colwise_gather_output'",
    ),
    "norm over the width, user's": (
        "olmo2", {}, ATTENTION, f"{LAYER}.self_attn (Olmo2Attention)",
        "q_norm has a parameter of shape (40,) that the plan does not cut",
    ),
    "norm per head": (
        "cohere", {"use_qk_norm": True}, None, f"{LAYER}.self_attn (CohereAttention)",
        "q_norm has a parameter of shape (4, 10) that the plan does not cut",
    ),
    "sinks": (
        "gpt_oss", EXPERTS, ATTENTION, f"{LAYER}.self_attn (GptOssAttention)", "sinks has a parameter of shape (4,)",
    ),
    "activation with a parameter": (
        "apertus", {}, None, f"{LAYER}.mlp (ApertusMLP)",
        "act_fn has a parameter of shape (1,) that the plan does not cut",
    ),
    "experts": (
        "mixtral", EXPERTS, None, f"{LAYER}.mlp (MixtralSparseMoeBlock)", "its plan has {'experts': 'moe_tp_experts'}",
    ),
    "latent attention": (
        "deepseek_v2", {**EXPERTS, "n_routed_experts": 4}, None, f"{LAYER}.self_attn (DeepseekV2Attention)",
        "'kv_a_proj_with_mqa': 'mla_kv_a_proj'",
    ),
    "two rowwise": (
        "doge", {}, None, f"{LAYER}.self_attn (DogeAttention)",
        "it needs colwise layers and one rowwise layer at its end; the plan has {'q_proj': 'colwise'",
    ),
    "no rowwise": (
        "llama", {}, {"layers.*.mlp.up_proj": "colwise"}, f"{LAYER}.mlp (LlamaMLP)",
        "one rowwise layer at its end; the plan has {'up_proj': 'colwise'}",
    ),
    "rowwise alone": (
        "llama", {}, {"layers.*.mlp.down_proj": "rowwise"}, f"{LAYER}.mlp (LlamaMLP)",
        "it needs colwise layers and one rowwise layer at its end; the plan has {'down_proj': 'rowwise'}",
    ),
    "half a block": (
        "llama", {}, {k: v for k, v in MLP.items() if "gate" not in k}, f"{LAYER}.mlp (LlamaMLP)",
        "gate_proj has a parameter of shape (36, 24) that the plan does not cut, and every term would need it whole",
    ),
    "half of attention": (
        "llama", {}, {k: v for k, v in ATTENTION.items() if "v_proj" not in k}, f"{LAYER}.self_attn (LlamaAttention)",
        "v_proj has a parameter of shape (20, 24) that the plan does not cut",
    ),
    "MLP without a module": (
        "opt", {"ffn_dim": 36, "word_embed_proj_dim": 24, "dropout": 0.0},
        {"decoder.layers.*.fc1": "colwise", "decoder.layers.*.fc2": "rowwise"},
        "model.decoder.layers.0 (OPTDecoderLayer)", "self_attn.k_proj has a parameter of shape (24, 24)",
    ),
    "module of another kind": (
        "llama", {}, {"layers.*.mlp.act_fn": "colwise", **MLP}, f"{LAYER}.mlp (LlamaMLP)", "act_fn is a SiLU",
    ),
    "attention dropout": (
        "llama", {"attention_dropout": 0.1}, None, f"{LAYER}.self_attn (LlamaAttention)",
        "it drops activations inside ({'attention_dropout': 0.1}); set the rate to 0 in the model's config",
    ),
    "dropout module": (
        "gptj", {"head_dim": 6, "rotary_dim": 4, "resid_pdrop": 0.2}, None, "transformer.h.0.attn (GPTJAttention)",
        "'resid_dropout': 0.2",
    ),
    "narrow ffn": (
        "llama", {"intermediate_size": 3}, None, f"{LAYER}.mlp (LlamaMLP)",
        "3 rows cannot be cut into 4 slices of at least one row; use a smaller tsp.size",
    ),
    "narrow heads": (
        "llama", {"head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1}, None,
        f"{LAYER}.self_attn (LlamaAttention)", "2 rows cannot be cut into 4 slices of at least one row",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "sizes", "own", "block", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(
    family: str, sizes: dict[str, Any], own: dict[str, str] | None, block: str, reason: str
) -> None:
    with pytest.raises(ValueError) as info:
        planned(tiny(family, **sizes), own)
    message = str(info.value)
    assert message.startswith(f"{block} cannot be folded because ") and reason in message
    assert "to leave it whole, give tsp.plan with the linear layers of the other blocks only" in message


class Renamed(nn.Linear):
    """A subclass that computes what nn.Linear does."""


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_subclass_of_linear() -> None:
    """Accepted as long as it computes x W^T; one with a forward of its own (quantised, LoRA) is not."""
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.__class__ = Renamed
    assert len(planned(model)) == 4
    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    message = "model.layers.1.mlp (LlamaMLP) cannot be folded because up_proj is a Doubled"
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(model)


def test_attention_without_heads_in_its_config() -> None:
    model = tiny("llama")
    model.model.layers[0].self_attn.config = object()
    with pytest.raises(ValueError, match="its config tells neither num_key_value_heads nor num_attention_heads"):
        planned(model)


def test_widths_that_are_no_whole_number_of_heads() -> None:
    model = tiny("llama")
    model.model.layers[0].self_attn.v_proj = nn.Linear(24, 19, bias=False)
    message = "the widths {'v_proj': 19} are not a whole number of its 2 kv heads"
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(model)
