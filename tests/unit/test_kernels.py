"""ds_tsp.kernels: every kernel against attention spelled out, the front door's tiles, refusals, and what torch is told.

flash_attn and CUDA are not here: the adapter runs against a stand-in with flash_attn's signature, layout checks and
semantics, the CUDA op against its meta kernel (shapes) and against the CPU op behind its schema (numbers).
"""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ds_tsp.kernels import AttentionSpec, attend, attend_backward, choose, flash, merge, reference, sdpa

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
KERNELS = {kernel.name: kernel for kernel in (reference.KERNEL, sdpa.KERNEL, flash.KERNEL)}


def visible(rows, keys, spec):
    """The contract, literally: [rows][keys] of bool."""
    if not spec.causal:
        return torch.ones(rows, keys, dtype=torch.bool)
    window = keys if spec.window is None else spec.window
    first = keys - rows
    return torch.tensor([[first + i - window < j <= first + i for j in range(keys)] for i in range(rows)])


def scores_of(q, k, spec):
    """Uncapped or capped scores [B, H, Sq, Sk], kv heads repeated."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bshe,bthe->bhst", q, k) * spec.scale
    return scores if spec.softcap is None else spec.softcap * torch.tanh(scores / spec.softcap)


def naive(q, k, v, spec, dout):
    """out, lse, dq, dk, dv in fp64 by softmax over the full mask and autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = scores_of(q, k, spec).masked_fill(~visible(q.shape[1], k.shape[1], spec), -torch.inf)
    v_H = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = torch.einsum("bhst,bthe->bshe", torch.softmax(scores, -1), v_H)
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def qkv_dout(rows, keys, heads, head_dim, dtype=torch.float64, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q_shape, k_shape = (batch, rows, heads[0], head_dim), (batch, keys, heads[1], head_dim)
    return [torch.randn(x, generator=generator).double().to(dtype) for x in (q_shape, k_shape, k_shape, q_shape)]


def both(q, k, v, dout, spec, kernel):
    out, lse = attend(q, k, v, spec, kernel)
    return out, lse, *attend_backward(dout, q, k, v, out, lse, spec, kernel)


def assert_close(got, want, atol=1e-10, case=None):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert x.shape == y.shape, (name, case)
        assert (x - y).abs().max() <= atol, (name, case)  # a NaN fails it too


# --- a stand-in for flash_attn 2.8: names and order as in flash_attn_interface.py -----------------------------------


def check_flash(q, k, v, causal, left, right, softcap, alibi_slopes, dropout_p):
    assert (dropout_p, alibi_slopes) == (0.0, None) and isinstance(causal, bool) and softcap >= 0.0
    assert isinstance(left, int) and isinstance(right, int) and q.ndim == k.ndim == 4 and k.shape == v.shape
    assert q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[2] % k.shape[2] == 0
    assert q.shape[3] % 8 == 0 and q.shape[3] <= 256
    assert all(x.stride(-1) == 1 and x.dtype == q.dtype for x in (q, k, v))


def flash_scores(q, k, softmax_scale, causal, left, right, softcap):
    scores = scores_of(q, k, AttentionSpec(softmax_scale, softcap=softcap or None))
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    right = 0 if causal else right
    left, right = (q.shape[1] + k.shape[1] if side < 0 else side for side in (left, right))  # -1 is no limit
    hide = (ahead > right) | (ahead < -left)
    return scores.masked_fill(hide, -torch.inf)


def flash_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    check_flash(q, k, v, causal, window_size_left, window_size_right, softcap, alibi_slopes, dropout_p)
    assert return_softmax is False
    scores = flash_scores(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap)
    v_H = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = torch.einsum("bhst,bthe->bshe", scores.softmax(-1), v_H).contiguous()
    return out, scores.logsumexp(-1).contiguous(), torch.empty(0), torch.empty(2, dtype=torch.int64)


def flash_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    check_flash(q, k, v, causal, window_size_left, window_size_right, softcap, alibi_slopes, dropout_p)
    assert deterministic is False and dout.shape == out.shape == q.shape
    assert softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and softmax_lse.is_contiguous()
    for grad, x in ((dq, q), (dk, k), (dv, v)):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.stride(-1) == 1
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    with torch.enable_grad():
        scores = flash_scores(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap)
    p = (scores.detach() - softmax_lse.unsqueeze(-1)).exp()  # the saved lse and out, as the real kernel does
    group = q.shape[2] // k.shape[2]
    dp = torch.einsum("bshe,bthe->bhst", dout, v.repeat_interleave(group, dim=2))
    ds = p * (dp - (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1))
    dv.copy_(torch.einsum("bhst,bshe->bthe", p, dout).unflatten(2, (-1, group)).sum(3))
    for grad, value in zip((dq, dk), torch.autograd.grad(scores, (q, k), ds), strict=True):
        grad.copy_(value)
    return torch.empty(0)  # softmax_d: the gradients come back in dq, dk, dv


def install_flash(monkeypatch, version="2.8.3"):
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    vars(package).update(__version__=version, flash_attn_interface=interface)
    vars(interface).update(_flash_attn_forward=flash_forward, _flash_attn_backward=flash_backward)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


@pytest.fixture
def flash_attn(monkeypatch):
    install_flash(monkeypatch)


@pytest.fixture
def no_flash_attn(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)


# --- numbers ---------------------------------------------------------------------------------------------------------

CASES = [
    (name, softcap, tile)
    for name in KERNELS
    for softcap in (None, 5.0)
    for tile in (None, 3)
    if not (name == "sdpa" and softcap)
]


SHAPES = [(rows, keys, window) for rows, keys in ((7, 7), (5, 12), (1, 9), (1, 1)) for window in (None, 1, 3, 99)]


@pytest.mark.parametrize("heads, head_dim", [((4, 1), 8), ((4, 4), 8), ((6, 2), 20)])
@pytest.mark.parametrize("name, softcap, tile", CASES)
def test_equals_attention_spelled_out(flash_attn, name, softcap, tile, heads, head_dim):
    kernel = KERNELS[name]
    if tile is not None:
        kernel = replace(kernel, row_tile=lambda device, spec: tile)
    for rows, keys, window in SHAPES:
        spec = AttentionSpec(0.7, window, softcap)
        q, k, v, dout = qkv_dout(rows, keys, heads, head_dim)
        got = both(q, k, v, dout, spec, kernel)
        assert {x.dtype for x in got} == {torch.float64}
        assert_close(got, naive(q, k, v, spec, dout), case=(rows, keys, window))


@settings(max_examples=40)
@given(
    name=st.sampled_from(["reference", "sdpa"]),
    rows=st.integers(1, 40),
    before=st.integers(0, 40),
    window=st.none() | st.integers(1, 90),
    tile=st.none() | st.integers(1, 50),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    seed=st.integers(0, 99),
)
def test_any_tiling_of_any_shape(name, rows, before, window, tile, heads, seed):
    kernel, spec = KERNELS[name], AttentionSpec(0.4, window)
    kernel = replace(kernel, row_tile=lambda device, spec: tile)
    q, k, v, dout = qkv_dout(rows, rows + before, heads, 8, batch=1, seed=seed)
    assert_close(both(q, k, v, dout, spec, kernel), naive(q, k, v, spec, dout))


@pytest.mark.parametrize("name, window", [("reference", None), ("reference", 60), ("sdpa", 60), ("sdpa", None)])
def test_own_tiles_across_their_edges(name, window):
    q, k, v, dout = qkv_dout(271, 333, (2, 1), 8, batch=1)
    spec = AttentionSpec(0.4, window)
    assert_close(both(q, k, v, dout, spec, KERNELS[name]), naive(q, k, v, spec, dout))


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x):
    return torch.stack((x, x + 1), -1).flatten(-2)[..., ::2]


