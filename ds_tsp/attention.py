"""The core of attention over a sharded sequence: queries stay, K/V of one head group are gathered or go round a ring.

transformers calls the core through its attention interface, under the name `INTERFACE`. Rotary positions are right
because the model computed them from the positions that travel with the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .comm import Wire
from .documents import decode, is_encoded
from .kernels import AttentionSpec
from .layout import local_layout
from .schedules import SCHEDULES, Call

INTERFACE = "ds_tsp"

# Arguments of attention functions in transformers which change the result and which the core does not compute.
_REFUSED = ("position_bias", "head_mask", "encoder_hidden_states", "block_mask")


@dataclass
class AttentionCore:
    """What an attention module needs to attend across the axis; hangs on it as ``tsp_core``.

    `schedule`: "tsp", K/V are gathered; "metp", they go round a ring.
    `tape`: while a list, forward appends (out, lse) of each term. `replay`: while a pair, the core hands this saved
    output on instead of running the kernel, so that the quadratic kernel never runs twice. `tokens`: how many local
    tokens the term that runs has. `called`: the model has come by here.
    """

    wire: Wire
    kernel: str
    name: str
    schedule: str = "tsp"
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


def attend_forward(
    core: AttentionCore, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of local queries on the keys of one head group, by the core's schedule.

    Shapes: q [B, s, h, E]; k, v [B, s, k, E]; sinks [h] -> out [B, s, h, E], lse [B, h, s].
    Communication per rank: received 2 (P-1) B s k E elements, by either schedule.
    """
    forward, _ = SCHEDULES[core.schedule]
    out, lse = forward(call, q, k, v)
    if sinks is None:
        return out, lse
    # A sink is one more key per head, with this score and no value: it only takes part in the sum of exponentials.
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * (lse - with_sink).exp().mT[..., None]).to(q.dtype), with_sink


def attend_backward(
    core: AttentionCore, call: Call, saved: tuple[Tensor, ...], dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `attend_forward` from its saved (q, k, v, out, lse).

    Communication per rank: K/V again, 2 (P-1) B s k E elements; dK/dV reduce-scattered ("tsp"), as many, or carried
    round the ring and home ("metp"), 2 P B s k E. dK/dV are summed and travel in fp32 where K/V are half precision.
    """
    _, backward = SCHEDULES[core.schedule]
    return backward(call, saved, dout)


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
    layout = local_layout(query.shape[2], core.wire.mesh.size, core.wire.mesh.layout)
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
    call = Call(core.wire, layout, spec, decode(attention_mask, layout.padded), core.choose)
    return core(call, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), s_aux), None
