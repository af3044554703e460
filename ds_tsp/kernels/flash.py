"""Adapter to the flash_attn package, 2.7 or later: its dense kernels, below its autograd functions.

Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py. Imported when a kernel is chosen or run, never
when this module is.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from .block import AttentionSpec, Kernel, before_ampere

# 2.7.0 replaced the window_size pair by two integers and returns (out, lse, ...) instead of eight tensors.
_OLDEST = Version("2.7.0")


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Shapes: q, out [B, s, H, E]; k, v [B, S, K, E]; lse [B, H, s] fp32. One kernel call, bottom-right aligned."""
    head_dim = q.shape[-1]
    op = _interface()._flash_attn_forward
    out, lse, *_ = op(*_padded(q, k, v), **_arguments(spec), return_softmax=False)
    return out[..., :head_dim], lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec,
             dk_sum: Tensor, dv_sum: Tensor) -> Tensor:  # fmt: skip
    """Shapes: as `forward`; dq in q's dtype. The kernel sums dk and dv in fp32, and rounds before they are added."""
    head_dim = q.shape[-1]
    dout, q, k, v, out = _padded(dout, q, k, v, out)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    op = _interface()._flash_attn_backward
    # The kernel reads lse as if it were contiguous, whatever its strides.
    op(dout, q, k, v, out, lse.contiguous(), dq, dk, dv, **_arguments(spec), deterministic=False)
    dk_sum += dk[..., :head_dim]
    dv_sum += dv[..., :head_dim]
    return dq[..., :head_dim]


def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _arguments(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": spec.scale,
        "causal": spec.causal,
        "window_size_left": -1 if spec.window is None else spec.window - 1,  # theirs does not count the token itself
        "window_size_right": 0 if spec.causal else -1,
        "softcap": spec.softcap or 0.0,
        "alibi_slopes": None,
    }


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Zero columns up to a multiple of 8, which the kernels want: they change no score, and their own out is zero."""
    missing = -tensors[0].shape[-1] % 8
    return [F.pad(x, (0, missing)) if missing else x for x in tensors]


def _refusal(device: torch.device, dtype: torch.dtype, spec: AttentionSpec, head_dim: int) -> str | None:
    try:
        _interface()  # not find_spec: flash-attn 4 alone also owns a folder flash_attn, without this module
        version = Version(importlib.import_module("flash_attn").__version__)
    except ImportError as error:
        return f"cannot be imported ({error}): pip install ds_tsp[flash]"
    if version < _OLDEST:
        return f"cannot use flash_attn {version}, older than {_OLDEST}: pip install -U ds_tsp[flash]"
    if device.type != "cuda":
        return f"cannot run on device {device.type!r}, only on cuda (ROCm included)"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"cannot do dtype={dtype}, only float16 and bfloat16"
    if head_dim > 256:
        return f"cannot do head_dim={head_dim}, at most 256"
    return before_ampere(device)


def _row_tile(device: torch.device, spec: AttentionSpec) -> None:
    return None


KERNEL = Kernel("flash_attn", forward, backward, _refusal, _row_tile)
