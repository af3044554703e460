"""Attention over a sharded sequence, by two schedules: queries stay; K/V are gathered ("tsp") or go round ("metp").

Sources: TSP, arXiv 2604.26294; METP, doi 10.1631/FITEE.2400602.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from . import kernels
from .comm import Wire, gather_sequence, reduce_scatter_sequence
from .documents import Document, blocks, pairs
from .kernels import AttentionSpec, Kernel
from .layout import SequenceLayout, accumulate_dtype

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """What one call computes: the kernel's spec, the documents in positions of the padded sequence, and by whom.

    `choose` gives the kernel for a tensor and a spec.
    """

    wire: Wire
    layout: SequenceLayout
    spec: AttentionSpec
    documents: tuple[Document, ...]
    choose: Callable[[Tensor, AttentionSpec], Kernel]


def _gather_kv(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if call.wire.mesh.size == 1:
        return k, v
    kv = gather_sequence(_side_by_side(k, v), call.layout, call.wire.mesh)
    return kv[:, :, 0], kv[:, :, 1]


def _side_by_side(k: Tensor, v: Tensor) -> Tensor:
    with record_function("ds_tsp.pack"):
        return torch.stack((k, v), dim=2)


def _blocks(call: Call) -> list[tuple[slice, slice, slice]]:
    """The kernel calls of this rank: rows, LOCAL queries, keys."""
    found, i = [], 0
    for run in call.layout.runs(call.wire.mesh.rank):
        for rows, queries, keys in blocks(call.documents, run, call.spec.window, call.spec.causal):
            found.append((rows, slice(queries.start - run[0] + i, queries.stop - run[0] + i), keys))
        i += run[1] - run[0]
    return found


def gathered_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k_S, v_S = _gather_kv(call, k, v)
    kernel, parts = call.choose(q, call.spec), _blocks(call)
    if len(parts) == 1:
        _, queries, keys = parts[0]
        return kernels.attend(q, k_S[:, keys], v_S[:, keys], call.spec, kernel)
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulate_dtype(q.dtype))
    for rows, queries, keys in parts:
        block = (q[rows, queries], k_S[rows, keys], v_S[rows, keys])
        out[rows, queries], lse[rows, :, queries] = kernels.attend(*block, call.spec, kernel)
    return out, lse


def gathered_backward(call: Call, saved: tuple[Tensor, ...], dout: Tensor) -> Grads:
    q, k, v, out, lse = saved
    if call.wire.mesh.size == 1 and len(_blocks(call)) == 1:
        kernel = call.choose(q, call.spec)
        dq, dk, dv = kernels.attend_backward(dout, q, k, v, out, lse, call.spec, kernel)
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    dq, dkv = _of_gathered(call, saved, dout)  # K/V are let go before the exchange makes room for dK/dV once more
    dkv_s = reduce_scatter_sequence(dkv, call.layout, call.wire.mesh).to(k.dtype)
    return dq, dkv_s[:, :, 0], dkv_s[:, :, 1]


def _of_gathered(call: Call, saved: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, Tensor]:
    """dQ, and dK/dV of all tokens from these queries: [B, S, 2, k, E]."""
    q, k, v, out, lse = saved
    k_S, v_S = _gather_kv(call, k, v)
    kernel, dq = call.choose(q, call.spec), torch.empty_like(q)
    dkv = q.new_zeros(*k_S.shape[:2], 2, *k_S.shape[2:], dtype=accumulate_dtype(q.dtype))
    for rows, queries, keys in _blocks(call):
        block = (dout[rows, queries], q[rows, queries], k_S[rows, keys], v_S[rows, keys], out[rows, queries])
        into = dkv[rows, keys, 0], dkv[rows, keys, 1]
        dq[rows, queries], *_ = kernels.attend_backward(*block, lse[rows, :, queries], call.spec, kernel, into)
    return dq, dkv


def ring_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K/V of one rank after another pass by; what each adds is merged by log-sum-exp. Source: METP."""
    dtype = accumulate_dtype(q.dtype)
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
    for owner, kv in _passing(call, k, v):
        for rows, queries, keys, turn, spec in _pairs(call, owner):
            block = [turn(x) for x in (q[rows, queries], kv[rows, keys, 0], kv[rows, keys, 1])]
            out_part, lse_part = kernels.attend(block[0], block[1], block[2], spec, call.choose(q, spec))
            part = turn(out_part).to(dtype), turn(lse_part, 2)
            merged = kernels.merge(out[rows, queries], lse[rows, :, queries], *part)
            out[rows, queries], lse[rows, :, queries] = merged
    return out.to(q.dtype), lse


