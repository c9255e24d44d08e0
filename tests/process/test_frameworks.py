"""Frameworks with launchers or managers of their own, and those that take long: DeepSpeed,
ray.train, torchft, TRL.

They are not part of the environment of ``make test``; ``make ecosystem`` installs them and runs
these tests.
"""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest

from support.commands import Command, potluck_command

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = Path(__file__).parent / "scripts"
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
POTLUCK_RUN = [*potluck_command(), "run", "--workers", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RESULT = re.compile(
    r"rank \d of (\d), backend potluck: loss ([\d.]+) -> ([\d.]+)(?:, parameters (\w{12}))?"
)

pytest.importorskip("torch")


def results(command: list[str], timeout_s: float = 500) -> list[tuple[str, ...]]:
    """What each rank printed: world size, first and last loss, the rest."""
    with Command(command, env=QUIET) as run:
        assert run.finish(timeout_s) == 0, run.text
        return RESULT.findall(run.text)


@pytest.fixture(scope="module")
def alone() -> tuple[str, ...]:
    pytest.importorskip("deepspeed", reason="make ecosystem installs DeepSpeed")
    [found] = results([sys.executable, str(EXAMPLES / "deepspeed_digits.py"), "--steps", "20"])
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("start", "stage"), [(TORCHRUN, "0"), (TORCHRUN, "1"), (TORCHRUN, "2"), (POTLUCK_RUN, "3")]
)
def test_deepspeed_trains_as_one_process_does(
    alone: tuple[str, ...], start: list[str], stage: str
) -> None:
    """In every stage of ZeRO. The first test waits for an extension that DeepSpeed compiles."""
    script = [str(EXAMPLES / "deepspeed_digits.py"), "--stage", stage, "--steps", "20"]
    ranks = results([*start, *script])
    assert [size for size, *_ in ranks] == ["2", "2"]
    assert len(set(ranks)) == 1  # the loss and the parameters' digest are equal
    assert [float(loss) for loss in ranks[0][1:3]] == pytest.approx(
        [float(loss) for loss in alone[1:3]], abs=2e-3
    )


@pytest.mark.timeout(400)
def test_ray_starts_workers_whose_backend_is_potluck() -> None:
    pytest.importorskip("ray", reason="make ecosystem installs Ray")
    [(size, first, last, _)] = results(
        [sys.executable, str(EXAMPLES / "ray_digits.py"), "--steps", "20"], 380
    )
    assert size == "2"
    assert float(last) < 0.9 * float(first)


@pytest.mark.timeout(300)
def test_torchfts_manager_goes_on_after_a_kill_and_takes_a_new_replica_in() -> None:
    """The survivor's step does not count; the new replica gets the state from it."""
    pytest.importorskip("torchft", reason="make ecosystem installs torchft")
    server = str(Path(sys.executable).with_name("torchft_lighthouse"))

    with contextlib.ExitStack() as stack:
        arguments = ["--bind", "127.0.0.1:0", "--min_replicas", "2"]
        lighthouse = stack.enter_context(Command([server, *arguments]))
        address = lighthouse.wait_for("listening on: ").rpartition(" ")[2]

        def replica(name: str, dies_at: int) -> Command:
            script = str(SCRIPTS / "torchft_replica.py")
            command = [sys.executable, script, address, name, str(dies_at)]
            return stack.enter_context(Command(command, env=QUIET))

        survivor = replica("0", -1)
        killed = replica("1", 3)
        assert killed.finish(100) == -9, killed.text
        fresh = replica("1", -1)
        assert survivor.finish(100) == 0, survivor.text
        assert fresh.finish(100) == 0, fresh.text
        survivor.wait_for("step 3 does not count")
        norms = [run.wait_for("ends at step 6").rpartition(" ")[2] for run in (survivor, fresh)]
    assert norms[0] == norms[1]
    assert re.search(r"step 3 does not count: .*lost rank [01]", survivor.text), survivor.text


def test_trls_sft_and_dpo_train_adapters_on_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="make ecosystem installs TRL")
    with Command([sys.executable, str(EXAMPLES / "lora/make_tiny.py"), str(tmp_path)]) as making:
        assert making.finish() == 0, making.text
    script = str(SCRIPTS / "trl_adapters.py")
    with Command([*POTLUCK_RUN, script, str(tmp_path)], env=QUIET | {"HF_HUB_OFFLINE": "1"}) as run:
        assert run.finish(500) == 0, run.text
    found = re.findall(r"(SFT|DPO) of 2: loss ([\d.]+) -> ([\d.]+), adapters (\w{12})", run.text)
    assert sorted(name for name, *_ in found) == ["DPO", "DPO", "SFT", "SFT"], run.text
    assert len(set(found)) == 2, "the ranks end with equal adapters"
    for _, first, last, _ in found:
        assert float(last) < float(first)
