"""A training that saves after each step into the disk of its machine, and whose machine may go amid
the second save: ``dies_saving.py DISKS STEPS [RANK CALL]``. MACHINE names the disk, below DISKS.

Rank RANK loses its disk and is killed just before its CALL-th call, from 0, of fsync, rename or
unlink in that save; what a save calls beyond these goes on to the vote about it.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

import potluck
from potluck.checkpoint import CheckpointStore
from potluck.training import ElasticLoop, Policy, Schedule, StateReplica

disk, steps = Path(sys.argv[1]) / os.environ["MACHINE"], int(sys.argv[2])
victim, fatal = (int(each) for each in sys.argv[3:5]) if len(sys.argv) > 3 else (-1, 0)
state = {"sum": np.zeros(1)}
calls = 0


def set_state(new):
    state["sum"][:] = new["sum"]


def mortal(function):
    def call(*arguments, **options):
        global calls
        # What other files of a process are flushed, as its keys', is none of a save.
        if ctx.rank == victim and job.step_number == 2:
            if calls == fatal:
                shutil.rmtree(disk)
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
        return function(*arguments, **options)

    return call


with potluck.init(timeout_s=60) as ctx:
    job = ElasticLoop(
        ctx,
        Schedule(64, 8, epochs=4),
        StateReplica(lambda: state, set_state),
        checkpoint=CheckpointStore(disk, keep=1),
        policy=Policy(save_every=1000),
    )
    os.fsync, os.rename = mortal(os.fsync), mortal(os.rename)
    Path.unlink = mortal(Path.unlink)
    began = -1
    for _ in job:
        began = job.step_number if began < 0 else began
        with job.step():
            job.commit()
            state["sum"] += job.step_number
        job.save()
        print(f"step {job.step_number} counts", flush=True)
        if job.step_number >= steps:
            break
    print(f"began at {began}, sum {int(state['sum'][0])}", flush=True)