def ring_backward(call: Call, saved: tuple[Tensor, ...], dout: Tensor) -> Grads:
    """dK/dV of a rank ride one step behind its K/V and take one last hop home, as dW does in an MLP."""
    q, k, v, out, lse = saved
    dtype = accumulate_dtype(q.dtype)
    dq, riding = q.new_zeros(q.shape, dtype=dtype), None
    for owner, kv in _passing(call, k, v):
        dkv = torch.zeros_like(kv, dtype=dtype)
        for rows, queries, keys, turn, spec in _pairs(call, owner):
            block = (dout[rows, queries], q[rows, queries], kv[rows, keys, 0], kv[rows, keys, 1], out[rows, queries])
            d, a, b, c, o = (turn(x) for x in block)
            parts = turn(lse[rows, :, queries], 2), spec, call.choose(q, spec)
            sums = dkv[rows, keys, 0], dkv[rows, keys, 1]
            if turn is _as_it_is:
                dq_part, *_ = kernels.attend_backward(d, a, b, c, o, *parts, into=sums)
            else:
                dq_part, *turned = kernels.attend_backward(d, a, b, c, o, *parts)
                for total, part in zip(sums, turned, strict=True):
                    total.add_(turn(part))
            dq[rows, queries].add_(turn(dq_part))
        if riding is not None:
            dkv += riding.wait()
        riding = call.wire.hop(dkv, torch.empty_like(dkv))
    assert riding is not None
    dkv_s = riding.wait().to(k.dtype)
    return dq.to(q.dtype), dkv_s[:, :, 0], dkv_s[:, :, 1]


def _passing(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The ranks' K/V as they come by, [B, s, 2, k, E] of `owner`; the next is on its way while one is used."""
    kv, mesh = _side_by_side(k, v), call.wire.mesh
    for t in range(mesh.size):
        ahead = call.wire.hop(kv, torch.empty_like(kv)) if t < mesh.size - 1 else None
        yield (mesh.rank - t) % mesh.size, kv
        if ahead is not None:
            kv = ahead.wait()


def _pairs(call: Call, owner: int) -> Iterator[tuple[slice, slice, slice, Any, AttentionSpec]]:
    """The kernel calls of local queries on the keys of `owner`: rows, LOCAL queries, LOCAL keys, how to turn, spec."""
    layout, spec = call.layout, call.spec
    specs = {"causal": spec, "full": replace(spec, causal=False, window=None), "flipped": replace(spec, window=None)}
    for i, mine in enumerate(layout.chunks(call.wire.mesh.rank)):
        for j, theirs in enumerate(layout.chunks(owner)):
            runs = [(chunk * layout.chunk, (chunk + 1) * layout.chunk) for chunk in (mine, theirs)]
            if spec.causal and theirs > mine:
                continue
            for rows, queries, keys, kind in pairs(call.documents, runs[0], runs[1], spec.window, spec.causal):
                local = (_shift(queries, i * layout.chunk - runs[0][0]), _shift(keys, j * layout.chunk - runs[1][0]))
                yield rows, *local, _turned if kind == "flipped" else _as_it_is, specs[kind]


def _turned(x: Tensor, dim: int = 1) -> Tensor:
    return x.flip(dim)


def _as_it_is(x: Tensor, dim: int = 1) -> Tensor:
    return x


def _shift(run: slice, by: int) -> slice:
    return slice(run.start + by, run.stop + by)


# Name of the schedule -> (q, k, v -> out, lse) and (its saved q, k, v, out, lse, and dout -> dq, dk, dv).
SCHEDULES = {"tsp": (gathered_forward, gathered_backward), "metp": (ring_forward, ring_backward)}
