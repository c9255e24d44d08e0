"""Saving a checkpoint as a group: a collective call, in which rank 0 or every rank writes."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck._core.optional import installed
from potluck.checkpoint.state import State
from potluck.checkpoint.store import CheckpointStore, Part
from potluck.errors import CheckpointError

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

MAX_REASON_BYTES = 512
"""Bytes of a rank's error text that other ranks receive."""

MAX_WRITE_S = 600.0
"""Seconds that ranks wait for a rank that writes."""


def save(ctx: DistributedContext, store: CheckpointStore, state: State, step: int) -> str:
    """Write ``state``, which all ranks hold, as the checkpoint of ``step``. A collective call.

    Rank 0 writes, or each rank its part if the store is sharded; then all wait for the slowest
    rank, so that a rank with a slow disk is not taken for lost. CheckpointError on a rank whose
    write failed (in an asynchronous store: whose previous write failed). On other ranks the result
    names that rank and its error; it is empty if no write failed.
    """
    failed: CheckpointError | None = None
    try:
        _write(ctx, store, state, step)
    except CheckpointError as error:
        failed = error
    reason = np.zeros(MAX_REASON_BYTES, np.uint8)
    if failed is not None:
        text = str(failed).encode()[:MAX_REASON_BYTES]
        reason[: len(text)] = np.frombuffer(text, np.uint8)
    reasons = ctx.all_gather(reason, timeout=max(ctx.timeout_s, MAX_WRITE_S))
    if failed is not None:
        raise failed
    for rank, row in enumerate(reasons):
        if row[0]:
            text = row.tobytes().rstrip(b"\0")
            return f"{ctx.group.describe(rank)}: {text.decode(errors='replace')}"
    return ""


def _write(ctx: DistributedContext, store: CheckpointStore, state: State, step: int) -> None:
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
    """The facts of a checkpoint's manifest, as plain JSON values: members and versions."""
    versions = {"python": platform.python_version()}
    found = {package: installed(package) for package in ("potluck", "torch", "numpy")}
    versions |= {package: version for package, version in found.items() if version}
    return {
        "world_size": ctx.world_size,
        "group_epoch": ctx.epoch,
        "workers": [member.worker for member in ctx.members],
        "versions": versions,
    }
