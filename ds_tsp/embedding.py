"""The input embedding over a vocabulary cut into P slices: the owner of a row looks it up and sends it to who asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .comm import all_gather_rows, exchange
from .layout import WeightCut, accumulate_dtype
from .mesh import Mesh


@dataclass(frozen=True)
class _Routes:
    """Who asked for which rows: `ids` of every rank sorted by owner, `order` of the own tokens,
    `counts[asker][owner]`."""

    ids: Tensor
    order: Tensor
    counts: list[list[int]]

    def asked(self, asker: int, owner: int) -> slice:
        start = sum(self.counts[asker][:owner])
        return slice(start, start + self.counts[asker][owner])


def _routes(ids: Tensor, cut: WeightCut, mesh: Mesh) -> _Routes:
    everyones = all_gather_rows(ids, mesh)
    inner = torch.tensor(cut.bounds[1:-1], device=ids.device)
    owner = torch.bucketize(everyones, inner, right=True)
    counts = torch.stack([(owner == j).sum(1) for j in range(mesh.size)], dim=1)
    order = owner.argsort(dim=1, stable=True)
    return _Routes(everyones.gather(1, order), order[mesh.rank], counts.tolist())


class _Embed(torch.autograd.Function):
    """Rows of the embedding for local tokens.

    Shapes: ids [n], weight [v, D] -> [n, D]. Sharded over: tokens and rows of the vocabulary.
    Communication per rank: the ids, P n integers; then each row that another rank owns, at most n D elements, in P-1
    exchanges of at most n rows, so that no rank ever holds the rows of all tokens. Backward: their gradients back.
    Gradient: complete for the own rows, summed in fp32 where the weight is half precision; reduce it over dp only.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, cut: WeightCut, mesh: Mesh, padding_idx: int | None) -> Tensor:
        routes, me = _routes(ids, cut, mesh), mesh.rank
        out = weight.new_empty(ids.numel(), weight.shape[1])
        for distance in range(mesh.size):
            asker, owner = (me + distance) % mesh.size, (me - distance) % mesh.size
            rows = weight[routes.ids[asker, routes.asked(asker, me)] - cut.bounds[me]]
            mine = routes.asked(me, owner)
            out[routes.order[mine]] = exchange(rows, (mine.stop - mine.start, weight.shape[1]), mesh, distance)
        ctx.routes, ctx.cut, ctx.mesh, ctx.padding_idx = routes, cut, mesh, padding_idx
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor):
        routes, mesh, me = ctx.routes, ctx.mesh, ctx.mesh.rank
        dweight = dout.new_zeros(ctx.rows, dout.shape[1], dtype=accumulate_dtype(ctx.dtype))
        for distance in range(mesh.size):
            owner, asker = (me + distance) % mesh.size, (me - distance) % mesh.size
            theirs = routes.asked(asker, me)
            rows = dout[routes.order[routes.asked(me, owner)]]
            arrived = exchange(rows, (theirs.stop - theirs.start, dout.shape[1]), mesh, distance)
            ids = routes.ids[asker, theirs]
            if ctx.padding_idx is not None:
                arrived = arrived.masked_fill((ids == ctx.padding_idx)[:, None], 0)
            dweight.index_add_(0, ids - ctx.cut.bounds[me], arrived.to(dweight.dtype))
        return None, dweight.to(ctx.dtype), None, None, None


class ShardedEmbedding(nn.Embedding):
    """nn.Embedding of which this rank holds a slice of the rows. A family's own embedding class stays in front of
    it."""

    tsp_mesh: Mesh

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        cut: WeightCut = weight.tsp_cut
        rows = _Embed.apply(input.flatten(), self.weight, cut, self.tsp_mesh, self.padding_idx)
        return rows.view(*input.shape, -1)
