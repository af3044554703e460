"""ds_tsp: tensor and sequence parallelism folded onto one axis, for DeepSpeed and Hugging Face models."""

from .checkpoint import full_state_dict
from .data import shard_batch
from .engine import initialize
from .export import save_pretrained
from .loader import ShardedLoader as shard_loader  # noqa: N813  used as a function
from .pipeline import pipeline
from .pretrained import from_pretrained

__version__ = "0.1.0"
__all__ = [
    "from_pretrained",
    "full_state_dict",
    "initialize",
    "pipeline",
    "save_pretrained",
    "shard_batch",
    "shard_loader",
]
