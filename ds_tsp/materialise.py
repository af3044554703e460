"""Where a rank's slices come from when it is given a model: one with weights, one on the meta device, or one that
``deepspeed.zero.Init`` partitioned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import zero
from torch import Tensor, nn
from transformers import PreTrainedModel

from .comm import broadcast_from_first, from_first_rank
from .layout import WeightCut
from .mesh import Mesh

Cuts = Mapping[str, WeightCut]  # of parameters, by every name that they have


@contextmanager
def whole_shapes(model: nn.Module) -> Iterator[None]:
    """While active, a parameter that ``zero.Init`` partitioned looks like a meta tensor of its whole shape."""
    slots = [(m, leaf, p) for m in model.modules() for leaf, p in m._parameters.items()]
    kept: list[tuple[nn.Module, str, Any]] = [slot for slot in slots if hasattr(slot[2], "ds_id")]
    try:
        for module, leaf, parameter in kept:
            shape = torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta")
            module._parameters[leaf] = nn.Parameter(shape, parameter.requires_grad)
        yield
    finally:
        for module, leaf, parameter in kept:
            module._parameters[leaf] = parameter


def hold_slices(model: nn.Module, cuts: Cuts, mesh: Mesh, others_on_meta: bool = False) -> None:
    """Let each parameter hold this rank's slice, or the whole where `cuts` has no cut; the parameters stay the same
    objects.

    Weights are those of the group's first rank, whatever the others have. A meta model gets new ones, drawn on all
    ranks from one seed of the world's first rank: every rank draws its own slices only, so they are distributed as
    those of the whole model and are not the same numbers. Memory: one whole parameter beside what the model has.
    Communication: a broadcast of each parameter; from ``zero.Init`` an all-gather of each instead.
    others_on_meta: what is there belongs to other stages of a pipeline, and stays as it is.
    Raises ValueError if a part of the model only is on the meta device, or stays without values.
    """
    if not others_on_meta and isinstance(model, PreTrainedModel) and any(p.is_meta for p in model.parameters()):
        _initialise(model, cuts, mesh)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        cut = cuts.get(name)
        if hasattr(parameter, "ds_id"):
            _unpartition(parameter, cut, mesh)
        elif cut is None:
            broadcast_from_first(parameter.data, mesh)
        elif tuple(parameter.shape) == cut.shape:
            broadcast_from_first(parameter.data, mesh)
            parameter.data, parameter.grad = cut.take(parameter.data, mesh.rank), None
    for buffer in model.buffers():
        if not buffer.is_meta:
            broadcast_from_first(buffer.data, mesh)


def _unpartition(parameter: nn.Parameter, cut: WeightCut | None, mesh: Mesh) -> None:
    """Make an ordinary parameter of one that ZeRO-3 holds in parts; `initialize` partitions it again, over dp."""
    with zero.GatheredParameters([parameter]):
        held = parameter.data.clone() if cut is None else cut.take(parameter.data, mesh.rank)
    for name in [n for n, value in vars(parameter).items() if n.startswith("ds_") or callable(value)]:
        delattr(parameter, name)
    parameter.data = held


def cut_meta(model: nn.Module, cuts: Cuts, rank: int) -> None:
    """Put meta tensors of the shape of this rank's slices where the model's meta parameters are."""
    cut_ones: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in cuts:
            owner, _, leaf = name.rpartition(".")
            if id(parameter) not in cut_ones:
                part = cuts[name].take(parameter.data, rank)
                cut_ones[id(parameter)] = nn.Parameter(part, parameter.requires_grad)
            model.get_submodule(owner)._parameters[leaf] = cut_ones[id(parameter)]


@contextmanager
def own_random(model: nn.Module, cuts: Cuts, rank: int, seed: int) -> Iterator[None]:
    """While active, the model's own initialisation draws other numbers for the slices of other ranks, and zeroes the
    row of the padding token on its owner."""
    moved: list[tuple[nn.Embedding, int]] = []
    for name, cut in cuts.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
            moved.append((owner, owner.padding_idx))
            row, rows = owner.padding_idx - cut.bounds[rank], cut.bounds[rank + 1] - cut.bounds[rank]
            owner.padding_idx = row if 0 <= row < rows else None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + rank)
            yield
    finally:
        for owner, padding_idx in moved:
            owner.padding_idx = padding_idx


def new_seed() -> int:
    """One seed for all ranks, from the first one's generator, which moves by one draw."""
    return from_first_rank(int(torch.randint(2**62, ()).item()))


def _initialise(model: PreTrainedModel, cuts: Cuts, mesh: Mesh) -> None:
    """Give a meta model weights by its own initialisation, of this rank's slices only."""
    real = next((name for name, p in model.named_parameters() if not p.is_meta), None)
    if real:
        raise ValueError(f"only a part of {type(model).__name__} is on the meta device: {real} is not; "
                         "build the whole model there, or load it with ds_tsp.from_pretrained")  # fmt: skip
    slots = [(m, leaf, p) for m in model.modules() for leaf, p in m._parameters.items() if p is not None]
    cut_meta(model, cuts, mesh.rank)
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)  # transformers' mark, set if it was made elsewhere
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                made = nn.Parameter(_unset(parameter), parameter.requires_grad)
                module._parameters[leaf] = empty.setdefault(id(parameter), made)
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[leaf] = _unset(buffer)
    with own_random(model, cuts, mesh.rank, new_seed()):
        model.initialize_weights()
    model.tie_weights()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(f"{type(model).__name__} cannot be given weights on the meta device, as its _init_weights "
                             f"leaves {name} unset; build it with weights, or use ds_tsp.from_pretrained")  # fmt: skip
    _keep_identity(slots)


def _unset(meta: Tensor) -> Tensor:
    """Memory for a meta tensor, filled with what shows if nobody sets it."""
    return torch.full_like(meta, torch.nan if meta.is_floating_point() else 0, device="cpu")


def _keep_identity(slots: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Move the values of new parameters into those that the model had: optimizers were built with them."""
    became: dict[int, nn.Parameter] = {}
    for module, leaf, original in slots:
        new = module._parameters[leaf]
        assert new is not None
        if id(new) not in became:
            vars(new).update(vars(original))
            torch.utils.swap_tensors(original, new)
            became[id(new)] = original
        module._parameters[leaf] = became[id(new)]
