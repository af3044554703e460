"""Weights out of a folded model, as the unsharded Hugging Face model names and shapes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import zero
from torch import Tensor, nn

from .comm import gather_slices, receive_named, send_named
from .layout import WeightCut
from .mesh import Mesh


def full_state_dict(engine: Any) -> dict[str, Tensor]:
    """The unsharded state dict of ``engine.module``, on the CPU of global rank 0; empty elsewhere.

    Collective: every rank calls it. One tensor at a time is gathered, over dp under ZeRO-3 and over the TSP axis, so no
    rank but rank 0 ever holds more than one whole slice. Names, shapes and ties are those of the unsharded model;
    dtypes are those of the engine's parameters (half precision under fp16 and bf16).
    """
    found = dict(iterate_full_tensors(engine))
    return {name: found[name] for name in _named_model(engine).state_dict(keep_vars=True) if name in found} | found


def iterate_full_tensors(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """The items of `full_state_dict`, one by one; of a pipeline stage by stage."""
    mesh: Mesh = engine.tsp
    names = set()
    for name, full in _own_tensors(engine):
        if mesh.stage == 0:
            names.add(name)
            yield name, full
        else:  # only the first rank of a stage gets here
            send_named(name, full, mesh.pipe_ranks[0])
    if mesh.stage and mesh.dp_rank == mesh.rank == 0:
        send_named("", torch.empty(0), mesh.pipe_ranks[0])
    elif mesh.stages > 1 and mesh.stage == mesh.dp_rank == mesh.rank == 0:
        for source in mesh.pipe_ranks[1:]:
            while (pair := receive_named(source))[0]:
                if pair[0] not in names:  # a tied weight is on two stages
                    yield pair


def _named_model(engine: Any) -> nn.Module:
    """The module whose names are those of the Hugging Face model."""
    return engine.module.tsp_stage.model if hasattr(engine.module, "tsp_stage") else engine.module


def _own_tensors(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of this stage, on its first rank; those on the meta device are other stages'."""
    model = _named_model(engine)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    done: dict[int, Tensor | None] = {}
    for name, entry in model.state_dict(keep_vars=True).items():
        parameter = parameters.get(name, entry)
        if parameter.is_meta:
            continue
        if id(parameter) not in done:  # a tied weight is gathered once and keeps its tie
            done[id(parameter)] = gather_tensor(parameter, engine.tsp)
        full = done[id(parameter)]
        if full is not None:
            yield name, full


def gather_tensor(parameter: Tensor, mesh: Mesh) -> Tensor | None:
    """A whole parameter or buffer, a copy on the CPU of global rank 0; None elsewhere. Collective."""
    partitioned = hasattr(parameter, "ds_id")
    with zero.GatheredParameters([parameter], enabled=partitioned), torch.no_grad():
        if mesh.dp_rank:
            return None  # the replicas of the first dp rank's group hold the same
        cut: WeightCut | None = getattr(parameter, "tsp_cut", None)
        if cut is None:
            return parameter.detach().cpu().clone() if mesh.rank == 0 else None
        shapes = [cut.slice_shape(rank) for rank in range(mesh.size)]
        slices = gather_slices(parameter.detach(), shapes, mesh)
        return None if slices is None else torch.cat([s.cpu() for s in slices], dim=cut.dim)
