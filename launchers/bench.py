"""Time and peak live bytes of the folded layer and model beside the unsharded ones, all in one run.

    deepspeed --num_gpus 4 launchers/bench.py --length 2048 --dtype fp32 bf16
    LOCAL_SIZE=4 torchrun --nproc_per_node 4 launchers/bench.py --hidden_size 512 --csv out.csv

A row is one case of one scope (a decoder layer, or the whole model with its loss), forward and backward:

    unsharded          the Hugging Face model with sdpa attention, on one rank
    unsharded + ckpt   the same under its own gradient checkpointing: per decoder layer, non-reentrant
    folded P=n         on n ranks that share the tokens; it recomputes inside, so without checkpointing
    folded P=1 + ckpt  the same under Hugging Face's checkpointing, on one rank

With --breakdown: where each millisecond of a layer's forward and backward goes on rank 0, by torch's profiler, beside
the unsharded layer with as many tokens on one rank (length / P). Self times by kind:

    kernel      attention, forward and backward
    GEMM        matrix products, but for those computed again
    recompute   whatever is computed a second time, by the fold or by Hugging Face's checkpointing
    packing     copies into and out of what travels: weights, dW, K/V
    wire        collectives, and waiting for them
    other       all other operators: norms, rotary, activations, sums
    Python      the time in no operator; a profiler makes it longer

Cases take turns while other ranks wait. A time is the median over rounds of the slowest rank, a ratio that of ratios
within a round. Memory is the fullest rank's, in a pass of its own, above what was live before the forward; backward's
includes the gradients. Where ranks share cores, P > 1 is not faster, only smaller.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from ds_tsp.config import TSPConfig
from ds_tsp.grad_sync import sum_replicated_gradients
from ds_tsp.inject import inject
from ds_tsp.layout import SequenceLayout
from ds_tsp.mesh import Mesh
from ds_tsp.meter import LiveBytes

SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 704,
         "num_hidden_layers": 4, "vocab_size": 2048}  # fmt: skip
Work = tuple[nn.Module, Callable[[], Tensor], Callable[[Tensor], None]]  # a module, one forward, one backward
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCOPES = ("layer", "model")
KINDS = ("kernel", "GEMM", "recompute", "packing", "wire", "other", "Python")
RANGES = {"ds_tsp.recompute": "recompute", "ds_tsp.pack": "packing", "ds_tsp.wire": "wire"}
GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
HEADER = ("scope", "dtype", "case", "forward ms", "backward ms", "both ms", "/unsharded", "/unsharded+ckpt",
          "weights MiB", "forward peak MiB", "backward peak MiB")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What one row measures. size: TSP ranks, 0 for the unsharded model."""

    size: int
    checkpointed: bool = False

    @property
    def name(self) -> str:
        return (f"folded P={self.size}" if self.size else "unsharded") + (" + ckpt" if self.checkpointed else "")


@dataclass(frozen=True)
class Row:
    """Seconds of (forward, backward, both) per round. Bytes of the weights, and peaks above what was live before."""

    case: Case
    seconds: list[list[float]]
    weights: int
    forward_peak: int
    backward_peak: int

    def cells(self, bases: Sequence[Row]) -> list[str]:
        times = [f"{median(part) * 1e3:.2f}" for part in zip(*self.seconds, strict=True)]
        ratios = [f"{median(a[2] / b[2] for a, b in zip(self.seconds, x.seconds, strict=True)):.3f}" for x in bases]
        memory = [f"{value / 2**20:.2f}" for value in (self.weights, self.forward_peak, self.backward_peak)]
        return [self.case.name, *times, *ratios, *memory]


def cases(sizes: Sequence[int]) -> list[Case]:
    """The two unsharded ones first, then the folded; with checkpointing only where one rank does all."""
    return [Case(0), Case(0, True), *map(Case, sizes), *(Case(size, True) for size in sizes if size == 1)]


