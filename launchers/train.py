"""Train a causal language model on text files: a plain DeepSpeed script, plus ``ds_tsp.initialize``.

    deepspeed --num_gpus 2 launchers/train.py --deepspeed --deepspeed_config ds_configs/cpu_tsp2.json --steps 200

The model is a small byte-level Llama made here, or a local Hugging Face folder with its tokenizer. The text is the
source of the Python standard library, or the files that you name. Every rank reads it all; the loader deals windows.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import transformers
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor
from tqdm import tqdm

import ds_tsp
from ds_tsp.config import load_config
from ds_tsp.meter import peak_memory

# width, layers, ffn width; 4 query and 2 kv heads, vocabulary 256
BYTE_MODELS = {"byte-tiny": (64, 2, 128), "byte-small": (128, 4, 384)}
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # not every Python brings its tests
SEPARATOR = b"\0"  # between files


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="byte-small", help=f"{', '.join(BYTE_MODELS)}, or a local Hugging Face folder")
    add("--text", type=Path, nargs="+", help="text files (default: the Python standard library's sources)")
    add("--seq-length", type=int, default=512, help="tokens per window")
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--seed", type=int, default=1234, help="of new weights and of the order of the windows")
    add("--lr", type=float, help="peak learning rate (3e-4), for a config without an optimizer")
    add("--weight-decay", type=float, help="of matrices (0.1), for a config without an optimizer")
    add("--warmup-steps", type=int, default=10)
    add("--min-lr-ratio", type=float, default=0.1, help="the cosine ends at this part of the peak")
    add("--eval-fraction", type=float, default=0.05, help="held out: whole files, or the tail where they are few")
    add("--eval-every", type=int, default=100, help="steps between validations; there is always one at the end")
    add("--eval-batches", type=int, default=16, help="micro batches of each data-parallel rank in one validation")
    add("--log-every", type=int, default=10, help="steps between printed lines")
    add("--gradient-checkpointing", action="store_true")
    add("--pipeline-stages", type=int, default=1, help="cut the layers into this many stages; ranks = stages x dp x P")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    args = deepspeed.add_config_arguments(parser).parse_args()
    if not 0 < args.eval_fraction < 1:
        parser.error(f"--eval-fraction {args.eval_fraction} must lie between 0 and 1")
    if min(args.seq_length, args.steps, args.eval_every, args.eval_batches, args.log_every) < 1:
        parser.error("--seq-length, --steps, --eval-every, --eval-batches and --log-every must be 1 or more")
    return args


def build_model(args: argparse.Namespace, config: dict[str, Any], half: bool) -> tuple[Any, Any]:
    """The model, of a folder this rank's slices only, and its tokenizer; none for bytes."""
    transformers.set_seed(args.seed)
    tokenizer: Any = None
    if args.model in BYTE_MODELS:
        width, layers, ffn = BYTE_MODELS[args.model]
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=256, hidden_size=width, num_hidden_layers=layers, intermediate_size=ffn, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=args.seq_length, initializer_range=width**-0.5,
            bos_token_id=None, eos_token_id=None))  # fmt: skip
    elif Path(args.model).is_dir():
        dtype = torch.bfloat16 if half else torch.float32
        model = ds_tsp.from_pretrained(args.model, config, dtype=dtype).train()
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    else:
        raise ValueError(f"--model {args.model} is neither a folder nor one of {', '.join(BYTE_MODELS)}")
    longest = getattr(model.config, "max_position_embeddings", args.seq_length)
    if args.seq_length > longest:
        raise ValueError(f"--seq-length {args.seq_length} is longer than the {longest} positions of {args.model}")
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model, tokenizer


class Windows(torch.utils.data.Dataset):
    """Windows of `length` tokens, one behind the other; a rest at the end is not used."""

    def __init__(self, documents: list[bytes], length: int, tokenizer: Any) -> None:
        if tokenizer is None:
            self.tokens = torch.from_numpy(np.frombuffer(bytearray(SEPARATOR.join(documents)), dtype=np.uint8))
        else:
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            texts = [document.decode(errors="replace") for document in documents]
            coded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            self.tokens = torch.tensor([token for ids in coded for token in (*ids, *end)], dtype=torch.int32)
        self.length, self.bytes_per_token = length, sum(map(len, documents)) / max(len(self.tokens), 1)
        if len(self.tokens) < length:
            raise ValueError(f"{len(self.tokens)} tokens of text are less than one window of {length}: give more text")

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens[index * self.length : (index + 1) * self.length].long()
        return {"input_ids": ids, "labels": ids}


