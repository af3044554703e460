"""On a GPU: the attention kernels in bf16, beside fp64. Skipped where torch sees none."""

import pytest
import torch

from ds_tsp import kernels
from ds_tsp.kernels import AttentionSpec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize(("queries", "keys"), [(96, 96), (40, 96)])
def test_kernel_against_reference_in_fp64(name: str, queries: int, keys: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, queries, 8, 64), (2, keys, 2, 64), (2, keys, 2, 64), (2, queries, 8, 64))
    exact = [torch.randn(s, generator=generator, device="cuda", dtype=torch.float64) for s in shapes]
    half = [x.bfloat16() for x in exact]
    spec, results = AttentionSpec(scale=0.125), {}
    for label, (q, k, v, dout), asked in (("exact", exact, "reference"), ("half", half, name)):
        kernel = kernels.choose(asked, q.device, q.dtype, spec, 64)
        out, lse = kernels.attend(q, k, v, spec, kernel)
        results[label] = [out, *kernels.attend_backward(dout, q, k, v, out, lse, spec, kernel)]
    for a, b in zip(results["exact"], results["half"], strict=True):
        assert (a - b.double()).norm() < 2e-2 * a.norm()
