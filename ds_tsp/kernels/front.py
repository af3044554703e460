"""The front door: checks shapes, tiles query rows, and decides once per call site which kernel runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..layout import accumulate_dtype
from . import flash, reference, sdpa
from .block import AttentionSpec, Grads, Kernel

# In the order in which "auto" tries them.
KERNELS = {kernel.name: kernel for kernel in (flash.KERNEL, sdpa.KERNEL, reference.KERNEL)}


def choose(name: str, device: torch.device, dtype: torch.dtype, spec: AttentionSpec, head_dim: int) -> Kernel:
    """The kernel `name`, or for "auto" the first of flash_attn, sdpa, reference that can do the job.

    Raises: ValueError if `name` is unknown or cannot do the job; says why, and which kernels can.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown; use {_either(['auto', *KERNELS])}")
    refusals = {kernel.name: kernel.refusal(device, dtype, spec, head_dim) for kernel in KERNELS.values()}
    able = [other for other, refusal in refusals.items() if refusal is None]
    if not able:
        raise ValueError(f"no kernel runs: {'; '.join(f'{other!r} {why}' for other, why in refusals.items())}")
    if name == "auto":
        return KERNELS[able[0]]
    if name not in able:
        raise ValueError(f"kernel {name!r} {refusals[name]}; use {_either(able)}")
    return KERNELS[name]


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Attention of Sq query rows on Sk keys, any strides; memory linear in S.

    Shapes: q, out [B, Sq, H, E]; k, v [B, Sk, K, E], K divides H; lse [B, H, Sq], natural log, fp32 (fp64 for fp64).
    Raises: ValueError for shapes that do not fit, and for Sq > Sk where `spec` is causal.
    """
    _check(q, k, v, spec)
    q, k, v = _rows_in_one_piece(q, k, v)
    tiles = list(_tiles(q, k, spec, kernel))
    if len(tiles) == 1:
        rows, keys, block_spec = tiles[0]
        return kernel.forward(q, k[:, keys], v[:, keys], block_spec)
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulate_dtype(q.dtype))
    for rows, keys, block_spec in tiles:
        out[:, rows], lse[:, :, rows] = kernel.forward(q[:, rows], k[:, keys], v[:, keys], block_spec)
    return out, lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, kernel: Kernel,
    into: tuple[Tensor, Tensor] | None = None,
) -> Grads:  # fmt: skip
    """dq, dk, dv of `attend` from its saved out and lse; the scores are computed again, tile by tile.

    `out` and `lse` may be those of attention over more keys (merged): the result is then these keys' share.

    Shapes: dout, dq as q; dk, dv as k. dq in q's dtype; dk, dv summed and returned in fp32 where k is half precision,
    or added to `into` and returned, where it is given.
    Raises: ValueError as `attend`, and where dout or out differ from q in shape or dtype.
    """
    _check(q, k, v, spec, dout, out)
    dout, q, k, v, out = _rows_in_one_piece(dout, q, k, v, out)
    dk, dv = into or (torch.zeros_like(x, dtype=accumulate_dtype(k.dtype)) for x in (k, v))
    tiles, dq = list(_tiles(q, k, spec, kernel)), torch.empty(0)
    if len(tiles) != 1:
        dq = torch.empty_like(q)
    for rows, keys, block_spec in tiles:
        block = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
        dq_tile = kernel.backward(*block, block_spec, dk[:, keys], dv[:, keys])
        if len(tiles) == 1:
            return dq_tile, dk, dv
        dq[:, rows] = dq_tile
    return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, spec: AttentionSpec, kernel: Kernel) -> Iterator[tuple[slice, slice, AttentionSpec]]:
    """Query rows and the keys in their reach: each tile is bottom-right aligned again. None where q is empty."""
    total, keys = q.shape[1], k.shape[1]
    if q.numel() == 0:  # torch's CPU op divides by zero (SIGFPE, no exception) on an empty tensor
        return
    height = kernel.row_tile(q.device, spec.over(keys)) or total
    for start in range(0, total, height):
        stop = min(start + height, total)
        last = keys - total + stop if spec.causal else keys
        first = 0 if spec.window is None else max(0, last - (stop - start) - spec.window + 1)
        yield slice(start, stop), slice(first, last), spec.over(last - first)


def _rows_in_one_piece(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies of those whose last dim is strided: torch's CPU op would read the wrong numbers, the others refuse."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _check(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *like_q: Tensor) -> None:
    for x in like_q:
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(f"dout and out must be as q {tuple(q.shape)} {q.dtype}, not {tuple(x.shape)} {x.dtype}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        shapes = " ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v {shapes} are not [B, Sq, H, E] and twice [B, Sk, K, E] with K a divisor of H")
    if spec.causal and q.shape[1] > k.shape[1]:
        raise ValueError(f"{q.shape[1]} query rows need at least as many keys, not {k.shape[1]}, to be causal")
    if q.shape[1] and not k.shape[1]:
        raise ValueError(f"{q.shape[1]} query rows have no key to attend to; skip the call")


def _either(names: list[str]) -> str:
    *head, last = (repr(name) for name in names)
    return f"{', '.join(head)} or {last}" if head else last
