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
from .documents import Document, blocks, decode, is_encoded
from .kernels import AttentionSpec
from .layout import SequenceLayout, accumulate_dtype, local_layout
from .mesh import Mesh

INTERFACE = "ds_tsp"

# Arguments of attention functions in transformers which change the result and which the core does not compute.
_REFUSED = ("position_bias", "head_mask", "encoder_hidden_states", "block_mask")


@dataclass(frozen=True)
class Call:
    """What one call of the core computes: the kernel's spec and the documents, in positions of the padded sequence."""

    spec: AttentionSpec
    documents: tuple[Document, ...]
    layout: SequenceLayout


@dataclass
class AttentionCore:
    """What an attention module needs to attend across the axis; hangs on it as ``tsp_core``.

    `tape`: while a list, forward appends (out, lse) of each term. `replay`: while a pair, the core hands this saved
    output on instead of running the kernel, so that the quadratic kernel never runs twice. `tokens`: how many local
    tokens the term that runs has. `called`: the model has come by here.
    """

    mesh: Mesh
    kernel: str
    name: str
    called: bool = False
    tokens: int | None = None
    tape: list[tuple[Tensor, Tensor]] | None = None
    replay: tuple[Tensor, Tensor] | None = None
    _chosen: dict[Any, Any] = field(default_factory=dict)

    def choose(self, q: Tensor, spec: AttentionSpec) -> Any:
        key = (q.device.type, q.dtype, q.shape[-1], spec)
        if key not in self._chosen:
            self._chosen[key] = kernels.choose(self.kernel, q.device, q.dtype, spec, q.shape[-1])
        return self._chosen[key]

    def __call__(self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Shapes: q [B, s, h, E], k, v [B, s, k, E], sinks [h] -> [B, s, h, E]; h, k the heads of one group."""
        if self.replay is not None:
            return _Attend.apply(self, call, q, k, v, sinks, *self.replay)
        with torch.no_grad():
            out, lse = attend_forward(self, call, q, k, v, sinks)
        if self.tape is not None:
            self.tape.append((out, lse))
        # Inside a fold's forward gradients are off. An attention whose weights are not folded is differentiated here.
        return _Attend.apply(self, call, q, k, v, sinks, out, lse) if torch.is_grad_enabled() else out


def _gather_kv(core: AttentionCore, layout: SequenceLayout, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if core.mesh.size == 1:
        return k, v
    kv = gather_sequence(torch.stack((k, v), dim=2), layout, core.mesh)
    return kv[:, :, 0], kv[:, :, 1]


def _blocks(core: AttentionCore, call: Call) -> list[tuple[slice, slice, slice]]:
    """The kernel calls of this rank: rows, LOCAL queries, keys."""
    found, i = [], 0
    for run in call.layout.runs(core.mesh.rank):
        for rows, queries, keys in blocks(call.documents, run, call.spec.window, call.spec.causal):
            found.append((rows, slice(queries.start - run[0] + i, queries.stop - run[0] + i), keys))
        i += run[1] - run[0]
    return found


def attend_forward(
    core: AttentionCore, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of local queries on the keys of one head group.

    Shapes: q [B, s, h, E]; k, v [B, s, k, E]; sinks [h] -> out [B, s, h, E], lse [B, h, s].
    Communication per rank: received 2 (P-1) B s k E elements.
    """
    k_S, v_S = _gather_kv(core, call.layout, k, v)
    kernel, parts = core.choose(q, call.spec), _blocks(core, call)
    if len(parts) == 1:
        _, queries, keys = parts[0]
        out, lse = kernels.attend(q, k_S[:, keys], v_S[:, keys], call.spec, kernel)
    else:
        out = q.new_empty(q.shape)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulate_dtype(q.dtype))
        for rows, queries, keys in parts:
            block = (q[rows, queries], k_S[rows, keys], v_S[rows, keys])
            out[rows, queries], lse[rows, :, queries] = kernels.attend(*block, call.spec, kernel)
    if sinks is None:
        return out, lse
    # A sink is one more key per head, with this score and no value: it only takes part in the sum of exponentials.
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * (lse - with_sink).exp().mT[..., None]).to(q.dtype), with_sink


