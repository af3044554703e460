"""The schemes that are compared: how each is set up as its own documentation tells, and how it runs a step.

A scheme is data: a name and what builds its `Runner`. Every runner trains the same Llama from the same weights with the
same AdamW. `d` is its number of data-parallel ranks: each step, every one of them takes its share of the sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import ulysses_sp as alst
from deepspeed.utils import groups
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..engine import initialize

Batch = dict[str, Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """What all schemes have in common. sequences: of a step, over all ranks; None: one per data-parallel rank."""

    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 704
    layers: int = 2
    vocab: int = 2048
    dtype: str = "fp32"
    recompute: bool = True
    sequences: int | None = None
    tsp_recompute: str | None = None
    seed: int = 7

    def per_step(self, d: int) -> int:
        """Sequences of a step with d data-parallel ranks. Raises ValueError if they cannot be shared out."""
        if self.sequences is not None and self.sequences % d:
            raise ValueError(f"--sequences {self.sequences} cannot be dealt to {d} data-parallel ranks; use a multiple")
        return d if self.sequences is None else self.sequences

    def model(self) -> Any:
        """The unmodified Hugging Face model, on the device, equal on all ranks. Its weights are fp32 for every dtype:
        each scheme makes its own copy in bf16."""
        set_seed(self.seed)
        config = LlamaConfig(
            hidden_size=self.hidden, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn, num_hidden_layers=self.layers, vocab_size=self.vocab, use_cache=False,
            max_position_embeddings=1 << 20, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        if self.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.to(get_accelerator().current_device_name()).train()

    def batch(self, sequences: int, length: int) -> Tensor:
        """Token ids [sequences, length], the same on all ranks."""
        generator = torch.Generator().manual_seed(self.seed + length)
        ids = torch.randint(self.vocab, (sequences, length), generator=generator)
        return ids.to(get_accelerator().current_device_name())


class Runner:
    """A scheme that was built. d: its data-parallel ranks.

    `place` turns a step's sequences into this rank's micro-batches, outside of what is timed. `step` and `forward` take
    them, and give the mean loss of this rank's micro-batches; its mean over the ranks is that of the step.
    """

    def __init__(
        self, engine: Any, d: int, place: Callable[[Tensor], list[Batch]], loss: Callable[[Any, Batch], Tensor]
    ):
        self.engine, self.d, self.place, self.loss = engine, d, place, loss

    def step(self, batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            loss = self.loss(self.engine, batch)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch]) -> Tensor:
        self.engine.eval()
        losses = [self.loss(self.engine, batch) for batch in batches]
        self.engine.train()
        return torch.stack(losses).mean()


@dataclass(frozen=True)
class Scheme:
    """refusal: why it cannot run on that many ranks with these settings, or ''."""

    name: str
    about: str
    build: Callable[[Settings], Runner]
    refusal: Callable[[int, Settings], str] = lambda world, settings: ""


# --- What is common to several of them.


def adamw(model: Any) -> torch.optim.Optimizer:
    # A large eps, so that gradients of a wrong scale, to which AdamW is nearly blind, show in the losses.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def ds_config(settings: Settings, d: int, stage: int, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config. Buckets hold one decoder layer, FSDP2's unit too: the default of 5e8 elements takes GBs."""
    h, kv = settings.hidden, settings.hidden * settings.kv_heads // settings.heads
    bucket = h * (2 * h + 2 * kv + 3 * settings.ffn)
    zero = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket, "stage3_max_live_parameters": bucket,
                 "stage3_max_reuse_distance": bucket, "stage3_param_persistence_threshold": 0}  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.per_step(d) // d,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.dtype == "bf16"},
        "steps_per_print": 10**9,
        **more,
    }


def ungrouped_stage(settings: Settings) -> int:
    """Of ZeRO, where one data-parallel rank leaves nothing to partition: 0, but bf16 needs fp32 master weights."""
    return 0 if settings.dtype == "fp32" else 1


def whole(ids: Tensor) -> list[Batch]:
    """Every rank is given every sequence."""
    return [{"input_ids": row, "labels": row} for row in ids.split(1)]


def dealt(ids: Tensor) -> list[Batch]:
    """Every rank is given other sequences."""
    return whole(ids[dist.get_rank() :: dist.get_world_size()])


