"""What a communicator and its sub-groups share, and the calls of each in their order
(``Channel``)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from potluck._core.engine.call import Call
from potluck._core.engine.loop.native import NativeLoop, engine_of
from potluck._core.engine.loop.progress import ProgressLoop
from potluck._core.engine.loop.running import CompiledPlan
from potluck._core.engine.shm.channel import ChannelMemory
from potluck._core.engine.shm.group import GroupMemory
from potluck._core.forks import Owner
from potluck._core.metrics import Metrics
from potluck._core.transport.link import Connector
from potluck._core.types import Engine, Group


class Channel:
    """The number that keeps a communicator's frames apart, the sequence numbers of its calls, and
    its shared memory. Methods are called with the lock of the group's communicators held."""

    __slots__ = ("_sequence", "memory", "number")

    def __init__(self, number: int, sequence: int) -> None:
        """``sequence`` is the number of the first call."""
        self.number = number
        self.memory: ChannelMemory | None = None
        """None if the ranks are not all on one node. Else it counts the calls."""
        self._sequence = sequence

    def take_sequence(self, call: Call) -> int:
        """The sequence number of the next call, one that goes over links."""
        if self.memory is not None:
            sequence = self.memory.take_sequence()
            self.memory.note_link_call(sequence, call.fingerprint)
            return sequence
        self._sequence += 1
        return self._sequence - 1

    def leave(self) -> int:
        """This rank makes no more calls; those under way end. Returns the sequence number that the
        next call would have."""
        return self._sequence if self.memory is None else self.memory.leave()


Loop = ProgressLoop | NativeLoop
"""What runs a group's operations: the reference in Python, or its native twin."""

_KEYED, ASIDE = 1 << 31, 1 << 30
"""Channels with the first bit come from a key, those with the second are for the messages aside of
another channel, and the others come from counting."""


_T = TypeVar("_T")


@dataclass(slots=True)
class _Keyed:
    """A sub-group that has a key, which ``holders`` have asked for and not left."""

    digest: int
    name: str
    communicator: Any
    holders: int = 0


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
    keyed: dict[int, _Keyed] = field(default_factory=dict)
    """By channel: the sub-groups that have a key."""
    sequences: dict[int, int] = field(default_factory=dict)
    """By the digest of a sub-group that was left: the sequence number of its next call. A group of
    the same key goes on there, since other members may not have left it, or be ahead."""
    dropped: deque[Channel] = field(default_factory=deque)
    """Of communicators that are gone without ``close``. The garbage collector adds to it, in the
    midst of anything, so that no lock may be taken then."""

    def named(self, members: tuple[int, ...], key: str, make: Callable[[int, int], _T]) -> _T:
        """The communicator of ``members`` that ``key`` names; ``make(channel, sequence)`` makes it.
        For each call of this there is one of ``leave``."""
        self.leave_dropped()
        name = f"{key} of {members}"
        digest = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        channel = digest % ASIDE | _KEYED
        with self.lock:
            entry = self.keyed.get(channel)
            if entry is None:
                sequence = self.sequences.pop(digest, 0)
                entry = self.keyed[channel] = _Keyed(digest, name, make(channel, sequence))
            elif entry.name != name:
                raise ValueError(
                    f"the group {name} can't be told from {entry.name}; choose another key"
                )
            entry.holders += 1
            made: _T = entry.communicator
            return made

    def count(self) -> int:
        """The next channel that all ranks count."""
        self.leave_dropped()
        with self.lock:
            return next(self.channels)

    def leave(self, channel: Channel) -> bool:
        """Leave a sub-group. False, and nothing is done, if others here have asked for it, too."""
        with self.lock:
            entry = self.keyed.get(channel.number)
            if entry is not None:
                entry.holders -= 1
                if entry.holders:
                    return False
                del self.keyed[channel.number]
            sequence = channel.leave()
            if entry is not None and sequence:
                self.sequences[entry.digest] = sequence
        self.loop.leave(channel.number, sequence)
        return True

    def leave_dropped(self) -> None:
        """Leave the sub-groups whose communicators are gone."""
        while self.dropped:
            self.leave(self.dropped.popleft())

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
