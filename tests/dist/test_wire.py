"""Bytes on the wire, as DeepSpeed's comms logger counts them, equal the formulas of docs/algorithm.md to the byte."""

from fractions import Fraction
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

from ds_tsp.data import FACTS
from ds_tsp.layout import SequenceLayout, cut_bounds
from tests.dist.test_fold import folded_pair
from tests.harness import run_ranks
from tests.models import tiny, tokens

B, LENGTH, LAYERS = 2, 24, 2
BATCH_CHECK = 8 * (len(FACTS) + 1)  # bytes of a rank's row in the one all-gather per forward
# What a logged message of one byte brings to each rank, on average over the group's ranks.
RECEIVED = {
    "broadcast": lambda p: Fraction(p - 1, p),  # all but the owner receive it
    "reduce": lambda p: Fraction(p - 1, p),
    "all_to_all_single": lambda p: Fraction(1),  # a ring hop: what is sent is received by the next rank
    "all_gather_into_tensor": lambda p: Fraction(p - 1),  # logged: the own part
    "reduce_scatter_tensor": lambda p: Fraction(p - 1, p),  # logged: all parts
}


def all_reduced(p: int) -> Fraction:  # a reduce-scatter and an all-gather
    return 2 * Fraction(p - 1, p)


def logged() -> dict[str, int]:
    """Bytes per operation since the last call."""
    counted = {op: sum(size * entry[0] for size, entry in sizes.items()) for op, sizes in dist.comm.comms_logger.comms_dict.items()}
    dist.reset_log()
    return counted


def wire_job(size: int, dtype: torch.dtype, sizes: dict[str, int], checkpointing: bool = False, **tsp: Any):
    tsp = {"shard_vocab": False, **tsp}
    _, model, _ = folded_pair("llama", size, dtype, tsp, num_hidden_layers=LAYERS, **sizes)
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


# Policy and HF's checkpointing -> how often weights and K/V travel in backward. A checkpointed layer's forward runs once
# more, with its weights; where the policy is "full" its attention does, too.
AGAIN = {
    ("selective", False): (1, 1),
    ("selective", True): (2, 1),
    ("none", False): (1, 1),
    ("none", True): (2, 1),
    ("full", False): (1, 2),
    ("full", True): (2, 2),
}
SPAN = [(case, torch.float32) for case in AGAIN]
SPAN += [(("selective", checkpointing), dtype) for checkpointing in (False, True) for dtype in (torch.bfloat16, torch.float64)]


FIRST = SPAN[:2]


@pytest.mark.parametrize(
    ("size", "kv_heads", "case", "dtype"),
    [(2, 2, *span) for span in SPAN] + [(p, kv, *span) for p, kv in ((4, 2), (4, 4), (1, 4)) for span in FIRST],
)
def test_bytes_equal_formulas(size: int, kv_heads: int, case: tuple[str, bool], dtype: torch.dtype) -> None:
    sizes, (weights, kv) = {**SIZES, "num_key_value_heads": kv_heads}, AGAIN[case]
    want = {name: LAYERS * value for name, value in formulas(size, sizes, dtype.itemsize).items()}
    for logs in run_ranks(size, wire_job, size, dtype, sizes, case[1], recompute=case[0]):
        got: dict[str, dict[str, Any]] = {
            phase: {op: RECEIVED[op](size) * count for op, count in log.items() if op in RECEIVED}
            for phase, log in logs.items()
        }
        if size == 1:
            assert not any(got["forward"].values()) and not any(got["backward"].values())
            continue
        forward, backward = got["forward"], got["backward"]
        assert forward == {
            "broadcast": want["broadcast"],
            "all_to_all_single": want["mlp weights"],
            "all_gather_into_tensor": want["K/V"] + BATCH_CHECK * (size - 1),
        }
        assert backward == {
            "broadcast": weights * want["broadcast"],
            "reduce": want["reduce"],
            "all_to_all_single": weights * want["mlp weights"] + want["mlp gradients"],
            "all_gather_into_tensor": kv * want["K/V"],
            "reduce_scatter_tensor": want["dK/dV"],
        }


@pytest.mark.parametrize(
    ("size", "kv_heads", "case", "dtype"),
    [(2, 2, *span) for span in SPAN] + [(p, 4, *span) for p in (3, 4) for span in FIRST],
)
def test_bytes_of_metp(size: int, kv_heads: int, case: tuple[str, bool], dtype: torch.dtype) -> None:
    """K/V make P-1 hops instead of being gathered, which is as much; dK/dV ride behind and take P."""
    sizes, (weights, kv) = {**SIZES, "num_key_value_heads": kv_heads}, AGAIN[case]
    want = {name: LAYERS * value for name, value in formulas(size, sizes, dtype.itemsize).items()}
    logs = run_ranks(size, wire_job, size, dtype, sizes, case[1], schedule="metp", recompute=case[0])
    hops = [sum(Fraction(log[phase]["all_to_all_single"]) for log in logs) / size for phase in ("forward", "backward")]
    assert hops[0] == want["mlp weights"] + want["K/V"]
    gradients = want["mlp gradients"] + want["dK/dV"] / Fraction(size - 1, size)
    assert hops[1] == weights * want["mlp weights"] + kv * want["K/V"] + gradients
    for log in logs:
        assert log["forward"]["all_gather_into_tensor"] == BATCH_CHECK
        assert "all_gather_into_tensor" not in log["backward"] and "reduce_scatter_tensor" not in log["backward"]


