"""Pipeline stages with TSP inside equal the unsharded model: losses, norms and weights of five steps, by any route."""

import copy
import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ds_tsp
from ds_tsp.layout import SequenceLayout
from ds_tsp.meter import LiveBytes
from tests.dist.test_families import FAMILIES
from tests.harness import run_ranks
from tests.integration.test_training import STEPS, adamw, ds_config, micro_batch, train_reference
from tests.models import tiny, tokens

WORLD = 8


def pipeline_engine(model: Any, config: dict[str, Any], stages: int = 2, **more: Any) -> Any:
    module = ds_tsp.pipeline(model, num_stages=stages, config=config, **more)
    engine, *_ = ds_tsp.initialize(model=module, optimizer=adamw(module), config=config)
    return engine


@functools.cache
def expected_run(family: str, tied: bool, clip: float, accumulate: int) -> dict[str, Any]:
    model = tiny(family, tie_word_embeddings=tied).train()
    run = train_reference(model, 2, clip, accumulate)
    return {
        "losses": torch.tensor(run["losses"]).view(STEPS, -1).mean(1).tolist(),
        "norms": run["norms"],
        "weights": dict(model.state_dict()),
    }


def training_job(expected: dict[str, Any], family: str, tied: bool, clip: float, accumulate: int, stage: int,
                 schedule: str, interval: int) -> dict[str, float]:  # fmt: skip
    config = ds_config(2, stage, clip, accumulate)
    config["tsp"]["schedule"] = schedule
    model = tiny(family, tie_word_embeddings=tied)
    engine = pipeline_engine(model, config, activation_checkpoint_interval=interval)
    errors = {"loss": 0.0, "norm": 0.0, "weights": 0.0}
    for step in range(STEPS):
        batches = iter([micro_batch(step, micro, engine.tsp.dp_rank) for micro in range(accumulate)])
        loss = engine.train_batch(batches).item()
        errors["loss"] = max(errors["loss"], abs(loss - expected["losses"][step]))
        if clip or stage:  # plain fp32 DeepSpeed has no norm unless it clips
            norm = float(engine.get_global_grad_norm())
            errors["norm"] = max(errors["norm"], abs(norm - expected["norms"][step]))
    weights = ds_tsp.full_state_dict(engine)
    if torch.distributed.get_rank() == 0:
        assert list(weights) == list(expected["weights"])
        assert not tied or weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
        errors["weights"] = max((weights[n] - v).abs().max().item() for n, v in expected["weights"].items())
    else:
        assert not weights
    return errors


# Each ZeRO stage meets each schedule, tied and untied; accumulation, clipping, checkpointing are dealt out over them.
@pytest.mark.parametrize(
    ("stage", "tied", "schedule", "family", "clip", "accumulate", "interval"),
    [
        (0, False, "tsp", "llama", 0.5, 2, 0),
        (0, False, "metp", "qwen3", 0.0, 1, 1),
        (0, True, "tsp", "qwen3", 0.5, 1, 2),
        (0, True, "metp", "gemma2", 0.5, 1, 0),
        (1, False, "tsp", "qwen3", 0.5, 1, 0),
        (1, False, "metp", "llama", 0.5, 8, 0),
        (1, True, "tsp", "gemma2", 0.5, 2, 1),
        (1, True, "metp", "llama", 0.0, 1, 0),
    ],
)
def test_training_equals_unsharded(stage: int, tied: bool, schedule: str, family: str, clip: float, accumulate: int,
                                   interval: int) -> None:  # fmt: skip
    expected = expected_run(family, tied, clip, accumulate)
    job = (family, tied, clip, accumulate, stage, schedule, interval)
    for rank, errors in enumerate(run_ranks(WORLD, training_job, expected, *job)):
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"


