"""Loaders and averages: batches cut early, several epochs, and one mean over all tokens of a step."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ds_tsp
from ds_tsp.data import MARK
from tests.harness import assert_all_ranks_raise, run_ranks
from tests.integration.test_training import adamw, ds_config, micro_batch
from tests.models import tiny, tokens


class Rows(Dataset):
    """`count` rows of 15 tokens, of which more and more have no label."""

    def __init__(self, count: int):
        ids = tokens(count, 15, seed=5)["input_ids"]
        ignored = torch.arange(15) < (torch.arange(count) % 13)[:, None]
        self.rows = [
            {"input_ids": i, "labels": label} for i, label in zip(ids, ids.masked_fill(ignored, -100), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


def start(
    size: int, accumulate: int = 1, stage: int = 1, tsp: dict[str, Any] | None = None, count: int = 24, **more: Any
):
    model = tiny("llama", num_hidden_layers=1)
    config = ds_config(size, stage, accumulate=accumulate, **more)
    config["tsp"] |= tsp or {}
    # DeepSpeed starts worker processes for its loader, which ranks of the harness, being daemons, may not have.
    with mock.patch("deepspeed.runtime.engine.DeepSpeedDataLoader", _without_workers):
        engine, _, loader, _ = ds_tsp.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1),
                                                 training_data=Rows(count), config=config)  # fmt: skip
    return engine, loader


def _without_workers(**arguments: Any) -> DeepSpeedDataLoader:
    return DeepSpeedDataLoader(**{**arguments, "num_local_io_workers": 0})


def loader_job(size: int) -> list[Any]:
    """Two epochs of the loader that initialize returns: its length and the first ids of each batch."""
    engine, loader = start(size, count=22)
    seen = [[batch["input_ids"][:, :3].tolist() for batch in loader] for _ in range(2)]
    result = [len(loader), seen, engine.tsp.dp_rank]
    engine.destroy()
    return result


@pytest.mark.parametrize("size", [2, 4])
def test_loader_deals_by_dp_rank(size: int) -> None:
    results = run_ranks(4, loader_job, size)
    for length, seen, dp_rank in results:
        assert length == len(seen[0]) == -(-22 // (2 * (4 // size)))
        assert all(other[1] == seen for other in results if other[2] == dp_rank)
        assert all(other[1] != seen for other in results if other[2] != dp_rank)


def early_cut_job() -> dict[str, Any]:
    """Steps on batches that a ShardedLoader cut, and the same on full ones."""
    losses = {}
    for early in (False, True):
        engine, _ = start(2, stage=2)
        mesh = engine.tsp
        sampler = DistributedSampler(Rows(24), mesh.dp_size, mesh.dp_rank, shuffle=True)
        loader: Any = DataLoader(Rows(24), batch_size=3, sampler=sampler)
        if early:
            loader = ds_tsp.shard_loader(loader, mesh)
        assert len(loader) == 4 and loader.sampler is sampler and loader.batch_size == 3
        losses[early] = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                if early:
                    assert batch["input_ids"].shape == (3, 8) and ds_tsp.shard_batch(batch, mesh) is batch
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                losses[early].append(loss.item())
        engine.eval()
        with torch.no_grad():
            batch = tokens(2, 15)
            full = engine(input_ids=batch["input_ids"]).logits
            part = ds_tsp.shard_batch(batch, mesh)
            part.pop("labels")
            losses["logits"] = (engine(**part).logits - full).abs().max().item()
        engine.destroy()
    return losses


def test_batches_cut_early() -> None:
    for losses in run_ranks(4, early_cut_job):
        assert losses[True] == losses[False] and len(losses[True]) == 8
        assert losses["logits"] == 0


def wrong_cut_job(what: str) -> None:
    engine, _ = start(4, stage=0)
    batch = ds_tsp.shard_batch(tokens(2, 15), engine.tsp)
    if what == "other place":
        batch[MARK] = dataclasses.replace(batch[MARK], place=(2, 0, "zigzag"))
    elif what == "mark lost":
        batch.pop(MARK)
    elif what == "cut again":
        batch["input_ids"] = batch["input_ids"][:, :2]
    engine(**batch)


@pytest.mark.parametrize(
    ("what", "match"),
    [("other place", r"was cut for .*\(2, 0, 'zigzag'\)"), ("mark lost", "must be given the same batch"),
     ("cut again", r"\['input_ids'\] of a batch that was cut .* another shape")],
)  # fmt: skip
def test_wrong_cut_is_refused(what: str, match: str) -> None:
    assert_all_ranks_raise(4, wrong_cut_job, what, match=match)


def token_mean_job(size: int, accumulate: int, stage: int) -> dict[str, float]:
    """Losses and weights of two epochs, beside steps on ONE mean over all tokens of each step."""
    engine, loader = start(size, accumulate, stage, {"loss_average": "token"}, count=8 * accumulate)
    reference = tiny("llama", num_hidden_layers=1)
    optimizer, dp = torch.optim.SGD(reference.parameters(), 0.1), engine.tsp.dp_size
    worst = 0.0
    for _ in range(2):
        mean = 0.0
        step: list[dict[str, Tensor]] = []
        for i, batch in enumerate(loader):
            got = engine(**batch).loss
            engine.backward(got)
            engine.step()
            mean += got.item() / accumulate
            step += _everyones(batch, engine)
            if (i + 1) % accumulate == 0:
                whole = {k: torch.cat([b[k] for b in step]) for k in ("input_ids", "labels")}
                optimizer.zero_grad()
                loss = reference(**whole).loss
                loss.backward()
                optimizer.step()
                total = torch.tensor(mean)
                torch.distributed.all_reduce(total, group=engine.tsp.dp_group)
                worst, mean, step = max(worst, (total / dp - loss).abs().item()), 0.0, []
    weights = ds_tsp.full_state_dict(engine)
    errors = {n: (v - weights[n]).abs().max().item() for n, v in reference.state_dict().items()} if weights else {}
    engine.destroy()
    return {"loss": worst, **errors}


def _everyones(batch: dict[str, Tensor], engine: Any) -> list[dict[str, Tensor]]:
    found: list[Any] = [None] * engine.tsp.dp_size
    torch.distributed.all_gather_object(
        found, {k: batch[k] for k in ("input_ids", "labels")}, group=engine.tsp.dp_group
    )
    return found


@pytest.mark.parametrize(("size", "accumulate", "stage"), [(1, 3, 1), (2, 1, 0), (2, 3, 1), (4, 2, 3)])
def test_one_mean_over_all_tokens(size: int, accumulate: int, stage: int) -> None:
    for errors in run_ranks(4, token_mean_job, size, accumulate, stage):
        assert max(errors.values()) < 1e-5, errors


def blind_token_mean_job(what: str) -> None:
    engine, loader = start(2, 3, tsp={"loss_average": "token"}, count=24 if what == "keys" else 20)
    for batch in loader:
        keys = ("input_ids", "labels") if what == "keys" else tuple(batch)
        engine.backward(engine(**{k: batch[k] for k in keys}).loss)
        engine.step()


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("keys", r"gradient_accumulation_steps=3 .*call engine\(\*\*batch\)"),
        ("rest", r"this one ends with 2 of 3 micro-batches"),
    ],
)
def test_token_mean_needs_to_look_ahead(what: str, match: str) -> None:
    assert_all_ranks_raise(4, blind_token_mean_job, what, match=match)


def curve_job(tied: bool, **tsp: Any) -> list[float]:
    model = tiny("llama", tie_word_embeddings=tied)
    config = ds_config(2, 1, clip=1.0)
    config["tsp"] |= tsp
    engine, *_ = ds_tsp.initialize(model=model, optimizer=adamw(model), config=config)
    losses = []
    for step in range(20):
        loss = engine(**micro_batch(step % 2, 0, 0)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert (engine.module.lm_head.weight is engine.module.model.embed_tokens.weight) == tied
    engine.destroy()
    return losses


@pytest.mark.parametrize("tied", [True, False])
def test_same_curve_whatever_the_options(tied: bool) -> None:
    whole, *others = (
        run_ranks(2, curve_job, tied, **tsp)[0]
        for tsp in ({"shard_vocab": False}, {"shard_vocab": True}, {"schedule": "metp", "layout": "contiguous"})
    )
    assert whole[0] - whole[-1] > 0.01
    for other in others:
        assert max(abs(a - b) for a, b in zip(whole, other, strict=True)) < 1e-5


def functional_dropout_job() -> Tensor:
    """starcoder2 drops embeddings by a function: what of an all-ones embedding comes out of the model's first layer."""
    model = tiny("starcoder2", embedding_dropout=0.5, residual_dropout=0.0, num_hidden_layers=1)
    engine, *_ = ds_tsp.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), config=ds_config(2, 0)
    )
    dropped: list[Tensor] = []
    engine.module.model.layers[0].register_forward_pre_hook(lambda module, args: dropped.append(args[0] == 0))
    engine(inputs_embeds=torch.ones(2, 16, 24))
    engine.destroy()
    return dropped[0]


