"""The batch: every form a user may hand in is either exact or refused, on all ranks of the group, before any hang."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ds_tsp
from tests.dist.test_fold import assert_small, folded_pair, gradient_errors
from tests.harness import assert_all_ranks_raise, run_ranks
from tests.integration.test_training import ds_config
from tests.models import fp64_throughout, tiny, tokens

SIZE = 3


def batch_of(rank: int, **changes: Any) -> dict[str, Any]:
    """tokens(2, 14) with `changes`; a callable change gets the batch and the rank."""
    batch: dict[str, Any] = tokens(2, 14)
    for name, change in changes.items():
        batch[name] = change(batch, rank) if callable(change) else change
    return {k: v for k, v in batch.items() if v is not None}


def forward_job(change: str) -> None:
    _, model, mesh = folded_pair("llama", SIZE, num_hidden_layers=1)
    model(**batch_of(mesh.rank, **WRONG[change][0]))


def _with(tensor: Tensor, where: tuple[int, int], value: int) -> Tensor:
    return tensor.index_put(tuple(torch.tensor(i) for i in where), torch.tensor(value))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "empty batch": ({"input_ids": torch.empty(0, 14, dtype=torch.int64), "labels": None}, r"empty.*\(0, 14\)"),
    "empty sequence": ({"input_ids": torch.empty(2, 0, dtype=torch.int64), "labels": None}, r"empty.*\(2, 0\)"),
    "nothing": ({"input_ids": None, "labels": None}, "needs a tensor input_ids"),
    "id too large": ({"input_ids": lambda b, r: _with(b["input_ids"], (1, 13), 53)}, r"input_ids must lie in 0 \.\. 52"),
    "negative id": ({"input_ids": lambda b, r: _with(b["input_ids"], (0, 0), -1)}, r"got -1 \.\. "),
    "label too large": ({"labels": lambda b, r: _with(b["labels"], (0, 5), 60)}, "labels must lie in .* or -100"),
    "labels of another shape": ({"labels": lambda b, r: b["labels"][:, :-1]}, r"labels has shape \(2, 13\)"),
    "other ids on a rank": ({"input_ids": lambda b, r: b["input_ids"] + (r == 1)}, r"rank\(s\) \[1\] of the group"),
    "rows swapped on a rank": ({"input_ids": lambda b, r: b["input_ids"].flip(0) if r == 2 else b["input_ids"]},
                               r"rank\(s\) \[2\]"),
    "other length on a rank": ({"input_ids": lambda b, r: b["input_ids"][:, : 14 - (r == 2)],
                                "labels": lambda b, r: b["labels"][:, : 14 - (r == 2)]}, r"rank\(s\) \[2\]"),
    "labels on one rank only": ({"labels": lambda b, r: b["labels"] if r == 0 else None}, r"rank\(s\) \[1, 2\]"),
    "wrong on one rank only": ({"input_ids": lambda b, r: b["input_ids"][0] if r == 1 else b["input_ids"]},
                               r"must be \[B, S\]|rank 1 of the TSP group was given a wrong batch"),
    "labels on padding": ({"attention_mask": lambda b, r: (torch.arange(14) < 9).expand(2, 14).long()},
                          "predicted from padded tokens"),
    "a hole in the mask": ({"attention_mask": lambda b, r: (torch.arange(14) != 6).expand(2, 14).long(),
                            "labels": lambda b, r: torch.full((2, 14), -100)}, "padding between real tokens"),
    "a cache": ({"past_key_values": object()}, "there is no K/V cache in training"),
    "attention weights": ({"output_attentions": True}, "never formed"),
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_wrong_batch_is_refused_on_all_ranks(change: str) -> None:
    assert_all_ranks_raise(SIZE, forward_job, change, error=ValueError, match=WRONG[change][1])


def exact_job(name: str) -> dict[str, float]:
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", SIZE)
        batch = batch_of(mesh.rank, **EXACT[name])
        labels = batch["labels"]
        expected = reference(**batch).loss
        got = model(**batch).loss
        if (labels[:, 1:] == -100).all():  # a mean over no token: Hugging Face gives NaN, we give nothing to learn
            got.backward()
            return {"loss": got.item(), "gradient": max(p.grad.abs().max().item() for p in model.parameters())}
        expected.backward()
        got.backward()
        return {"loss": (got - expected).abs().item(), **gradient_errors(reference, model, mesh)}


def _one_label(position: int) -> Any:
    return lambda b, r: torch.full((2, 14), -100).index_put((torch.tensor(1), torch.tensor(position)), b["input_ids"][1, position])


EXACT: dict[str, dict[str, Any]] = {
    **{f"only label {i}": {"labels": _one_label(i)} for i in range(0, 14)},
    "no label": {"labels": torch.full((2, 14), -100)},
    "own positions": {"position_ids": torch.arange(5, 19)[None].expand(2, 14)},
    "three-dimensional": {"input_ids": None, "inputs_embeds": torch.linspace(-1, 1, 2 * 14 * 24).sin().view(2, 14, 24).double()},
    "mask of ones": {"attention_mask": torch.ones(2, 14, dtype=torch.int64)},
    "padding on the right": {"attention_mask": lambda b, r: (torch.arange(14) < torch.tensor([[9], [14]])).long(),
                             "labels": lambda b, r: b["labels"].masked_fill(torch.arange(14) >= torch.tensor([[9], [14]]), -100)},
    "num_items_in_batch": {"num_items_in_batch": 57},
    "num_items_in_batch, a tensor": {"num_items_in_batch": torch.tensor(57)},
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_batch_is_exact(name: str) -> None:
    results = run_ranks(SIZE, exact_job, name)
    assert_small(results)
    assert len({r["loss"] for r in results}) == 1


def outputs_job() -> dict[str, Any]:
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", SIZE)
        ids = tokens(2, 14)["input_ids"]
        whole = reference(ids, output_hidden_states=True)
        got = model(ids, output_hidden_states=True)
        checks: dict[str, float] = {"positional": (got.logits - whole.logits).abs().max().item()}
        checks["hidden"] = max((a - b).abs().max().item() for a, b in zip(got.hidden_states, whole.hidden_states, strict=True))
        last = model(input_ids=ids, logits_to_keep=2).logits
        checks["logits_to_keep"] = (last - whole.logits[:, -2:]).abs().max().item()
        some = model(input_ids=ids, logits_to_keep=torch.tensor([0, 7])).logits
        checks["logits_to_keep list"] = (some - whole.logits[:, [0, 7]]).abs().max().item()
        as_tuple = model(input_ids=ids, return_dict=False)
        checks["return_dict"] = (as_tuple[0] - whole.logits).abs().max().item()
        # A loss of the caller's own, from the whole logits: its gradients arrive at every parameter.
        weight = torch.linspace(0, 1, whole.logits.numel(), dtype=torch.float64).view_as(whole.logits)
        (whole.logits * weight).sum().backward()
        (got.logits * weight).sum().backward()
        checks.update(gradient_errors(reference, model, mesh))
        with_labels = model(**tokens(2, 14))
        assert with_labels.logits is None
        assert isinstance(with_labels.loss.item(), float) and model(**tokens(2, 14), return_dict=False)[0].dim() == 0
        # The two models share nothing: the reference still attends by itself.
        assert reference.config._attn_implementation == "eager" and model.config._attn_implementation == "ds_tsp"
    return checks


def test_outputs_are_whole_and_in_order() -> None:
    assert_small(run_ranks(SIZE, outputs_job))


def interleaved_job() -> dict[str, float]:
    """Two forwards of different lengths before the backwards, in reverse; and gradients of one loss taken twice."""
    with fp64_throughout():
        reference, model, mesh = folded_pair("llama", SIZE)
        for m in (reference, model):
            losses = [m(**tokens(b, n, seed=n)).loss for b, n in ((2, 14), (1, 9))]
            losses[1].backward()
            losses[0].backward(retain_graph=True)
            losses[0].backward()
        return gradient_errors(reference, model, mesh)


def test_forwards_may_interleave() -> None:
    assert_small(run_ranks(SIZE, interleaved_job))


def frozen_job() -> dict[str, Any]:
    with fp64_throughout():
        reference, model, mesh = folded_pair("qwen3", SIZE)
        for m in (reference, model):
            for name, parameter in m.named_parameters():
                parameter.requires_grad_("k_proj" in name or "q_norm" in name or "layers.1.mlp.up" in name)
        batch = tokens(2, 14)
        (reference(**batch).loss).backward()
        (model(**batch).loss).backward()
        return gradient_errors(reference, model, mesh)


def test_frozen_parameters() -> None:
    """Some weights of a block trained, others not: nothing is computed or sent for the frozen ones."""
    assert_small(run_ranks(SIZE, frozen_job))


def eval_job(stage: int) -> dict[str, float]:
    """Train, evaluate other shapes, train on: evaluation leaves no trace, and gives the reference's numbers."""
    model, reference = tiny("llama"), tiny("llama").eval()
    engine, *_ = ds_tsp.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), config=ds_config(2, stage))
    batch, odd = tokens(2, 21), tokens(5, 11, seed=3)
    engine.backward(engine(**batch).loss)
    engine.step()
    engine.eval()
    with torch.no_grad():
        loss, logits = engine(**odd).loss, engine(odd["input_ids"]).logits
        expected = reference(**odd)
    engine.train()
    again = engine(**batch).loss
    engine.backward(again)
    engine.step()
    result = {
        "loss": (loss - expected.loss).abs().item(),
        "logits": (logits - expected.logits).abs().max().item(),
        "train": (again - reference(**batch).loss).abs().item(),
    }
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", [0, 3])
def test_eval_between_steps(stage: int) -> None:
    assert_small(run_ranks(4, eval_job, stage), 2e-6)
