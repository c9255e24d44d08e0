"""What a communicator and its sub-groups share."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from potluck.engine.call import Call
from potluck.engine.connector import Connector
from potluck.engine.loop.compiled import CompiledPlan
from potluck.engine.loop.native import NativeLoop, engine_of
from potluck.engine.loop.progress import ProgressLoop
from potluck.engine.shm.group import GroupMemory
from potluck.forks import Owner
from potluck.metrics import Metrics
from potluck.types import Engine, Group

Loop = ProgressLoop | NativeLoop
"""What runs a group's operations: the reference in Python, or its native twin."""

_T = TypeVar("_T")

_KEYED = 1 << 31
"""Channels with this bit come from a key, the others from counting."""


_open: weakref.WeakSet[GroupResources] = weakref.WeakSet()
_open_lock = threading.Lock()


def ongoing_here() -> list[Hashable]:
    """A name for each operation under way in this process, whatever its group. For any thread."""
    with _open_lock:
        groups = list(_open)
    return [(id(resources), name) for resources in groups for name in resources.ongoing()]


@dataclass(slots=True, eq=False, weakref_slot=True)
class GroupResources:
    """One group's loop, its shared memory (None: it has none), and its channels so far."""

    loop: Loop
    metrics: Metrics
    nodes: tuple[int, ...]
    shm: GroupMemory | None = None
    owner: Owner = field(default_factory=lambda: Owner("this group"))
    lock: contextlib.AbstractContextManager[Any] = field(default_factory=threading.RLock)
    channels: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    keyed: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """By channel: the name of a sub-group that has a key, and its communicator."""

    def named(self, members: tuple[int, ...], key: str, make: Callable[[int], _T]) -> _T:
        """The communicator of ``members`` that ``key`` names; ``make(channel)`` makes it."""
        name = f"{key} of {members}"
        digest = blake2b(name.encode(), digest_size=4).digest()
        channel = int.from_bytes(digest, "little") | _KEYED
        with self.lock:
            if channel not in self.keyed:
                self.keyed[channel] = name, make(channel)
            before, communicator = self.keyed[channel]
        if before != name:
            raise ValueError(f"the group {name} can't be told from {before}; choose another key")
        made: _T = communicator
        return made

    def ongoing(self) -> list[Hashable]:
        """A name for each operation under way, the same for as long as it is. For any thread."""
        shared = () if self.shm is None else self.shm.ongoing()
        return [*self.loop.ongoing(), *shared]

    def on_end(
        self,
        call: Call,
        nbytes: int,
        seconds: float,
        error: BaseException | None,
        num_beyond: int,
    ) -> None:
        """Count a call that has ended. ``num_beyond``: of the elements that this rank has encoded,
        how many were beyond the codec's range."""
        if num_beyond:
            self.metrics.beyond(call.operation, call.codec, num_beyond)
        if call.parent_call:
            return
        if error is None:
            self.metrics.observe(call.operation, call.algorithm, nbytes, seconds)
        else:
            self.metrics.failed(call.operation, type(error).__name__)


def open_resources(
    group: Group,
    connector: Connector,
    metrics: Metrics,
    segment_bytes: int,
    max_early_bytes: int,
    use_shared_memory: bool,
) -> GroupResources:
    """Begin a group's loop. The result's ``nodes`` has each rank's node index, counted in the order
    of the ranks; a rank whose node is unknown counts as a node of its own."""

    def on_operation(
        plan: CompiledPlan, seconds: float, error: BaseException | None, num_beyond: int
    ) -> None:
        resources.on_end(plan.call, plan.nbytes, seconds, error, num_beyond)

    order: dict[str, int] = {}
    nodes = tuple(
        order.setdefault(member.node or f"unknown {rank}", len(order))
        for rank, member in enumerate(group.members)
    )
    run = NativeLoop if engine_of(connector.is_native) is Engine.NATIVE else ProgressLoop
    loop: Loop = run(
        group,
        connector,
        segment_bytes=segment_bytes,
        max_early_bytes=max_early_bytes,
        on_operation=on_operation,
        meter=metrics.link,
    )
    metrics.group(group.epoch, group.world_size)
    is_known = all(member.node for member in group.members)
    shm = GroupMemory(group, loop, metrics) if use_shared_memory and is_known else None
    resources = GroupResources(loop, metrics, nodes, shm)
    with _open_lock:
        _open.add(resources)
    return resources
