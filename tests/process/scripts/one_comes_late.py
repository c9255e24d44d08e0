"""Rank 1 comes late to an all-reduce, for which the others wait: ``HOW SECONDS``.

``computes``: in Python. ``holds the lock``: in one native call that keeps the interpreter's lock,
so that no other Python thread of the process runs.
"""

import ctypes
import sys
import time

import numpy as np

import potluck

how, seconds = sys.argv[1], float(sys.argv[2])
ctx = potluck.init()
ctx.barrier()
if ctx.rank == 1 and how == "computes":
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
elif ctx.rank == 1:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
total = ctx.all_reduce(np.ones(1))
print(f"rank {ctx.rank} of epoch {ctx.epoch}: {total[0]:g}")
