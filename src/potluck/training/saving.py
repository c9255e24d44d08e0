"""Checkpoints of a group: one call on every rank, one file or one part from each."""

from __future__ import annotations

import logging
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.checkpoint.state import State
from potluck.checkpoint.store import CheckpointStore, Part
from potluck.errors import CheckpointError

if TYPE_CHECKING:
    from potluck.context import DistributedContext

_log = logging.getLogger(__name__)


def save(ctx: DistributedContext, store: CheckpointStore, state: State, step: int) -> None:
    """Write ``state``, which all ranks hold, as the checkpoint of ``step``. Every rank calls it.

    Rank 0 writes, or, if the store is sharded, each rank its part. CheckpointError on a rank whose
    write failed (of an asynchronous store: whose last write failed).
    """
    facts = world_facts(ctx)
    if not store.sharded:
        if ctx.is_master:
            store.save(state, step, facts=facts)
        return
    number = np.zeros(1, np.int64)
    failed: CheckpointError | None = None
    if ctx.is_master:
        try:
            number[0] = store.next_number()
        except CheckpointError as error:
            failed = error
    ctx.broadcast(number)
    if failed is not None:
        raise failed
    if number[0]:
        part = Part(ctx.rank, ctx.world_size, int(number[0]))
        store.save(state, step, facts=facts, part=part)


def world_facts(ctx: DistributedContext) -> dict[str, Any]:
    """What is worth knowing of the world a checkpoint comes from; plain JSON values."""
    versions = {"python": platform.python_version()}
    for package in ("potluck", "torch", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "world_size": ctx.world_size,
        "group_epoch": ctx.epoch,
        "workers": [member.worker for member in ctx.members],
        "versions": versions,
    }
