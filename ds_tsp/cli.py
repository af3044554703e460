"""The command line: ``ds_tsp COMMAND ...`` or ``python -m ds_tsp COMMAND ...``, under any launcher."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence

# Command -> the module that has its `main(argv, prog)`, and a line of help. A module is imported when it is asked for.
COMMANDS = {
    "bench": ("ds_tsp.bench.command", "time, memory and traffic of training, beside DeepSpeed's and PyTorch's schemes"),
    "convert": ("ds_tsp.convert", "a checkpoint of any degree, to DeepSpeed's universal format"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command with the arguments behind its name."""
    parser = argparse.ArgumentParser(
        prog="ds_tsp",
        description="\n".join(f"  {name:8} {about}" for name, (_, about) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher puts it first
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="ds_tsp COMMAND --help lists them")
    known = parser.parse_args(argv)
    if known.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(known.local_rank))
    importlib.import_module(COMMANDS[known.command][0]).main(known.arguments, prog=f"ds_tsp {known.command}")