def read_text(files: list[Path] | None, held_out: float) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on, and those held out: every n-th file or, with fewer files than n, the tail of it all."""
    if files is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = sorted(root.rglob("*.py"))
        files = [path for path in found if not NOT_TEXT.intersection(path.relative_to(root).parts)]
    documents, every = [path.read_bytes() for path in files], round(1 / held_out)
    if len(documents) >= every > 1:
        return [d for i, d in enumerate(documents, 1) if i % every], documents[every - 1 :: every]
    text = SEPARATOR.join(documents)
    cut = round(len(text) * (1 - held_out))
    return [text[:cut]], [text[cut:]]


def optimizer_and_schedule(args: argparse.Namespace, config: dict[str, Any], model: Any) -> dict[str, Any]:
    """These arguments of initialize; where the config has an optimizer or a scheduler, that one is used."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    chosen: dict[str, Any] = {"model_parameters": [{"params": matrices}, {"params": others, "weight_decay": 0.0}]}
    if "optimizer" not in config:
        given = {"lr": args.lr, "weight_decay": args.weight_decay}
        hyper = {"lr": 3e-4, "weight_decay": 0.1} | {name: v for name, v in given.items() if v is not None}
        chosen["optimizer"] = lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), **hyper)
    elif args.lr is not None or args.weight_decay is not None:
        raise ValueError("the config has an optimizer: set lr and weight_decay there, not by --lr and --weight-decay")
    if "scheduler" not in config:
        chosen["lr_scheduler"] = lambda optimizer: transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, args.warmup_steps, args.steps, min_lr_rate=args.min_lr_ratio
        )
    return chosen


