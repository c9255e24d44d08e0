"""A worker that loads samples ahead is killed: the others notice at once, nothing counts twice."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.commands import run_command

pytest.importorskip("torch")

SCRIPT = """
import os
import sys
import time
import numpy as np
import torch
from torch import nn
import potluck
from potluck.torch import DDP, ElasticLoop

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return index

class Counts:
    counts = np.zeros(2000)

    def state_dict(self):
        return {"counts": self.counts.copy()}

    def load_state_dict(self, state):
        self.counts[:] = state["counts"]

ctx, seen = potluck.init(), Counts()
model = DDP(nn.Linear(1, 1), ctx)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
job = ElasticLoop(
    model, optimizer, Numbers(), batch_size=20, also={"seen": seen}, num_workers=2, ctx=ctx
)
for indices in job:
    with job.step():
        mine = np.zeros(2000)
        mine[indices.numpy()] = 1
        ctx.all_reduce(mine)
        job.commit()
        seen.counts += mine
    if job.step_number == 10:
        print("at step 10:", os.getpid(), flush=True)
        while not os.path.exists(sys.argv[1]):  # until one of them was killed
            time.sleep(0.01)
print("counted", sorted(set(seen.counts.tolist())), job.recoveries, flush=True)
"""


@pytest.mark.timeout(200)
def test_samples_count_once_although_a_worker_with_loaders_is_killed(tmp_path: Path) -> None:
    """Its loaders live on for seconds: they must not hold its connections open."""
    script = tmp_path / "code" / "count.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    killed = tmp_path / "killed"
    with run_command("--workers", "3", str(script), str(killed)) as run:
        victim = int(run.wait_for("at step 10:").split()[-1])
        os.kill(victim, signal.SIGKILL)
        killed.touch()
        assert run.finish() == 0, run.text
    found = re.findall(r"counted (\[.*?\]) (\[.*?\])", run.text)
    assert [counts for counts, _ in found] == ["[1.0]"] * len(found), run.text
    assert len(found) >= 2, "the worker that starts again may come too late"


FORMATS = {
    "pyarrow": ["parquet", "arrow"],
    "numpy": ["numpy", "webdataset"],
    "datasets": ["huggingface"],
}


@pytest.mark.parametrize("package", FORMATS)
def test_the_example_trains_on_files_of_each_format_on_two_workers(package: str) -> None:
    pytest.importorskip(package, reason="pip install 'potluck[data,ecosystem]'")
    pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")
    example = Path(__file__).parents[2] / "examples" / "data_digits.py"
    with run_command("--workers", "2", str(example), "--format", *FORMATS[package]) as run:
        assert run.finish() == 0, run.text
    for name in FORMATS[package]:
        assert len(re.findall(rf"{name}: test accuracy 0\.\d+ after 21000 ", run.text)) == 2
