"""The examples of torch's parallelism run, train and print their results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from potluck.testing.commands import Command, run_command

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "torch"


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy (0\.\d+|1\.0+)", text)]


def test_potluck_run_starts_an_example() -> None:
    with run_command("--workers", "2", str(EXAMPLES / "ddp_digits.py"), "--epochs", "3") as run:
        assert run.finish(100) == 0, run.text
        run.wait_for(lambda line: line.startswith("[0] test accuracy") and "2 workers" in line)
        assert accuracies(run.text)[0] > 0.8


@pytest.mark.timeout(240)
def test_torchrun_starts_every_example(tmp_path: Path) -> None:
    """All in one go: each makes its process group, trains, and leaves it."""
    steps = ["--steps", "30"]
    runs = [
        ["ddp_digits.py", "--epochs", "2"],
        ["fsdp2_digits.py", *steps],
        ["fsdp2_digits.py", *steps, "--bf16"],
        ["fsdp2_digits.py", *steps, "--replicas", "2"],
        ["tensor_parallel.py", *steps],
        ["pipeline.py", *steps],
        ["zero_digits.py", *steps],
        *[["checkpoint_reshard.py", "--folder", str(tmp_path / "saved"), *steps]] * 2,
        ["comm_hooks.py", *steps],
        ["compiled.py", *steps],  # the last: it changes the default dtype
    ]
    assert {run[0] for run in runs} == {path.name for path in EXAMPLES.glob("*.py")}
    words: list[str] = []
    for name, *options in runs:
        words += [*([","] if words else []), str(EXAMPLES / name), *options]
    script = str(ROOT / "tests" / "process" / "scripts" / "run_examples.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with Command([*launcher, "--nproc-per-node", "2", script, *words]) as run:
        assert run.finish(200) == 0, run.text
    reached = accuracies(run.text)
    assert len(reached) == 9, run.text
    assert min(reached) > 0.5, run.text
    kept = re.findall(r"this worker holds (\d+) of (\d+) parameters", run.text)
    assert [whole == here for here, whole in kept] == [False, False, True], run.text
    losses = re.findall(r"steps (\d+) to (\d+) on 2 workers: loss ([\d.]+)", run.text)
    assert [pair[:2] for pair in losses] == [("0", "30"), ("30", "60")]
    assert float(losses[1][2]) < float(losses[0][2])
    hook, compiled = re.findall(r"parameters differ .*?by (\S+)", run.text)
    assert 0 < float(hook) < 0.02, run.text
    assert float(compiled) < 1e-10, run.text
    assert re.search(r"[1-9]\d* graphs compiled", run.text)
    assert re.search(r"worker 0, speed 1\.00, has layers 0", run.text)


def test_without_a_package_every_example_says_how_to_get_it() -> None:
    script = """
import runpy, sys
sys.modules["sklearn"] = None
for example in sys.argv[1:]:
    try:
        runpy.run_path(example)
    except SystemExit as error:
        print(error)
"""
    examples = sorted(map(str, EXAMPLES.glob("*.py")))
    with Command([sys.executable, "-c", script, *examples]) as run:
        assert run.finish(60) == 0, run.text
    assert run.text.splitlines() == [
        "this needs sklearn: pip install 'potluck[torch,sklearn]'"
    ] * len(examples)
