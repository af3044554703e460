"""Peak resident memory of each rank while it loads a model from disk, beside plain from_pretrained on one rank.

    LOCAL_SIZE=4 torchrun --nproc_per_node 4 launchers/load_bench.py

A random Llama, of 1B parameters unless told otherwise, is written as bf16 safetensors files into a temporary folder by
a process of its own. Every rank loads its slices; then rank 0 alone loads the whole, and reads every parameter once,
as any use of it does: plain from_pretrained leaves parameters in the mapped file until somebody does.
Resident: the kernel's peak (VmHWM) above what was resident before, mapped pages of the files included. Anonymous: the
part that is not such pages, the highest of samples. The loading ranks make their process groups inside, too.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ds_tsp

SIZES = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 8192, "vocab_size": 128256}  # fmt: skip
HEADER = ("rank", "what", "parameters MiB", "peak resident MiB", "/ model", "of it anonymous MiB", "seconds")


def write_model(args: argparse.Namespace) -> None:
    config = LlamaConfig(**{name: getattr(args, name) for name in SIZES}, tie_word_embeddings=not args.untied)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(args.write, max_shard_size=args.max_shard_size)


def resident(*names: str) -> list[int]:
    """Bytes by their names in /proc/self/status."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) * 1024 for name in names]


def watch(load: Callable[[], Any]) -> tuple[Any, int, int, float]:
    """What `load` returns, its peaks of resident and of anonymous memory above what was there before, and seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak falls to what is resident now
    before, anonymous = resident("VmRSS", "RssAnon")
    samples, done = [anonymous], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            samples.extend(resident("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    start = time.perf_counter()
    result = load()
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    return result, resident("VmHWM")[0] - before, max(samples) - anonymous, seconds


def touched(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        parameter.detach().max()
    return model


def measure(folder: str) -> list[Sequence[str]]:
    """The rows of the table. Collective over the world."""
    dist.barrier()  # until the files are written
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    config = {"tsp": {"size": world}, "train_micro_batch_size_per_gpu": 1}

    def row(what: str, model: Any, peak: int, anonymous: int, seconds: float) -> Sequence[str]:
        held = sum(p.nbytes for p in model.parameters())
        mib = [f"{value / 2**20:.0f}" for value in (held, peak, anonymous)]
        return (str(rank), what, *mib[:2], f"{peak / whole:.3f}", mib[2], f"{seconds:.1f}")

    mine = row("ds_tsp.from_pretrained", *watch(lambda: ds_tsp.from_pretrained(folder, config)))
    rows: list[Any] = [None] * world
    dist.all_gather_object(rows, mine)
    gc.collect()
    if rank == 0:
        rows.append(row("plain from_pretrained, read", *watch(lambda: touched(folder))))
    dist.barrier()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--max-shard-size", default="580MB", help="of a file")
    parser.add_argument("--untied", action="store_true", help="an output layer of its own")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_model(args)
        return
    dist.init_distributed(dist_backend="gloo")
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        if dist.get_rank() == 0:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--write", own], check=True)
            files = [path.stat().st_size / 2**20 for path in Path(own).glob("*.safetensors")]
            print(f"{len(files)} files of together {sum(files):.0f} MiB", flush=True)
        table = [HEADER, *measure(folder[0])]
    if dist.get_rank() == 0:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        print(*("  ".join(map(str.rjust, line, widths)) for line in table), sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
