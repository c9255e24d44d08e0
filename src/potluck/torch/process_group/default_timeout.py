"""torch's ``_set_pg_timeout`` on potluck's groups.

torch sets the timeout of its own Gloo and NCCL groups only, and warns about all others. It has no
extension point for this, so the function is replaced, for potluck's groups.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from potluck.torch.process_group.group import PotluckProcessGroup


@functools.cache
def replace_set_timeout() -> None:
    """Let ``_set_pg_timeout`` set the timeout of potluck's groups. Idempotent."""
    module: Any = dist.distributed_c10d
    torchs = module._set_pg_timeout

    @functools.wraps(torchs)
    def replaced(timeout: timedelta, group: Any = None) -> None:
        chosen = dist.group.WORLD if group is None else group
        if isinstance(chosen, PotluckProcessGroup):
            chosen.set_timeout(timeout)
        else:
            torchs(timeout, group)

    module._set_pg_timeout = replaced