def model_loss(engine: Any, batch: Batch) -> Tensor:
    return engine(**batch).loss


# --- Data parallel.


def zero3(settings: Settings) -> Runner:
    world, model = dist.get_world_size(), settings.model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=ds_config(settings, world, 3))
    return Runner(engine, world, dealt, model_loss)


class FullyShard(Runner):
    """FSDP2: a decoder layer is a unit, the rest is another; parameters are let go after forward."""

    def __init__(self, settings: Settings) -> None:
        device, world, model = get_accelerator().device_name(), dist.get_world_size(), settings.model()
        half = settings.dtype == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
        mesh = init_device_mesh(device, (world,))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        self.optimizer = adamw(model)
        super().__init__(model, world, dealt, model_loss)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            loss = self.loss(self.engine, batch)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()


# --- Tensor parallel, and the schemes of this package.


def autotp(settings: Settings) -> Runner:
    model, world = settings.model(), dist.get_world_size()
    # The head cut as well, with DeepSpeed's own loss over it: without, every rank holds all logits.
    parallel = {"autotp_size": world, "vocab_parallel_lm_head": True}
    config = ds_config(settings, 1, ungrouped_stage(settings), tensor_parallel=parallel)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    return Runner(engine, 1, whole, model_loss)


def folded(settings: Settings, schedule: str) -> Runner:
    model = settings.model()
    section = {"size": dist.get_world_size(), "schedule": schedule}
    if settings.tsp_recompute is not None:
        section["recompute"] = settings.tsp_recompute
    config = ds_config(settings, 1, ungrouped_stage(settings), tsp=section)
    engine, *_ = initialize(model=model, optimizer=adamw(model), config=config)
    return Runner(engine, 1, whole, model_loss)


# --- Sequence parallel.


def ulysses(settings: Settings, tiled: bool) -> Runner:
    """tiled: the whole of ALST on one device, with the MLP and the loss computed in tiles of `hidden` tokens."""
    model, world = settings.model(), dist.get_world_size()
    mpu = alst.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=world, micro_batch_size=1
    )
    config = ds_config(settings, 1, 3)
    if tiled:
        tile(model, world, config["gradient_accumulation_steps"])
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, mpu=mpu)
    group = mpu.get_sequence_parallel_group()
    if tiled:
        return Tiled(engine, 1, partial(ulysses_shards, group=group), lambda engine, batch: engine(**batch))
    return Runner(engine, 1, partial(ulysses_shards, group=group), partial(ulysses_loss, group=group))


def tp_ulysses(settings: Settings) -> Runner:
    """Two ranks share weights, world / 2 share tokens. register_with_transformers counts the uncut model's heads and
    groups neighbours, so its three steps are taken by hand; the ranks that share tokens are data parallel to AutoTP."""
    model = settings.model()
    # To DeepSpeed the ranks that share tokens are data parallel, of which each takes micro-batches of its own.
    stage = ds_config(settings, 1, 1, tensor_parallel={"autotp_size": 2, "vocab_parallel_lm_head": True})
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=stage)
    group = groups.get_data_parallel_group()
    attention = alst.UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS["sdpa"], batch_size=1, attn_head_count=settings.heads // 2,
        attn_head_size=settings.hidden // settings.heads, kv_head_count=settings.kv_heads // 2,
        num_hidden_layers=settings.layers, process_group=group, seq_length_is_variable=True,
    )  # fmt: skip
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda module, q, k, v, mask, *rest, **options: attention(
        module, q, k, v, None, *rest, **options
    )
    return Runner(engine, 1, partial(ulysses_shards, group=group), partial(ulysses_loss, group=group))


def ulysses_shards(ids: Tensor, group: Any) -> list[Batch]:
    """This rank's part of every sequence, dealt by ALST's own adapter: it takes one sequence of each rank at a time."""
    size, rank, device = dist.get_world_size(group), dist.get_rank(group), ids.device
    padded = torch.cat([ids, ids[-1:].expand(-len(ids) % size, -1)])
    positions = torch.arange(ids.shape[1], device=device)[None]
    loader: Any = [{"input_ids": row, "labels": row, "position_ids": positions} for row in padded[rank::size].split(1)]
    adapter = alst.UlyssesSPDataLoaderAdapter(loader, rank, group, size, device)
    shards = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in adapter]
    return shards[: len(ids)]


