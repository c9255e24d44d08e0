"""examples/training_loop.py: all that it turns on works together, and resumes in another world."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from support import examples

if importlib.util.find_spec("sklearn") is None:  # it isn't imported: that takes a second
    pytest.skip("the digits come with scikit-learn", allow_module_level=True)
pytest.importorskip("tensorboardX", reason="pip install 'potluck[tensorboard]'")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return examples.example("training_loop")


def test_all_of_it_on_two_workers_then_on_one(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = threading.local()
    monkeypatch.setattr("potluck.torch.ddp.init", lambda: mine.ctx)
    options = ["--precision", "bfloat16", "--recompute", "--adapt", "--pieces", "3"]
    options += ["--checkpoint", str(tmp_path / "state"), "--tensorboard", str(tmp_path / "runs")]

    def train(ctx: DistributedContext, epochs: int) -> Any:
        mine.ctx = ctx
        return example.main([*options, "--epochs", str(epochs)])

    first, second = run_world(2, lambda ctx: train(ctx, 1))
    assert first.parameter_hash() == second.parameter_hash()
    (alone,) = run_world(1, lambda ctx: train(ctx, 2))
    assert alone.step_number > first.step_number
    assert len(alone.losses) == alone.step_number - first.step_number
    assert alone.committed == 2 * alone.schedule.num_samples
    assert alone.last_loss < first.losses[0]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    told = capsys.readouterr()
    assert told.out.count("test accuracy") == 2
    assert told.err.count("epoch 1/1: loss") == 1
    assert told.err.count("epoch 2/2: loss") == 1
