"""Causal attention with a log-sum-exp, behind one front door.

block.py       what one kernel call computes (AttentionSpec), what a kernel is (Kernel), how two calls merge
front.py       attend, attend_backward, choose: tiles query rows, decides once which kernel runs
flash.py       adapter to the flash_attn package
sdpa.py        torch's own flash kernels, CPU and CUDA
reference.py   the same signature written out; slow, any device and floating dtype
"""

from .block import AttentionSpec, Kernel, merge
from .front import attend, attend_backward, choose

__all__ = ["AttentionSpec", "Kernel", "attend", "attend_backward", "choose", "merge"]