def attend_backward(
    core: AttentionCore, call: Call, saved: tuple[Tensor, ...], dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `attend_forward` from its saved (q, k, v, out, lse).

    Communication per rank: K/V gathered again, dK/dV reduce-scattered: 2 (P-1) B s k E elements each. dK/dV are summed
    and travel in fp32 where K/V are half precision.
    """
    q, k, v, out, lse = saved
    k_S, v_S = _gather_kv(core, call.layout, k, v)
    kernel, parts = core.choose(q, call.spec), _blocks(core, call)
    if len(parts) == 1 and core.mesh.size == 1:
        dq, dk, dv = kernels.attend_backward(dout, q, k_S, v_S, out, lse, call.spec, kernel)
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    dq = torch.empty_like(q)
    dkv = q.new_zeros(*k_S.shape[:2], 2, *k_S.shape[2:], dtype=accumulate_dtype(q.dtype))
    for rows, queries, keys in parts:
        block = (dout[rows, queries], q[rows, queries], k_S[rows, keys], v_S[rows, keys], out[rows, queries])
        dq_part, dk_part, dv_part = kernels.attend_backward(*block, lse[rows, :, queries], call.spec, kernel)
        dq[rows, queries] = dq_part
        dkv[rows, keys, 0] += dk_part
        dkv[rows, keys, 1] += dv_part
    dkv_s = reduce_scatter_sequence(dkv, call.layout, core.mesh).to(k.dtype)
    return dq, dkv_s[:, :, 0], dkv_s[:, :, 1]


class _Attend(torch.autograd.Function):
    """Hands the saved output on, and differentiates the kernel that made it."""

    @staticmethod
    def forward(ctx: Any, core: AttentionCore, call: Call, q, k, v, sinks, out, lse):
        ctx.core, ctx.call = core, call
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dsinks = None
        if sinks is not None:
            # dS = P (dP - rowsum(dout * out)), and dP of the sink is 0: it has no value.
            share = (sinks.to(lse.dtype)[:, None] - lse).exp()
            dsinks = -(share * (dout * out).sum(-1, dtype=lse.dtype).mT).sum((0, 2)).to(sinks.dtype)
        dq, dk, dv = attend_backward(ctx.core, ctx.call, (q, k, v, out, lse), dout)
        return None, None, dq, dk, dv, dsinks, None, None


def _only_in_the_mask(module: torch.nn.Module, window: int | None, length: int) -> list[str]:
    """What the config says of this layer's mask and the layer did not pass on: no mask is made, so it would be lost."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds is not None and index is not None else None
    windowed = kind == "sliding_attention" or (
        kind is None and getattr(config, "use_sliding_window", True) is not False
    )
    told = getattr(config, "sliding_window", None)
    if windowed and told is not None and told < length and window is None:
        return [f"sliding_window={told} of its config is not handed to the kernel; set it to None to attend to all"]
    chunk = getattr(config, "attention_chunk_size", None)
    chunked = kind == "chunked_attention" and chunk is not None and chunk < length
    return [f"attention_chunk_size={chunk} of its config is in the mask only"] if chunked else []


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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. Shapes: query [B, h, s, E], key, value [B, k, s, E] -> [B, s, h, E].

    Raises ValueError for what the core cannot compute exactly, naming the block and the argument.
    """
    core: AttentionCore | None = getattr(module, "tsp_core", None)
    if core is None:
        raise ValueError(
            f"{type(module).__name__} attends over a sharded sequence, but ds_tsp did not recognise it as an attention "
            "module; its model cannot be used with TSP"
        )
    core.called = True
    layout = local_layout(query.shape[2], core.mesh.size, core.mesh.layout)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = causal and getattr(getattr(module, "config", None), "is_causal", True) is not False
    refused = [f"{name} was given" for name in _REFUSED if kwargs.get(name) is not None]
    if dropout:
        refused.append(f"it drops attention weights (attention_dropout={dropout}): set it to 0 in the model's config")
    if attention_mask is not None and not is_encoded(attention_mask):
        refused.append(f"its model makes a mask of its own, of shape {tuple(attention_mask.shape)}")
    if sliding_window is not None and not causal:
        refused.append(f"sliding_window={sliding_window} is bidirectional: set it to None in the model's config")
    if value.shape != key.shape:
        refused.append(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in width")
    if core.tokens not in (None, query.shape[2]):
        refused.append(
            f"of {core.tokens} tokens it makes {query.shape[2]}: it splits heads by a number it was built with"
        )
    refused += _only_in_the_mask(module, sliding_window, layout.padded)
    if refused:
        raise ValueError(f"{core.name} cannot attend over a sharded sequence: {'; '.join(refused)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = AttentionSpec(scale=scale, window=sliding_window, softcap=softcap, causal=causal)
    call = Call(spec, decode(attention_mask, layout.padded), layout)
    return core(call, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), s_aux), None
