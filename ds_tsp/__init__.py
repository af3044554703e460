"""ds_tsp: tensor and sequence parallelism folded onto one axis, for DeepSpeed and Hugging Face models."""

from .checkpoint import full_state_dict
from .engine import initialize

__version__ = "0.1.0"
__all__ = ["full_state_dict", "initialize"]
