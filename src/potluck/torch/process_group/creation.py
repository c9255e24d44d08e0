"""Creation of process groups: of a world, or of a sub-group that shares the world's links."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from potluck.errors import ConfigurationError
from potluck.torch.process_group.builtin_hooks import replace_builtin_hooks
from potluck.torch.process_group.default_timeout import replace_set_timeout
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.torch.process_group.mixed import check_alone
from potluck.torch.process_group.rendezvous import meet
from potluck.torch.process_group.storeless import FormedStore
from potluck.torch.process_group.world import World

OLDEST_TORCH = "2.10"
"""The oldest supported release (``make test-oldest-torch``). Before 2.7 torch's C++ code loses the
Python part of a Work that it holds, so that DDP waits for ever; 2.7 to 2.9 have defects in
pipelines, HSDP on CPUs and clipped DTensors."""


def create(options: Any, backend_options: Any) -> PotluckProcessGroup:
    """Create a group for ``init_process_group`` or ``new_group``; torch calls it on the members.

    A sub-group of a potluck world shares its links and needs no communication. Any other group
    meets through the store and gets a world of its own. ConfigurationError for an old torch, or for
    a group with several backends.
    """
    if torch.__version__ < OLDEST_TORCH:
        raise ConfigurationError(
            f"the process group needs torch {OLDEST_TORCH} or newer, this is {torch.__version__}: "
            "pip install --upgrade torch"
        )
    check_alone("new_group" if options.global_ranks_in_group else "init_process_group")
    replace_builtin_hooks()
    replace_set_timeout()
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
        timeout_s=timeout.total_seconds(),
    )
    return PotluckProcessGroup(
        world, world.communicator, name=name, timeout=timeout, store=options.store
    )


def _parent() -> PotluckProcessGroup | None:
    """The default group, if it is potluck's."""
    default = dist.distributed_c10d._world.default_pg
    return default if isinstance(default, PotluckProcessGroup) else None


def _formed(store: Any) -> World | None:
    """The world of a store that ``potluck://`` made."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.world if isinstance(store, FormedStore) else None
