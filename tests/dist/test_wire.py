"""Bytes on the wire, as DeepSpeed's comms logger counts them, equal the formulas of docs/algorithm.md to the byte."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.dist.test_fold import folded_pair
from tests.harness import run_ranks
from tests.models import tokens

B, LENGTH, LAYERS = 2, 24, 2
# What a logged message of one byte brings to each rank, on average over the group's ranks.
RECEIVED = {
    "broadcast": lambda p: Fraction(p - 1, p),  # all but the owner receive it
    "reduce": lambda p: Fraction(p - 1, p),
    "all_to_all_single": lambda p: Fraction(1),  # a ring hop: what is sent is received by the next rank
    "all_gather_into_tensor": lambda p: Fraction(p - 1),  # logged: the own part
    "reduce_scatter_tensor": lambda p: Fraction(p - 1, p),  # logged: all parts
}


def logged() -> dict[str, int]:
    """Bytes per operation since the last call."""
    counted = {op: sum(size * entry[0] for size, entry in sizes.items()) for op, sizes in dist.comm.comms_logger.comms_dict.items()}
    dist.reset_log()
    return counted


def wire_job(size: int, dtype: torch.dtype, sizes: dict[str, int], checkpointing: bool) -> dict[str, dict[str, int]]:
    _, model, mesh = folded_pair("llama", size, dtype, num_hidden_layers=LAYERS, **sizes)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logger = dist.comm.comms_logger
    logger.enabled = logger.prof_all = True
    try:
        dist.reset_log()
        loss = model(**tokens(B, LENGTH)).loss
        forward = logged()
        loss.backward()
        return {"forward": forward, "backward": logged()}
    finally:
        logger.enabled = logger.prof_all = False


def formulas(size: int, sizes: dict[str, int], beta: int) -> dict[str, Fraction]:
    """Received bytes per rank and layer: docs/algorithm.md; h width, r kv/q heads, F ffn/h, N tokens, e = (P-1)/P."""
    h, heads, kv = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    assert heads * sizes["head_dim"] == h
    r, ffn, n, e = Fraction(kv, heads), Fraction(sizes["intermediate_size"], h), B * LENGTH, Fraction(size - 1, size)
    attention, mlp, activations = (2 + 2 * r) * h * h, 3 * ffn * h * h, 2 * n * h * r
    gradient = max(beta, 4)  # weight and K/V gradients are summed, and travel, in fp32
    return {
        "broadcast": attention * e * beta,
        "reduce": attention * e * gradient,
        "mlp weights": mlp * e * beta,
        "mlp gradients": mlp * gradient,  # P hops of 1/P
        "K/V": activations * e * beta,
        "dK/dV": activations * e * gradient,
    }


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 48}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 2), (4, 4), (1, 4)])
def test_bytes_equal_formulas(size: int, kv_heads: int, dtype: torch.dtype, checkpointing: bool) -> None:
    sizes = {**SIZES, "num_key_value_heads": kv_heads}
    want = {name: LAYERS * value for name, value in formulas(size, sizes, dtype.itemsize).items()}
    batch_check = 12 * 8 if size > 1 else 0  # one all-gather of 12 integers per forward
    for logs in run_ranks(size, wire_job, size, dtype, sizes, checkpointing):
        got: dict[str, dict[str, Any]] = {
            phase: {op: RECEIVED[op](size) * count for op, count in log.items() if op in RECEIVED}
            for phase, log in logs.items()
        }
        again = 2 if checkpointing else 1  # HF's checkpointing runs the layer's forward once more in backward
        if size == 1:
            assert not any(got["forward"].values()) and not any(got["backward"].values())
            continue
        forward, backward = got["forward"], got["backward"]
        assert forward == {
            "broadcast": want["broadcast"],
            "all_to_all_single": want["mlp weights"],
            "all_gather_into_tensor": want["K/V"] + batch_check * (size - 1),
        }
        assert backward == {
            "broadcast": again * want["broadcast"],
            "reduce": want["reduce"],
            "all_to_all_single": again * want["mlp weights"] + want["mlp gradients"],
            "all_gather_into_tensor": again * want["K/V"],
            "reduce_scatter_tensor": want["dK/dV"],
        }


@pytest.mark.parametrize("size", [2, 4])
def test_no_activation_is_reduced(size: int) -> None:
    """Beside the fold: an all-reduce of the loss, and of the gradient of each replicated parameter."""
    sizes = {**SIZES, "num_key_value_heads": 2}
    for logs in run_ranks(size, wire_job, size, torch.float32, sizes, False):
        replicated = 2 * 53 * 32 + (2 * LAYERS + 1) * 32  # embedding, head, norms
        assert logs["forward"]["all_reduce"] == 4 and logs["backward"]["all_reduce"] == 4 * replicated
