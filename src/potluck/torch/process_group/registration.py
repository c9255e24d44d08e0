"""Makes torch know the backend ``"potluck"``: by ``import potluck.torch``, or by itself.

torch calls ``register`` when it is imported, through the entry point group ``torch.backends``.
Nothing but names is registered; the engine is imported when the first group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from potluck.torch.process_group.group import PotluckProcessGroup

NAME = "potluck"
DEVICES = ("cpu", "cuda", "mps")


def register() -> None:
    """Register the backend. Idempotent; nothing happens where torch lacks torch.distributed."""
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))


def create(options: Any, backend_options: Any) -> PotluckProcessGroup:
    """What torch calls for ``init_process_group`` and ``new_group``, on the members only.

    A sub-group of a potluck world shares its links and needs no message to come about; any other
    group meets through the store and gets a world of its own.
    """
    from potluck.torch.process_group.group import PotluckProcessGroup
    from potluck.torch.process_group.rendezvous import meet

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
    world = meet(
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
    from potluck.torch.process_group.group import PotluckProcessGroup

    default = dist.distributed_c10d._world.default_pg
    return default if isinstance(default, PotluckProcessGroup) else None
