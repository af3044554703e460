"""Where DeepSpeed's optimizers keep the trained copy of each parameter, at every stage and precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Piece:
    """This rank's part of one trained parameter: elements [start, start + numel) of its flattened slice lie at `offset`
    of `flat`, the tensor for which the base optimizer keeps its state.
    """

    flat: Tensor
    offset: int
    start: int
    numel: int

    def within(self, tensor: Tensor) -> Tensor:
        """The same part of `tensor`, which is `flat` or a state of its shape."""
        return tensor.view(-1).narrow(0, self.offset, self.numel)

    def of(self, local: Tensor) -> Tensor:
        """This rank's elements of the whole slice `local`."""
        return local.reshape(-1).narrow(0, self.start, self.numel)


def named(engine: Any) -> dict[str, nn.Parameter]:
    """This rank's parameters by their names in the unsharded model, each once; of a pipeline those of this stage."""
    stage = getattr(engine.module, "tsp_stage", None)
    module: nn.Module = engine.module if stage is None else stage.model  # the latter has other stages' on meta
    return {name: parameter for name, parameter in module.named_parameters() if not parameter.is_meta}


def base(engine: Any) -> Any:
    """The torch optimizer inside of DeepSpeed's, whose state is the trained one."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def groups(engine: Any) -> list[list[nn.Parameter]]:
    """The trained parameters of each of the user's parameter groups, in the order in which DeepSpeed keeps them."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "sub_group_to_group_id"):  # stage 3
        whole: list[list[nn.Parameter]] = [[] for _ in base(engine).param_groups]
        for sub, parameters in enumerate(optimizer.fp16_groups):
            whole[optimizer.sub_group_to_group_id[sub]] += parameters
        return whole
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    return [group["params"] for group in getattr(optimizer, "param_groups", [])]  # none: an engine that cannot train


def pieces(engine: Any) -> Iterator[tuple[nn.Parameter, Piece]]:
    """Each trained parameter of which this rank keeps something, with what it keeps."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "sub_group_to_group_id"):  # stage 3
        for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            offset = 0
            for parameter in parameters:
                each = parameter.ds_tensor.ds_numel
                start = each * engine.tsp.dp_rank
                yield parameter, Piece(flat, offset, start, max(0, min(each, parameter.ds_numel - start)))
                offset += each
    elif hasattr(optimizer, "bit16_groups") or hasattr(optimizer, "bf16_groups"):  # stages 1 and 2
        flats = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
        for flat, parameters in zip(flats, groups(engine), strict=True):
            for parameter in parameters:
                mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is not None:
                    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                    yield parameter, Piece(flat, here.start, there.start, here.numel)
    elif hasattr(optimizer, "fp32_groups_flat"):  # stage 0 in half precision, fused
        for flat, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            offset = 0
            for parameter in parameters:
                yield parameter, Piece(flat, offset, 0, parameter.numel())
                offset += parameter.numel()
    else:  # stage 0: in fp32 the parameter itself
        masters = getattr(optimizer, "fp32_groups", None) or groups(engine)
        for flats, parameters in zip(masters, groups(engine), strict=True):
            for flat, parameter in zip(flats, parameters, strict=True):
                yield parameter, Piece(flat, 0, 0, parameter.numel())


def put(parameter: nn.Parameter, local: Tensor, dp_rank: int) -> None:
    """Overwrite the parameter itself with the slice `local`; under ZeRO-3 this rank's part of it."""
    part: Any = getattr(parameter, "ds_tensor", None)
    if part is None:
        parameter.data.copy_(local)
        return
    start = part.ds_numel * dp_rank
    mine = local.reshape(-1)[start : start + part.ds_numel]
    part.data.view(-1)[: mine.numel()].copy_(mine)


def shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of this rank's slice, also while ZeRO-3 has it partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
