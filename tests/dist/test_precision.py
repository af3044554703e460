"""Half precision: the folded model is no further from fp64 than twice the plain model in the same dtype."""

import copy

import pytest
import torch

from ds_tsp.config import TSPConfig
from ds_tsp.grad_sync import sum_replicated_gradients
from ds_tsp.inject import inject
from ds_tsp.mesh import Mesh
from tests.dist.test_fold import mine
from tests.harness import run_ranks
from tests.models import tiny, tokens


def precision_job(family: str, size: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """For loss, logits and each gradient: distance from fp64 of the plain model and of the folded one."""
    plain = tiny(family, intermediate_size=72, hidden_size=48).to(dtype)
    exact, folded = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    mesh = Mesh.create(size)
    inject(folded, TSPConfig(size=size), mesh)
    sum_replicated_gradients([p for p in folded.parameters() if not hasattr(p, "tsp_cut")], mesh)
    batch = tokens(4, 67)
    models = {"exact": exact, "plain": plain, "folded": folded}
    for model in models.values():
        model(**batch).loss.backward()
    with torch.no_grad():
        logits = {k: m(input_ids=batch["input_ids"]).logits.double() for k, m in models.items()}
    errors = {"logits": tuple((logits[k] - logits["exact"]).norm().item() for k in ("plain", "folded"))}
    named = {k: dict(m.named_parameters()) for k, m in models.items()}
    for name, parameter in named["folded"].items():
        target = mine(named["exact"][name].grad, parameter, mesh)
        grads = mine(named["plain"][name].grad, parameter, mesh), parameter.grad
        errors[name] = tuple((g.double() - target).norm().item() for g in grads)
    return errors


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("llama", torch.float16)])
def test_error_at_most_twice_plain(family: str, dtype: torch.dtype, size: int) -> None:
    for rank, errors in enumerate(run_ranks(size, precision_job, family, size, dtype)):
        for name, (plain, folded) in errors.items():
            assert folded <= 2 * plain, f"rank {rank}, {name}: {folded} against {plain}"
