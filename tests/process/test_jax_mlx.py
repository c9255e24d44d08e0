"""JAX and MLX in processes: tests/arrays, the examples, kills, MLX's collectives and mlx_lm."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.examples import EXAMPLES
from support.ports import reserved_ports

ARRAYS = Path(__file__).parents[1] / "arrays"
SCRIPTS = Path(__file__).parent / "scripts"
QUIET = {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("file", sorted(ARRAYS.glob("test_*.py")), ids=lambda file: file.stem)
def test_arrays_in_a_process_that_may_have_jaxs_threads(file: Path) -> None:
    needs("jax", "mlx")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* passed in", done.stdout, re.MULTILINE), done.stdout


def output(*arguments: str, env: dict[str, str] | None = None) -> str:
    with Command(arguments, env=QUIET | (env or {})) as run:
        assert run.finish(250) == 0, run.text
        return run.text


@pytest.mark.parametrize("library", ["jax", "mlx"])
def test_the_example_survives_a_kill_and_all_ranks_end_with_equal_bits(library: str) -> None:
    needs(library, "sklearn")
    script = str(EXAMPLES / f"{library}_digits.py")
    run = [*potluck_command(), "run", "--workers", "3", "--chaos", "kill rank 2 at step 30"]
    text = output(*run, script, "--epochs", "4", "--require-accuracy", "0.85")
    assert "worker 2 killed by SIGKILL" in text
    assert re.search(r"committed steps +92", text), text
    assert re.search(r"steps run again +1$", text, re.MULTILINE), text
    assert re.search(r"parameters +equal on all", text), text
    [accuracy] = re.findall(r"\[\d\] test accuracy (0\.\d+) after 92 steps", text)
    assert float(accuracy) > 0.85


def test_mlxs_collectives_and_their_gradients_are_those_of_mlx_itself(tmp_path: Path) -> None:
    """Beside MLX's ring, which has all but sum_scatter."""
    needs("mlx")
    script = str(SCRIPTS / "mlx_collectives.py")
    ours = output(*potluck_command(), "run", "--workers", "2", script)
    hosts = tmp_path / "hosts.json"
    with reserved_ports(2) as ports, ExitStack() as stack:
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        commands = [
            stack.enter_context(
                Command(
                    [sys.executable, script, "--own"],
                    env=QUIET | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                )
            )
            for rank in range(2)
        ]
        assert [each.finish(100) for each in commands] == [0, 0], commands[0].text
    for rank, theirs in enumerate(commands):
        lines = [line[4:] for line in ours.splitlines() if line.startswith(f"[{rank}] ")]
        scattered = [line for line in lines if line.startswith("sum_scatter")]
        assert [line for line in lines if line not in scattered] == theirs.lines
        wanted = [[12.0, 14.0], [16.0, 18.0]][rank]
        for dtype, line in zip(("float32", "bfloat16"), scattered, strict=True):
            assert line.endswith(f"mlx.core.{dtype} [{wanted}]"), line


def test_mlx_lms_lora_trains_on_two_workers(tmp_path: Path) -> None:
    needs("mlx", "mlx_lm", "transformers")
    script = str(SCRIPTS / "mlx_lora.py")
    output(sys.executable, script, "make", str(tmp_path))
    text = output(*potluck_command(), "run", "--workers", "2", script, "train", str(tmp_path))
    assert {"[0] rank 0 of 2", "[1] rank 1 of 2"} < set(text.splitlines())
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    losses = dict(re.findall(r"^\[0\] +(\d+) +val (\d+\.\d+)", plain, re.MULTILINE))
    first, last = float(losses["1"]), float(losses["30"])
    assert last < 0.5 * first, text
    assert (tmp_path / "adapters" / "adapters.safetensors").is_file()
