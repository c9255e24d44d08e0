"""potluck's own examples and those of torch's parallelism: each trains alone, under potluck run
and under torchrun, and prints its result."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.commands import Command, run_command

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "torch"
RUN_EXAMPLES = ROOT / "tests" / "process" / "scripts" / "run_examples.py"
ELASTIC = [
    ["../digits.py", "--epochs", "1", "--require-accuracy", "0"],
    ["../training_loop.py", "--epochs", "1"],
]
SHORT = [
    *ELASTIC,
    ["ddp_digits.py", "--epochs", "1"],
    ["fsdp2_digits.py", "--steps", "3"],
    ["tensor_parallel.py", "--steps", "3"],
    ["pipeline.py", "--steps", "3"],
    ["zero_digits.py", "--steps", "3"],
    ["checkpoint_reshard.py", "--steps", "3"],
    ["comm_hooks.py", "--steps", "3"],
    ["compiled.py", "--steps", "3"],  # the last: it changes the default dtype
]
"""Every example, with the arguments that make it short."""


RESULT = r"test accuracy|steps \d+ to \d+ on \d workers: loss"


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy (0\.\d+|1\.0+)", text)]


def one_after_the_other(runs: list[list[str]]) -> list[str]:
    """The arguments for running examples in one process: importing takes the longest."""
    words: list[str] = [str(RUN_EXAMPLES)]
    for name, *options in runs:
        words += [*([","] if len(words) > 1 else []), str(EXAMPLES / name), *options]
    return words


def test_no_example_is_left_out() -> None:
    """Those that are neither here nor in torch's folder are in test_ecosystem.py."""
    assert {name for name, *_ in SHORT[2:]} == {path.name for path in EXAMPLES.glob("*.py")}


def test_every_example_runs_alone(tmp_path: Path) -> None:
    words = one_after_the_other(SHORT)
    with Command([sys.executable, *words], env={"HOME": str(tmp_path)}) as run:
        assert run.finish() == 0, run.text
    assert len(re.findall(r"^end of ", run.text, re.MULTILINE)) == len(SHORT)
    assert "test accuracy" in run.text
    assert "steps 0 to 3 on 1 workers" in run.text


@pytest.mark.parametrize(
    "examples", [SHORT[:1], SHORT[1:2], SHORT[2:]], ids=["digits", "training_loop", "the others"]
)
def test_potluck_run_starts_every_example(examples: list[list[str]], tmp_path: Path) -> None:
    """Each elastic example by itself: a worker that has left the cluster's group has finished."""
    command = ["--workers", "2", *one_after_the_other(examples)]
    with run_command(*command, HOME=str(tmp_path)) as run:
        assert run.finish(200) == 0, run.text
        said = {str(EXAMPLES / name): "" for name, *_ in examples}
        for rank in range(2):
            lines = "\n".join(line for line in run.lines if line.startswith(f"[{rank}]"))
            parts = re.split(r"end of (\S+)", lines)
            for text, name in zip(parts[:-1:2], parts[1::2], strict=True):
                said[name] += text
    for name, text in said.items():
        assert re.search(RESULT, text), (name, run.text)


@pytest.mark.timeout(240)
def test_torchrun_starts_every_example(tmp_path: Path) -> None:
    """All in one go: each makes its process group, trains, and leaves it."""
    steps = ["--steps", "30"]
    runs = [
        *ELASTIC,
        ["ddp_digits.py", "--epochs", "2"],
        ["fsdp2_digits.py", *steps],
        ["fsdp2_digits.py", *steps, "--bf16"],
        ["fsdp2_digits.py", *steps, "--replicas", "2"],
        ["tensor_parallel.py", *steps],
        ["pipeline.py", *steps],
        ["zero_digits.py", *steps],
        *[["checkpoint_reshard.py", *steps]] * 2,
        ["comm_hooks.py", *steps],
        ["compiled.py", *steps],  # the last: it changes the default dtype
    ]
    assert {run[0] for run in runs} == {run[0] for run in SHORT}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", *one_after_the_other(runs)]
    with Command(command, env={"HOME": str(tmp_path)}) as run:
        assert run.finish(200) == 0, run.text
    reached = accuracies(run.text)
    assert len(reached) == 12, run.text
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
for name in [name for name in sys.modules if name.startswith("sklearn.")]:
    del sys.modules[name]
sys.modules["sklearn"] = None
for example in sys.argv[1:]:
    try:
        runpy.run_path(example)
    except SystemExit as error:
        print(error)
"""
    examples = sorted(map(str, EXAMPLES.glob("*.py")))
    with Command([sys.executable, "-c", script, *examples]) as run:
        assert run.finish() == 0, run.text
    assert run.text.splitlines() == [
        "this needs sklearn: pip install 'potluck[torch,sklearn]'"
    ] * len(examples)
