"""launchers/train.py, started as users start it."""

import contextlib
import importlib.util
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    binaries = Path(sys.executable).parent
    script = ["launchers/train.py", "--model", "byte-tiny", "--seq-length", "65", "--steps", "4", "--eval-batches", "2"]
    environment = {**os.environ, "LOCAL_SIZE": "2", "PYTHONPATH": str(ROOT), "PATH": f"{binaries}:{os.environ['PATH']}"}
    return subprocess.run(
        [str(binaries / launcher[0]), *launcher[1:], *script, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


CONFIG = ("--deepspeed", "--deepspeed_config", "ds_configs/cpu_tsp2.json")


def validation_loss(output: str) -> str:
    return re.findall(r"validation loss (\d+\.\d+) nats/byte", output)[-1]


def test_deepspeed_and_torchrun() -> None:
    """The same losses by both launchers, and the table of bytes: half of every state, with two ranks."""
    port = str(free_port())
    try:
        one = start(["deepspeed", "--num_gpus", "2", "--master_port", port], *CONFIG)
        two = start(["torchrun", "--nproc_per_node", "2", "--master_port", port], *CONFIG)
    finally:
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink()  # DeepSpeed's own, 69 MB per rank
    assert one.returncode == 0, one.stdout[-2000:] + one.stderr[-2000:]
    assert two.returncode == 0, two.stdout[-2000:] + two.stderr[-2000:]
    assert validation_loss(one.stdout + one.stderr) == validation_loss(two.stdout + two.stderr)
    for state in ("parameters", "gradients", "optimizer state"):
        ratio = float(re.search(rf"{state}\s+\S+\s+\S+\s+(\S+)", one.stdout + one.stderr)[1])  # type: ignore[index]
        assert 0.5 <= ratio < 0.51, state


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--model", "byte-huge"), "neither a folder nor one of byte-tiny")]
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], message: str) -> None:
    run = start(["torchrun", "--nproc_per_node", "1", "--master_port", str(free_port())], *CONFIG, *arguments)
    assert run.returncode and message in run.stderr


def train_job(*arguments: str) -> str:
    """The script in ranks that are there already: eight new processes would take a minute to import everything."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "launchers" / "train.py")
    assert spec is not None and spec.loader is not None
    script, output = importlib.util.module_from_spec(spec), io.StringIO()
    spec.loader.exec_module(script)
    command = [
        "train.py",
        "--model",
        "byte-tiny",
        "--seq-length",
        "65",
        "--steps",
        "2",
        "--eval-batches",
        "2",
        *arguments,
    ]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(script.dist, "destroy_process_group"),
        contextlib.redirect_stdout(output),
    ):
        script.main()
    return output.getvalue()


def test_pipeline_stages() -> None:
    """Two stages, P = 2 and data parallel 2, trained as without stages."""
    text = str(ROOT / "docs" / "algorithm.md")
    common = ("--text", text, "--deepspeed", "--deepspeed_config", "ds_configs/cpu_pipe2_tsp2_dp2.json")
    piped = run_ranks(8, train_job, *common, "--pipeline-stages", "2")[0]
    whole = run_ranks(4, train_job, *common)[0]
    assert "2 stages x TSP 2 x data parallel 2" in piped
    assert validation_loss(piped) == validation_loss(whole)
    assert re.findall(r"norm (\S+)", piped) == re.findall(r"norm (\S+)", whole)
    assert re.search(r"gradients\s+0\.[1-9]", piped)
