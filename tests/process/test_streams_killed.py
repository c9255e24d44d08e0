"""A worker that trains on a stream is killed, and starts again: each item counts once."""

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

NUM = 20_000

class Stream(torch.utils.data.IterableDataset):
    at = 0

    def __iter__(self):
        while self.at < NUM:
            self.at += 1
            yield self.at - 1

class Seeking(Stream):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Counts:
    counts = np.zeros(NUM)

    def state_dict(self):
        return {"counts": self.counts.copy()}

    def load_state_dict(self, state):
        self.counts[:] = state["counts"]

ctx, seen = potluck.init(), Counts()
model = DDP(nn.Linear(1, 1), ctx)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
job = ElasticLoop(
    model,
    optimizer,
    {"seeks": Seeking, "begins again": Stream}[sys.argv[2]](),
    batch_size=20,
    epochs=1,
    also={"seen": seen},
    num_workers=2,
    ctx=ctx,
)
was_whole = False
for items in job:
    with job.step():
        mine = np.zeros(NUM)
        mine[items.numpy()] = 1
        ctx.all_reduce(mine)
        job.commit()
        seen.counts += mine
    if job.step_number == 10:
        print("at step 10:", os.getpid(), flush=True)
        while not os.path.exists(sys.argv[1]):  # until one of them was killed
            time.sleep(0.01)
    if job.step_number > 10 and ctx.world_size < 3:
        time.sleep(0.1)  # the worker that starts again has 1,000 steps to come
    was_whole |= job.step_number > 11 and ctx.world_size == 3
print("counted", sorted(set(seen.counts.tolist())), was_whole, flush=True)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("source", ["seeks", "begins again"])
def test_items_count_once_although_a_worker_is_killed_and_starts_again(
    tmp_path: Path, source: str
) -> None:
    script = tmp_path / "code" / "count.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    killed = tmp_path / "killed"
    with run_command("--workers", "3", str(script), str(killed), source) as run:
        victim = int(run.wait_for("at step 10:").split()[-1])
        os.kill(victim, signal.SIGKILL)
        killed.touch()
        assert run.finish(timeout_s=200) == 0, run.text
    found = re.findall(r"counted (\[.*?\]) (\w+)", run.text)
    assert found == [("[1.0]", "True")] * 3, run.text
    said = len(re.findall(r"the stream can't seek, so its first \d+ items are read", run.text))
    assert (said > 0) == (source == "begins again"), run.text
