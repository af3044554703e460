"""The folded model equals the unsharded one: outputs, loss and every gradient, in fp64, on P = 1, 2, 3, 4 ranks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_tsp.config import TSPConfig
from ds_tsp.grad_sync import sum_replicated_gradients
from ds_tsp.inject import inject
from ds_tsp.layout import SequenceLayout
from ds_tsp.mesh import Mesh
from tests.harness import run_ranks
from tests.models import fp64_throughout, tiny, tokens

TOLERANCE = 1e-10


def folded_pair(family: str, size: int, dtype: torch.dtype = torch.float64, tsp: dict | None = None, **sizes: Any):
    """An unsharded model, and a copy folded over `size` ranks."""
    reference = tiny(family, **sizes).to(dtype)
    model = copy.deepcopy(reference)
    config = TSPConfig(size=size, **(tsp or {}))
    mesh = Mesh.create(size, config.layout)
    inject(model, config, mesh)
    sum_replicated_gradients([p for p in model.parameters() if not hasattr(p, "tsp_cut")], mesh)
    return reference, model, mesh


def mine(full: Tensor, parameter: nn.Parameter, mesh: Mesh) -> Tensor:
    """The part of an unsharded parameter's tensor that belongs to `parameter`, sharded or not."""
    return parameter.tsp_cut.take(full, mesh.rank) if hasattr(parameter, "tsp_cut") else full


def gradient_errors(reference: nn.Module, model: nn.Module, mesh: Mesh) -> dict[str, float]:
    """Largest difference per parameter; a parameter without a gradient on one side only is infinitely wrong."""
    errors = {}
    names = dict(reference.named_parameters())
    assert list(names) == [n for n, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        expected = names[name].grad
        if (expected is None) != (parameter.grad is None):
            errors[name] = float("inf")
        elif expected is not None:
            errors[name] = (parameter.grad - mine(expected, parameter, mesh)).abs().max().item()
    return errors


def model_job(family: str, size: int, length: int, tsp: dict | None = None, **sizes: Any) -> dict[str, float]:
    with fp64_throughout():
        reference, model, mesh = folded_pair(family, size, tsp=tsp, **sizes)
        batch = tokens(2, length)
        expected, got = reference(**batch).loss, model(**batch).loss
        expected.backward()
        got.backward()
        errors = gradient_errors(reference, model, mesh)
        errors["loss"] = (got - expected).abs().item()
        ids = batch["input_ids"]
        errors["logits"] = (model(input_ids=ids).logits - reference(input_ids=ids).logits).abs().max().item()
    return errors


def assert_small(results: list[dict[str, float]], tolerance: float = TOLERANCE) -> None:
    for rank, errors in enumerate(results):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < tolerance, f"rank {rank}: {worst} differs by {errors[worst]}"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
def test_whole_model_equals_unsharded(family: str, size: int) -> None:
    assert_small(run_ranks(size, model_job, family, size, length=19))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_metp_equals_unsharded(family: str, layout: str, size: int) -> None:
    """K/V go round a ring: full attention, and windows that end inside of another rank's chunk."""
    tsp = {"schedule": "metp", "layout": layout}
    for length, window in ((19, 5), (33, 14)):
        sizes = {} if family == "llama" else {"sliding_window": window}
        assert_small(run_ranks(size, model_job, family, size, length, tsp=tsp, **sizes))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2), (8, 4), (6, 6)])
def test_any_number_of_heads(size: int, heads: int, kv_heads: int) -> None:
    """P above, below and coprime to the kv heads; slices of heads, and of uneven size."""
    job = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": 37}
    assert_small(run_ranks(size, model_job, "llama", size, length=13, attention_bias=True, mlp_bias=True, **job))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_length(size: int, layout: str) -> None:
    for length in sorted({1, 2, size - 1, 2 * size - 1, 2 * size, 2 * size + 1, 4 * size + 3} - {0}):
        assert_small(run_ranks(size, length_job, size, layout, length))


def length_job(size: int, layout: str, length: int) -> dict[str, float]:
    if length > 1:
        return model_job("llama", size, length, tsp={"layout": layout}, num_hidden_layers=1)
    with fp64_throughout():  # one token predicts nothing: the loss is a mean over no token
        reference, model, _ = folded_pair("llama", size, tsp={"layout": layout}, num_hidden_layers=1)
        batch = tokens(2, length)
        loss = model(**batch).loss
        loss.backward()
        gradients = [p.grad.abs().max().item() for p in model.parameters()]
        ids = batch["input_ids"]
        difference = (model(input_ids=ids).logits - reference(input_ids=ids).logits).abs().max().item()
    return {"loss": loss.item(), "gradients": max(gradients), "logits": difference}


def block_job(kind: str, size: int, kv_heads: int) -> dict[str, float]:
    """One attention or MLP block alone: output, input gradient, weight gradients."""
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", size, num_key_value_heads=kv_heads, attention_bias=True)
        sequence = SequenceLayout(24, size)
        mine_ = sequence.positions(mesh.rank)
        x = torch.randn(2, 24, 24, dtype=torch.float64)
        dy = torch.randn(2, 24, 24, dtype=torch.float64)
        whole, part = x.clone().requires_grad_(), x[:, mine_].clone().requires_grad_()
        blocks = [m.model.layers[0].get_submodule(kind) for m in (reference, model)]
        if kind == "mlp":
            expected, got = blocks[0](whole), blocks[1](part)
        else:
            positions = torch.arange(24)[None]
            rotary = reference.model.rotary_emb
            mask = torch.full((24, 24), float("-inf"), dtype=torch.float64).triu(1)[None, None]
            expected = blocks[0](whole, position_embeddings=rotary(x, positions), attention_mask=mask)[0]
            got = blocks[1](hidden_states=part, position_embeddings=rotary(x, positions[:, mine_]))[0]
        expected.backward(dy)
        got.backward(dy[:, mine_])
        errors = gradient_errors(blocks[0], blocks[1], mesh)
        errors["output"] = (got - expected[:, mine_]).abs().max().item()
        errors["dx"] = (part.grad - whole.grad[:, mine_]).abs().max().item()
    return errors


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_alone(size: int, kv_heads: int) -> None:
    assert_small(run_ranks(size, block_job, "self_attn", size, kv_heads))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mlp_alone(size: int) -> None:
    assert_small(run_ranks(size, block_job, "mlp", size, kv_heads=2))
