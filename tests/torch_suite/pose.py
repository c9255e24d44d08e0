"""Lets potluck stand in for Gloo, so that torch's tests for Gloo run on it unchanged.

torch's tests look at the backend's *name* to decide what to run and what to expect; a third-party
name is skipped by many. So the tests are told "gloo", and where torch would build its
ProcessGroupGloo, potluck's group is built instead. Everything else is torch's own.
"""

from __future__ import annotations

import types
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from potluck.torch.process_group import creation
from potluck.torch.process_group.group import PotluckProcessGroup


class PosingAsGloo(PotluckProcessGroup):
    """Takes the arguments of ProcessGroupGloo and becomes potluck's group."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: Any = None) -> PosingAsGloo:
        options = types.SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=timeout,
            group_id=_making[-1]["group_name"],
            global_ranks_in_group=_making[-1]["global_ranks_in_group"],
        )
        made = creation.create(options, None)
        made.__class__ = cls
        return made  # type: ignore[return-value]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Everything was done in __new__."""


_making: list[dict[str, Any]] = []


def pose() -> None:
    """From now on this process and its children get potluck when they ask for Gloo."""
    real = c10d._new_process_group_helper

    def helper(
        group_size: int, group_rank: int, global_ranks_in_group: Any, backend: Any, store: Any,
        group_name: Any, *arguments: Any, **options: Any,
    ) -> Any:  # fmt: skip
        _making.append({"group_name": group_name, "global_ranks_in_group": global_ranks_in_group})
        try:
            return real(
                group_size, group_rank, global_ranks_in_group, backend, store, group_name,
                *arguments, **options,
            )  # fmt: skip
        finally:
            _making.pop()

    creation.check_alone = lambda _: None  # the name that it finds is the borrowed one, "gloo"
    c10d._new_process_group_helper = helper
    c10d.ProcessGroupGloo = PosingAsGloo
    dist.ProcessGroupGloo = PosingAsGloo
