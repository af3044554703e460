"""What one rank holds: 1/P of the folded weights, and never a whole sequence of activations."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ds_tsp
from ds_tsp import schedules
from ds_tsp.kernels import reference
from ds_tsp.layout import head_groups
from ds_tsp.meter import LiveBytes
from tests.dist.test_fold import folded_pair
from tests.harness import run_ranks
from tests.integration.test_training import ds_config
from tests.models import tiny, tokens

B, S, D, E, KV = 2, 512, 40, 10, 4
SIZES = {"hidden_size": D, "head_dim": E, "num_attention_heads": 4, "num_key_value_heads": KV, "intermediate_size": 64,
         "vocab_size": 56}  # fmt: skip


class Largest(TorchDispatchMode):
    """Remembers the largest storage that any operation returned, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().size() // x.itemsize for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


def largest_job(size: int, kv_heads: int, **tsp: str) -> int:
    """One decoder layer, forward and backward, on this rank's tokens."""
    _, model, _ = folded_pair("llama", size, torch.float32, tsp, **{**SIZES, "num_key_value_heads": kv_heads})
    x = torch.randn(B, S // size, D, requires_grad=True)
    positions = torch.arange(S // size)[None]
    rotary = model.model.rotary_emb(x, positions)
    with Largest() as largest:
        model.model.layers[0](x, position_embeddings=rotary).sum().backward()
    return largest.numel


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 4), (4, 2)])
def test_no_whole_sequence_but_one_groups_kv(size: int, kv_heads: int) -> None:
    one_groups_kv = 2 * B * S * (kv_heads // head_groups(kv_heads, size)) * E
    for numel in run_ranks(size, largest_job, size, kv_heads):
        assert numel <= one_groups_kv < B * S * D


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 4), (4, 2)])
def test_metp_holds_no_whole_sequence_at_all(size: int, kv_heads: int) -> None:
    """Nothing is larger than this rank's tokens at the widest place of a layer: the model's width, or one group's K/V."""
    widest = max(D, 4 * E, 2 * (kv_heads // head_groups(kv_heads, size)) * E)
    for numel in run_ranks(size, largest_job, size, kv_heads, schedule="metp"):
        assert numel <= B * (S // size) * widest


def score_job(size: int) -> list[int]:
    """Elements of each score block that the reference kernel makes for one term, under metp."""
    _, model, mesh = folded_pair("llama", size, torch.float32, {"schedule": "metp", "kernel": "reference"}, **SIZES)
    seen: list[int] = []
    with mock.patch.object(reference, "hidden", _recording(reference.hidden, seen)), torch.no_grad():
        x = torch.randn(B, S // size, D)
        rotary = model.model.rotary_emb(x, torch.arange(S // size)[None])
        model.model.layers[0].self_attn(x, position_embeddings=rotary)
    return seen


def _recording(hidden: Any, seen: list[int]) -> Any:
    def recorded(rows: int, keys: int, *rest: Any) -> Tensor:
        seen.append(rows * keys)
        return hidden(rows, keys, *rest)

    return recorded


@pytest.mark.parametrize("size", [2, 4])
def test_live_scores_of_metp(size: int) -> None:
    """B (H/P) (S/P) (S/P) at most, the paper's O(1/P^3): a block is one chunk of queries on one chunk of keys."""
    for seen in run_ranks(size, score_job, size):
        assert seen and max(seen) <= (S // size) ** 2 / 4  # zigzag: a chunk is half of a rank's tokens


def activation_job(size: int, recompute: str) -> tuple[int, int]:
    """Bytes that the forward of two layers leaves for backward, and the peak of both passes, above what was before."""
    sizes = {**SIZES, "num_attention_heads": 4, "vocab_size": 56}
    _, model, _ = folded_pair("llama", size, torch.float32, {"recompute": recompute}, **sizes)
    held = []
    for _ in range(2):  # the first makes the buffers
        x = torch.randn(B, S // size, D, requires_grad=True)
        rotary = model.model.rotary_emb(x, torch.arange(S // size)[None])
        y = x
        with LiveBytes() as meter:
            for layer in model.model.layers:
                y = layer(y, position_embeddings=rotary)
            kept = meter.current - meter.start
            y.sum().backward()
            held.append((kept, meter.peak - meter.start))
        del y
    return held[-1]


@pytest.mark.parametrize("recompute", ["selective", "none", "full"])
def test_activations_halve(recompute: str) -> None:
    """On two ranks each keeps half of what one keeps, within 10%."""
    ((alone, _),) = run_ranks(1, activation_job, 1, recompute)
    for kept, _ in run_ranks(2, activation_job, 2, recompute):
        assert 0.45 * alone <= kept <= 0.55 * alone


def attention_job(size: int) -> tuple[int, int]:
    """Elements that METP's attention keeps for backward, its input included, and those of q, k, v of one term there."""
    sizes = {**SIZES, "hidden_size": 40, "head_dim": 10, "num_key_value_heads": 4, "num_hidden_layers": 1}
    _, model, _ = folded_pair("llama", size, torch.float32, {"schedule": "metp"}, **sizes)
    attention, seen = model.model.layers[0].self_attn, []
    x = torch.randn(B, S // size, D, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(S // size)[None])
    forward, backward = schedules.SCHEDULES["metp"]

    def recorded(call: Any, saved: tuple[Tensor, ...], dout: Tensor) -> Any:
        seen.append(sum(t.untyped_storage().size() // 4 for t in saved[:3]))
        return backward(call, saved, dout)

    with mock.patch.dict(schedules.SCHEDULES, {"metp": (forward, recorded)}):
        attention(x, position_embeddings=rotary)[0].sum().backward()  # makes the buffers
        with LiveBytes() as meter:
            y, _ = attention(x, position_embeddings=rotary)
            kept = meter.current - meter.start - y.numel() * 4
            y.sum().backward()
    return x.numel() + kept // 4, max(seen)


@pytest.mark.parametrize(("size", "saved"), [(2, 0.4166), (4, 0.65)])
def test_metp_keeps_less_than_tensor_parallelism(size: int, saved: float) -> None:
    """Tensor parallelism keeps x, whole, and q, k, v, out of its heads: B S h (1 + 4/P). METP: B S h (2/P + 3/P^2)."""
    tensor, lse = B * S * D * (1 + 4 / size), B * (S // size) * 4
    for kept, term in run_ranks(size, attention_job, size):
        assert kept + term == B * S * D * (2 / size + 3 / size**2) + lse
        assert kept - lse + term <= (1 - saved) * tensor


def state_job(size: int, stage: int) -> dict[str, list[int]]:
    """Elements of each folded weight's parameter, gradient and optimizer state, beside those of the whole weight."""
    model = tiny("llama", **SIZES)
    whole = {n: p.numel() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    engine, optimizer, *_ = ds_tsp.initialize(model=model, optimizer=optimizer, config=ds_config(size, stage))
    engine.backward(engine(**tokens(2, 16)).loss)
    gradients = {n: p.grad.numel() for n, p in model.named_parameters()}
    engine.step()
    sizes = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "tsp_cut"):
            moments = [v.numel() for v in optimizer.state[parameter].values() if v.numel() > 1]
            sizes[name] = [whole[name], parameter.numel(), gradients[name], sum(moments)]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().size() // 4 for p in model.parameters()}
    assert sum(storages.values()) == sum(p.numel() for p in model.parameters())  # slices keep nothing else alive
    engine.destroy()
    return sizes


@pytest.mark.parametrize("size", [2, 4])
def test_folded_state_is_exactly_one_pth(size: int) -> None:
    for sizes in run_ranks(4, state_job, size, 0):
        assert len(sizes) == 2 * 7 + 2  # two layers of seven matrices, embedding and head
        for name, (whole, parameter, gradient, moments) in sizes.items():
            assert (parameter, gradient, moments) == (whole / size, whole / size, 2 * whole / size), name


def zero_state_job(size: int, stage: int) -> tuple[int, int, int]:
    """Elements of this rank's part of ZeRO's fp32 master weights; replicated and folded elements of the model."""
    model = tiny("llama", **SIZES)
    replicated = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    folded = sum(p.numel() for p in model.parameters()) - replicated
    optimizer = torch.optim.AdamW(model.parameters())
    engine, optimizer, *_ = ds_tsp.initialize(model=model, optimizer=optimizer, config=ds_config(size, stage))
    engine.backward(engine(**tokens(2, 16)).loss)
    engine.step()
    state = optimizer.optimizer.state
    moments = sum(v.numel() for s in state.values() for v in s.values() if torch.is_tensor(v) and v.numel() > 1)
    engine.destroy()
    return moments, folded, replicated


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_zero_divides_what_the_fold_left(size: int, stage: int) -> None:
    for moments, folded, replicated in run_ranks(4, zero_state_job, size, stage):
        mine = (folded // size + replicated) / (4 // size)
        assert 2 * mine <= moments <= 2 * mine * 1.02  # ZeRO pads its partitions
