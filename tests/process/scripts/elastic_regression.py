"""A training with one large all-reduce a step, that notes what happens and when.

Linear regression on real sums: each rank's gradient is a function of its samples, so parameters
show whether a sample was counted twice or not at all. Notes go to ``NOTES/<pid>``, one line per
event with the monotonic clock, which all processes of one host share. The training ends, on all
ranks at the same step, after the file ``NOTES/stop`` has appeared. While there is a file
``NOTES/slow`` each step takes 50 ms more, and 500 ms more while there is ``NOTES/slower``. With a
third argument it keeps checkpoints there, one every ten steps.
"""

import hashlib
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np

import potluck
from potluck.checkpoint import CheckpointStore
from potluck.training.elastic import ElasticLoop, Policy
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule

notes = Path(sys.argv[1])
width = int(sys.argv[2])
own = (notes / str(os.getpid())).open("a", buffering=1)


def note(kind: str, *facts: object) -> None:
    print(time.monotonic(), kind, *facts, file=own)


class Losses(logging.Handler):
    """The loop says when its group is over: the moment a blocked call has raised."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "step %d: %s":
            note("lost", *record.getMessage().splitlines()[:1])


log = logging.getLogger("potluck.training.training")
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(Losses())

ctx = potluck.init()
weights = np.zeros(width)
counted = np.zeros(1)
state = {"weights": weights, "counted": counted}


def set_state(new: dict[str, np.ndarray]) -> None:
    weights[:] = new["weights"]
    counted[:] = new["counted"]


schedule = Schedule(num_samples=64, batch_size=8, epochs=1_000_000, seed=3)
job = ElasticLoop(
    ctx,
    schedule,
    StateReplica(lambda: state, set_state),
    checkpoint=CheckpointStore(sys.argv[3]) if len(sys.argv) > 3 else None,
    policy=Policy(hash_every=1, save_every=10),
)
note("begin", os.environ["POTLUCK_WORKER"])
for share in job:
    with job.step():
        note("step", job.step_number, ctx.rank, ctx.epoch)
        if (notes / "slow").exists():
            time.sleep(0.05)
        if (notes / "slower").exists():
            time.sleep(0.5)
        gradient = np.full(width, share.indices.sum() * (share.weight > 0), dtype=np.float64)
        ctx.all_reduce(gradient)
        job.commit(loss=float((notes / "stop").exists()))
        weights += gradient
        counted += gradient[0]
        note("commit", job.step_number, ctx.world_size, ctx.epoch)
    if job.last_loss > 0:
        break
digest = hashlib.sha256(weights.tobytes()).hexdigest()
note("end", job.step_number, int(counted[0]), digest)
