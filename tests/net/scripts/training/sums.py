"""A training whose right answer is known: the sum of all samples of all committed steps.

sums.py STOP [WIDTH]: prints each step it commits; ends, on all ranks after the same step, once the
file STOP is there, and prints what it counted. Steps last at least ``pace.STEP_S``.
"""

import hashlib
import sys
import threading
from pathlib import Path

import numpy as np
from pace import SCHEDULE, STEP_S

import potluck
from potluck.training.elastic import ElasticLoop, Policy
from potluck.training.replica import StateReplica

stop, width = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000
computing = threading.Event()
ctx = potluck.init()
state = {"weights": np.zeros(width), "counted": np.zeros(1)}


def set_state(new):
    for name, value in new.items():
        state[name][:] = value


replica = StateReplica(lambda: state, set_state)
job = ElasticLoop(ctx, SCHEDULE, replica, policy=Policy(hash_every=1))
for share in job:
    with job.step():
        computing.wait(STEP_S)
        mine = np.full(width, share.indices.sum() * (share.weight > 0), dtype=np.float64)
        ctx.all_reduce(mine)
        job.commit(loss=float(stop.exists()))
        state["weights"] += mine
        state["counted"] += mine[0]
        print(f"step {job.step_number} of {ctx.world_size}", flush=True)
    if job.last_loss > 0:
        break
digest = hashlib.sha256(state["weights"].tobytes()).hexdigest()
print(f"counted {int(state['counted'][0])} in {job.step_number} steps, {digest[:16]}", flush=True)
ctx.close()