def head_dim_outermost(x):
    return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("view", [transposed, every_other, head_dim_outermost])
@pytest.mark.parametrize("keys, window", [(9, None), (14, None), (14, 4)])
def test_any_strides(flash_attn, name, view, keys, window):
    kernel, spec = KERNELS[name], AttentionSpec(0.7, window)
    q, k, v, dout = qkv_dout(9, keys, (4, 2), 20)
    dout = dout[:1, :1, :1, :1].expand(q.shape)
    want = naive(q, k, v, spec, dout)
    out, lse = attend(view(q), view(k), view(v), spec, kernel)
    lse = torch.cat((lse, lse + 1), 2)[:, :, : q.shape[1]]
    assert not lse.is_contiguous()
    grads = attend_backward(dout, view(q), view(k), view(v), view(out), lse, spec, kernel)
    assert_close((out, lse, *grads), want)


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_of_keys_merge_and_their_gradients_add_up(flash_attn, name):
    kernel, causal = KERNELS[name], AttentionSpec(0.7)
    full = replace(causal, causal=False)
    q, k, v, dout = qkv_dout(6, 15, (4, 2), 8)
    blocks = [(slice(0, 2), full), (slice(2, 9), full), (slice(9, 15), causal)]  # 2 keys for 6 rows: fewer is allowed
    out, lse = attend(q, k[:, blocks[0][0]], v[:, blocks[0][0]], full, kernel)
    for keys, spec in blocks[1:]:
        out, lse = merge(out, lse, *attend(q, k[:, keys], v[:, keys], spec, kernel))
    parts = [attend_backward(dout, q, k[:, keys], v[:, keys], out, lse, spec, kernel) for keys, spec in blocks]
    dq, dk, dv = sum(part[0] for part in parts), *(torch.cat([part[i] for part in parts], 1) for i in (1, 2))
    assert_close((out, lse, dq, dk, dv), naive(q, k, v, causal, dout))


