"""Packed documents, padding on both sides, attention sinks, bidirectional attention: exact to the unsharded model.

The reference runs without a K/V cache, as in training: with one, transformers does not look for packed documents.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_tsp.config import TSPConfig
from ds_tsp.grad_sync import sum_replicated_gradients
from ds_tsp.inject import inject
from ds_tsp.mesh import Mesh
from tests.dist.test_fold import assert_small, folded_pair, gradient_errors
from tests.harness import run_ranks
from tests.models import fp64_throughout, tiny, tokens

LENGTH = 26


def packed(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def padded(left: tuple[int, ...], right: tuple[int, ...]) -> dict[str, Tensor]:
    """A batch whose rows are padded; padding, and the first token after it, which padding predicts, have no label."""
    batch = tokens(len(left), LENGTH)
    index = torch.arange(LENGTH)
    real = (index >= torch.tensor(left)[:, None]) & (index < LENGTH - torch.tensor(right)[:, None])
    # Where no padding is in front, the first token is predicted by nothing anyway.
    learned = real & (index > torch.tensor(left)[:, None])
    return {**batch, "attention_mask": real.long(), "labels": batch["labels"].masked_fill(~learned, -100)}


BATCHES: dict[str, dict[str, Tensor]] = {
    "packed": {**tokens(1, LENGTH), "position_ids": packed(7, 1, 11, 7)},
    "packed, all rows alike": {**tokens(3, LENGTH), "position_ids": packed(9, 17).expand(3, -1)},
    "packed, one row of positions": {**tokens(2, LENGTH), "position_ids": packed(13, 13)},
    "packed, rows differ": {**tokens(3, LENGTH),
                            "position_ids": torch.cat([packed(5, 21), packed(26), packed(2, 2, 20, 2)])},
    "a document per token": {**tokens(1, LENGTH), "position_ids": torch.zeros(1, LENGTH, dtype=torch.int64)},
    "padding on the right": padded((0, 0, 0), (0, 9, 25)),
    "padding on the left": padded((0, 9, 24), (0, 0, 0)),
    "padding on both": padded((3, 0, 7), (4, 11, 0)),
    "a row of padding": padded((0, 26), (5, 0)),
}  # fmt: skip


def document_job(family: str, size: int, name: str, checkpointing: bool = False, **tsp: str) -> dict[str, float]:
    with fp64_throughout():
        reference, model, mesh = folded_pair(family, size, tsp=tsp)
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = BATCHES[name]
        expected, got = reference(**batch, use_cache=False).loss, model(**batch).loss
        expected.backward()
        model(**tokens(2, 9)).loss  # another batch in between: the recompute must not take its documents
        got.backward()
        return {"loss": (got - expected).abs().item(), **gradient_errors(reference, model, mesh)}


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_documents(name: str, size: int) -> None:
    assert_small(run_ranks(size, document_job, "llama", size, name))


@pytest.mark.parametrize("name", ["packed, rows differ", "padding on both"])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_documents_with_windows(family: str, name: str) -> None:
    assert_small(run_ranks(3, document_job, family, 3, name))
    assert_small(run_ranks(4, document_job, family, 4, name, checkpointing=True, layout="contiguous"))


@pytest.mark.parametrize(("family", "size"), [("llama", 4), ("gemma2", 3)])
def test_documents_on_the_ring(family: str, size: int) -> None:
    for i, name in enumerate(BATCHES):
        layout = ("zigzag", "contiguous")[i % 2]
        assert_small(run_ranks(size, document_job, family, size, name, schedule="metp", layout=layout))


def flash_keys_job(size: int, keys: dict[str, Any]) -> dict[str, float]:
    """What transformers' flash path is given: cu_seq_lens or seq_idx, with or without positions."""
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", size)
        batch = tokens(1, LENGTH)
        expected = reference(**batch, position_ids=packed(7, 1, 11, 7), use_cache=False).loss
        got = model(**batch, **keys).loss
        expected.backward()
        got.backward()
        return {"loss": (got - expected).abs().item(), **gradient_errors(reference, model, mesh)}


CUMULATIVE = torch.tensor([0, 7, 8, 19, 26], dtype=torch.int32)


