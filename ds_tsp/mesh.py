"""The process mesh: TSP axes of neighbouring ranks, data-parallel axes across them, pipeline stages outermost."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator


def init_distributed(**options: Any) -> None:
    """Join the world, on this rank's own device: DeepSpeed's engine sets it too, but after the first collectives."""
    accelerator = get_accelerator()
    dist.init_distributed(accelerator.communication_backend_name(), **options)
    accelerator.set_device(int(os.environ.get("LOCAL_RANK", 0)))


@dataclass(frozen=True)
class Mesh:
    """This rank's place on the axes, and the groups along them. Also the ``mpu`` that DeepSpeed asks.

    With 8 ranks and size 4 the TSP groups are {0,1,2,3} {4,5,6,7} and the data-parallel groups {0,4} {1,5} {2,6} {3,7}.
    To DeepSpeed the TSP axis is the model-parallel axis: ZeRO partitions over `dp_group`, norms and overflow flags are
    combined over both. In a pipeline both axes lie within a stage: with 8 ranks, size 2 and 2 stages, the first stage
    is {0,1,2,3}, its TSP groups {0,1} {2,3}, its data-parallel groups {0,2} {1,3}; `pipe_ranks` are the ranks at the
    same place of every stage, {0,4} and so on, and `replica_group` is all stages of a data-parallel rank, {0,1,4,5}.
    """

    size: int
    rank: int
    group: Any
    ranks: tuple[int, ...]
    dp_size: int
    dp_rank: int
    dp_group: Any
    dp_ranks: tuple[int, ...]
    layout: str = "zigzag"  # how a sequence is dealt to the axis: layout.SequenceLayout.kind
    stages: int = 1
    stage: int = 0
    pipe_group: Any = None
    pipe_ranks: tuple[int, ...] = ()
    replica_group: Any = None

    @classmethod
    def create(cls, size: int, layout: str = "zigzag") -> Mesh:
        """Make the groups. Collective over the world: every rank calls it, with the same arguments.

        Raises ValueError if `size` does not divide the world.
        """
        world, me = dist.get_world_size(), dist.get_rank()
        if size < 1 or world % size:
            raise ValueError(f"tsp.size={size} does not divide world size {world}")
        tsp_axes = [tuple(range(start, start + size)) for start in range(0, world, size)]
        dp_axes = [tuple(range(start, world, size)) for start in range(size)]
        # new_group is collective: all ranks make all groups, in one order.
        groups = {
            ranks: dist.new_group(list(ranks)) for ranks in (*tsp_axes, *(a for a in dp_axes if a not in tsp_axes))
        }
        tsp, dp = tsp_axes[me // size], dp_axes[me % size]
        return cls(
            size=size,
            rank=me % size,
            group=groups[tsp],
            ranks=tsp,
            dp_size=world // size,
            dp_rank=me // size,
            dp_group=groups[dp],
            dp_ranks=dp,
            layout=layout,
        )

    @classmethod
    def of_grid(cls, grid: Any, layout: str = "zigzag") -> Mesh:
        """The mesh within one stage of a pipeline: the groups that DeepSpeed's `PipelineParallelGrid` made."""
        return cls(
            size=grid.get_slice_parallel_world_size(),
            rank=grid.get_slice_parallel_rank(),
            group=grid.get_slice_parallel_group(),
            ranks=tuple(grid.slice_group),
            dp_size=grid.get_data_parallel_world_size(),
            dp_rank=grid.get_data_parallel_rank(),
            dp_group=grid.get_data_parallel_group(),
            dp_ranks=tuple(grid.dp_group),
            layout=layout,
            stages=grid.get_pipe_parallel_world_size(),
            stage=grid.get_stage_id(),
            pipe_group=grid.get_pipe_parallel_group(),
            pipe_ranks=tuple(grid.pp_group),
            replica_group=grid.get_model_parallel_group(),
        )

    # The names by which DeepSpeed asks a model-parallel unit.
    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_group(self) -> Any:
        return self.group

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_data_parallel_group(self) -> Any:
        return self.dp_group
