"""``ChannelMemory``: sets up the shared memory of one channel, and starts calls through it.

The first call on a channel whose ranks are on one node begins the setup, by two all_gathers over
links, so that all ranks come to the same answer:

1. Rank 0 makes the memory and offers it. All ranks tell whether they can use shared memory: the
   native core is there, and this worker's share of memory is not spent.
2. Each rank maps the memory and tells whether that worked. A random token in the memory proves that
   it mapped the right one.

Calls made meanwhile wait. Then they go through shared memory, or over links if there will be none,
in the order in which they were made.

Ranks of one node use their shared memory for every call that can go through it: no plan over links
is as fast. The choice that is left is between two ways of reducing. With ``w`` ranks and ``n``
bytes, every rank

- *at once*: copies ``n`` in, waits once, and combines ``w * n``;
- *in slices*: copies ``n (w - 1) / w`` in, waits, combines ``n`` (its slice of all ranks), keeps
  ``n / w`` of it, waits again, and copies ``n (w - 1) / w`` out.

So slices cost one more wait and save ``n (w - 1) (w - 1) / w`` bytes of work (``small_bytes``). The
same trade of latency for bandwidth is in Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import weakref
from collections import deque
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
import numpy as np

from potluck._core import native
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.request import FastPath, Request, label, part_of_call
from potluck._core.engine.shm.group import MAX_BYTES, Failure, GroupMemory, SharedMemoryWork
from potluck._core.engine.work import Work
from potluck._core.system import usable_cpus
from potluck._core.transport import memory
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import code_of

NUM_SLOTS = 4
"""Slots of each rank, used in rotation. The pipeline has three stages (copy in, combine, copy out),
each at another block; the fourth slot lets a fast rank copy in the next block meanwhile."""

_CREDIBLE = 10.0
"""A measured cost may differ from the model's by this factor."""

_SPIN_WAKES = 4
_MOST_SPIN_S = 50e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of a call take on one node."""

    wait_s: float
    """To see that another rank has arrived, when each rank has a core of its own."""
    turn_s: float
    """The same when both ranks share a core, and the waiting rank yields it."""
    wake_s: float
    """The same when the waiting rank sleeps."""
    byte_s: float
    """To read one byte that another core has written, and combine or copy it."""


MODEL = Costs(wait_s=0.1e-6, turn_s=1.5e-6, wake_s=5e-6, byte_s=1 / 40e9)
"""The costs that are assumed where they could not be measured."""


def credible(measured: Costs) -> Costs:
    """``measured``, with the model's figure for each that is far from it (or 0: not measured).

    A machine that is busy at that moment measures how busy it is.
    """

    def chosen(value: float, model: float) -> float:
        return value if model / _CREDIBLE <= value <= model * _CREDIBLE else model

    return Costs(
        wait_s=chosen(measured.wait_s, MODEL.wait_s),
        turn_s=chosen(measured.turn_s, MODEL.turn_s),
        wake_s=chosen(measured.wake_s, MODEL.wake_s),
        byte_s=chosen(measured.byte_s, MODEL.byte_s),
    )


def small_bytes(world_size: int, cores: int, costs: Costs = MODEL) -> int:
    """The size in bytes at which both ways cost the same. Up to it every rank combines everything.

    ``cores`` is how many processors the ranks share.
    """
    turns = -(-world_size // cores)
    wait_s = costs.wait_s * world_size if turns == 1 else costs.turn_s * turns
    w = world_size
    per_byte = (w - 1) * (w - 1) / w * costs.byte_s * turns
    return int(wait_s / per_byte)


def spin_s(world_size: int, cores: int, costs: Costs = MODEL) -> float:
    """How long a waiting rank keeps its core before it yields, and then sleeps.

    Several times what a sleep with its wake-up costs. 0 with more ranks than cores: the other ranks
    need the core that this rank would spin on.
    """
    if world_size > cores:
        return 0.0
    return min(_SPIN_WAKES * costs.wake_s, _MOST_SPIN_S)


_log = logging.getLogger(__name__)

NO_SHARED_MEMORY = (
    "algorithm='shared_memory' needs all ranks on one node, Linux, and potluck's native core on "
    "every rank"
)

_OFFER_BYTES = 512
_MAGIC = b"potluck\x03"
_SLOT_BYTES = (252 * 1024, 60 * 1024)
"""Bytes of a slot while at least half of the worker's share of memory is left, and after that."""

