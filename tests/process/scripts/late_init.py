"""Worker 1 calls potluck.init() only once the file GATE is there."""

import os
import sys
import threading
from pathlib import Path

import potluck

if os.environ["POTLUCK_WORKER"] == "1":
    later = threading.Event()
    while not Path(sys.argv[1]).exists():
        later.wait(0.05)
with potluck.init() as ctx:
    print(f"rank {ctx.rank} of {ctx.world_size}", flush=True)
