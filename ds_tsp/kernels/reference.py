"""Attention written out: the golden answer the fast kernels are compared with, and the fallback for what they refuse.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2, one block of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import accumulate_dtype
from .block import AttentionSpec, Kernel, hidden


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[B, S, H, E] -> [B, K, H/K, S, E] in fp32 or fp64: query head h attends on kv head h // (H/K)."""
    return x.to(accumulate_dtype(x.dtype)).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_token(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(q_BKGsE: Tensor, k_BK1SE: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """Masked scores [B, K, G, s, S], and tanh of the uncapped ones where there is a softcap."""
    scores, tanh = spec.scale * (q_BKGsE @ k_BK1SE.mT), None
    if spec.softcap is not None:
        tanh = torch.tanh(scores / spec.softcap)
        scores = spec.softcap * tanh
    if spec.causal:
        scores = scores.masked_fill(hidden(q_BKGsE.shape[3], k_BK1SE.shape[3], spec, scores.device), -torch.inf)
    return scores, tanh


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Shapes: q, out [B, s, H, E]; k, v [B, S, K, E]; lse [B, H, s]. Holds s*S scores per head."""
    kv_heads = k.shape[2]
    scores, _ = _scores(_by_kv_head(q, kv_heads), _by_kv_head(k, kv_heads), spec)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ _by_kv_head(v, kv_heads)
    return _by_token(out).to(q.dtype), lse.flatten(1, 2)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec,
             dk_sum: Tensor, dv_sum: Tensor) -> Tensor:  # fmt: skip
    """dS = P * (dP - rowsum(dout * out)), from the saved lse and not by autograd."""
    kv_heads = k.shape[2]
    dout_, q_, k_, v_, out_ = (_by_kv_head(x, kv_heads) for x in (dout, q, k, v, out))
    scores, tanh = _scores(q_, k_, spec)
    p = (scores - lse.unflatten(1, (kv_heads, -1)).unsqueeze(-1)).exp()
    dv = (p.mT @ dout_).sum(2, keepdim=True)
    delta = (dout_ * out_).sum(-1, keepdim=True)
    ds = p * (dout_ @ v_.mT - delta)
    if tanh is not None:
        ds = ds * (1 - tanh.square())
    dq = spec.scale * (ds @ k_)
    dk = spec.scale * (ds.mT @ q_).sum(2, keepdim=True)
    dk_sum += _by_token(dk)
    dv_sum += _by_token(dv)
    return _by_token(dq).to(q.dtype)


def _refusal(device: torch.device, dtype: torch.dtype, spec: AttentionSpec, head_dim: int) -> str | None:
    return None if dtype.is_floating_point else f"cannot do dtype={dtype}"


def _row_tile(device: torch.device, spec: AttentionSpec) -> int:
    return 256  # a tile holds 256*S scores per head: linear in S


KERNEL = Kernel("reference", forward, backward, _refusal, _row_tile)