def crossover_job(size: int, length: int, schedule: str | None) -> Fraction:
    """Bytes that a rank receives in the forward of two decoder layers, folded or (None) under DeepSpeed's AutoTP."""
    h = 16
    sizes = {"hidden_size": h, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": h // 4,
             "intermediate_size": 4 * h, "num_hidden_layers": LAYERS}  # fmt: skip
    if schedule is None:
        config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": size}}
        optimizer = torch.optim.SGD((model := tiny("llama", **sizes)).parameters(), 0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        layers = engine.module.model
    else:
        _, model, _ = folded_pair("llama", size, torch.float32, {"schedule": schedule}, **sizes)
        layers = model.model
    local = length if schedule is None else length // size
    x, positions = torch.randn(B, local, h), torch.arange(local)[None]
    rotary, logger = layers.rotary_emb(x, positions), dist.comm.comms_logger
    logger.enabled = logger.prof_all = True
    try:
        dist.reset_log()
        with torch.no_grad():
            for layer in layers.layers:
                x = layer(x, position_embeddings=rotary)
        received = {**RECEIVED, "all_reduce": all_reduced, "inference_all_reduce": all_reduced}
        return sum((received[op](size) * count for op, count in logged().items()), Fraction(0))
    finally:
        logger.enabled = logger.prof_all = False


@pytest.mark.parametrize("size", [2, 4])
def test_crossover_with_tensor_parallelism(size: int) -> None:
    """As much at B S = 8 h, for as many kv heads as query heads and a gated MLP of 4 h; less beyond (docs, Volume)."""
    for length, sign in ((32, 1), (64, 0), (128, -1)):  # B = 2, h = 16
        tensor, *folded = (run_ranks(size, crossover_job, size, length, s) for s in (None, "tsp", "metp"))
        assert all(t == 4 * B * length * 16 * Fraction(size - 1, size) * 4 * LAYERS for t in tensor)
        for received in folded:
            difference = sum(received) - sum(tensor)
            assert (difference > 0) - (difference < 0) == sign


@pytest.mark.parametrize("size", [2, 4])
def test_no_activation_is_reduced(size: int) -> None:
    """Beside the fold: an all-reduce of the loss, and of the gradient of each replicated parameter."""
    sizes = {**SIZES, "num_key_value_heads": 2}
    for logs in run_ranks(size, wire_job, size, torch.float32, sizes):
        replicated = 2 * 53 * 32 + (2 * LAYERS + 1) * 32  # embedding, head, norms
        assert logs["forward"]["all_reduce"] == 4 and logs["backward"]["all_reduce"] == 4 * replicated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_of_the_vocabulary(size: int, dtype: torch.dtype) -> None:
    """Its slices travel as those of an MLP; embedding rows go to the ranks that ask, each once, and back."""
    sizes = {**SIZES, "num_key_value_heads": 4}
    runs = [run_ranks(size, wire_job, size, dtype, sizes, shard_vocab=sharded) for sharded in (False, True)]
    ids, bounds, beta = tokens(B, LENGTH)["input_ids"], cut_bounds(53, size), dtype.itemsize
    rows = sum(int((part >= high).sum() + (part < low).sum()) for part, low, high in _parts(ids, size, bounds))
    vocabulary, width = 53 * SIZES["hidden_size"], SIZES["hidden_size"]
    more = {phase: _total(runs[1], phase) - _total(runs[0], phase) for phase in ("forward", "backward")}
    id_bytes = size * (size - 1) * 8 * ids.numel() // size
    assert more["forward"] == vocabulary * (size - 1) * beta + rows * width * beta + id_bytes
    saved = 2 * vocabulary * 4 * 2 * (size - 1)  # no all-reduce of two whole gradients, which sends and receives each part
    head = vocabulary * (size - 1) * beta + vocabulary * size * max(beta, 4)
    assert more["backward"] == head + rows * width * beta - saved


def _parts(ids: torch.Tensor, size: int, bounds: tuple[int, ...]):
    sequence = SequenceLayout(LENGTH, size)
    return [(ids[:, sequence.positions(rank)], bounds[rank], bounds[rank + 1]) for rank in range(size)]


def _total(logs: list[dict[str, dict[str, int]]], phase: str) -> Fraction:
    """Bytes received by all ranks together; an all-reduce counts as reduce-scatter and all-gather."""
    size = len(logs)
    received = {**RECEIVED, "all_reduce": all_reduced}
    return sum((received[op](size) * count for log in logs for op, count in log[phase].items()), Fraction(0))