@pytest.mark.parametrize(
    "keys",
    [
        {"cu_seq_lens_q": CUMULATIVE, "cu_seq_lens_k": CUMULATIVE, "max_length_q": 11, "max_length_k": 11},
        {"cu_seq_lens_q": CUMULATIVE, "cu_seq_lens_k": CUMULATIVE, "position_ids": packed(7, 1, 11, 7)},
        {"seq_idx": torch.repeat_interleave(torch.arange(4), torch.tensor([7, 1, 11, 7]))[None]},
    ],
)
def test_keys_of_the_flash_path(keys: dict[str, Any]) -> None:
    assert_small(run_ranks(3, flash_keys_job, 3, keys))


SINK_PLAN = {
    **{f"layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")},
    "layers.*.self_attn.o_proj": "rowwise",
}


def sinks_job(size: int, plan: dict[str, str], schedule: str) -> dict[str, float]:
    """gpt-oss: a learned sink per head, windows, and experts that stay whole."""
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
             "sliding_window": 5, "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
    with fp64_throughout():
        reference, model, mesh = folded_pair("gpt_oss", size, tsp={"plan": plan, "schedule": schedule}, **sizes)
        batch = tokens(2, 13)
        expected, got = reference(**batch, use_cache=False).loss, model(**batch).loss
        expected.backward()
        got.backward()
        return {"loss": (got - expected).abs().item(), **gradient_errors(reference, model, mesh)}


@pytest.mark.parametrize("schedule", ["tsp", "metp"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_attention_sinks(size: int, schedule: str) -> None:
    assert_small(run_ranks(size, sinks_job, size, SINK_PLAN, schedule))


def bidirectional_job(size: int, length: int, left: tuple[int, ...] = (0, 0), right: tuple[int, ...] = (0, 0),
                      schedule: str = "tsp") -> dict[str, float]:  # fmt: skip
    """A decoder used as an encoder: config.is_causal = False. Hidden states of real tokens, and gradients from them."""
    with fp64_throughout():
        reference = tiny("llama", is_causal=False).double().model
        model, mesh = copy.deepcopy(reference), Mesh.create(size)
        inject(model, TSPConfig(size=size, schedule=schedule), mesh)
        sum_replicated_gradients([p for p in model.parameters() if not hasattr(p, "tsp_cut")], mesh)
        index = torch.arange(length)
        real = (index >= torch.tensor(left)[:, None]) & (index < length - torch.tensor(right)[:, None])
        batch = {"input_ids": tokens(2, length)["input_ids"], "attention_mask": real.long()}
        expected, got = (m(**batch).last_hidden_state * real[..., None] for m in (reference, model))
        weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
        (expected * weight).sum().backward()
        (got * weight).sum().backward()
        return {"hidden": (got - expected).abs().max().item(), **gradient_errors(reference, model, mesh)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [12, 13])
def test_bidirectional(length: int, size: int) -> None:
    assert_small(run_ranks(size, bidirectional_job, size, length))


@pytest.mark.parametrize(("left", "right"), [((4, 0), (0, 0)), ((0, 0), (0, 5)), ((2, 3), (4, 1))])
@pytest.mark.parametrize("size", [2, 3])
def test_bidirectional_with_padding(size: int, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Where tokens look ahead, neither padding nor what fills the chunks up may be seen."""
    for schedule in ("tsp", "metp"):
        assert_small(run_ranks(size, bidirectional_job, size, 13, left, right, schedule))


def gpt2_job(size: int) -> dict[str, float]:
    """Learned positions; an MLP of Conv1D layers, folded; an attention that stays whole, over the sharded sequence."""
    plan = {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"}
    with fp64_throughout():
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                 "attn_pdrop": 0.0, "n_inner": 37, "tie_word_embeddings": True}  # fmt: skip
        reference, model, mesh = folded_pair("gpt2", size, tsp={"plan": plan}, **sizes)
        batch = tokens(2, 13)
        expected, got = reference(**batch, use_cache=False).loss, model(**batch).loss
        expected.backward()
        got.backward()
        return {"loss": (got - expected).abs().item(), **gradient_errors(reference, model, mesh)}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_learned_positions_and_an_attention_left_whole(size: int) -> None:
    assert_small(run_ranks(size, gpt2_job, size))