def endless(loader: Any, device: torch.device, seed: int) -> Iterator[dict[str, Tensor]]:
    """Batches for ever, in another order in each epoch; the order depends on the seed alone."""
    if len(loader) == 0:
        raise ValueError(f"{len(loader.dataset)} windows are too few for one micro batch on every data-parallel rank")
    loader.num_local_io_workers, loader.pin_memory = 0, device.type != "cpu"  # a window is a slice of memory
    loader.data_sampler.seed, epoch = seed, 0
    while True:
        loader.data_sampler.set_epoch(epoch)  # DeepSpeed's loader repeats one order otherwise
        for batch in loader:
            yield {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        epoch += 1


def average(loss: Tensor, engine: Any) -> float:
    """Over the data-parallel ranks; within a TSP group the loss is the same already."""
    dist.all_reduce(loss, group=engine.tsp.dp_group)
    return loss.item() / engine.tsp.dp_size


def maximum(values: list[int], engine: Any) -> list[int]:
    """Over all ranks."""
    most = torch.tensor(values, device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


@torch.no_grad()
def validate(engine: Any, windows: Windows, batches: int) -> float:
    """Mean loss in nats per byte of held-out windows spread over the text, the same ones every time."""
    micro, dp = engine.train_micro_batch_size_per_gpu(), engine.tsp.dp_size
    count = min(len(windows) // dp, batches * micro)  # equal on every rank, since a forward is collective
    if count == 0:
        raise ValueError(f"{len(windows)} held-out windows are too few for {dp} data-parallel ranks")
    chosen = torch.linspace(0, len(windows) - 1, count * dp).long()[engine.tsp.dp_rank :: dp]
    total = torch.zeros((), device=engine.device)
    engine.eval()
    for part in chosen.split(micro):
        ids = torch.stack([windows[index]["input_ids"] for index in part.tolist()]).to(engine.device)
        batch = {"input_ids": ids, "labels": ids}
        if isinstance(engine, PipelineEngine):
            total += engine.eval_batch(iter([batch]), num_micro_batches=1) * len(ids)
        else:
            total += engine(**batch).loss * len(ids)
    engine.train()
    return average(total / count, engine) / windows.bytes_per_token


def train(engine: Any, loader: Any, held_out: Windows, args: argparse.Namespace, say: Any) -> list[int]:
    """Runs all steps; returns what this rank held at the last one."""
    gas, pipelined = engine.gradient_accumulation_steps(), isinstance(engine, PipelineEngine)
    plain = engine.optimizer is engine.basic_optimizer and not pipelined
    held: list[int] = []
    tokens, start = 0, time.perf_counter()
    batches, shown = endless(loader, engine.device, args.seed), dist.get_rank() == 0 and sys.stderr.isatty()
    for step in tqdm(range(1, args.steps + 1), unit="step", disable=not shown):
        logs, validates = (step % every == 0 or step == args.steps for every in (args.log_every, args.eval_every))
        loss = torch.zeros((), device=engine.device)
        if pipelined:
            loss, tokens = engine.train_batch(batches), tokens + engine.train_batch_size() * args.seq_length
        for micro_step in () if pipelined else range(1, gas + 1):
            batch = next(batches)
            micro_loss = engine(**batch).loss
            engine.backward(micro_loss)
            loss += micro_loss.detach() / gas
            tokens += batch["input_ids"].numel() * engine.tsp.dp_size
            if logs and micro_step == gas:  # plain fp32 AdamW keeps no norm; the other optimizers do, in their step
                norm = clip_grad_norm_(engine.module.parameters(), math.inf, mpu=engine.tsp) if plain else math.nan
                held = held_bytes(engine)
            engine.step()
        if logs:
            mean, speed = average(loss, engine), tokens / (time.perf_counter() - start)
            norm, peak = norm if plain else engine.get_global_grad_norm(), maximum([peak_memory()], engine)[0] / 2**20
            say(f"step {step:>5}  loss {mean:.4f}  {speed:,.0f} tokens/s  lr {engine.get_lr()[0]:.2e}  "
                f"norm {math.nan if norm is None else float(norm):.2f}  peak {peak:,.0f} MiB")  # fmt: skip
            record(engine, train_loss=mean, tokens_per_second=speed)
            tokens, start = 0, time.perf_counter()
        if validates:
            before = time.perf_counter()
            nats = validate(engine, held_out, args.eval_batches)
            say(f"step {step:>5}  validation loss {nats:.4f} nats/byte, {nats / math.log(2):.4f} bits/byte")
            record(engine, eval_loss=nats)
            start += time.perf_counter() - before
    last = held_bytes(engine)  # the first step makes the moments
    return [max(pair) for pair in zip(held or last, last, strict=True)]


def record(engine: Any, **values: float) -> None:
    """In the monitors that the config asks for, beside what DeepSpeed writes there."""
    engine.monitor.write_events([(f"Train/Samples/{name}", v, engine.global_samples) for name, v in values.items()])


def held_bytes(engine: Any) -> list[int]:
    """Bytes of parameters, gradients and optimizer state on this rank; gradients live from backward to step."""
    parameters, zero = list(engine.module.parameters()), engine.optimizer
    weights = [getattr(p, "ds_tensor", p.data) for p in parameters]  # the first is ZeRO-3's part of it
    gradients = [p.grad for p in parameters if p.grad is not None]
    gradients += [g for group in getattr(zero, "averaged_gradients", {}).values() for g in group or []]
    gradients += getattr(zero, "fp32_groups_gradients_flat", [])  # of bf16 with fp32 accumulation
    if isinstance(engine, PipelineEngine):  # its train_batch has freed them again
        gradients = [p for p in parameters if p.requires_grad]
    basic, own = engine.basic_optimizer, {id(p) for p in parameters}
    state = [p for group in basic.param_groups for p in group["params"] if id(p) not in own]  # master weights
    state += [value for entry in basic.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return [sum(t.numel() * t.element_size() for t in tensors) for tensors in (weights, gradients, state)]


def unsharded_bytes(model: Any, half: bool) -> list[int]:
    """The same of one rank that holds the whole model and AdamW's two moments; half precision has fp32 masters too."""
    whole = {p: math.prod(getattr(p, "tsp_cut", p).shape) for p in model.parameters()}
    everything, trained = sum(whole.values()), sum(n for p, n in whole.items() if p.requires_grad)
    return [everything * (2 if half else 4), trained * (2 if half else 4), trained * 4 * (3 if half else 2)]


def table(rank: list[int], whole: list[int]) -> str:
    lines = [f"{'MiB on one rank':<16}{'this run':>10}{'unsharded':>12}{'ratio':>8}"]
    names = ("parameters", "gradients", "optimizer state", "together")
    for name, held, all_of_it in zip(names, (*rank, sum(rank)), (*whole, sum(whole)), strict=True):
        lines.append(f"{name:<16}{held / 2**20:>10.2f}{all_of_it / 2**20:>12.2f}{held / all_of_it:>8.3f}")
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    config = load_config(args=args)
    half = any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    model, tokenizer = build_model(args, config, half)
    texts = read_text(args.text, args.eval_fraction)
    training, held_out = (Windows(text, args.seq_length, tokenizer) for text in texts)
    whole = unsharded_bytes(model, half)
    pipelined = args.pipeline_stages > 1
    if pipelined:
        model = ds_tsp.pipeline(model, args.pipeline_stages, config)
    chosen = optimizer_and_schedule(args, config, model)
    chosen["training_data"] = None if pipelined else training
    engine, _, loader, _ = ds_tsp.initialize(args=args, model=model, config=config, **chosen)
    if pipelined:  # of training_data DeepSpeed makes an endless iterator of one order
        loader = engine.deepspeed_io(training)
    say = tqdm.write if dist.get_rank() == 0 else lambda line: None
    stages = f"{engine.tsp.stages} stages x " if pipelined else ""
    say(f"{args.model} on {engine.device.type}, {stages}TSP {engine.tsp.size} x data parallel {engine.tsp.dp_size}: "
        f"{len(training)} windows of {args.seq_length} tokens to train on, {len(held_out)} held out")  # fmt: skip
    held = train(engine, loader, held_out, args, say)
    say(table(maximum(held, engine), whole))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