def test_dropout_by_a_function_differs_between_ranks() -> None:
    one, two = run_ranks(2, functional_dropout_job)
    assert not torch.equal(one, two) and 0.4 < one.float().mean() < 0.6


def dropout_job(checkpointing: Any) -> dict[str, Any]:
    """Dropout outside of folded blocks (phi drops embeddings and residuals): ranks drop other tokens' activations."""
    model = tiny("phi", embd_pdrop=0.5, hidden_size=32, head_dim=8, num_key_value_heads=4, num_hidden_layers=1)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    engine, *_ = ds_tsp.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.0), config=ds_config(2, 0)
    )
    dropped: list[Tensor] = []
    drop = next(m for m in engine.module.modules() if isinstance(m, torch.nn.Dropout) and m.p)
    drop.register_forward_hook(lambda module, args, out: dropped.append(out == 0))
    ids = torch.ones(2, 16, dtype=torch.int64)
    before = torch.random.get_rng_state()
    losses, gradients = [], []
    for _ in range(2):
        torch.random.set_rng_state(before)
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        engine.backward(loss)
        gradients.append(torch.stack([p.grad.norm() for p in engine.module.parameters()]).norm().item())
        engine.step()
        after = torch.random.get_rng_state()
    again = engine(input_ids=ids, labels=ids).loss.item()
    engine.destroy()
    return {"mask": dropped[0], "rate": dropped[0].float().mean().item(), "losses": losses, "other": again,
            "gradients": gradients, "moved": not torch.equal(before, after)}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [None, False])
def test_dropout_differs_between_ranks_and_repeats(checkpointing: Any) -> None:
    one, two = run_ranks(2, dropout_job, checkpointing)
    assert not torch.equal(one["mask"], two["mask"])
    for r in (one, two):
        assert 0.4 < r["rate"] < 0.6 and r["moved"]
        assert r["losses"][0] == r["losses"][1] != r["other"]
        assert r["gradients"][0] == r["gradients"][1]
    assert one["losses"] == two["losses"]