State = Enum("State", ["NEW", "ASKING", "OPEN", "NONE"])


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of the first all_gather. ``is_able`` and ``cpus`` count of every rank, the
    other fields only of rank 0, which makes the memory."""

    is_able: bool
    boot: str = ""
    pid: int = 0
    fd: int = 0
    token: bytes = b""
    slot_bytes: int = 0
    costs: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """In seconds, as ``Costs``. All ranks use those that rank 0 has
    measured, so that all of them choose the same way of reducing."""
    cpus: bytes = b""
    """The processors that the rank may use, one bit each."""


class Links(Protocol):
    """The calls of the same channel that go over links: its communicator."""

    fast_path: FastPath | None

    def exchange(
        self, output: Array, mine: Array, call: str, sequence: int, timeout_s: float
    ) -> Work:
        """An all_gather over links, for setting up shared memory before ``call``."""

    def run_instead(self, request: Request, work: SharedMemoryWork) -> None:
        """Run a call over links that has waited for shared memory."""


class ChannelMemory:
    """The shared memory of one channel. Methods take the lock of the group's communicators, except
    where a comment says that the caller holds it."""

    def __init__(
        self,
        group: GroupMemory,
        rank: int,
        ranks: tuple[int, ...],
        lock: Any,
        links: Links,
        sequence: int,
    ) -> None:
        """``sequence`` is the number of the first call. ``links`` is kept only while the setup is
        under way, and gets the fast path while there is one."""
        self.state = State.NEW
        self.sequence = sequence
        """The number of the next call. The native channel counts once there is one."""
        self._group = group
        self._rank = rank
        self._ranks = ranks
        self._lock = lock
        self._links = weakref.ref(links)
        self._is_left = False
        self._native: Any = None
        self._waiting: deque[tuple[Request, SharedMemoryWork]] = deque()
        self._fd = -1
        self._memory: Any = None
        self._taken = 0
        self._timeout_s = 0.0
        self._label = ""
        self._second = 0

    def run(self, request: Request) -> SharedMemoryWork | None:
        """Run a call through shared memory, now or after the setup; None if it has to go over
        links.

        During the setup every call waits, so that calls keep their order. ValueError if the request
        asks for shared memory and there is none.
        """
        if self.state is not State.NONE:
            with self._lock:
                if self.state is State.ASKING or self.takes(request):
                    return self._begin(request, request.label())
        if request.algorithm is Algorithm.SHARED_MEMORY:
            raise ValueError(NO_SHARED_MEMORY)
        return None

    # -- called with the lock held

    def leave(self) -> int:
        """This rank makes no more calls on this channel; those under way end, and then the memory
        is released. Returns the sequence number that the next call would have."""
        self._is_left = True
        channel = self._native
        if channel is not None:
            self._on_close()
            self._group.leave_channel(channel)
        return self.sequence

    def take_sequence(self) -> int:
        """The sequence number of the next call of this channel, through shared memory or not."""
        if self._native is not None:
            taken: int = self._native.take_sequence()
            return taken
        self.sequence += 1
        return self.sequence - 1

    def note_link_call(self, sequence: int, fingerprint: int) -> None:
        """Call ``sequence`` goes over links. A rank that waits for it in shared memory then raises
        Desync at once."""
        if self._native is not None:
            self._native.note_link_call(sequence, fingerprint)

    def takes(self, request: Request) -> bool:
        """Whether a call is for shared memory: False once it is known that there is none."""
        if self.state is State.NONE or request.algorithm not in (None, Algorithm.SHARED_MEMORY):
            return False
        if request.op is None or self._native is None:
            return True
        can: bool = self._native.can_combine(code_of(request.described.dtype), request.op)
        return can

    def _begin(self, request: Request, call: str) -> SharedMemoryWork:
        work = SharedMemoryWork(
            call,
            request.result,
            self._group,
            self._ranks,
            is_waiting=self._native is None,
        )
        is_first = self.state is State.NEW
        sequences = (self.take_sequence(), self.take_sequence()) if is_first else (-1, -1)
        request.sequence = self.take_sequence()
        if self._native is None:
            self._waiting.append((request, work))
        else:
            self._start(request, work)
        if is_first:  # last, because the setup may end at once: the call must be among the waiting
            self._ask(call, request.timeout_s, *sequences)
        return work

    def _error_of(
        self,
        operation: Operation,
        source: Any,
        result: Any,
        op: str | None,
        root: int,
        failure: tuple[str, int, bool, int],
    ) -> BaseException:
        """What a call on the fast path has failed with."""
        part = part_of_call(operation, source, result)
        call = label(operation, None, part, None if op is None else ReduceOp(op), root)
        return self._group.failure(Failure.of(self._ranks, *failure), call)

    # -- setting up

    def _ask(self, call: str, timeout_s: float, first: int, second: int) -> None:
        links = self._links()
        assert links is not None, "the call comes from there"
        self.state = State.ASKING
        self._timeout_s, self._label, self._second = timeout_s, call, second
        offer = self._offer()
        mine = np.zeros(_OFFER_BYTES, dtype=np.uint8)
        encoded = msgspec.msgpack.encode(offer)
        mine[: len(encoded) + 2] = np.frombuffer(
            len(encoded).to_bytes(2, "little") + encoded, dtype=np.uint8
        )
        offers = np.zeros(_OFFER_BYTES * len(self._ranks), dtype=np.uint8)
        work = links.exchange(offers, mine, call, first, timeout_s)
        work.add_done_callback(lambda done: self._on_offers(done, offers, links))

    def _offer(self) -> Offer:
        if not native.available or not memory.boot_id():
            return Offer(False)
        cpus = _usable_cpus()
        if self._rank != 0:
            return Offer(True, memory.boot_id(), cpus=cpus)
        slot_bytes = _SLOT_BYTES[2 * self._group.left_bytes < MAX_BYTES]
        token = secrets.token_bytes(32)
        try:
            self._fd, self._memory = memory.create(self._bytes(slot_bytes))
        except OSError as error:
            _log.debug("no shared memory: %s", error)
            return Offer(False)
        self._memory[:40] = _MAGIC + token
        costs = _measured_costs()
        boot, pid = memory.boot_id(), os.getpid()
        return Offer(True, boot, pid, self._fd, token, slot_bytes, costs, cpus)

    def _on_offers(self, work: Work, offers: Array, links: Links) -> None:
        error = work.exception()
        if error is not None:
            self._end(error, links)
            return
        parts = [bytes(part) for part in offers.reshape(len(self._ranks), -1)]
        said = [
            msgspec.msgpack.decode(part[2 : 2 + int.from_bytes(part[:2], "little")], type=Offer)
            for part in parts
        ]
        if not all(offer.is_able for offer in said):
            self._end(None, links)
            return
        mapped = np.array([self._map(said[0])], dtype=np.uint8)
        answers = np.zeros(len(self._ranks), dtype=np.uint8)
        exchanged = links.exchange(answers, mapped, self._label, self._second, self._timeout_s)
        cpus = functools.reduce(int.__or__, (int.from_bytes(each.cpus, "little") for each in said))
        cores = max(1, cpus.bit_count())
        exchanged.add_done_callback(
            lambda done: self._on_answers(done, answers, said[0], cores, links)
        )

    def _map(self, offer: Offer) -> bool:
        nbytes = NUM_SLOTS * offer.slot_bytes
        if not self._group.take(nbytes):
            return False
        self._taken = nbytes
        if self._rank == 0:
            return True
        try:
            mapped = memory.open_shared(
                offer.boot, offer.pid, offer.fd, self._bytes(offer.slot_bytes)
            )
        except (OSError, ValueError) as error:
            _log.debug("no shared memory with process %d: %s", offer.pid, error)
            return False
        self._memory = mapped
        return mapped[:40] == _MAGIC + offer.token

    def _on_answers(
        self, work: Work, answers: Array, offer: Offer, cores: int, links: Links
    ) -> None:
        error = work.exception()
        if error is not None or not answers.all():
            self._end(error, links)
            return
        self._drop_descriptor()
        try:
            self._open(offer, cores, links)
        except Exception as broken:  # the others may have theirs: no call can go over links
            self._end(self._group.broke(broken), links)

    def _open(self, offer: Offer, cores: int, links: Links) -> None:
        world = len(self._ranks)
        costs = credible(Costs(*offer.costs))
        salt = blake2b(f"{self._ranks}".encode(), digest_size=8).digest()
        with self._lock:
            if self.state is not State.ASKING:
                return
            channel = self._group.open(
                self._memory,
                self._on_close,
                self._ranks,
                self._taken,
                rank=self._rank,
                world=world,
                num_slots=NUM_SLOTS,
                slot_bytes=offer.slot_bytes,
                small_bytes=small_bytes(world, cores, costs),
                spin_s=spin_s(world, cores, costs),
                salt=int.from_bytes(salt, "little"),
                sequence=self.sequence,
                error_of=self._error_of,
            )
            self._drop_memory()
            self._native = channel
            self.state = State.OPEN
            while self._waiting:
                request, waiting = self._waiting.popleft()
                if self.takes(request):
                    self._start(request, waiting)
                else:
                    self._fall_back(request, waiting, links)
            if self._is_left:
                self.leave()
            else:
                links.fast_path = channel.fast_path

    def _end(self, error: BaseException | None, links: Links) -> None:
        """There will be no shared memory: a rank can't have it, or the setup failed by
        ``error``."""
        self._drop_descriptor()
        with self._lock:
            self.state = State.NONE
            self._drop_memory()
            self._group.give_back(self._taken)
            waiting, self._waiting = self._waiting, deque()
            for request, work in waiting:
                if error is None:
                    self._fall_back(request, work, links)
        for _, work in waiting:
            if error is not None:
                work.goes_over_links()
                self._group.failed(work.call, error)
                work.finish(error)

    def _fall_back(self, request: Request, work: SharedMemoryWork, links: Links) -> None:
        if request.algorithm is Algorithm.SHARED_MEMORY:
            work.finish(ValueError(NO_SHARED_MEMORY))
        else:
            links.run_instead(request, work)
        work.goes_over_links()

    def _on_close(self) -> None:
        with self._lock:
            if self._native is not None:
                self.sequence = self._native.take_sequence()
            self.state, self._native = State.NONE, None
            links = self._links()
            if links is not None:
                links.fast_path = None

    def _drop_descriptor(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drop_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _start(self, request: Request, work: SharedMemoryWork) -> None:
        described = request.described
        source = _address(request.source)
        result = source if request.result is request.source else _address(request.result)
        self._group.start(
            work,
            lambda ident: self._native.start(
                request.operation,
                code_of(described.dtype),
                request.op,
                request.root,
                list(described.shape),
                source,
                result,
                request.sequence,
                request.timeout_s,
                ident,
            ),
        )
        work.keep(request)

    def _bytes(self, slot_bytes: int) -> int:
        return int(native.core.shm_bytes(len(self._ranks), NUM_SLOTS, slot_bytes))


@functools.cache
def _measured_costs() -> tuple[float, float, float, float]:
    """The costs of waiting and reading on this machine, measured once, in about 3 ms."""
    wait_s, turn_s, wake_s, byte_s = native.core.shm_costs()
    return wait_s, turn_s, wake_s, byte_s


def _usable_cpus() -> bytes:
    """The processors that this process may use, one bit each; empty if there are too many.

    The union over all ranks counts: ranks that are bound to one core each have several together.
    """
    bits = sum(1 << cpu for cpu in usable_cpus())
    encoded = bits.to_bytes(-(-bits.bit_length() // 8), "little")
    return encoded if len(encoded) <= _OFFER_BYTES // 2 else b""


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])
