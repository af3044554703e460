"""Recompute policies and overlap change what is kept, computed twice and waited for, never a result."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_tsp import kernels
from ds_tsp.meter import LiveBytes
from ds_tsp.terms import BlockCall
from tests.dist.test_fold import TOLERANCE, assert_small, folded_pair, gradient_errors
from tests.harness import run_ranks
from tests.models import fp64_throughout, tokens

POLICIES = ("selective", "none", "full")
CHECKPOINTING = (None, {"use_reentrant": True}, {"use_reentrant": False})
LAYERS = 2


class Counts:
    """How often an attention kernel ran forward, and a term of a block."""

    def __init__(self) -> None:
        self.kernel = self.term = 0
        attend, run = kernels.attend, BlockCall.run

        def counted_attend(*args: Any) -> Any:
            self.kernel += 1
            return attend(*args)

        def counted_run(*args: Any) -> Any:
            self.term += 1
            return run(*args)

        self.patches = mock.patch.object(kernels, "attend", counted_attend), mock.patch.object(BlockCall, "run", counted_run)

    def take(self) -> tuple[int, int]:
        taken, self.kernel, self.term = (self.kernel, self.term), 0, 0
        return taken


def policy_job(family: str, size: int, schedule: str) -> dict[str, dict[str, Any]]:
    """Every policy under every kind of checkpointing: errors against the unsharded model, and what ran how often."""
    found = {}
    for policy, checkpointing in itertools.product(POLICIES, CHECKPOINTING):
        with fp64_throughout():
            tsp = {"schedule": schedule, "recompute": policy}
            reference, model, mesh = folded_pair(family, size, tsp=tsp, num_hidden_layers=LAYERS)
            if checkpointing is not None:
                model.train().gradient_checkpointing_enable(checkpointing)
            batch, counts = tokens(2, 19), Counts()
            expected = reference(**batch).loss
            expected.backward()
            with counts.patches[0], counts.patches[1]:
                got = model(**batch).loss
                forward = counts.take()
                got.backward()
                backward = counts.take()
            errors = gradient_errors(reference, model, mesh)
            errors["loss"] = (got - expected).abs().item()
        found[f"{policy} {checkpointing}"] = {"errors": errors, "forward": forward, "backward": backward}
    return found


@pytest.mark.parametrize(
    ("family", "size", "schedule"),
    [("llama", 1, "tsp"), ("llama", 2, "tsp"), ("llama", 2, "metp"), ("gemma2", 3, "metp"), ("qwen3", 4, "tsp")],
)
def test_policies(family: str, size: int, schedule: str) -> None:
    """The quadratic kernel runs once, but with "full"; projections are computed again, but with "none"."""
    for found in run_ranks(size, policy_job, family, size, schedule):
        for case, result in found.items():
            worst = max(result["errors"], key=result["errors"].__getitem__)
            assert result["errors"][worst] < TOLERANCE, f"{case}: {worst}"
            policy, checkpointed = case.split(" ")[0], "reentrant" in case
            kernel, terms = result["forward"]
            assert kernel and terms
            assert result["backward"] == (
                kernel if policy == "full" else 0,
                terms * ((policy != "none") + checkpointed),
            ), case


def twice_job(policy: str, checkpointing: Any) -> dict[str, float]:
    """Two forwards before their backwards, in either order, and a graph that is walked twice."""
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", 2, tsp={"recompute": policy})
        if checkpointing is not None:
            model.train().gradient_checkpointing_enable(checkpointing)
        for m in (reference, model):
            first, second = (m(**tokens(2, length, seed=length)).loss for length in (13, 18))
            first.backward(retain_graph=checkpointing != {"use_reentrant": True})
            second.backward()
            if checkpointing != {"use_reentrant": True}:  # which torch frees in any case
                first.backward()
            else:
                m(**tokens(2, 13, seed=13)).loss.backward()
        return gradient_errors(reference, model, mesh)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_interleaved_and_repeated_backwards(policy: str, checkpointing: Any) -> None:
    assert_small(run_ranks(2, twice_job, policy, checkpointing))


def bits_job(size: int, schedule: str) -> bool:
    """Whether all gradients, the loss and the logits are the same bits with and without overlap."""
    results: list[list[Tensor]] = []
    for overlap, policy in itertools.product((True, False), ("selective", "none")):
        tsp = {"schedule": schedule, "overlap": overlap, "recompute": policy}
        _, model, _ = folded_pair("llama", size, torch.float32, tsp, num_attention_heads=8, num_key_value_heads=4)
        loss = model(**tokens(2, 19)).loss
        loss.backward()
        logits = model(input_ids=tokens(2, 19)["input_ids"]).logits
        results.append([loss.detach(), logits.detach(), *(p.grad for p in model.parameters())])
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("size", "schedule"), [(1, "tsp"), (2, "metp"), (3, "tsp"), (4, "tsp"), (4, "metp")])
def test_overlap_and_policy_give_the_same_bits(size: int, schedule: str) -> None:
    assert run_ranks(size, bits_job, size, schedule) == [True] * size


def buffer_job(size: int, layers: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the buffers after a step, and after another one with more tokens."""
    sizes = {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32,
             "intermediate_size": 48, "vocab_size": 56, "num_hidden_layers": layers}  # fmt: skip
    _, model, _ = folded_pair("llama", size, dtype, **sizes)
    held = []
    for length in (16, 40):
        model(**tokens(2, length)).loss.backward()
        held.append(model.tsp_state.wire.buffer_bytes)
    return held[0], held[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_buffers_are_those_of_the_largest_block(size: int, dtype: torch.dtype) -> None:
    """docs/algorithm.md, "What a rank holds": they depend neither on the number of layers nor on that of tokens."""
    attention, ring = 4 * 32 * 32 // size, max(3 * 32 * 48, 56 * 32) // size  # a slice of attention; of MLP or head
    slots = min(3, size - 1)  # of attention weights: no more than other ranks have terms
    weights = slots * attention + min(2, size - 1) * ring
    gradients = min(2, size - 1) * attention + 2 * ring if size > 1 else 0
    bytes_ = weights * dtype.itemsize + gradients * 4
    for layers in (1, 3):
        held = run_ranks(size, buffer_job, size, layers, dtype)
        assert max(held) == (bytes_, bytes_)  # a rank whose own term falls between two others gets by with less
        assert all(few == many for few, many in held)


def kept_job(policy: str, checkpointing: bool) -> int:
    """Bytes that one layer's forward leaves alive: many weights, few tokens."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
             "intermediate_size": 160, "num_hidden_layers": 1}  # fmt: skip
    _, model, _ = folded_pair("llama", 4, torch.float32, {"recompute": policy}, **sizes)
    layer: nn.Module = model.model.layers[0]
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    held = []
    for _ in range(2):  # the first makes the buffers
        x = torch.randn(1, 8, 64, requires_grad=True)
        rotary = model.model.rotary_emb(x, torch.arange(8)[None])
        with LiveBytes() as meter:
            y = layer(x, position_embeddings=rotary)
            held.append(meter.current - meter.start)
        y.sum().backward()
        del y
    return held[-1]


def test_what_is_kept() -> None:
    """No policy keeps weights of other ranks; each keeps less than the next; a checkpointed layer keeps its attention."""
    token = 8 * 64 * 4  # bytes of [s, D]
    for plain in zip(*(run_ranks(4, kept_job, policy, False) for policy in ("full", "selective", "none")), strict=True):
        assert plain[0] + token <= plain[1] < plain[2]
        assert plain[2] < 30 * token < 4 * (4 * 64 * 64 + 3 * 64 * 160)  # weights of the layer
    full, selective = (run_ranks(4, kept_job, policy, True) for policy in ("full", "selective"))
    lse = 8 * 4 * 4
    assert [b - a for a, b in zip(full, selective, strict=True)] == [token + lse] * 4


def offload_job(policy: str) -> dict[str, float]:
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", 2, tsp={"recompute": policy})
        reference(**tokens(2, 19)).loss.backward()
        with torch.autograd.graph.save_on_cpu():
            loss = model(**tokens(2, 19)).loss
        loss.backward()
        return gradient_errors(reference, model, mesh)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_saved_can_be_offloaded(policy: str) -> None:
    assert_small(run_ranks(2, offload_job, policy))
