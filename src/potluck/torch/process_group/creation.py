"""What torch calls to make a group: the world's, or one that shares its links."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from potluck.errors import ConfigurationError
from potluck.torch.process_group.builtin_hooks import replace_builtin_hooks
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.torch.process_group.mixed import check_alone
from potluck.torch.process_group.rendezvous import meet
from potluck.torch.process_group.storeless import FormedStore
from potluck.torch.process_group.world import World

OLDEST_TORCH = "2.10"
"""The oldest release this is tested on (``make test-oldest-torch``). Before 2.7 torch's C++ code
forgets the Python half of a Work that it holds, so that DDP waits for ever; 2.7 to 2.9 have
defects of their own in pipelines, HSDP on CPUs and clipped DTensors."""


def create(options: Any, backend_options: Any) -> PotluckProcessGroup:
    """What torch calls for ``init_process_group`` and ``new_group``, on the members only.

    A sub-group of a potluck world shares its links and needs no message to come about; any other
    group meets through the store and gets a world of its own.
    """
    if torch.__version__ < OLDEST_TORCH:
        raise ConfigurationError(
            f"the process group needs torch {OLDEST_TORCH} or newer, this is {torch.__version__}: "
            "pip install --upgrade torch"
        )
    check_alone("new_group" if options.global_ranks_in_group else "init_process_group")
    replace_builtin_hooks()
    name = options.group_id
    ranks = list(options.global_ranks_in_group)
    timeout = getattr(backend_options, "_timeout", None) or options.timeout
    parent = _parent() if ranks else None
    if parent is not None:
        communicator = parent.communicator.subgroup(tuple(ranks), key=name)
        assert communicator is not None, "torch calls the creator on members only"
        return PotluckProcessGroup(
            parent._world, communicator, name=name, timeout=timeout, store=options.store
        )
    formed = None if ranks else _formed(options.store)
    world = formed or meet(
        options.store,
        options.group_rank,
        options.group_size,
        name=name,
        timeout_s=timeout.total_seconds(),
    )
    return PotluckProcessGroup(
        world, world.communicator, name=name, timeout=timeout, store=options.store
    )


def _parent() -> PotluckProcessGroup | None:
    """The default group, if it is one of ours."""
    default = dist.distributed_c10d._world.default_pg
    return default if isinstance(default, PotluckProcessGroup) else None


def _formed(store: Any) -> World | None:
    """The world that ``potluck://`` has formed already."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.world if isinstance(store, FormedStore) else None
