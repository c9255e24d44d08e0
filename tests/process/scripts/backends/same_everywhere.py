"""Started by python, potluck run, torchrun, mpirun: the same script, the same answer."""

import sys

import numpy as np

import potluck

ctx = potluck.init(*sys.argv[1:], timeout_s=30.0)
total = ctx.all_reduce(np.array([ctx.rank + 1.0]))
locals_ = sorted(ctx.all_gather(np.array([ctx.local_rank])).ravel().tolist())
ctx.barrier()
if ctx.is_master:
    print(f"world {ctx.world_size} sum {total[0]:g} local ranks {locals_}", flush=True)
ctx.close()
