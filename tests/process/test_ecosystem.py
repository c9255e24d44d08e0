"""Frameworks over potluck: their own configuration, with another backend's name.

Each example is trained alone, and on two workers by the launchers that its first lines name. What
it prints is checked: the backend, a loss that falls, and ranks that end with equal parameters.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from support.commands import Command, potluck_command

Results = list[tuple[str, ...]]

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_EXAMPLES = Path(__file__).parent / "scripts" / "front_ends.py"
POTLUCK_RUN = [*potluck_command(), "run", "--workers", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RESULT = re.compile(
    r"rank (\d) of (\d), backend (\w+): loss (\d+\.\d+) -> (\d+\.\d+), parameters (\w{12})"
)
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def run_examples(start: list[str], *commands: list[str], world_size: int = 2) -> list[Results]:
    """Run examples; for each, what each rank printed, in rank order."""
    for package in ("accelerate", "transformers", "lightning"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'potluck[ecosystem]'")
    words = [word for name, *rest in commands for word in (str(EXAMPLES / name), *rest, ",")]
    script = [str(RUN_EXAMPLES)] if len(commands) > 1 else []
    with Command([*start, *script, *words[:-1]], env=QUIET) as run:
        assert run.finish(200) == 0, run.text
        found = RESULT.findall(run.text)
    assert len(found) == world_size * len(commands), run.text
    return [sorted(each) for each in zip(*[iter(found)] * world_size, strict=True)]


def check(results: Results) -> None:
    assert [(rank, size, backend) for rank, size, backend, *_ in results] in (
        [("0", "1", "none")],
        [("0", "2", "potluck"), ("1", "2", "potluck")],
    )
    assert len({parameters for *_, parameters in results}) == 1
    for _, _, _, first, last, _ in results:
        assert float(last) < 0.8 * float(first)


COMMANDS = [
    ["accelerate_digits.py", "--epochs", "2"],
    ["transformers_tiny.py", "--steps", "30"],
    ["lightning_fabric_digits.py", "--epochs", "2"],
    ["lightning_trainer_digits.py", "--epochs", "3"],
]


def test_alone_the_examples_train_without_a_group() -> None:
    for results in run_examples([sys.executable], *COMMANDS, world_size=1):
        check(results)


def test_potluck_run_trains_the_front_ends_examples() -> None:
    """All in one pair of processes, one after the other: importing takes the longest."""
    for results in run_examples(POTLUCK_RUN, *COMMANDS):
        check(results)


def test_torchrun_trains_the_very_same_examples() -> None:
    for results in run_examples(TORCHRUN, *COMMANDS):
        check(results)


def test_no_example_is_left_out() -> None:
    listed = {name for name, *_ in COMMANDS}
    # test_parallelism_examples.py, test_estimators_processes.py, test_parameter_server_processes.py
    own = {"digits.py", "training_loop.py", "estimators.py", "parameter_server.py"}
    own |= {"shared_data.py"}  # test_shared_data.py
    own |= {"federated_client.py", "federated_server.py"}  # test_federated_page.py
    own |= {"work_queue.py", "trainers.py", "messages.py"}  # test_estimators_processes.py
    own |= {"data_digits.py"}  # test_loading_killed.py
    own |= {"sweep.py", "rollouts.py"}  # test_sweep.py, test_rollouts.py
    own |= {"jax_digits.py", "mlx_digits.py"}  # test_jax_mlx.py
    own |= {"lora/finetune.py", "lora/make_tiny.py", "lora/texts.py"}  # test_finetune.py
    others = {"deepspeed_digits.py", "ray_digits.py"}  # test_frameworks.py
    assert listed | own | others == {
        path.relative_to(EXAMPLES).as_posix()
        for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("lora/*.py")]
    }


@pytest.mark.parametrize("package", ["accelerate", "transformers", "lightning"])
def test_without_the_package_an_example_says_how_to_get_it(package: str) -> None:
    example = next(name for name, *_ in COMMANDS if name.startswith(package))
    script = f"import sys, runpy; sys.modules[{package!r}] = None; runpy.run_path({example!r})"
    with Command([sys.executable, "-c", script], cwd=EXAMPLES) as run:
        assert run.finish() == 1
        run.wait_for(f"this needs {package}: pip install 'potluck[torch,sklearn,ecosystem]'")
