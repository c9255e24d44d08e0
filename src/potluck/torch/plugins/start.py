"""Open the process group that a framework would have opened under another name."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def start(backend: str, timeout: timedelta | None) -> bool:
    """Whether there is a group: the one that is there, or, under a launcher, a new one.

    Without a launcher the script is alone, and needs none.
    """
    if dist.is_initialized():
        return True
    if not os.environ.get("RANK") or not os.environ.get("WORLD_SIZE"):
        return False
    dist.init_process_group(backend, timeout=timeout)
    return True