def meshes(sizes: Sequence[int]) -> dict[int, Mesh | None]:
    """For each size the axis of the world's first ranks; None on the others. Collective over the world."""
    me, groups = dist.get_rank(), {size: dist.new_group(list(range(size))) for size in sizes}
    alone = {"dp_size": 1, "dp_rank": 0, "dp_group": None, "dp_ranks": (me,)}
    return {n: Mesh(n, me, groups[n], tuple(range(n)), **alone) if me < n else None for n in sizes}  # type: ignore


def build(case: Case, args: argparse.Namespace, scope: str, dtype: torch.dtype, mesh: Mesh | None) -> Work | None:
    """The case's model with its inputs; None on a rank that has no part in it."""
    if mesh is None and (case.size or dist.get_rank()):
        return None
    set_seed(7)
    config = LlamaConfig(**{name: getattr(args, name) for name in SIZES}, max_position_embeddings=args.length)
    model: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model.to(get_accelerator().current_device_name(), dtype).train()
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh is not None:
        inject(model, TSPConfig(size=case.size, schedule=args.schedule), mesh)
        sum_replicated_gradients([p for p in model.parameters() if not hasattr(p, "tsp_cut")], mesh)
    ids = torch.randint(args.vocab_size, (args.batch, args.length), device=model.device)
    if scope == "model":
        return model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, lambda loss: loss.backward()
    layout = SequenceLayout(args.length, max(case.size, 1))
    positions = layout.positions(mesh.rank if mesh else 0)[None].to(model.device)
    x, dy = torch.randn(2, args.batch, layout.local_length, args.hidden_size, device=model.device, dtype=dtype)
    x, layer, rotary = x.clone().requires_grad_(), model.model.layers[0], model.model.rotary_emb(x, positions)
    return layer, lambda: layer(x, position_embeddings=rotary, position_ids=positions), lambda y: y.backward(dy)


def largest(values: Sequence[float]) -> list[float]:
    """The largest of each value over the world; also what the ranks without work wait at."""
    most = torch.tensor(values, dtype=torch.float64, device=get_accelerator().current_device_name())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def readings(work: Work | None, probe: Callable[[], float]) -> list[float]:
    """What `probe` tells before forward, after it, and after backward; zeros without work."""
    if work is None:
        return [0.0] * 3
    module, forward, backward = work
    module.zero_grad(set_to_none=True)
    before, out, middle = probe(), forward(), probe()
    backward(out)
    return [before, middle, probe()]


def seconds(work: Work | None) -> list[float]:
    """Of forward, backward and both, on the slowest rank."""

    def clock() -> float:
        get_accelerator().synchronize()
        return time.perf_counter()

    start, middle, stop = readings(work, clock)
    return largest([middle - start, stop - middle, stop - start])


def memory(work: Work | None) -> list[int]:
    """Bytes of the weights, and the peaks of forward and backward above what was live before, on the fullest rank."""
    gc.collect()  # or what another case left behind would die, and be missed, in the middle of this one
    with LiveBytes() as meter:
        start, forward, backward = readings(work, lambda: (meter.peak, meter.reset_peak())[0])  # type: ignore
    weights = sum(p.numel() * p.element_size() for p in work[0].parameters()) if work else 0
    return list(map(int, largest([weights, forward - start, backward - start])))


def measure(args: argparse.Namespace, scope: str, dtype: torch.dtype, axes: dict[int, Mesh | None]) -> list[Row]:
    """One row per case. Collective over the world."""
    works = {case: build(case, args, scope, dtype, axes.get(case.size)) for case in cases(list(axes))}
    held = {case: memory(work) for case, work in works.items()}
    taken: dict[Case, list[list[float]]] = {case: [] for case in works}
    for i in range(args.repeats):  # the pass for memory warmed up
        for case in list(works)[:: -1 if i % 2 else 1]:  # to and fro: no case always follows the same one
            taken[case].append(seconds(works[case]))
    return [Row(case, taken[case], *held[case]) for case in works]


