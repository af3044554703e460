"""``ds_tsp.pipeline``: a Hugging Face model as a DeepSpeed `PipelineModule`, on a grid of stages x data x TSP."""

from __future__ import annotations

import os
from os import PathLike
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import data
from .blocks import find_blocks_inside, plan_blocks
from .comm import Wire, all_reduce
from .config import TSPConfig, load_config, parse, pipeline_settings
from .inject import check_model, inject_blocks, inject_stage
from .mesh import Mesh, init_distributed
from .recompute import Recompute
from .stage import Part, Stage


def pipeline(
    model: PreTrainedModel | PreTrainedConfig,
    num_stages: int,
    config: str | PathLike[str] | dict[str, Any],
    partition_method: str = "parameters",
    activation_checkpoint_interval: int = 0,
    base_seed: int = 1234,
) -> PipelinedModel:
    """A `PipelineModule` of `num_stages` stages made of `model`, to be given to `ds_tsp.initialize`.

    model: a Hugging Face causal language model, or its config, or the model on the meta device. With the latter two a
    rank only ever makes the layers of its own stage, and initialises them by transformers' own rule from `base_seed`
    and the place of the layer: the same on all data-parallel and TSP ranks and at any number of stages, but not bit for
    bit what the whole model would draw. config: the DeepSpeed config with its ``"tsp"`` section; world = stages x dp x
    P, with the P ranks of a TSP group next to each other. partition_method, activation_checkpoint_interval: as
    DeepSpeed's. Layers, in order: embedding, decoder layers, norm, output layer, whose output is the loss.
    Raises ValueError before the first collective: sizes that do not fit, a model that cannot be cut into such layers.
    """
    settings = load_config(config)
    init_distributed()
    tsp = parse(settings, dist.get_world_size(), num_stages)
    pipeline_settings(settings, tsp.size)
    if isinstance(model, nn.Module):
        check_model(model)
    stage = Stage.of(model, base_seed)
    topology = PipeModelDataParallelTopology(num_stages, tsp.size, dist.get_world_size() // num_stages // tsp.size)
    os.environ.setdefault("LOCAL_RANK", str(dist.get_local_rank()))  # DeepSpeed's module wants it in the environment
    return PipelinedModel(stage, topology, partition_method, activation_checkpoint_interval)


class _Layer(LayerSpec):
    """A part of the model that is built on its own stage only; counted without being built."""

    def __init__(self, stage: Stage, name: str):
        LayerSpec.__init__(self, type(stage.model.get_submodule(name)))
        self.stage, self.name = stage, name

    def build(self, log: bool = False) -> nn.Module:
        return Part(self.stage, self.name)


class _TiedLayer(_Layer, TiedLayerSpec):
    """The embedding, which is the output layer's weight too. On the way out it passes hidden states to the loss."""

    def __init__(self, stage: Stage, name: str, at_the_end: bool):
        super().__init__(stage, name)
        self.key, self.tied_weight_attr = "embedding", [f"{name.rpartition('.')[2]}.weight"]
        self.forward_fn = (lambda module, carried: carried) if at_the_end else None


class PipelinedModel(PipelineModule):
    """The layers of this rank's stage. `tsp_stage.model` has them under their Hugging Face names."""

    def __init__(self, stage: Stage, topology: Any, partition_method: str, activation_checkpoint_interval: int):
        parts = stage.parts
        layers: list[_Layer] = [_Layer(stage, name) for name in parts.names()]
        if parts.tied:
            layers[0] = _TiedLayer(stage, parts.embedding, at_the_end=False)
            layers[-1] = _TiedLayer(stage, parts.embedding, at_the_end=True)
        super().__init__(
            layers,
            topology=topology,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
        )
        stage.source = None  # the other stages' weights may go
        self.tsp_stage = stage

    def _count_layer_params(self) -> list[int]:
        return [spec.stage.parameters_of(spec.name) for spec in self._layer_specs]

    def _partition_layers(self, method: str = "uniform") -> None:
        super()._partition_layers(method)
        empty = [i for i in range(self.num_stages) if self.parts[i] == self.parts[i + 1]]
        if empty:
            raise ValueError(
                f"{len(self._layer_specs)} layers in {self.num_stages} stages by partition_method={method!r} leave "
                f"stage(s) {empty} without any; use fewer stages, or another partition_method"
            )

    def train(self, mode: bool = True) -> PipelinedModel:
        self.tsp_stage.model.train(mode)
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Tensor:
        """Hidden states for the next stage; on the last one the loss, or logits in an evaluation without a loss."""
        stage = self.tsp_stage
        with stage.running(inputs) as micro:
            # Without an input that wants a gradient, reentrant checkpointing would cut off the embedding's.
            spark = torch.zeros((), requires_grad=torch.is_grad_enabled())
            x, *_ = super().forward((inputs, spark, micro))
        if self.stage_id < self.num_stages - 1:
            return x
        if not self.training:
            stage.evaluated = x
        # Not DeepSpeed's loss_fn: what it runs is outside of the module, and engines that hook the module's outputs
        # (bf16 with fp32 accumulation) would clear the output layer's gradient.
        return stage.loss(x) if stage.with_loss else self.logits()

    def logits(self) -> Tensor:
        """Logits of the micro batch that was evaluated last; collective over the last stage's TSP group."""
        stage, state = self.tsp_stage, self.tsp_stage.state
        assert stage.current is not None and stage.evaluated is not None
        local = stage.logits(stage.evaluated)
        return data.gather(local, stage.current.batch.sequence, state.mesh) if state.gather_logits else local


def inject_pipeline(module: PipelineModule, config: TSPConfig) -> Mesh:
    """Fold this rank's layers, in place; returns the mesh within the stage.

    Communication, for a module of the user's own: one all-reduce of a number over the replica, and as in `inject`.
    Raises ValueError if the module's grid is not one of TSP groups, or if no stage has a block to fold.
    """
    mesh = Mesh.of_grid(module.mpu(), config.layout)
    if mesh.size != config.size or mesh.ranks != tuple(range(mesh.ranks[0], mesh.ranks[0] + mesh.size)):
        raise ValueError(
            f"tsp.size={config.size}, but the pipeline's TSP group is {list(mesh.ranks)}; build the PipelineModule "
            f"with topology=PipeModelDataParallelTopology(num_pp={mesh.stages}, num_mp={config.size}, num_dp=...)"
        )
    if isinstance(module, PipelinedModel):
        recompute = inject_stage(module.tsp_stage.model, config, mesh)
        module.activation_checkpoint_func = recompute.around(module.activation_checkpoint_func)
        return mesh
    found = find_blocks_inside(module, config.plan)
    blocks = torch.tensor(len(found), device=get_accelerator().current_device_name())
    if mesh.size > 1 and not all_reduce(blocks, mesh.replica_group, mesh.size * mesh.stages):
        raise ValueError(
            f"no layer of this {type(module).__name__} can be folded (a Hugging Face attention or MLP with a "
            "base_model_tp_plan in its config), so its tokens would never meet; use tsp.size=1, or give tsp.plan"
        )
    wire, recompute = Wire(mesh, config.overlap), Recompute(config.recompute)
    inject_blocks(module, plan_blocks(module, found, config, wire, recompute), config, wire)
    module.activation_checkpoint_func = recompute.around(module.activation_checkpoint_func)
    return mesh
