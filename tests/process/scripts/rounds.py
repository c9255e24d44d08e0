"""A training in rounds of four steps. Each worker says whether every sample was counted once."""

import sys
import time

import potluck
from potluck.training.elastic import Policy
from potluck.training.sampler import Schedule
from support.counts import Counts

EPOCHS = 6


def slowly(counts: Counts) -> None:
    time.sleep(0.02)


ctx = potluck.init()
schedule = Schedule(num_samples=480, batch_size=6, epochs=EPOCHS, seed=1)
counts = Counts(
    ctx, schedule, 4, on_step=slowly, policy=Policy(hash_every=1), delay=int(sys.argv[1])
)
counts.run()
print("every sample counted once:", bool((counts.seen == EPOCHS).all()), flush=True)
ctx.close()
