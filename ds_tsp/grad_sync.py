"""Gradients of replicated parameters: each rank saw its own tokens only, so they are summed over the axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from .comm import all_reduce
from .layout import accumulate_dtype
from .mesh import Mesh


def sum_replicated_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Give each parameter a hook that replaces its gradient by the sum over the axis.

    A hook on the parameter's own gradient comes before whatever ZeRO does with it, at every stage, and under gradient
    accumulation. It returns a new tensor: autograd may still use the one it was given.
    Communication per backward and rank: an all-reduce of the parameter, in fp32 where it is half precision.
    """
    if mesh.size == 1:
        return

    def summed(grad: Tensor) -> Tensor:
        return all_reduce(grad.to(accumulate_dtype(grad.dtype)), mesh.group, mesh.size).to(grad.dtype)

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(summed)


def mark_sharded_gradients(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Let DeepSpeed's half-precision optimizer without ZeRO count the norm of every rank's slices.

    It asks the gradients whether they are sharded, where all its other optimizers ask the parameters; without an answer
    it counts those of the axis' first rank only, and clips by too small a norm.
    """
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return

    def mark(parameter: Tensor) -> None:
        grad: Any = parameter.grad
        grad.model_parallel = True

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mark)
