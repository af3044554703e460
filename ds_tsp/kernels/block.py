"""One kernel call: the attention it computes, what a kernel offers, and how two calls over different keys merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """Which keys a query row sees and how its scores are shaped.

    Bottom-right aligned: row i of Sq is absolute row Sk - Sq + i among the Sk keys and sees keys j <= row; with a
    window also j > row - window (a window counts the token itself, as in transformers' sliding_window). With a softcap
    c the scores are c * tanh(scale * qk / c), capped before they are masked. `causal=False`: every row sees every key,
    as when queries meet an earlier chunk on a ring of K/V blocks.

    Raises: ValueError for window < 1, softcap <= 0, or a window without causal.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} hides every key; use window >= 1, or None for no window")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap={self.softcap} is not positive; use None for no softcap")
        if self.window is not None and not self.causal:
            raise ValueError(f"window={self.window} needs causal=True; pass the keys in reach, or window=None")

    def over(self, keys: int) -> AttentionSpec:
        """The same attention over `keys` keys, where a window that covers them all is no window."""
        return self if self.window is None or self.window < keys else replace(self, window=None)


@dataclass(frozen=True)
class Kernel:
    """One implementation of attention on one block.

    `forward(q, k, v, spec) -> (out, lse)` and `backward(dout, q, k, v, out, lse, spec, dk, dv) -> dq`, which adds to dk
    and dv (fp32, or fp64), in layout [B, S, H, E], last dim of stride 1, lse [B, H, Sq]. With the out and lse of
    attention over MORE keys, backward gives this block's share of its gradient.
    `refusal(device, dtype, spec, head_dim)` says why the kernel cannot run, or None.
    `row_tile(device, spec)` is the most query rows of one call, or None where memory is linear without tiles.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, AttentionSpec, Tensor, Tensor], Tensor]
    refusal: Callable[[torch.device, torch.dtype, AttentionSpec, int], str | None]
    row_tile: Callable[[torch.device, AttentionSpec], int | None]


def hidden(rows: int, keys: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """True where causal `spec` hides a key. Shape: [rows, keys]."""
    row = torch.arange(keys - rows, keys, device=device)[:, None]
    behind = row - torch.arange(keys, device=device)
    return behind < 0 if spec.window is None else (behind < 0) | (behind >= spec.window)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of a and b together, from each alone, in the dtype of lse.

    A row that sees no key has lse -inf and is the neutral element; where both see none, out is 0 and lse -inf.

    Shapes: out [B, S, H, E]; lse [B, H, S].
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # -inf - -inf would be NaN: a row that saw nothing on either side is measured from 0, so both weights are exp(-inf).
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    share_a, share_b = ((part - base).exp().transpose(1, 2).unsqueeze(-1) for part in (lse_a, lse_b))
    return out_a * share_a + out_b * share_b, lse


def before_ampere(device: torch.device) -> str | None:
    """Why flash kernels cannot run on this NVIDIA GPU, or None; ROCm has its own list, which its kernels check."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"cannot run on compute capability {major}.{minor}, it needs 8.0 (Ampere)"
