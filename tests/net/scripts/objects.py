"""objects.py SIZE BACKEND: an object of SIZE bytes goes from rank 0 to the others by an object
collective of torch.

Ranks are those of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import datetime
import sys

import torch.distributed as dist

PATIENCE = datetime.timedelta(seconds=60)
OBJECT = {"steps": "s" * int(sys.argv[1])}

dist.init_process_group(sys.argv[2], init_method="env://", timeout=PATIENCE)
dist.barrier()
objects = [OBJECT if dist.get_rank() == 0 else None]
dist.broadcast_object_list(objects, src=0)
dist.barrier()
print("all the same" if objects[0] == OBJECT else f"other: {objects[0]!r}", flush=True)
