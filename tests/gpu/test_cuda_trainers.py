"""Trainers on a GPU that two processes share, or beside a processor, against two processors."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from support.commands import run_command
from support.devices import DEVICE, needs_device

pytestmark = needs_device

SCRIPTS = Path(__file__).parent / "scripts"
CLOSE = {"own": 1e-8, "dense": 0.02, "files": 0.02, "bfloat16": 0.3, "float16": 0.3}
"""By case: how far the outputs of two devices may be apart. Adam divides by the size of gradients,
so that what is rounded otherwise is soon seen."""


def train(folder: Path, *devices: str) -> Path:
    folder.mkdir()
    with run_command("--workers", "2", str(SCRIPTS / "trainers.py"), str(folder), *devices) as run:
        assert run.finish() == 0, run.text
        assert {"[0] all are trained", "[1] all are trained"} <= set(run.lines), run.text
    return folder


@pytest.fixture(scope="module")
def by_processors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("processors") / "found", "cpu", "cpu")


@pytest.mark.parametrize("other", [DEVICE, "cpu"])
def test_every_strategy_source_and_precision_learns_what_it_learns_on_processors(
    tmp_path: Path, by_processors: Path, other: str
) -> None:
    """With a model and a loss of the user's own, files of each rank, and scaled losses."""
    folder = train(tmp_path / "found", DEVICE, other)
    names = sorted(each.name for each in folder.glob("*.npz"))
    assert len(names) == 2 * (5 * 3 + 4 + 3)
    assert names == sorted(each.name for each in by_processors.glob("*.npz"))
    for name in names:
        case = name.split("-")[1]
        mine, theirs = np.load(folder / name), np.load(by_processors / name)
        assert mine.files == theirs.files
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=CLOSE[case]), name
        difference = np.abs(mine["outputs"] - theirs["outputs"])
        assert np.median(difference) <= CLOSE[case], (name, difference.max())
        if case in ("own", "dense", "files"):
            assert difference.max() <= 5 * CLOSE[case], (name, difference.max())


INTERRUPTED = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
import potluck
from potluck.torch import DDP, ElasticLoop

ctx = potluck.init()
device = torch.device(sys.argv[2:][ctx.rank])
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 5)).to(device), ctx)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
x, y = torch.randn(2000, 20), torch.randint(0, 5, (2000,))
job = ElasticLoop(
    model, optimizer, (x, y), batch_size=8, epochs=10_000, seed=1, ctx=ctx, checkpoint=sys.argv[1]
)
is_first = True
for inputs, labels in job:
    if is_first:
        print("begins with", job.step_number, job.parameter_hash(), flush=True)
    is_first = False
    with job.step():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
        optimizer.step()
    if job.step_number >= 20:
        print("ends with", job.step_number, job.parameter_hash(), flush=True)
"""


def hashes(lines: list[str], said: str) -> dict[int, set[str]]:
    """By step: the hashes of the ranks' weights."""
    found: dict[int, set[str]] = {}
    for line in lines:
        if said in line:
            step, value = line.partition(said)[2].split()
            found.setdefault(int(step), set()).add(value)
    return found


@pytest.mark.parametrize("other", [DEVICE, "cpu"])
def test_ctrl_c_keeps_the_weights_of_the_last_step_and_they_are_resumed(
    tmp_path: Path, other: str
) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    words = ["--workers", "2", str(script), str(tmp_path / "saved"), DEVICE, other]
    with run_command(*words) as run:
        run.wait_for("ends with 20 ")
        run.signal(signal.SIGINT)
        assert run.finish() == 130, run.text
        kept = int(re.search(r"interrupted; the checkpoint of step (\d+) is kept", run.text)[1])
        saved = hashes(run.lines, "ends with")[kept]
    assert kept >= 20
    with run_command(*words) as run:
        run.wait_for(f"resumed from the checkpoint of step {kept}")
        run.wait_for(f"ends with {kept + 1} ")
        run.signal(signal.SIGINT)
        assert run.finish() == 130, run.text
        resumed = hashes(run.lines, "begins with")
    assert resumed.keys() == {kept}
    assert len(resumed[kept]) == 1
    assert resumed[kept] <= saved
    if other == DEVICE:  # else each device rounds in its own way
        assert len(saved) == 1
