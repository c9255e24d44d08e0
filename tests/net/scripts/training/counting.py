"""A script that is not elastic: counts steps, and resumes from its own file. BACKEND FOLDER."""

import os
import pathlib
import signal
import sys
import threading

import torch
import torch.distributed as dist

backend, folder = sys.argv[1], pathlib.Path(sys.argv[2])
checkpoint = folder / "checkpoint"
if (folder / f"late-{os.environ['POTLUCK_NAME']}").exists():
    print("is late", flush=True)
    signal.pause()
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {rank} of {size} begins at {step}, restart {restarts}", flush=True)
pace = threading.Event()
while True:
    stop = torch.tensor([(folder / "stop").exists(), 1], dtype=torch.int32)
    dist.all_reduce(stop)
    assert stop[1] == size, stop
    if stop[0]:
        break
    step += 1
    if rank == 0:
        new = folder / "new"
        new.write_text(str(step))
        new.replace(checkpoint)
        if step % 2 == 0:
            print("step", step, flush=True)
    pace.wait(0.05)
dist.destroy_process_group()
