"""The core of attention over a sharded sequence: K/V of one head group are gathered, queries stay.

transformers calls the core through its attention interface, under the name `INTERFACE`. Rotary positions are right
because the model computed them from the positions that travel with the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .comm import gather_sequence, reduce_scatter_sequence
from .kernels import AttentionSpec
from .layout import SequenceLayout, accumulate_dtype, local_layout
from .mesh import Mesh

INTERFACE = "ds_tsp"

# Arguments of attention functions in transformers which change the result and which the core does not compute.
_REFUSED = ("s_aux", "position_bias", "head_mask", "encoder_hidden_states", "cu_seq_lens_q", "block_mask")


@dataclass
class AttentionCore:
    """What one attention block needs to attend across the axis; hangs on the block as ``tsp_core``.

    `tape`: while a list, forward appends (out, lse) of each term. `replay`: while a pair, the core hands this saved
    output on instead of running the kernel, so that the quadratic kernel never runs twice.
    """

    mesh: Mesh
    layout: str
    kernel: str
    name: str
    tape: list[tuple[Tensor, Tensor]] | None = None
    replay: tuple[Tensor, Tensor] | None = None
    _chosen: dict[Any, Any] = field(default_factory=dict)

    def choose(self, q: Tensor, spec: AttentionSpec) -> Any:
        key = (q.device.type, q.dtype, q.shape[-1], spec)
        if key not in self._chosen:
            self._chosen[key] = kernels.choose(self.kernel, q.device, q.dtype, spec, q.shape[-1])
        return self._chosen[key]

    def sequence(self, q: Tensor) -> SequenceLayout:
        return local_layout(q.shape[1], self.mesh.size, self.layout)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Shapes: q [B, s, h, E], k, v [B, s, k, E] -> [B, s, h, E]; h, k the heads of one group."""
        if self.replay is not None:
            return _Attend.apply(self, spec, q, k, v, *self.replay)
        out, lse = attend_forward(self, spec, q, k, v)
        if self.tape is not None:
            self.tape.append((out, lse))
        return out


def _reach(run: tuple[int, int], window: int | None) -> slice:
    """The keys a run of queries can see: all up to its end, or with a window, from the first query's window on."""
    start, stop = run
    return slice(0 if window is None else max(0, start - window + 1), stop)


def _gather_kv(core: AttentionCore, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if core.mesh.size == 1:
        return k, v
    kv = gather_sequence(torch.stack((k, v), dim=2), core.sequence(k), core.mesh)
    return kv[:, :, 0], kv[:, :, 1]


def attend_forward(core: AttentionCore, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of local queries on all keys of one head group.

    Shapes: q [B, s, h, E]; k, v [B, s, k, E] -> out [B, s, h, E], lse [B, h, s].
    Communication per rank: received 2 (P-1) B s k E elements.
    """
    k_S, v_S = _gather_kv(core, k, v)
    kernel, outs, lses, i = core.choose(q, spec), [], [], 0
    for run in core.sequence(q).runs(core.mesh.rank):
        rows, keys = slice(i, i + run[1] - run[0]), _reach(run, spec.window)
        out, lse = kernels.attend(q[:, rows], k_S[:, keys], v_S[:, keys], spec, kernel)
        outs.append(out)
        lses.append(lse)
        i = rows.stop
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 1), torch.cat(lses, 2))


def attend_backward(
    core: AttentionCore, spec: AttentionSpec, saved: tuple[Tensor, ...], dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `attend_forward` from its saved (q, k, v, out, lse).

    Communication per rank: K/V gathered again, dK/dV reduce-scattered: 2 (P-1) B s k E elements each. dK/dV are summed
    and travel in fp32 where K/V are half precision.
    """
    q, k, v, out, lse = saved
    k_S, v_S = _gather_kv(core, k, v)
    sequence, kernel, i = core.sequence(q), core.choose(q, spec), 0
    dq = torch.empty_like(q)
    dkv = q.new_zeros(*k_S.shape[:2], 2, *k_S.shape[2:], dtype=accumulate_dtype(q.dtype))
    for run in sequence.runs(core.mesh.rank):
        rows, keys = slice(i, i + run[1] - run[0]), _reach(run, spec.window)
        block = (dout[:, rows], q[:, rows], k_S[:, keys], v_S[:, keys], out[:, rows], lse[:, :, rows])
        dq_run, dk_run, dv_run = kernels.attend_backward(*block, spec, kernel)
        dq[:, rows] = dq_run
        dkv[:, keys, 0] += dk_run
        dkv[:, keys, 1] += dv_run
        i = rows.stop
    dkv_s = reduce_scatter_sequence(dkv, sequence, core.mesh).to(k.dtype)
    return dq, dkv_s[:, :, 0], dkv_s[:, :, 1]


class _Attend(torch.autograd.Function):
    """Hands the saved output on, and differentiates the kernel that made it."""

    @staticmethod
    def forward(ctx: Any, core: AttentionCore, spec: AttentionSpec, q, k, v, out, lse):
        ctx.core, ctx.spec = core, spec
        ctx.save_for_backward(q, k, v, out, lse)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor):  # type: ignore[override]
        dq, dk, dv = attend_backward(ctx.core, ctx.spec, ctx.saved_tensors, dout)
        return None, None, dq, dk, dv, None, None


def attention_interface(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. Shapes: query [B, h, s, E], key, value [B, k, s, E] -> [B, s, h, E].

    Raises ValueError for what the core cannot compute exactly, naming the block and the argument.
    """
    core: AttentionCore | None = getattr(module, "tsp_core", None)
    if core is None:
        raise ValueError(f"{type(module).__name__} attends to a sharded sequence but is not folded; add it to tsp.plan")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if dropout:
        refused.append(f"dropout={dropout}")
    if attention_mask is not None:
        refused.append(f"an explicit attention mask of shape {tuple(attention_mask.shape)}")
    if not causal:
        refused.append("bidirectional attention")
    if refused:
        raise ValueError(f"{core.name} cannot be folded because it uses {', '.join(refused)}, which TSP does not compute")
    spec = AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap
    )
    return core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), spec), None
