"""What ``soak.py`` trains on machines that come and go: a small GPT by DiLoCo with top-k.

Each exchange is checked: what the ranks' payloads decode to is, in float64, the sum over the ranks
of what went in less what each has kept (its residual). ``train.py STOP`` ends, on all ranks after
the same round, once the file STOP is there. Each rank prints a line of JSON every few rounds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import potluck
import potluck.torch as pt
from common.loss_tasks import SOAK, whole
from potluck.compressors import TopK
from potluck.compressors.base import Pending

EVERY, SHOWN_EVERY = 20, 10

worst = 0.0
num_checked = 0


class Checked(TopK):
    """TopK, whose sum compares what came out with what went in."""

    def exchange(self, comm: Any, array: Any, residual: Any, step: int) -> Pending:
        owed = array.astype(np.float64) + residual

        def check(found: Any) -> Any:
            global worst, num_checked
            sent = owed - residual
            comm.all_reduce(sent).wait()
            scale = max(float(np.abs(sent).max()), 1e-30)
            worst = max(worst, float(np.abs(sent - found).max()) / scale)
            num_checked += 1
            return found

        return super().exchange(comm, array, residual, step).then(check)


STRATEGY = pt.DiLoCo(every=EVERY, outer=pt.OuterSGD(1.0), compression=Checked(0.05, bits=2))


def held() -> dict[str, int]:
    """The memory, threads and open files of this process."""
    status = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return {
        "rss": int(status.split()[0]) << 10,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


stop = Path(sys.argv[1])
torch.set_num_threads(1)
ctx = potluck.init()
task = SOAK
model = pt.DDP(task.model(0), ctx)
optimizer = task.optimizer(model)
job = pt.ElasticLoop(
    model,
    optimizer,
    task.data(0),
    batch_size=task.batch_size,
    shuffle=False,
    collate=whole,
    strategy=STRATEGY,
)
for steps, (inputs, labels) in enumerate(job, start=1):
    with job.step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        torch.autograd.backward(loss)
        job.log(loss=loss)
        if stop.exists():
            job.stop()
        optimizer.step()
    if steps % (EVERY * SHOWN_EVERY) == 0:
        shown = {
            "rank": ctx.rank,
            "world_size": ctx.world_size,
            "step": job.step_number,
            "loss": job.last_loss,
            "checked": num_checked,
            "worst": worst,
            **held(),
        }
        print("soak " + json.dumps(shown), flush=True)
print(f"ended after step {job.step_number}, worst {worst:.3g}", flush=True)
ctx.close()
