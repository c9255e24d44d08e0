"""Plug-ins for frameworks that refuse unknown names of backends.

``accelerate`` and ``transformers`` accept only gloo or mpi on CPUs, but use a process group that
exists. Lightning needs no plug-in: ``DDPStrategy(process_group_backend="potluck")``.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

__all__ = ["start"]


def start(backend: str, timeout: timedelta | None) -> bool:
    """Open the default process group if a launcher's variables are set and there is no group yet.

    Returns whether there is a group now.
    """
    if dist.is_initialized():
        return True
    if not os.environ.get("RANK") or not os.environ.get("WORLD_SIZE"):
        return False
    dist.init_process_group(backend, timeout=timeout)
    return True
