"""torch's own flash kernels: the CPU op, and the CUDA (ROCm) op.

is_causal is used on square blocks only: elsewhere the CPU op aligns it top-left and the CUDA op bottom-right. So a
query block against a longer key prefix is a full block plus a square causal block, merged by log-sum-exp.

What the CPU op does that its schema does not say: it reads wrong numbers where the last dim is strided, dies of SIGFPE
on empty tensors (the front door keeps both away), and gives a row that sees nothing lse 0.0 (no causal row is such).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..layout import accumulate_dtype
from .block import AttentionSpec, Grads, Kernel, before_ampere, hidden, merge

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention.default
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

_HALF = (torch.float16, torch.bfloat16)
# Rows of a windowed tile. Of 128, 256, 512, window: 128 was fastest for windows of 64 to 2048 and fp32 on one core, and
# it bounds the mask to 128 * (127 + window).
_WINDOW_TILE = 128


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Shapes: q, out [B, s, H, E]; k, v [B, S, K, E]; lse [B, H, s]. One op call where s == S or there is a window."""
    op = _forward_cpu if q.is_cpu else _forward_cuda
    parts = [op(q, k[:, keys], v[:, keys], spec, causal) for keys, causal in _blocks(q, k, spec)]
    if len(parts) == 1:
        return parts[0]
    out, lse = merge(*parts[0], *parts[1])
    return out.to(q.dtype), lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec,
             dk_sum: Tensor, dv_sum: Tensor) -> Tensor:  # fmt: skip
    """Each block's backward with the MERGED out and lse is that block's share: dq is summed, dk and dv are adjacent.

    Shapes: as `forward`; dq in q's dtype.
    """
    dtype, op, dq = q.dtype, _backward_cpu if q.is_cpu else _backward_cuda, None
    if q.is_cpu and _slow_on_this_cpu(dtype):
        dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    for keys, causal in _blocks(q, k, spec):
        dq_part, dk, dv = op(dout, q, k[:, keys], v[:, keys], out, lse, spec, causal)
        dk_sum[:, keys].add_(dk)
        dv_sum[:, keys].add_(dv)
        dq = dq_part if dq is None else dq.to(accumulate_dtype(dtype)).add_(dq_part)
    assert dq is not None
    return dq.to(dtype)


def _blocks(q: Tensor, k: Tensor, spec: AttentionSpec) -> Iterator[tuple[slice, bool]]:
    """Runs of keys, and whether the square causal mask lies on them. A window is a mask, over all keys."""
    rows, keys = q.shape[1], k.shape[1]
    if not spec.causal or rows == 1 or spec.window is not None:
        yield slice(0, keys), False
        return
    if rows < keys:
        yield slice(0, keys - rows), False
    yield slice(keys - rows, keys), True


def _slow_on_this_cpu(dtype: torch.dtype) -> bool:
    """Whether half precision matmuls are emulated: the op's backward then took 8 to 17 times as long as in fp32."""
    if dtype not in _HALF or not torch.backends.mkldnn.is_available():
        return dtype in _HALF
    native = torch.ops.mkldnn
    return not (native._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else native._is_mkldnn_fp16_supported)()


def _mask(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor | None:
    if spec.window is None:
        return None
    rows, keys = q.shape[1], k.shape[1]
    return q.new_zeros(rows, keys).masked_fill_(hidden(rows, keys, spec, q.device), -torch.inf)


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, causal: bool) -> tuple[Tensor, Tensor]:
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _CPU(q_, k_, v_, 0.0, causal, attn_mask=_mask(q, k, spec), scale=spec.scale)
    return out.transpose(1, 2), lse


def _backward_cpu(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, causal: bool
) -> Grads:
    dout_, q_, k_, v_, out_ = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    mask = _mask(q, k, spec)
    dq, dk, dv = _CPU_BACKWARD(dout_, q_, k_, v_, out_, lse, 0.0, causal, attn_mask=mask, scale=spec.scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, causal: bool) -> tuple[Tensor, Tensor]:
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = _CUDA(q_, k_, v_, 0.0, causal, False, scale=spec.scale)
    return out.transpose(1, 2), lse


def _backward_cuda(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, causal: bool
) -> Grads:
    dout_, q_, k_, v_, out_ = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    # Read only with dropout, but ROCm takes the pointer of a device scalar in any case.
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    # No cumulative lengths: all sequences are equally long. The kernel reads lse as if it were contiguous.
    ragged = (None, None, q.shape[1], k.shape[1])
    dq, dk, dv = _CUDA_BACKWARD(
        dout_, q_, k_, v_, out_, lse.contiguous(), *ragged, 0.0, causal, seed, seed, scale=spec.scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _refusal(device: torch.device, dtype: torch.dtype, spec: AttentionSpec, head_dim: int) -> str | None:
    if spec.softcap is not None:
        return f"cannot do softcap={spec.softcap}"
    if device.type == "cpu":
        return None if dtype in (*_HALF, torch.float32, torch.float64) else f"cannot do dtype={dtype} on cpu"
    if device.type not in ("cuda", "meta"):  # a meta tensor stands for one on cuda
        return f"cannot run on device {device.type!r}"
    if dtype not in _HALF:
        return f"cannot do dtype={dtype} on cuda, only float16 and bfloat16"
    if spec.window is not None:
        return f"cannot do window={spec.window} on cuda"
    if head_dim % 8 or head_dim > 256:
        return f"cannot do head_dim={head_dim} on cuda, only multiples of 8 up to 256"
    return before_ampere(device)


def _row_tile(device: torch.device, spec: AttentionSpec) -> int | None:
    return None if spec.window is None else _WINDOW_TILE


KERNEL = Kernel("sdpa", forward, backward, _refusal, _row_tile)
