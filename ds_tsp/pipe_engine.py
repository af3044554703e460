"""DeepSpeed's pipeline engine for stages with a TSP axis inside: whole batches, shapes that change, true norms.

The class of one engine is swapped; DeepSpeed's own is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from .data import ShardedBatch, global_sum
from .mesh import Mesh
from .microbatches import count_tokens, draw, exchange


class TSPPipelineEngine(PipelineEngine):
    """`PipelineEngine` of a module that `ds_tsp.pipeline` made, or of the user's own (which has no `tsp_stage`)."""

    tsp: Mesh
    tsp_to_load: Iterator[ShardedBatch]
    tsp_shapes: frozenset[tuple[int, int]] = frozenset()

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """As DeepSpeed's. `data_iter` yields full batches, dicts, the same on the first and last stage's TSP groups."""
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        stage = getattr(self.module, "tsp_stage", None)
        if stage is not None:
            self._exchange(self.data_iterator, self.micro_batches, with_loss=True)
            if stage.state.loss_average == "token":
                count_tokens(stage.left, self.tsp, self.device)
        return super().train_batch()

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As DeepSpeed's. Logits are those of the last micro batch, on the last stage: whole and in order, or with
        ``gather_logits`` off this rank's own."""
        arguments = (data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches)
        stage = getattr(self.module, "tsp_stage", None)
        if stage is None:
            return super().eval_batch(*arguments)
        self._exchange(data_iter, num_micro_batches or self.micro_batches, with_loss=compute_loss)
        lengths = {(micro.batch.rows, micro.batch.sequence.length) for micro in stage.left}
        if not compute_loss and len(lengths) > 1:
            raise ValueError(
                f"without a loss DeepSpeed adds up the outputs of all micro batches, and these have (rows, length) "
                f"{sorted(lengths)}; evaluate one at a time, with num_micro_batches=1"
            )
        self.total_loss = None  # DeepSpeed forgets the last call's in training only, and would add logits to it
        stage.with_loss = compute_loss
        try:
            result = super().eval_batch(*arguments)
            loss, logits = result if return_logits else (result, None)
            if compute_loss and isinstance(loss, Tensor):
                loss = loss.reshape(())  # [1] on the stages that it is broadcast to
            if return_logits and compute_loss and self.is_last_stage():
                with torch.no_grad():
                    logits = self.module.logits()
        finally:
            stage.with_loss, stage.evaluated = True, None
        return (loss, logits) if return_logits else loss

    def _exchange(self, batches: Any, count: int, with_loss: bool) -> None:
        """Read the micro batches of this call, and make shapes, documents and positions known to all stages."""
        stage = self.module.tsp_stage
        vocabulary = stage.model.get_input_embeddings().num_embeddings
        stage.left = exchange(draw(batches, count, self.tsp, with_loss), self.tsp, vocabulary, self.device)
        self.tsp_to_load = iter([micro.batch for micro in stage.left])  # not what the stage adds to a micro batch
        # DeepSpeed keeps buffers of the shape it saw first, and asks the sender for shapes every time or never.
        shapes = frozenset(micro.shape for micro in stage.left)
        if shapes != self.tsp_shapes:
            self.reset_activation_shape()
        self.tsp_shapes, self.dynamic_shape = shapes, len(shapes) > 1

    def _next_batch(self) -> Any:
        if not hasattr(self.module, "tsp_stage"):
            return super()._next_batch()
        batch = next(self.tsp_to_load)
        return batch.arguments["input_ids"], batch.shift_labels

    def clip_fp32_gradients(self) -> None:
        """Clip plain fp32 gradients (ZeRO-0) by the norm of the whole model's.

        DeepSpeed's `clip_grad_norm_` counts a parameter that is not cut where ``get_model_parallel_rank() == 0``. In a
        pipeline's grid that rank runs over stages and TSP axis together, so it leaves out those of every stage but the
        first; and it counts a tied weight on each stage that has it.
        Communication: one all-reduce of a number over the replica.
        """
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        counted = [
            p.grad.detach().float().norm() ** 2
            for p in parameters
            if not p.ds_pipe_replicated and (self.tsp.rank == 0 or getattr(p, "model_parallel", False))
        ]
        total = torch.stack(counted).sum() if counted else torch.zeros((), device=self.device)
        dist.all_reduce(total, group=self.tsp.replica_group)
        self._global_grad_norm = total.sqrt()
        scale = (self.gradient_clipping() / (self._global_grad_norm + 1e-6)).clamp(max=1.0)
        for p in parameters:
            p.grad.mul_(scale.to(p.grad.dtype))


def adopt(engine: Any, mesh: Mesh) -> None:
    """Make DeepSpeed's `engine` ours. A pipeline of the user's asks for shapes on each micro batch, and its loss, this
    rank's share of the loss, is summed over the axis."""
    engine.tsp = mesh
    engine.__class__ = TSPPipelineEngine
    if not hasattr(engine.module, "tsp_stage"):
        engine.dynamic_shape, share = True, engine.module.loss_fn
        if share is not None and mesh.size > 1:
            engine.module.loss_fn = lambda outputs, labels: global_sum(share(outputs, labels), mesh)
