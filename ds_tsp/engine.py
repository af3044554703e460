"""``ds_tsp.initialize``: deepspeed.initialize for a model folded over a TSP axis."""

from __future__ import annotations

import copy
from collections.abc import Callable
from os import PathLike
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.pipe import PipelineModule
from deepspeed.utils import log_dist, set_z3_leaf_modules

from .config import load_config, parse, pipeline_settings
from .grad_sync import mark_sharded_gradients, sum_replicated_gradients
from .inject import inject
from .loader import TokenCountingLoader
from .mesh import Mesh, init_distributed
from .pipe_engine import adopt
from .pipeline import inject_pipeline
from .resume import attach


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | PathLike[str] | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | PathLike[str] | dict[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Fold `model`, an unmodified Hugging Face model, and return what ``deepspeed.initialize`` returns.

    Arguments and return value: those of ``deepspeed.initialize``; `config` has a ``"tsp"`` section. `model` is changed
    in place; one that `from_pretrained` loaded is folded already. ``engine.tsp`` is the `Mesh`. ``engine(**batch)``
    takes the full batch, the same on every rank of a TSP group, and returns the loss of the group's whole batch.
    Raises ValueError before anything is changed: config that does not fit the world, model that cannot be folded,
    `mpu` or `mesh_param` given (the TSP axis is DeepSpeed's model-parallel axis).
    """
    if model is None:
        raise ValueError("ds_tsp.initialize needs a model")
    if mpu is not None or mesh_param is not None:
        raise ValueError("mpu and mesh_param cannot be given: ds_tsp makes the process groups; leave them out")
    settings = load_config(config if config is not None else config_params, args)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    stages = model.num_stages if isinstance(model, PipelineModule) else 0
    tsp = parse(settings, dist.get_world_size(), stages or 1)
    if stages:
        settings, off = pipeline_settings(settings, tsp.size)
        mesh, folded = inject_pipeline(model, tsp), []
    else:
        loaded = getattr(model, "tsp_loaded", None)  # by from_pretrained, over groups that it made
        mesh = loaded.mesh if loaded else Mesh.create(tsp.size, tsp.layout)
        folded = inject(model, tsp, mesh)
    sum_replicated_gradients([p for p in model.parameters() if not hasattr(p, "tsp_cut")], mesh)
    # The parameters of a folded block are swapped while a term runs: ZeRO-3 must fetch the block's as one.
    if folded:
        set_z3_leaf_modules(model, folded)
    result = deepspeed.initialize(
        args=_without_config(args),
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=None if stages else mesh,  # a pipeline's grid is its own
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=settings,
    )
    engine, optimizer, loader, lr_scheduler = result
    engine.tsp = mesh
    mark_sharded_gradients(engine.optimizer, [p for p in model.parameters() if hasattr(p, "tsp_cut")])
    if stages:
        adopt(engine, mesh)
        if off:
            log_dist(f"{' and '.join(off)} switched off: each TSP rank sends its own tokens' activations", ranks=[0])
    if mesh.size > 1:
        engine.save_16bit_model = engine.save_fp16_model = _refuse_sliced_export
    attach(engine)
    if stages:
        return engine, optimizer, loader, lr_scheduler
    engine.module.tsp_state.accumulation = engine.gradient_accumulation_steps()
    if tsp.loss_average == "token" and loader is not None:
        loader = engine.training_dataloader = TokenCountingLoader(loader, mesh, engine.gradient_accumulation_steps())
    return engine, optimizer, loader, lr_scheduler


def _refuse_sliced_export(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "save_16bit_model would write this rank's slices; call ds_tsp.save_pretrained(engine, folder) on every rank"
    )


def _without_config(args: Any) -> Any:
    """`args` without its config path, which is resolved already; DeepSpeed refuses to be told twice."""
    told = [name for name in ("deepspeed_config", "deepscale_config") if getattr(args, name, None) is not None]
    if told:
        args = copy.copy(args)
        for name in told:
            setattr(args, name, None)
    return args
