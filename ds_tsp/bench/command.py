"""``ds_tsp bench``: arguments, the run, and where its results go. docs/benchmarks/README.md tells what is measured."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from . import report
from .measure import measure
from .schemes import DTYPES, SCHEMES, Settings

LAUNCH = """ds_tsp bench runs on several ranks: start it with a launcher, for example
    deepspeed --num_gpus 2 --module ds_tsp bench ...
    LOCAL_SIZE=2 torchrun --nproc_per_node 2 -m ds_tsp bench ..."""
SHAPES = ("hidden", "heads", "kv_heads", "ffn", "layers", "vocab")


def arguments(argv: Sequence[str], prog: str) -> argparse.Namespace:
    about = "\n".join(f"  {scheme.name:15} {scheme.about}" for scheme in SCHEMES.values())
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=f"{LAUNCH}\n\nschemes:\n{about}", formatter_class=formatter)
    add, default = parser.add_argument, Settings()
    add("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens of a sequence, over all ranks")
    add("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), metavar="NAME", help="default: all")
    add("--repeats", type=int, default=3, help="timed steps, of which the median counts; default 3")
    add("--sequences", type=int, help="sequences of an optimizer step, over all ranks; default: one per data-parallel "
        "rank, so 1 where all ranks share it; the number of ranks gives all schemes the same ones")  # fmt: skip
    add("--cap-mib", type=float, help="also seek the longest sequence whose training step stays below this, per rank")
    add("--cap-limit", type=int, default=65536, help="and no longer than this; default 65536")
    add("--dtype", choices=DTYPES, default="fp32")
    add("--recompute", choices=("on", "off"), default="on", help="gradient checkpointing of every layer; default on")
    add("--tsp-recompute", help='the value of "recompute" in the "tsp" section; default: leave it out')
    for name in SHAPES:
        add(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(default, name),
            help="of the model; default %(default)s",
        )
    add(
        "--out",
        type=Path,
        default=Path("bench"),
        help="folder of bench.csv (appended to), bench.md and plots; default bench",
    )
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        parser.error(LAUNCH)
    if min(args.lengths) < 1 or args.repeats < 1:
        parser.error(f"--lengths {args.lengths} and --repeats {args.repeats} must be at least 1")
    args.lengths = sorted(set(args.lengths))
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    shapes = {name: getattr(args, name) for name in SHAPES}
    return Settings(**shapes, dtype=args.dtype, recompute=args.recompute == "on", sequences=args.sequences,
                    tsp_recompute=args.tsp_recompute)  # fmt: skip


def main(argv: Sequence[str], prog: str = "ds_tsp bench") -> None:
    """Run, print the tables on rank 0, and write them with the CSV rows and the plots to --out."""
    args = arguments(argv, prog)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_distributed(accelerator.communication_backend_name(), verbose=False)
    settings, cap = settings_of(args), None if args.cap_mib is None else int(args.cap_mib * report.MIB)

    def log(line: str) -> None:
        if dist.get_rank() == 0:
            print(f"bench: {line}", file=sys.stderr, flush=True)

    chosen = [SCHEMES[name] for name in args.schemes]
    results = measure(chosen, settings, args.lengths, args.repeats, cap, log, args.cap_limit)
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        common = report.circumstances(settings)
        text = report.markdown(common, results, shlex.join([*prog.split(), *argv]))
        print(text, flush=True)
        (args.out / "bench.md").write_text(text)
        report.append_csv(args.out / "bench.csv", common, results)
        if importlib.util.find_spec("matplotlib"):
            report.plot(args.out, common, results)
        else:
            log("no plots: pip install ds_tsp[bench]")
    dist.barrier()
    dist.destroy_process_group()
