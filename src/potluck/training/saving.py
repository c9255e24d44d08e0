"""Saving a checkpoint as a group: a collective call, in which a rank of each of some machines
writes, or every rank a part."""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck._core.optional import installed
from potluck.checkpoint.state import State
from potluck.checkpoint.store import CheckpointStore, Part
from potluck.errors import CheckpointError
from potluck.training.copies import LINEAGE, NUM_COPIES, UNKNOWN, Copying, Lineage, counted, places

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

MAX_REASON_BYTES = 512
"""Bytes of a rank's error text that other ranks receive."""

MAX_WRITE_S = 600.0
"""Seconds that ranks wait for a rank that writes."""


@dataclass
class Copies:
    """What a rank knows of the checkpoints of its training, for ``save``: its ``lineage``; the
    ``last`` number; the ``nodes`` that hold that one. ``epoch``: the group that has agreed on where
    to write, at ``places``; ``domains``: see ``copies.places``."""

    lineage: Lineage = UNKNOWN
    last: int = 0
    nodes: frozenset[str] = frozenset()
    epoch: int = -1
    places: list[int] = field(default_factory=lambda: [0])
    domains: list[int] = field(default_factory=list)

    def is_short(self, store: CheckpointStore, nodes: Collection[str]) -> bool:
        """Whether fewer of the present ``nodes`` than could be hold the last checkpoint."""
        present = set(nodes)
        needed = min(store.copies, len(present))
        return bool(self.nodes) and not store.sharded and len(self.nodes & present) < needed


def save(
    ctx: DistributedContext,
    store: CheckpointStore,
    state: State,
    step: int,
    known: Copies | None = None,
) -> str:
    """Write ``state``, which all ranks hold, as the checkpoint of ``step``. A collective call.

    Rank 0 writes, and a rank on each of ``store.copies - 1`` other machines, or each rank its part
    if the store is sharded; in place of a machine that can't, the next one. All wait for the
    slowest of them, so that a rank with a slow disk is not taken for lost. CheckpointError if the
    checkpoint is on too few machines, on a rank whose write failed (in an asynchronous store: whose
    previous write failed). On other ranks the result names that rank and its error; it is empty
    otherwise. ``known`` is kept from call to call.
    """
    known = known or Copies()
    failed: CheckpointError | None = None
    if store.sharded:
        known.lineage = known.lineage if known.lineage.began else Lineage.new()
        try:
            _write_part(ctx, store, state, step, known)
        except CheckpointError as error:
            failed = error
        _, reasons = _outcomes(ctx, store, failed)
        return _told(reasons, failed)
    if known.epoch != ctx.epoch:
        _meet(ctx, store, known)
    known.last += 1
    copying = Copying(known.places, store.copies)
    if copying.needed == 1:
        store.safe = None
    facts = world_facts(ctx) | {LINEAGE: str(known.lineage), NUM_COPIES: copying.needed}
    texts: dict[int, str] = {}
    while writers := copying.writers:
        if ctx.rank in writers:
            try:
                store.save(state, step, facts=facts, part=Part(number=known.last))
            except CheckpointError as error:
                failed = error
        whole, reasons = _outcomes(ctx, store, failed)
        texts |= reasons
        copying.wrote(writers, texts)
        # A machine that can't is tried last from now on: its disk may be full for long.
        known.places = sorted(copying.places, key=copying.failed.__contains__)
        number = counted([whole[rank] for rank in sorted(copying.held)], copying.needed)
    if copying.needed > 1 and number:
        _count(ctx, store, number, copying.held)
    held = {known.domains[rank] for rank in copying.held}
    if not copying.counts:
        return _told(
            texts, failed, f"; it is on {len(held)} of {copying.needed} machines" * bool(held)
        )
    at = zip(ctx.members, known.domains, strict=True)
    known.nodes = frozenset(member.node for member, domain in at if domain in held)
    if failed is not None:
        _log.error("%s; other machines have the checkpoint", failed)
        ctx.report(event=str(failed))
    return ""