def batch_of(rows: int, length: int, seed: int, kind: str = "plain") -> dict[str, Tensor]:
    batch = tokens(rows, length, seed=seed)
    if kind == "packed":
        cut = length // 3
        positions = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(rows, -1)
        batch["position_ids"] = positions.contiguous()
        batch["labels"] = batch["labels"].index_fill(1, torch.tensor([cut]), -100)
    elif kind == "padded":
        mask = torch.ones_like(batch["input_ids"])
        mask[0, length // 2 :] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    return batch


# Rows and lengths change between calls, and inside of one; evaluation and training take turns.
CALLS = [
    ("eval", [batch_of(2, 21, 1), batch_of(2, 21, 2)]),
    ("train", [batch_of(3, 13, 3), batch_of(3, 13, 4)]),
    ("eval", [batch_of(5, 31, 5), batch_of(5, 31, 6, "packed")]),
    ("train", [batch_of(1, 40, 7, "packed"), batch_of(4, 9, 8, "padded")]),
    ("train", [batch_of(1, 7, 9), batch_of(1, 7, 10)]),
    ("eval", [batch_of(2, 21, 1)]),
]


@functools.cache
def expected_calls(family: str, layers: int) -> dict[str, Any]:
    model = tiny(family, num_hidden_layers=layers)
    optimizer, losses = adamw(model), []
    for kind, batches in CALLS:
        model.train(kind == "train")
        with torch.set_grad_enabled(kind == "train"):
            loss = torch.stack([model(**batch, use_cache=False).loss for batch in batches]).mean()
        losses.append(loss.item())
        if kind == "train":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"losses": losses, "weights": dict(model.state_dict())}


def calls_job(expected: dict[str, Any], family: str, layers: int, size: int, stages: int) -> dict[str, float]:
    model, config = tiny(family, num_hidden_layers=layers), ds_config(size, 1, 0.0, 2)
    # Each layer is run again in backward, when another micro batch has been through the stage meanwhile.
    engine = pipeline_engine(model, config, stages, activation_checkpoint_interval=1)
    errors = []
    for (kind, batches), loss in zip(CALLS, expected["losses"], strict=True):
        if kind == "train":
            got = engine.train_batch(iter(batches))
        else:
            got = engine.eval_batch(iter(batches), num_micro_batches=len(batches))
        errors.append(abs(got.item() - loss))
    weights = ds_tsp.full_state_dict(engine)
    differences = [(weights[n] - v).abs().max().item() for n, v in expected["weights"].items() if weights]
    return {"loss": max(errors), "weights": max(differences, default=0.0)}


@pytest.mark.parametrize(("family", "size", "stages"), [("llama", 2, 4), ("mistral", 4, 2)])
def test_other_lengths_and_rows_between_calls(family: str, size: int, stages: int) -> None:
    """Four stages: two of them read no data. Windows that end within the sequence; packed and padded batches."""
    layers = 5 if stages == 4 else 2
    expected = expected_calls(family, layers)
    for rank, errors in enumerate(run_ranks(WORLD, calls_job, expected, family, layers, size, stages)):
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"


