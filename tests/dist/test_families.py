"""Families and options beyond those of test_fold: equal to the unsharded model in fp64, or refused, never neither."""

from typing import Any

import pytest
import torch

from tests.dist.test_fold import assert_small, model_job
from tests.harness import run_ranks
from tests.models import tiny, tokens

LENGTH = 13  # P = 2 and 3 both pad it

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")


def plan(block: str, names: tuple[str, ...]) -> dict[str, Any]:
    """A user's plan that folds one kind of block; its last layer is the rowwise one."""
    return {"tsp": {"plan": {f"{block}.{name}": "rowwise" if name == names[-1] else "colwise" for name in names}}}


ATTENTION, MLP = plan("layers.*.self_attn", QKVO), plan("layers.*.mlp", GATED)
FEED_FORWARD = plan("layers.*.feed_forward", GATED)
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
SQUARE = {"head_dim": 6}  # H*E == D, which these families take for granted
EXPERTS = {
    "experts_implementation": "eager",  # the others have no fp64
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12,
    "attention_dropout": 0.0, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
}  # fmt: skip
SCALED = {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.4}
PER_LAYER = {"vocab_size_per_layer_input": 53, "hidden_size_per_layer_input": 6}
SHARED_KV = {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": WINDOW["layer_types"] * 2}
MLA = {"head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10, "kv_lora_rank": 8,
       "q_lora_rank": 8, "num_key_value_heads": 4, "first_k_dense_replace": 2}  # fmt: skip

# By transformers' own plan.
FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "codegen": {"rotary_dim": 4, **SQUARE},
    "cohere": {"attention_bias": True},
    "cohere2": WINDOW,
    "cwm": WINDOW,
    "ernie4_5": {"use_bias": True},
    "exaone4": WINDOW,
    "gemma": {},
    "gemma3_text": WINDOW,
    "gemma4_text": {**PER_LAYER, **WINDOW, "num_global_key_value_heads": 1, "global_head_dim": 12},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4, **SQUARE},
    "granite": SCALED,
    "helium": SQUARE,
    "hyperclovax": SCALED,
    "internlm3": {"bias": True, "qkv_bias": True},
    "jais2": {},
    "ministral": WINDOW,
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "nanochat": {},
    "nemotron": {},
    "olmo": {"clip_qkv": 0.3},
    "phi": {"hidden_size": 32, "head_dim": 8, "partial_rotary_factor": 0.5},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [0, 1]},
    "starcoder2": {"sliding_window": 5},
    "vaultgemma": WINDOW,
}  # fmt: skip

# Options that change the math of a block.
OPTIONS = [
    ("apertus", {"hidden_act": "silu"}),
    ("gemma4_text", {**PER_LAYER, "layer_types": WINDOW["layer_types"], "attention_k_eq_v": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("olmo", {"attention_bias": True}),
    ("phi", {"hidden_size": 32, "head_dim": 8, "qk_layernorm": True}),
    ("qwen2", WINDOW),
    ("qwen3", WINDOW),
    ("smollm3", {**WINDOW, "no_rope_layer_interval": 2}),
]

# By a user's plan; what it does not name stays whole, attention and experts too.
PLANNED = [
    ("codegen", plan("h.*.mlp", ("fc_in", "fc_out")) | {"rotary_dim": 4, **SQUARE}),
    ("deepseek_v3", {**MLP, **MLA, **EXPERTS}),
    ("ernie4_5_moe", {**ATTENTION, **EXPERTS}),
    ("flint", {**MLP, **MLA}),
    ("glm", ATTENTION),
    ("glm4", ATTENTION),
    ("gpt_oss", plan("layers.*.self_attn", ("sinks", *QKVO)) | WINDOW | EXPERTS),
    ("granitemoe", {**ATTENTION, **EXPERTS}),
    ("llama4_text", plan("model.layers.*.self_attn", QKVO) | EXPERTS
     | {"intermediate_size_mlp": 36, "attention_chunk_size": 128, "attn_temperature_tuning": False}),
    ("mixtral", {**ATTENTION, **EXPERTS, "sliding_window": 5}),
    ("phimoe", {**ATTENTION, **EXPERTS}),
    ("qwen2_moe", {**ATTENTION, **EXPERTS}),
    ("qwen3_moe", {**ATTENTION, **EXPERTS}),
]  # fmt: skip


def names(cases: list[tuple[str, Any]]) -> list[str]:
    return [f"{family}-{i}" for i, (family, _) in enumerate(cases)]


@pytest.mark.parametrize(("family", "sizes"), FAMILIES.items(), ids=FAMILIES)
def test_family(family: str, sizes: dict[str, Any]) -> None:
    assert_small(run_ranks(2, model_job, family, 2, LENGTH, **sizes))


@pytest.mark.parametrize("family", ["codegen", "cohere2", "gemma4_text", "gpt_neox", "phi", "smollm3"])
def test_family_on_three_ranks(family: str) -> None:
    assert_small(run_ranks(3, model_job, family, 3, LENGTH, **FAMILIES[family]))


@pytest.mark.parametrize(("family", "sizes"), OPTIONS, ids=names(OPTIONS))
def test_options(family: str, sizes: dict[str, Any]) -> None:
    assert_small(run_ranks(2, model_job, family, 2, LENGTH, **sizes))


@pytest.mark.parametrize(("family", "sizes"), PLANNED, ids=names(PLANNED))
def test_planned(family: str, sizes: dict[str, Any]) -> None:
    assert_small(run_ranks(2, model_job, family, 2, LENGTH, **sizes))


# ---- rotary embeddings whose frequencies depend on the length

ROTARY: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 8, "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
                 "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0]},
}  # fmt: skip


def rotary(kind: str) -> dict[str, Any]:
    return {
        "max_position_embeddings": 8 if kind == "dynamic" else 32,
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **ROTARY.get(kind, {})},
    }


