"""ds_tsp: tensor and sequence parallelism folded onto one axis, for DeepSpeed and Hugging Face models."""

from .checkpoint import full_state_dict
from .data import shard_batch
from .engine import initialize
from .loader import ShardedLoader as shard_loader  # noqa: N813  used as a function
from .pipeline import pipeline

__version__ = "0.1.0"
__all__ = ["full_state_dict", "initialize", "pipeline", "shard_batch", "shard_loader"]