def _count(ctx: DistributedContext, store: CheckpointStore, number: int, held: set[int]) -> None:
    """The checkpoint ``number`` counts: others may be removed."""
    store.safe = number
    if ctx.rank in held and not store.asynchronous:  # else with the next
        try:
            store.prune()
        except OSError as error:
            _log.warning("old checkpoints in %s can't be removed: %s", store.directory, error)


def _told(texts: dict[int, str], failed: CheckpointError | None, more: str = "") -> str:
    if failed is not None:
        raise CheckpointError(f"{failed}{more}") from failed
    return next((f"{text}{more}" for text in texts.values()), "")


def _outcomes(
    ctx: DistributedContext, store: CheckpointStore, failed: CheckpointError | None
) -> tuple[list[int], dict[int, str]]:
    """By rank, what ``store.whole`` says there, and, where writing failed, who it is and why. Cost:
    one all_gather of 520 bytes per rank."""
    row = np.zeros(8 + MAX_REASON_BYTES, np.uint8)
    row[:8] = np.frombuffer(store.whole.to_bytes(8, "little"), np.uint8)
    if failed is not None:
        text = str(failed).encode()[:MAX_REASON_BYTES]
        row[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    rows = ctx.all_gather(row, timeout=max(ctx.timeout_s, MAX_WRITE_S))
    whole = [int.from_bytes(each[:8].tobytes(), "little") for each in rows]
    reasons = {}
    for rank, each in enumerate(rows):
        if each[8]:
            text = each[8:].tobytes().rstrip(b"\0").decode(errors="replace")
            reasons[rank] = f"{ctx.group.describe(rank)}: {text}"
    return whole, reasons


def _meet(ctx: DistributedContext, store: CheckpointStore, known: Copies) -> None:
    """Agree in a new group on the lineage, on the last number, and on the ranks that may write.

    A rank sees by marks in its directory whether that is another rank's, too: one file system that
    machines share is one disk. Cost on several machines: two all_gathers of 48 and 8 bytes per
    rank; on one none.
    """
    nodes = [member.node for member in ctx.members]
    firsts = [nodes.index(node) for node in nodes]
    if len(set(nodes)) == 1:
        if not known.lineage.began:
            known.lineage = Lineage.new()
        known.places, known.domains = [0], firsts
        if ctx.is_master:
            with contextlib.suppress(CheckpointError):  # which writing will raise
                known.last = max(known.last, store.next_number() - 1)
    else:
        lineage = known.lineage if known.lineage.began else Lineage.new()
        mark, last = secrets.randbits(63), known.last
        with contextlib.ExitStack() as shown:
            if firsts[ctx.rank] == ctx.rank:
                with contextlib.suppress(CheckpointError):
                    shown.enter_context(store.marked(mark))
                    last = max(last, store.next_number() - 1)
            safe = store.safe
            if safe is None:  # of another training nothing is known here
                safe = last if known.lineage.began else 0
            rows = ctx.all_gather(
                np.array([*lineage, bool(known.lineage.began), mark, last, safe], np.int64)
            )
            seen = store.marks(rows[:, 3].tolist())
            domain = next(
                (rank for rank in range(ctx.world_size) if int(rows[rank, 3]) in seen), ctx.rank
            )
            domains = ctx.all_gather(np.array([domain], np.int64)).reshape(-1).tolist()
        proposed = [Lineage(*map(int, row[:2])) for row in rows]
        found = [each for each, row in zip(proposed, rows, strict=True) if row[2]]
        known.lineage = max(found, default=proposed[0])
        known.last, store.safe = int(rows[:, 4].max()), int(rows[:, 5].max())
        known.domains = [domains[first] for first in firsts]
        known.places = places(nodes, known.domains)
        known.epoch = ctx.epoch


def _write_part(
    ctx: DistributedContext, store: CheckpointStore, state: State, step: int, known: Copies
) -> None:
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
        store.save(state, step, facts=world_facts(ctx) | {LINEAGE: str(known.lineage)}, part=part)


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