@pytest.mark.parametrize(("size", "layout"), [(2, "contiguous"), (3, "zigzag")])
@pytest.mark.parametrize("kind", ROTARY)
def test_scaled_rotary(kind: str, size: int, layout: str) -> None:
    """Contiguous: the first rank's own positions stay below the length at which the frequencies change."""
    assert_small(run_ranks(size, model_job, "llama", size, LENGTH, tsp={"layout": layout}, **rotary(kind)))


@pytest.mark.parametrize("kind", ROTARY)
def test_scaling_is_active(kind: str) -> None:
    """Else the test above would compare a rotary embedding that is not scaled with itself."""
    ids = tokens(2, LENGTH)["input_ids"]
    scaled, plain = (tiny("llama", **rotary(k))(input_ids=ids).logits for k in (kind, "default"))
    assert (scaled - plain).abs().max() > 1e-3


# ---- what would give other numbers without an error: equal, or refused by a ValueError on every rank

DENSE = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0, "dropout": 0.0}
SILENT = {
    # Dropout by a function, in training only; each term would drop its own.
    "residual dropout": ("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.1}),
    "residual dropout 2": ("starcoder2", {"residual_dropout": 0.1}),
    # Later layers read K/V that a folded layer left in a dict: outside of its graph, of one head group only.
    "shared K/V": ("gemma4_text", {**PER_LAYER, **SHARED_KV}),
    "shared K/V, attention whole": ("gemma4_text", {**MLP, **PER_LAYER, **SHARED_KV, "sliding_window": 5}),
    # One value per head, as many as a head is wide (gpt-oss: 64 and 64): taken for a norm of a head's width.
    "sinks": ("gpt_oss", {**ATTENTION, **EXPERTS, "head_dim": 4}),
    # The window or chunk is in the mask only, and no mask is made.
    "window in the mask": ("phimoe", {**ATTENTION, **EXPERTS, "sliding_window": 5}),
    "windows in masks": ("qwen2_moe", {**ATTENTION, **EXPERTS, **WINDOW}),
    "chunked attention": ("llama4_text", plan("model.layers.*.self_attn", QKVO) | EXPERTS
                          | {"intermediate_size_mlp": 36, "attention_chunk_size": 5}),
    # Positions counted from the local tokens, not from position_ids.
    "own positions": ("llama4_text", plan("model.layers.*.self_attn", QKVO) | EXPERTS
                      | {"intermediate_size_mlp": 36, "attention_chunk_size": 128, "no_rope_layers": [0, 1],
                         "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5}),
    # view(B, -1, num_heads, E): half the heads become half the tokens.
    "own head count": ("opt", plan("decoder.layers.*.self_attn", (*QKVO[:3], "out_proj")) | DENSE
                       | {"ffn_dim": 36, "word_embed_proj_dim": 24}),
    # Attention that does not ask transformers' attention interface: local tokens only.
    "own attention": ("gpt_neo", plan("h.*.mlp", ("c_fc", "c_proj")) | DENSE
                      | {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}),
    "attention not declared": ("biogpt", plan("layers.*.self_attn", (*QKVO[:3], "out_proj"))
                               | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "alibi": ("bloom", plan("h.*.mlp", ("dense_h_to_4h", "dense_4h_to_h")) | DENSE | {"n_head": 4}),
    # Tokens mixed by something that is not attention: local tokens only.
    "convolution": ("lfm2", plan("layers.*.feed_forward", ("w1", "w3", "w2"))
                    | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "mamba": ("jamba", {**FEED_FORWARD, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4,
                        "expert_layer_period": 100, "expert_layer_offset": 99, "attn_layer_offset": 1,
                        "attn_layer_period": 2}),
    "mamba beside attention": ("falcon_h1", {**FEED_FORWARD, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
                                             "mamba_d_state": 8}),
    "linear attention": ("qwen3_next", {**MLP, **EXPERTS, "mlp_only_layers": [0, 1],
                                        "layer_types": ["linear_attention", "full_attention"]}),
    # A product of means over tokens is no sum over ranks.
    "router loss": ("mixtral", {**ATTENTION, **EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.5}),
}  # fmt: skip


def silent_job(family: str, sizes: dict[str, Any]) -> dict[str, float] | str:
    try:
        return model_job(family, 2, LENGTH, **sizes)
    except ValueError as refusal:
        torch.distributed.barrier()  # a rank that computes on would have met other collectives, and failed
        return str(refusal)


@pytest.mark.parametrize(("family", "sizes"), SILENT.values(), ids=SILENT)
def test_never_silently_wrong(family: str, sizes: dict[str, Any]) -> None:
    results = run_ranks(2, silent_job, family, sizes)
    if any(isinstance(result, str) for result in results):
        assert results == [results[0]] * 2
    else:
        assert_small(results)