def test_merge_of_rows_that_saw_nothing():
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 4, 3)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    none, none_lse = merge(*nothing, *nothing)
    assert torch.equal(none, nothing[0]) and torch.equal(none_lse, nothing[1])
    assert merge(out.bfloat16(), lse, *nothing)[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("rows, keys, window", [(0, 0, None), (0, 5, None), (0, 5, 2)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty(name, rows, keys, window, batch):
    q, k, v, dout = qkv_dout(rows, keys, (4, 2), 8, batch=batch)
    out, lse, dq, dk, dv = both(q, k, v, dout, AttentionSpec(1.0, window), KERNELS[name])
    assert out.shape == dq.shape == q.shape and lse.shape == (batch, 4, 0)
    assert dk.shape == dv.shape == k.shape and not dk.any() and not dv.any()


# --- half precision --------------------------------------------------------------------------------------------------


def relative(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys, window", [(150, None), (190, None), (190, 40)])
@pytest.mark.parametrize("name, emulated", [("reference", None), ("sdpa", True), ("sdpa", False)])
def test_half_precision_error_is_at_most_twice_that_of_plain_math(monkeypatch, name, emulated, keys, window, dtype):
    monkeypatch.setattr(sdpa, "_slow_on_this_cpu", lambda dtype: emulated)
    spec, kernel = AttentionSpec(0.35, window), KERNELS[name]
    q, k, v, dout = qkv_dout(150, keys, (4, 2), 8, dtype)
    exact = naive(q, k, v, spec, dout)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    q_, k_, v_ = (x.transpose(1, 2) for x in leaves)
    mask = visible(150, keys, spec)
    plain = F.scaled_dot_product_attention(q_, k_, v_, mask, scale=spec.scale, enable_gqa=True).transpose(1, 2)
    plain_grads = torch.autograd.grad(plain, leaves, dout)
    out, lse, *grads = both(q, k, v, dout, spec, kernel)
    assert out.dtype == grads[0].dtype == dtype
    assert lse.dtype == grads[1].dtype == grads[2].dtype == torch.float32
    assert relative(lse, exact[1]) < 1e-5  # the CPU op's exp is good to 3e-6
    for x, math, y in zip((out, *grads), (plain, *plain_grads), (exact[0], *exact[2:]), strict=True):
        assert relative(x, y) <= 2 * relative(math, y)
    if emulated is not False:  # dv = P^T dout in fp32 throughout, never rounded
        assert relative(grads[2], exact[4]) < 1e-4


@pytest.mark.parametrize("emulated, dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_backward_in_fp32_where_the_cpu_emulates_bf16(monkeypatch, emulated, dtype):
    seen: list[torch.Tensor] = []
    op = sdpa._CPU_BACKWARD

    def spy(*args, **kwargs):
        seen.extend(args[:5])
        return op(*args, **kwargs)

    monkeypatch.setattr(sdpa, "_slow_on_this_cpu", lambda dtype: emulated)
    monkeypatch.setattr(sdpa, "_CPU_BACKWARD", spy)
    q, k, v, dout = qkv_dout(9, 12, (4, 2), 8, torch.bfloat16)
    both(q, k, v, dout, AttentionSpec(0.35), sdpa.KERNEL)
    assert len(seen) == 10 and {x.dtype for x in seen} == {dtype}
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.undo()
    assert (sdpa._slow_on_this_cpu(torch.bfloat16), sdpa._slow_on_this_cpu(torch.float32)) == (not native, False)


def test_tiles_are_summed_in_fp32():
    q, k, v, dout = qkv_dout(100, 100, (4, 1), 8, torch.bfloat16)
    spec = AttentionSpec(0.35)
    want = naive(q, k, v, spec, dout)
    by_row = replace(reference.KERNEL, row_tile=lambda device, spec: 1)
    _, lse, _, dk, dv = both(q, k, v, dout, spec, by_row)
    # 100 sums per element: each rounded to bf16 they would be off by 1e-2; what is left is the rounding of out.
    assert relative(dk, want[3]) < 4e-3 and relative(dv, want[4]) < 1e-5


# --- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an op returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, window, tile", [("sdpa", 48, 128), ("reference", 48, 256), ("reference", None, 256), ("sdpa", None, None)]
)
def test_nothing_larger_than_one_tile(name, window, tile, dtype):
    S, heads, E = 1500, 2, 8
    q, k, v, dout = qkv_dout(S, S, (heads, 1), E, dtype, batch=1)
    assert KERNELS[name].row_tile(CPU, AttentionSpec(1.0, window)) == tile
    with Largest() as largest:
        both(q, k, v, dout, AttentionSpec(0.3, window), KERNELS[name])
    scores = 0 if tile is None else heads * tile * (S if window is None else tile + window - 1)
    assert 0 < largest.numel <= max(S * heads * E, scores) < S * S


def calls(monkeypatch, name):
    """Spies on the CPU op; returns its (rows, keys, causal, masked) as they come."""
    seen, op = [], getattr(sdpa, name)

    def spy(*args, **kwargs):
        q, k = args[:2] if name == "_CPU" else args[1:3]
        seen.append((q.shape[2], k.shape[2], args[-1], kwargs["attn_mask"] is not None))
        return op(*args, **kwargs)

    monkeypatch.setattr(sdpa, name, spy)
    return seen


@pytest.mark.parametrize(
    "rows, keys, window, want",
    [
        (20, 20, None, [(20, 20, True, False)]),
        (20, 20, 20, [(20, 20, True, False)]),  # a window that covers all keys is no window
        (20, 50, None, [(20, 30, False, False), (20, 20, True, False)]),
        (1, 50, None, [(1, 50, False, False)]),
        (1, 50, 8, [(1, 8, False, False)]),  # the keys in reach, all of them seen
        (20, 50, 8, [(20, 27, False, True)]),
        (140, 140, 8, [(128, 128, False, True), (12, 19, False, True)]),
    ],
)
def test_calls_of_the_cpu_op(monkeypatch, rows, keys, window, want):
    forward, backward = calls(monkeypatch, "_CPU"), calls(monkeypatch, "_CPU_BACKWARD")
    q, k, v, dout = qkv_dout(rows, keys, (2, 1), 8)
    both(q, k, v, dout, AttentionSpec(0.3, window), sdpa.KERNEL)
    assert forward == want and backward == want


def test_one_square_block_copies_nothing():
    q, k, v, dout = (transposed(x) for x in qkv_dout(20, 20, (2, 1), 8))

    class Ops(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Ops() as ops:
        both(q, k, v, dout, AttentionSpec(0.3), sdpa.KERNEL)
    assert set(ops.names) - {"transpose", "slice", "view", "alias", "detach"} == {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "zeros_like",  # sums that dk and dv are added to
        "add_",
        "empty",
    }


# --- the CUDA op -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, keys", [(20, 20), (20, 50), (1, 50)])
def test_cuda_op_on_meta_tensors(rows, keys):
    q, k, v, dout = (transposed(x.to(META)) for x in qkv_dout(rows, keys, (4, 2), 64, torch.bfloat16))
    kernel = choose("sdpa", META, q.dtype, AttentionSpec(0.3), 64)
    out, lse, dq, dk, dv = both(q, k, v, dout, AttentionSpec(0.3), kernel)
    assert out.shape == dq.shape == q.shape and out.dtype == dq.dtype == torch.bfloat16
    assert dk.shape == dv.shape == k.shape and dk.dtype == dv.dtype == torch.float32
    assert lse.shape == (2, 4, rows) and lse.dtype == torch.float32


@pytest.mark.parametrize("rows, keys", [(20, 20), (20, 50), (1, 50)])
def test_cuda_op_gets_the_right_arguments(monkeypatch, rows, keys):
    def bound(op, args, kwargs):
        names = [argument.name for argument in op._schema.arguments]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    cuda, cuda_backward = sdpa._CUDA, sdpa._CUDA_BACKWARD

    def forward(*args, **kwargs):
        a = bound(cuda, args, kwargs)
        assert a["query"].shape[2] == a["key"].shape[2] or not a["is_causal"]  # where both alignments agree
        assert a["dropout_p"] == 0.0 and a["return_debug_mask"] is False
        out, lse = sdpa._CPU(a["query"], a["key"], a["value"], 0.0, a["is_causal"], scale=a["scale"])
        return out, lse, None, None, rows, keys, None, None, None

    def backward(*args, **kwargs):
        a = bound(cuda_backward, args, kwargs)
        assert (a["max_q"], a["max_k"]) == (a["query"].shape[2], a["key"].shape[2])
        assert a["cum_seq_q"] is None and a["cum_seq_k"] is None and a["logsumexp"].is_contiguous()
        assert a["philox_seed"].dtype == a["philox_offset"].dtype == torch.int64 and a["dropout_p"] == 0.0
        tensors = [a[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
        return sdpa._CPU_BACKWARD(*tensors, 0.0, a["is_causal"], scale=a["scale"])

    for name, value in {"_CUDA": forward, "_CUDA_BACKWARD": backward}.items():
        monkeypatch.setattr(sdpa, name, value)
    monkeypatch.setattr(sdpa, "_forward_cpu", sdpa._forward_cuda)
    monkeypatch.setattr(sdpa, "_backward_cpu", sdpa._backward_cuda)
    q, k, v, dout = qkv_dout(rows, keys, (4, 2), 8)
    assert_close(both(q, k, v, dout, AttentionSpec(0.3), sdpa.KERNEL), naive(q, k, v, AttentionSpec(0.3), dout))


# --- choosing --------------------------------------------------------------------------------------------------------

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    "device, dtype, window, softcap, head_dim, with_flash, without",
    [
        (CPU, F32, None, None, 20, "sdpa", "sdpa"),
        (CPU, BF16, 4096, None, 512, "sdpa", "sdpa"),
        (CPU, F64, 4096, 50.0, 64, "reference", "reference"),
        (CUDA, BF16, None, None, 128, "flash_attn", "sdpa"),
        (CUDA, F16, 4096, None, 256, "flash_attn", "reference"),
        (CUDA, F16, None, 50.0, 256, "flash_attn", "reference"),
        (CUDA, BF16, None, None, 20, "flash_attn", "reference"),
        (CUDA, BF16, None, None, 264, "reference", "reference"),
        (CUDA, F32, None, None, 64, "reference", "reference"),
        (META, BF16, None, None, 64, "sdpa", "sdpa"),
        (torch.device("xpu"), BF16, None, None, 64, "reference", "reference"),
    ],
)
def test_auto(monkeypatch, installed, device, dtype, window, softcap, head_dim, with_flash, without):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # "cuda" stands for a GPU new enough
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    if installed:
        install_flash(monkeypatch)
    want = with_flash if installed else without
    spec = AttentionSpec(0.3, window, softcap)
    assert choose("auto", device, dtype, spec, head_dim).name == want
    assert choose(want, device, dtype, spec, head_dim) is choose("auto", device, dtype, spec, head_dim)


@pytest.mark.parametrize(
    "name, device, dtype, spec, head_dim, message",
    [
        ("sdpa", CPU, F32, {"softcap": 50.0}, 64, "kernel 'sdpa' cannot do softcap=50.0; use 'reference'"),
        ("sdpa", CUDA, BF16, {"softcap": 9.0}, 64, "cannot do softcap=9.0; use 'flash_attn' or 'reference'"),
        ("sdpa", CUDA, BF16, {"window": 7}, 64, "cannot do window=7 on cuda; use 'flash_attn' or 'reference'"),
        ("sdpa", CUDA, F32, {}, 64, "cannot do dtype=torch.float32 on cuda, only float16 and bfloat16; use"),
        ("sdpa", CUDA, BF16, {}, 20, "cannot do head_dim=20 on cuda, only multiples of 8 up to 256; use 'flash_attn'"),
        ("sdpa", torch.device("xpu"), BF16, {}, 64, "cannot run on device 'xpu'; use 'reference'"),
        ("sdpa", CPU, torch.float8_e5m2, {}, 64, "cannot do dtype=torch.float8_e5m2 on cpu; use 'reference'"),
        ("flash_attn", CPU, BF16, {}, 64, "cannot run on device 'cpu', only on cuda (ROCm included); use 'sdpa' or"),
        ("flash_attn", CUDA, F32, {}, 64, "cannot do dtype=torch.float32, only float16 and bfloat16; use 'reference'"),
        ("flash_attn", CUDA, BF16, {}, 264, "cannot do head_dim=264, at most 256; use 'reference'"),
        ("flash", CPU, F32, {}, 64, "kernel 'flash' is unknown; use 'auto', 'flash_attn', 'sdpa' or 'reference'"),
        ("reference", CPU, torch.int64, {}, 64, "no kernel runs: "),
    ],
)
def test_refusals(monkeypatch, flash_attn, name, device, dtype, spec, head_dim, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as info:
        choose(name, device, dtype, AttentionSpec(0.3, **spec), head_dim)
    assert message in str(info.value)


def test_flash_attn_not_installed(no_flash_attn):
    with pytest.raises(ValueError, match=r"cannot be imported .*: pip install ds_tsp\[flash\]; use 'sdpa' or"):
        choose("flash_attn", CPU, torch.bfloat16, AttentionSpec(0.3), 64)


def test_flash_attn_too_old(monkeypatch):
    install_flash(monkeypatch, "2.6.3")
    with pytest.raises(ValueError, match=r"flash_attn 2\.6\.3, older than 2\.7\.0: pip install -U ds_tsp\[flash\]"):
        choose("flash_attn", CUDA, torch.bfloat16, AttentionSpec(0.3), 64)


def test_gpu_too_old(monkeypatch, flash_attn):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose("auto", CUDA, torch.float16, AttentionSpec(0.3), 64).name == "reference"
    with pytest.raises(ValueError, match=r"'sdpa' cannot run on compute capability 7\.5, it needs 8\.0 .*use"):
        choose("sdpa", CUDA, torch.float16, AttentionSpec(0.3), 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose("auto", CUDA, torch.float16, AttentionSpec(0.3), 64).name == "flash_attn"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"window": 0}, "window=0 hides every key; use window >= 1"),
        ({"softcap": 0.0}, "softcap=0.0 is not positive; use None"),
        ({"window": 4, "causal": False}, "window=4 needs causal=True"),
    ],
)
def test_spec_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(1.0, **fields)


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((2, 5, 4, 8), (2, 4, 2, 8), (2, 4, 2, 8)), "5 query rows need at least as many keys, not 4, to be causal"),
        (((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 3, 8)), "K a divisor of H"),
        (((2, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)), "q, k, v .* are not"),
        (((2, 5, 4, 8), (2, 5, 2, 8), (2, 6, 2, 8)), "q, k, v .* are not"),
        (((2, 5, 4, 8), (2, 5, 2, 16), (2, 5, 2, 16)), "q, k, v .* are not"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    q, k, v = map(torch.randn, shapes)
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, AttentionSpec(1.0), sdpa.KERNEL)


def test_backward_refuses_another_dtype_and_forward_no_keys():
    q, k, v, dout = qkv_dout(5, 5, (4, 2), 8)
    out, lse = attend(q, k, v, AttentionSpec(1.0), sdpa.KERNEL)
    with pytest.raises(ValueError, match=r"must be as q \(2, 5, 4, 8\) torch.float64, not .* torch.float32"):
        attend_backward(dout, q, k, v, out.float(), lse, AttentionSpec(1.0), sdpa.KERNEL)
    with pytest.raises(ValueError, match="5 query rows have no key"):
        attend(q, k[:, :0], v[:, :0], AttentionSpec(1.0, causal=False), sdpa.KERNEL)
