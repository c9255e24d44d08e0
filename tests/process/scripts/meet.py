"""One rank that meets the others: ``[BACKEND [GATE]]``. With GATE, a file, rank 1 waits for it."""

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

if len(sys.argv) > 2 and os.environ["RANK"] == "1":
    later = threading.Event()
    while not Path(sys.argv[2]).exists():
        later.wait(0.05)
dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=100))
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()}: {total.item():g}", flush=True)
dist.destroy_process_group()