def kind(event: Any) -> str:
    """Of an operator, by its name, or by the range of ours that it lies in."""
    name, around = event.name, event
    inside = set()
    while around is not None:
        inside.add(RANGES.get(around.name))
        around = around.cpu_parent
    for found in ("wire", "packing"):
        if found in inside:
            return found
    if "recompute" in inside:  # the kernel too, if it runs again
        return "recompute"
    if "scaled_dot_product" in name:
        return "kernel"
    return "GEMM" if name in GEMMS else "other"


def breakdown(work: Work, repeats: int) -> dict[str, float]:
    """Milliseconds per kind of one forward and backward, and in all."""
    module, forward, backward = work
    seconds = 0.0
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            module.zero_grad(set_to_none=True)
            start = time.perf_counter()
            backward(forward())
            get_accelerator().synchronize()
            seconds += time.perf_counter() - start
    spent: Counter[str] = Counter()
    for event in profiler.events():
        ours = event.name in RANGES and RANGES[event.name] != "wire"
        if not ours and not event.name.startswith("ProfilerStep") and not event.is_async:
            spent[kind(event)] += event.self_cpu_time_total / 1e3 / repeats
    total = seconds * 1e3 / repeats
    return {**spent, "Python": total - sum(spent.values()), "all": total}


def again() -> tuple[Any, Any]:
    """The contexts of a checkpointed layer's two runs: the second is computed again."""
    return nullcontext(), record_function("ds_tsp.recompute")


def breakdown_cases(args: argparse.Namespace) -> dict[str, Work | None]:
    """By name; None on ranks that have no part in it."""
    axes, size = meshes([1, dist.get_world_size()]), dist.get_world_size()
    shorter = argparse.Namespace(**{**vars(args), "length": args.length // size})
    layer_of = functools.partial(build, scope="layer", dtype=DTYPES[args.dtype[0]])
    checkpointed = layer_of(Case(0, True), shorter, mesh=None)
    if checkpointed is not None:
        layer: Any = checkpointed[0]
        function = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = functools.partial(function, context_fn=again)
    return {
        "unsharded": layer_of(Case(0), shorter, mesh=None),
        "unsharded + ckpt": checkpointed,
        "folded P=1": layer_of(Case(1), shorter, mesh=axes[1]),
        f"folded P={size}": layer_of(Case(size), args, mesh=axes[size]),
    }


def print_breakdown(args: argparse.Namespace) -> None:
    table: list[Sequence[str]] = [("case", *KINDS, "all")]
    for name, work in breakdown_cases(args).items():
        if work is not None:
            breakdown(work, 1)  # warms up
            found = breakdown(work, args.repeats)
            table.append((name, *(f"{found.get(column, 0.0):.1f}" for column in (*KINDS, "all"))))
        dist.barrier()
    show(args, table)


def show(args: argparse.Namespace, table: Sequence[Sequence[str]]) -> None:
    if dist.get_rank() == 0:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        print(vars(args), *("  ".join(map(str.rjust, line, widths)) for line in table), sep="\n", flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, default in {**SIZES, "batch": 1, "length": 2048, "repeats": 9}.items():
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    add("--sizes", type=int, nargs="+", default=[1, 2, 4], help="values of P; those above the world are left out")
    add("--dtype", nargs="+", choices=DTYPES, default=["fp32"])
    add("--scope", nargs="+", choices=SCOPES, default=list(SCOPES))
    add("--schedule", choices=("tsp", "metp"), default="tsp")
    add("--breakdown", action="store_true", help="milliseconds of a layer by kind, instead")
    add("--csv", type=Path, help="write the table to this file, too")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    dist.init_distributed(get_accelerator().communication_backend_name())
    if args.breakdown:
        print_breakdown(args)
    else:
        axes = meshes([size for size in args.sizes if size <= dist.get_world_size()])
        table: list[Sequence[str]] = [HEADER]
        for dtype in args.dtype:
            for scope in args.scope:
                rows = measure(args, scope, DTYPES[dtype], axes)
                table += [(scope, dtype, *row.cells(rows[:2])) for row in rows]
        show(args, table)
        if args.csv and dist.get_rank() == 0:
            args.csv.write_text("".join(",".join(line) + "\n" for line in table))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
