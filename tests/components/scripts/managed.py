"""An elastic training that tells what it does: ``managed.py [FOLDER EPOCHS [CHECKPOINT]]``.

Each rank's gradient is the sum of its samples' numbers, so the result shows whether a sample was
counted twice or not at all. A step takes 0.1 s more while there is the file ``FOLDER/slow``.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import potluck
from potluck.checkpoint import CheckpointStore
from potluck.training import ElasticLoop, Policy, Schedule, StateReplica

folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path.cwd())
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 60
counted = np.zeros(1)
state = {"counted": counted}


def set_state(new):
    counted[:] = new["counted"]


ctx = potluck.init()
job = ElasticLoop(
    ctx,
    Schedule(num_samples=64, batch_size=8, epochs=epochs, seed=3),
    StateReplica(lambda: state, set_state),
    checkpoint=CheckpointStore(sys.argv[3]) if len(sys.argv) > 3 else None,
    policy=Policy(hash_every=1, save_every=10),
)
began = None
for share in job:
    if began is None:
        began = job.step_number
        print(f"begins at step {began} in {os.getcwd()}", flush=True)
    with job.step():
        if (folder / "slow").exists():
            time.sleep(0.1)
        gradient = np.full(1, share.indices.sum() * (share.weight > 0), dtype=np.float64)
        ctx.all_reduce(gradient)
        job.commit(loss=0.0)
        counted += gradient
    if job.step_number % 10 == 0:
        place = os.environ.get("SLURMD_NODENAME", "")
        print(
            f"step {job.step_number}: rank {ctx.rank} of {ctx.world_size} {place} {os.getpid()} "
            f"{os.getppid()}",
            flush=True,
        )
Path(os.environ["POTLUCK_OUTPUT"], "result.txt").write_text(f"{int(counted[0])}\n")
print(f"ends at step {job.step_number}: counted {int(counted[0])}", flush=True)