def sent_job() -> list[int]:
    """Bytes that each rank sends to other stages in one step, the second of two alike; and DeepSpeed's two switches."""
    with mock.patch("ds_tsp.engine.log_dist") as log:
        engine = pipeline_engine(tiny("llama"), ds_config(2, 1, 0.0, 3))
    assert isinstance(engine, PipelineEngine) and log.call_count == 1
    assert log.call_args.args[0].startswith("pipeline.pipe_partitioned and pipeline.grad_partitioned switched off")
    sent: list[int] = []
    send = p2p.send

    def counted(tensor: Tensor, to: int, **more: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return send(tensor, to, **more)

    with mock.patch.object(p2p, "send", counted):
        for step in range(2):
            sent.clear()
            engine.train_batch(iter([micro_batch(step, micro, engine.tsp.dp_rank) for micro in range(3)]))
    return [*sent, engine.is_pipe_partitioned, engine.is_grad_partitioned]


def test_only_local_activations_cross_a_boundary() -> None:
    """B x s x D elements of 4 bytes for each micro batch, forward and back: 21 tokens are padded to 24, 12 a rank."""
    assert run_ranks(WORLD, sent_job) == [[2 * 12 * 24 * 4] * 3 + [False, False]] * WORLD


class RealBytes(LiveBytes):
    """Tensors with memory behind them only."""

    def _see(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            super()._see(tensor)


def built_job(stages: int, meta: bool) -> dict[str, Any]:
    config = tiny("llama", num_hidden_layers=6).config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    whole = sum(p.numel() for p in empty.parameters()) * 4
    with RealBytes([]) as live:
        module = ds_tsp.pipeline(empty if meta else config, stages, ds_config(2, 0), "type:decoderlayer")
    own = sum(p.numel() for p in module.parameters()) * 4
    engine, *_ = ds_tsp.initialize(model=module, optimizer=adamw(module), config=ds_config(2, 0))
    loss = engine.train_batch(iter([micro_batch(0, 0, 0)])).item()
    return {"peak": live.peak / whole, "own": own / whole, "layers": len(module.forward_funcs), "loss": loss,
            "weights": ds_tsp.full_state_dict(engine)}  # fmt: skip


def test_from_a_config_no_rank_makes_another_stages_layers() -> None:
    """Nor from a model on the meta device; the weights are the same, at any number of stages."""
    two, four = run_ranks(WORLD, built_job, 2, False), run_ranks(WORLD, built_job, 4, True)
    assert [r["layers"] for r in two] == [4] * 4 + [5] * 4
    assert max(r["own"] for r in two) < 0.55 and max(r["peak"] for r in two) < 0.6
    assert max(r["own"] for r in four) < 0.35 and max(r["peak"] for r in four) < 0.4
    assert len({r["loss"] for r in two}) == 1 and abs(two[0]["loss"] - four[0]["loss"]) < 1e-5
    assert list(two[0]["weights"]) == list(four[0]["weights"])
    for name, weight in two[0]["weights"].items():
        assert (weight - four[0]["weights"][name]).abs().max() < 1e-5
        assert weight.std() > 0.01 or "norm" in name


def faults_job() -> list[str]:
    """Wrong data in turn; each is refused on every rank before anything runs, and the engine goes on."""
    engine = pipeline_engine(tiny("llama"), ds_config(2, 1, 0.0, 2))
    good, last = batch_of(2, 9, 1), engine.is_last_stage()
    other = batch_of(2, 9, 2)
    cases: list[Any] = [
        iter([good]),
        iter([good, other if last else good]),
        iter([good, other if engine.tsp.rank else good]),
        iter([good, good if last else {"input_ids": good["input_ids"]}]),
        iter([good, {**good, "token_type_ids": good["labels"]}]),
        iter([(good["input_ids"], good["labels"])] * 2),
        iter([{**good, "input_ids": good["input_ids"] + 50}] * 2),
        [good, good],
    ]
    messages = []
    for batches in cases:
        with pytest.raises((ValueError, StopIteration)) as raised:
            engine.train_batch(batches)
        messages.append(f"{raised.type.__name__}: {raised.value}")
    # A batch that was cut early is recognised, by some ranks or all.
    cut = ds_tsp.shard_batch(good, engine.tsp) if engine.tsp.dp_rank else good
    loss = engine.train_batch(iter([cut, good])).item()
    assert loss == pytest.approx(tiny("llama")(**good).loss.item(), abs=1e-5)
    return messages


def test_wrong_data_is_refused_on_all_ranks() -> None:
    ended, stages, group, label, unknown, kind, ids, no_iterator = range(8)
    for rank, messages in enumerate(run_ranks(WORLD, faults_job)):
        assert messages[ended].startswith("StopIteration: the data of rank 0 of the TSP group of stage 0 ended at")
        assert "rank 0 of the TSP group of stage 1 read another one than rank 0" in messages[stages]
        assert "rank 1 of the TSP group of stage 0 read another one than rank 0" in messages[group]
        assert ("no labels" if rank < 4 else "rank 0 of the TSP group of stage 0 was given") in messages[label]
        assert "passes on input_ids, labels, positions and documents; the batch has" in messages[unknown]
        assert "takes batches as dicts; got tuple" in messages[kind]
        assert "input_ids must lie in 0 .. 52" in messages[ids]
        assert "from an iterator: 'list' object is not an iterator" in messages[no_iterator]


def evaluation_job(stages: int, size: int, gather: bool) -> dict[str, float]:
    """Logits beside a loss, and without one; the mean over all tokens of a step where micro batches are uneven."""
    config = ds_config(size, 0, 0.0, 2)
    config["tsp"] |= {"loss_average": "token", "gather_logits": gather}
    engine, reference = pipeline_engine(tiny("gemma2"), config, stages), tiny("gemma2")
    mine = batch_of(2, 19, engine.tsp.dp_rank)
    with torch.no_grad():
        expected = reference(**mine)
    loss, logits = engine.eval_batch(iter([mine]), return_logits=True, num_micro_batches=1)
    ids = {"input_ids": mine["input_ids"]}
    alone = engine.eval_batch(iter([ids]), compute_loss=False, reduce_output=None, num_micro_batches=1)
    errors = {"loss": 0.0 if engine.tsp.dp_size > 1 else (loss - expected.loss).abs().item()}
    assert (logits is None) == (alone is None) == (not engine.is_last_stage())
    if logits is not None:
        whole = expected.logits
        if not gather:  # local tokens, the last of which fill up the sequence
            at = SequenceLayout(19, size).positions(engine.tsp.rank)
            logits, alone, whole = logits[:, at < 19], [alone[0][:, at < 19]], whole[:, at[at < 19]]
        errors |= {"beside": (logits - whole).abs().max().item(), "alone": (alone[0] - whole).abs().max().item()}
    dp_ranks = range(engine.tsp.dp_size)
    everyones = [[batch_of(1 + micro, 9 + 14 * micro + dp, dp) for micro in range(2)] for dp in dp_ranks]
    got = engine.train_batch(iter(everyones[engine.tsp.dp_rank])).item()
    losses = [reference(**batch, use_cache=False) for row in everyones for batch in row]
    valid = [(batch["labels"][:, 1:] != -100).sum() for row in everyones for batch in row]
    mean = sum(out.loss * n for out, n in zip(losses, valid, strict=True)) / sum(valid)
    return errors | {"token": abs(got - mean.item())}


@pytest.mark.parametrize(("stages", "size", "gather"), [(2, 2, True), (2, 4, False), (1, 4, True)])
def test_logits_and_the_mean_over_tokens(stages: int, size: int, gather: bool) -> None:
    """Also one stage alone, first and last at once."""
    for rank, errors in enumerate(run_ranks(WORLD, evaluation_job, stages, size, gather)):
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"


def families_job(families: dict[str, Any]) -> dict[str, float]:
    errors = {}
    for family, sizes in families.items():
        engine = pipeline_engine(tiny(family, **sizes), ds_config(4, 1, 0.0))
        reference, batch = tiny(family, **sizes).train(), batch_of(2, 27, 3)
        optimizer, out = adamw(reference), reference(**batch)
        out.loss.backward()
        optimizer.step()
        errors[family] = abs(engine.train_batch(iter([batch])).item() - out.loss.item())
        weights = ds_tsp.full_state_dict(engine)
        for name, weight in reference.state_dict().items():
            if weights:
                errors[f"{family} {name}"] = (weights[name] - weight).abs().max().item()
    return errors


def test_other_families() -> None:
    """Rotary embeddings by kind of layer, parallel blocks, other names of parts, biases, a logit scale."""
    families = {family: FAMILIES[family] for family in ("gemma3_text", "cohere2", "gpt_neox", "phi")}
    for rank, errors in enumerate(run_ranks(WORLD, families_job, families)):
        assert max(errors.values()) < 1e-5, (
            f"rank {rank}: {max(errors, key=errors.__getitem__)}, {max(errors.values())}"
        )


class FirstOfMine(nn.Module):
    """A pipeline of the user's own, of Hugging Face layers: it makes positions itself, from those of local tokens."""

    def __init__(self, model: Any):
        super().__init__()
        self.embed = copy.deepcopy(model.model.embed_tokens)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, positions = inputs
        return self.embed(ids), positions


class LayerOfMine(nn.Module):
    def __init__(self, model: Any, number: int):
        super().__init__()
        self.block, self.rotary = copy.deepcopy(model.model.layers[number]), copy.deepcopy(model.model.rotary_emb)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, positions = inputs
        return self.block(x, position_embeddings=self.rotary(x, positions)), positions


class LastOfMine(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.norm, self.head = copy.deepcopy(model.model.norm), copy.deepcopy(model.lm_head)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(self.norm(inputs[0]))


def share_of_mine(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    targets, valid = labels
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / valid


def own_module_job() -> dict[str, float]:
    with pytest.raises(ValueError, match=r"5 layers in 8 stages by partition_method='uniform' leave .* \[5, 6, 7\]"):
        ds_tsp.pipeline(tiny("llama"), 8, ds_config(1, 0), "uniform")
    model, config = tiny("llama"), ds_config(2, 0, 0.5, 1)
    layers = [LayerSpec(FirstOfMine, model), *(LayerSpec(LayerOfMine, model, i) for i in range(2)),
              LayerSpec(LastOfMine, model)]  # fmt: skip
    topology = PipeModelDataParallelTopology(2, 2, 2)
    os.environ["LOCAL_RANK"] = "0"
    module = PipelineModule(layers, topology=topology, loss_fn=share_of_mine, partition_method="uniform")
    engine, *_ = ds_tsp.initialize(model=module, optimizer=adamw(module), config=config)
    optimizer, errors = adamw(model), {"loss": 0.0}
    for step, length in enumerate((16, 9, 31)):
        everyones = [batch_of(1 + step, length, 10 * step + dp) for dp in range(2)]
        mine = ds_tsp.shard_batch(everyones[engine.tsp.dp_rank], engine.tsp)
        valid = (everyones[engine.tsp.dp_rank]["labels"][:, 1:] != -100).sum()
        positions = mine["position_ids"].expand(1 + step, -1).contiguous()
        loss = engine.train_batch(iter([((mine["input_ids"], positions), (mine["labels"], valid))]))
        optimizer.zero_grad()
        expected = torch.stack([model(**batch).loss for batch in everyones]).mean()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        errors["loss"] = max(errors["loss"], abs(loss.item() - expected.item()))
        errors[f"norm {step}"] = (engine.get_global_grad_norm() - norm).abs().item()
    assert sum(type(m).__name__.startswith("Folded") for m in module.modules()) == 2
    for more, message in (({"topology": topology}, "no layer of this PipelineModule can be folded"),
                          ({"num_stages": 2}, "tsp.size=2, but the pipeline's TSP group is")):  # fmt: skip
        linear = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=nn.functional.mse_loss, **more)
        with pytest.raises(ValueError, match=message):
            ds_tsp.initialize(model=linear, config=config, model_parameters=linear.parameters())
    return errors


def test_a_pipeline_module_of_the_users_own() -> None:
    """The user's layers see this rank's tokens; loss_fn gives this rank's share of the loss."""
    for rank, errors in enumerate(run_ranks(WORLD, own_module_job)):
        assert max(errors.values()) < 1e-5, f"rank {rank}: {errors}"


def half_precision_job() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, stage, more in (("fp32", 1, {}), ("bf16-0", 0, {"bf16": {"enabled": True}}),
                              ("bf16-1", 1, {"bf16": {"enabled": True}})):  # fmt: skip
        config = ds_config(2, stage, 1.0, 2, **more)
        module = ds_tsp.pipeline(tiny("qwen3", tie_word_embeddings=True), 2, config)
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        engine, *_ = ds_tsp.initialize(model=module, model_parameters=module.parameters(), config=config)
        found[name] = []
        for step in range(3):
            batches = iter([micro_batch(step, micro, engine.tsp.dp_rank) for micro in range(2)])
            found[name] += [engine.train_batch(batches).item(), float(engine.get_global_grad_norm())]
    return found


def test_bf16() -> None:
    for found in run_ranks(WORLD, half_precision_job):
        for name in ("bf16-0", "bf16-1"):
            assert found[name] != found["fp32"]
            assert found[name] == pytest.approx(found["fp32"], rel=3e-2)


def resume_job(folder: str) -> float:
    """Two steps, a checkpoint of DeepSpeed's, one step; and that last step again from the checkpoint."""

    def step(engine: Any, number: int) -> float:
        return engine.train_batch(iter([micro_batch(number, 0, engine.tsp.dp_rank)])).item()

    engine = pipeline_engine(tiny("gemma2"), ds_config(2, 1, 0.5))
    step(engine, 0), step(engine, 1)
    engine.save_checkpoint(folder)
    last, weights = step(engine, 2), ds_tsp.full_state_dict(engine)
    other = pipeline_engine(tiny("gemma2").config, ds_config(2, 1, 0.5))
    other.load_checkpoint(folder)
    again, others = step(other, 2), ds_tsp.full_state_dict(other)
    return max([abs(last - again), *((weights[n] - others[n]).abs().max().item() for n in weights)])


def test_deepspeeds_checkpoint_resumes(tmp_path: Path) -> None:
    assert run_ranks(WORLD, resume_job, str(tmp_path)) == [0.0] * WORLD