def ulysses_loss(engine: Any, batch: Batch, group: Any) -> Tensor:
    """The mean over the tokens of all ranks, from each one's mean.

    Value and gradient are those of the documented recipe, which differentiates through an all-gather; that one fails
    on gloo where the group is not the world (torch scatters from a rank of the group as if it were one of the world).
    """
    targets = batch["shift_labels"]
    logits = engine(**{name: tensor for name, tensor in batch.items() if name != "shift_labels"}).logits
    model = engine.module
    local = model.loss_function(logits, labels=None, vocab_size=model.config.vocab_size, shift_labels=targets)
    valid = (targets != -100).sum()
    total = torch.stack([local.detach() * valid, valid.float()])
    dist.all_reduce(total, group=group)
    own = local * valid / total[1] * dist.get_world_size(group)  # the engine divides gradients by the group's size
    return own + (total[0] / total[1] - own).detach()


class Tiled(Runner):
    """ALST's tiled loss differentiates in its forward, so what the loss is scaled by has to be known there already."""

    def step(self, batches: Sequence[Batch]) -> Tensor:
        losses = []
        for batch in batches:
            loss = self.loss(self.engine, batch)
            self.engine.backward(loss, scale_wrt_gas=False)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def tile(model: Any, size: int, accumulated: int) -> None:
    """ALST's TiledMLP and TiledFusedLogitsLoss, as their docstrings show it, on this model only."""

    def mlp_forward(self: Any, x: Tensor) -> Tensor:
        weights = [self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight]
        return alst.TiledMLP.apply(type(self).forward, self, x, math.ceil(x.shape[1] / x.shape[2]), weights)

    def forward(self: Any, shift_labels: Tensor, **inputs: Any) -> Any:
        hidden = self.model(**inputs).last_hidden_state
        valid = (shift_labels != -100).sum()
        dist.all_reduce(valid)
        scale = size / (valid.float() * (accumulated if torch.is_grad_enabled() else 1))

        def tile_loss(self: Any, x: Tensor, targets: Tensor) -> Tensor:
            logits = self.lm_head(x).float()
            return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") * scale

        tiles = math.ceil(hidden.shape[1] / hidden.shape[2])
        weights = [self.lm_head.weight]
        return alst.TiledFusedLogitsLoss.apply(tile_loss, self, hidden, shift_labels, None, tiles, weights, "sum")

    for layer in model.model.layers:
        layer.mlp.forward = MethodType(mlp_forward, layer.mlp)
    model.forward = MethodType(forward, model)


# --- The table.


def _heads_divide(world: int, settings: Settings) -> str:
    if settings.heads % world or (settings.kv_heads % world and world % settings.kv_heads):
        return f"{settings.heads} query and {settings.kv_heads} kv heads cannot be shared by {world} ranks"
    return ""


def _two_by_two(world: int, settings: Settings) -> str:
    if world % 2 or world < 4:
        return f"needs 2 x 2 ranks or more, {world} started"
    half = Settings(heads=settings.heads // 2, kv_heads=max(settings.kv_heads // 2, 1))
    return _heads_divide(world // 2, half)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("zero3", "DeepSpeed ZeRO-3, data parallel", zero3),
        Scheme("fsdp2", "PyTorch fully_shard, data parallel", FullyShard),
        Scheme("autotp", "DeepSpeed AutoTP, tensor parallel, vocabulary-parallel head and loss", autotp, _heads_divide),
        Scheme("ulysses", "DeepSpeed Ulysses (ALST) with ZeRO-3, sequence parallel", partial(ulysses, tiled=False),
               _heads_divide),
        Scheme("alst", "the same with ALST's tiled MLP and tiled loss", partial(ulysses, tiled=True), _heads_divide),
        Scheme("autotp_ulysses", "AutoTP of 2 x Ulysses of world / 2, with ZeRO-1", tp_ulysses, _two_by_two),
        Scheme("tsp", "ds_tsp, schedule tsp", partial(folded, schedule="tsp")),
        Scheme("metp", "ds_tsp, schedule metp", partial(folded, schedule="metp")),
    )
}  # fmt: skip
