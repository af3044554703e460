"""What a pipeline is made of, and what is refused before it is made: no processes."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ds_tsp.blocks import find_blocks_inside
from ds_tsp.config import parse, pipeline_settings
from ds_tsp.mesh import Mesh
from ds_tsp.microbatches import Drawn, draw
from ds_tsp.parts import find_parts
from ds_tsp.stage import Stage
from tests.models import tiny

CONFIG: dict[str, Any] = {"train_batch_size": 8, "tsp": {"size": 2}}


def test_world_is_stages_times_dp_times_size() -> None:
    assert parse(CONFIG, 8, stages=4).size == 2
    for config, stages, message in [
        (CONFIG, 3, "3 pipeline stages do not divide world size 8; use 1, 2, 4 or 8"),
        (CONFIG, 0, "0 pipeline stages do not divide world size 8"),
        (CONFIG, 8, "tsp.size=2 does not divide the 1 ranks of each of 8 stages of world size 8; use 1"),
        ({**CONFIG, "train_batch_size": 3}, 2, "is not a multiple of dp=2 (world size 8 / tsp.size 2 / 2 stages) = 2"),
    ]:
        with pytest.raises(ValueError) as raised:
            parse(config, 8, stages)
        assert message in str(raised.value)


def test_partitioned_activations_are_switched_off() -> None:
    """DeepSpeed's default is to cut them; only what was not said is told."""
    config = {**CONFIG, "pipeline": {"activation_checkpoint_interval": 2, "grad_partitioned": False}}
    settings, off = pipeline_settings(config, 2)
    expected = {"activation_checkpoint_interval": 2, "grad_partitioned": False, "pipe_partitioned": False}
    assert settings["pipeline"] == expected and off == ["pipeline.pipe_partitioned"]
    assert "pipe_partitioned" not in config["pipeline"]  # the user's dict stays as it is
    assert pipeline_settings(config, 1) == (config, [])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pipeline": {"pipe_partitioned": True}}, "pipeline.pipe_partitioned=true cannot be used with tsp.size=2"),
        ({"pipeline": {"grad_partitioned": True}}, "pipeline.grad_partitioned=true cannot be used"),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            "activation_checkpointing.partition_activations",
        ),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage=2: DeepSpeed's pipeline engine allows 0 and 1"),
        ({"zero_optimization": {"stage": 3}}, "ZeRO-3 are incompatible with pipeline parallelism"),
    ],
)
def test_refused_settings(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        pipeline_settings({**CONFIG, **more}, 2)
    assert message in str(raised.value)


def test_parts_of_a_model() -> None:
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    for family in ("llama", "gemma2"):
        parts = find_parts(tiny(family))
        assert parts.names() == names and parts.tied == (family == "gemma2")


def test_weights_are_made_for_own_parts_only() -> None:
    """By transformers' own rule, the same whatever else is made; what is not the stage's own stays without weights."""
    config = tiny("llama").config
    one, other = Stage.of(config, seed=3), Stage.of(config, seed=3)
    first, again = one.build("model.layers.1"), [other.build(n) for n in ("model.norm", "model.layers.1")][1]
    for (name, a), b in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
        expected = 1.0 if "norm" in name else 0.0
        assert abs(a.mean().item() - expected) < 0.01 and ("norm" in name or 0.01 < a.std() < 0.03)
    assert {n.split(".")[2] for n, p in one.model.named_parameters() if not p.is_meta} == {"1"}
    assert one.parameters_of("model.layers.0") == sum(p.numel() for p in first.parameters())


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("gpt2", {}, "a pipeline of GPT2LMHeadModel would leave out transformer.wpe.weight"),
        ("opt", {}, "needs a causal language model with a decoder and an output layer; got OPTForCausalLM"),
        (
            "granite",
            {"embedding_multiplier": 2.0},
            "GraniteModel does more to the hidden states than to hand them from",
        ),
        ("phi", {"embd_pdrop": 0.1}, "PhiModel does more to the hidden states than to hand them from"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_models_that_are_no_chain_of_layers_are_refused(family: str, sizes: Any, message: str, weights: bool) -> None:
    model = tiny(family, **sizes).eval()
    with pytest.raises(ValueError, match=message):
        Stage.of(model if weights else model.config, seed=1)


def test_a_part_that_nothing_initialises_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny("llama").config).to("meta")
    stage = Stage.of(model, seed=1)
    stage.model.model.layers[0].register_parameter("extra", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(
        ValueError, match="model.layers.0.extra is on the meta device and LlamaForCausalLM does not init"
    ):
        stage.build("model.layers.0")


def test_what_a_pipeline_would_lose_is_refused() -> None:
    model = tiny("llama")
    model.model.register_buffer("scale", torch.ones(1))
    with pytest.raises(ValueError, match="would leave out model.scale"):
        Stage.of(model, seed=1)
    model = tiny("llama")
    model.model.norm.to("meta")
    with pytest.raises(ValueError, match="model.norm.weight is on the meta device and other weights are not"):
        Stage.of(model, seed=1)


def test_blocks_are_found_in_layers_of_any_name() -> None:
    model = tiny("llama")
    mine = nn.ModuleDict({"3": nn.ModuleDict({"block": model.model.layers[0]}), "4": model.model.layers[1].mlp})
    found = find_blocks_inside(mine, None)
    assert {name: sorted(styles) for name, styles in found.items()} == {
        "3.block.self_attn": ["k_proj", "o_proj", "q_proj", "v_proj"],
        "3.block.mlp": ["down_proj", "gate_proj", "up_proj"],
    }


def test_a_stage_in_the_middle_reads_nothing() -> None:
    mesh = Mesh(1, 0, None, (2,), 1, 0, None, (2,), stages=4, stage=2)
    assert draw(None, 3, mesh, with_loss=True) == [Drawn(0)] * 3
