"""The communicator: the operations of one group, through shared memory or over links.

Arrays here are NumPy and C-contiguous; the context turns whatever users pass into that. Every call
returns a Work at once. A communicator and its sub-groups share one progress loop and one link per
pair of ranks; ``channel`` keeps their frames apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from functools import partial

from potluck._core.checks import check_peer
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.compiler import Compiler
from potluck._core.engine.loop.mailbox import ANY_SOURCE, Receiving, sending
from potluck._core.engine.loop.running import as_bytes
from potluck._core.engine.request import FastPath, Request, checked_ranks
from potluck._core.engine.resources import ASIDE, Channel, GroupResources, open_resources
from potluck._core.engine.shm.channel import NO_SHARED_MEMORY, ChannelMemory
from potluck._core.engine.shm.group import SharedMemoryWork
from potluck._core.engine.work import Work, deadline_after
from potluck._core.metrics import Metrics
from potluck._core.transport.link import Connector
from potluck._core.types import Group
from potluck._core.wire.dtypes import code_of
from potluck.errors import GroupClosed, LinkError, PotluckError

SEGMENT_BYTES = 512 * 1024
MAX_EARLY_BYTES = 2 * 1024 * 1024


class Communicator:
    """One rank's access to one immutable group.

    ``ranks`` are this channel's members in the numbering of the whole group. After the first
    GroupError every call raises the same error: form a new group.
    """

    device: str | None = None
    """Arrays are in host memory."""

    fast_path: FastPath | None = None
    """Through shared memory; None while there is none."""

    def __init__(
        self,
        group: Group,
        resources: GroupResources,
        channel: int,
        ranks: tuple[int, ...],
        sequence: int = 0,
    ) -> None:
        """``sequence`` is the number of the first call on ``channel``."""
        self.group = group
        self._shared = resources
        self._channel = Channel(channel, sequence)
        self._ranks = ranks
        self._nodes = tuple(resources.nodes[rank] for rank in ranks)
        self._compiler = Compiler(group, channel, ranks, self._nodes, resources.loop.segment_bytes)
        self._aside: Communicator | None = None
        self._finalizer: weakref.finalize[..., Communicator] | None = None
        self._is_left = False
        self.rank = ranks.index(group.rank)
        self.world_size = len(ranks)
        if resources.shm is not None and self.world_size > 1 and len(set(self._nodes)) == 1:
            self._channel.memory = ChannelMemory(
                resources.shm, self.rank, ranks, resources.lock, self, sequence
            )

    @classmethod
    def open(
        cls,
        group: Group,
        connector: Connector,
        *,
        metrics: Metrics | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        max_early_bytes: int = MAX_EARLY_BYTES,
        use_shared_memory: bool = False,
    ) -> Communicator:
        """The communicator of a whole group. Links are made when first needed.

        ``use_shared_memory``, the same on all ranks: those of one node share memory where they can.
        """
        resources = open_resources(
            group,
            connector,
            metrics or Metrics(),
            segment_bytes,
            max_early_bytes,
            use_shared_memory,
        )
        return cls(group, resources, 0, tuple(range(group.world_size)))

    def run(self, request: Request) -> Work:
        """Begin a collective. TypeError or ValueError for what has no meaning."""
        self._check_open()
        wanted, encoding, memory = request.algorithm, request.encoding, self._channel.memory
        if memory is not None:
            if wanted in (None, Algorithm.SHARED_MEMORY) and encoding is None:
                request.check(self.world_size)
            else:
                # Not for shared memory. It still goes through `memory`, so that calls made during
                # the setup keep their order; the name of an algorithm then keeps it on links. With
                # a codec and ranks of one node, direct is what the compiler would choose.
                self._compiler.compile(request)  # ValueError if there is no such plan
                request.algorithm = wanted or Algorithm.DIRECT
            work = memory.run(request)
            if work is not None:
                return work
        elif wanted is Algorithm.SHARED_MEMORY:
            raise ValueError(NO_SHARED_MEMORY)
        return self._run_over_links(request)

    # -- point to point

    def send(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        """Send ``array`` to ``peer``; done when its memory may be reused."""
        self._check_open()
        self._check_peer(peer)
        work = Work(f"send({array.dtype}, shape {array.shape}, to rank {peer}, tag {tag})", array)
        item = sending(
            self._ranks[peer],
            self._channel.number,
            tag,
            code_of(array.dtype),
            0,
            array.reshape(-1),
            work,
            deadline_after(timeout_s),
        )
        self._resources.loop.send(item)
        return work

    def recv(self, array: Array, peer: int, tag: int, *, timeout_s: float) -> Work:
        """Fill ``array`` with a message of exactly its size; ``peer`` -1 takes any sender's.

        The work's ``source`` is then the sender's rank in this communicator.
        """
        self._check_open()
        if peer != ANY_SOURCE:
            self._check_peer(peer)
        whom = "any rank" if peer == ANY_SOURCE else f"rank {peer}"
        work = Work(f"recv({array.dtype}, shape {array.shape}, from {whom}, tag {tag})", array)
        item = Receiving(
            source=ANY_SOURCE if peer == ANY_SOURCE else self._ranks[peer],
            channel=self._channel.number,
            ranks=self._ranks,
            tag=tag,
            dtype=code_of(array.dtype),
            array=array,
            data=as_bytes(array.reshape(-1)),
            work=work,
            deadline=deadline_after(timeout_s),
        )
        self._resources.loop.receive(item)
        return work

    # -- groups

    def subgroup(self, ranks: Sequence[int], *, key: str | None = None) -> Communicator | None:
        """A communicator of some of the ranks, None on the others.

        Costs nothing on the wire. Without ``key`` every rank must call it, in the same order: the
        ranks count their calls alike. With ``key`` only the members need to, whenever they like:
        the group is known by its key and ranks, and asking again gives the same communicator, which
        is then to be closed as often. Without ``key`` the last reference to it closes it.
        """
        self._check_open()
        chosen, shared = checked_ranks(ranks, self.world_size), self._shared
        members = tuple(self._ranks[rank] for rank in chosen)
        if key is not None:
            if self.rank not in chosen:
                return None
            make = partial(Communicator, self.group, shared)
            return shared.named(
                members, key, lambda channel, sequence: make(channel, members, sequence)
            )
        channel = shared.count()
        if self.rank not in chosen:
            return None
        made = Communicator(self.group, shared, channel, members)
        made._finalizer = weakref.finalize(made, shared.dropped.append, made._channel)
        made._finalizer.atexit = False
        return made

    def aside(self) -> Communicator:
        """The same ranks on a channel of its own: no message there matches one of a script."""
        self._check_open()
        with self._shared.lock:
            if self._aside is None:
                channel = self._channel.number | ASIDE
                self._aside = Communicator(self.group, self._shared, channel, self._ranks)
            return self._aside

    # -- life

    @property
    def error(self) -> BaseException | None:
        """Why the group is over, None while it is not."""
        return self._resources.loop.error

    @property
    def metrics(self) -> Metrics:
        return self._resources.metrics

    def ongoing(self) -> list[Hashable]:
        """A name for each operation under way, the same for as long as it is. For any thread."""
        return self._resources.ongoing()

    def abort(self, error: PotluckError) -> None:
        """End the group with ``error``, here and on every rank that can be reached."""
        if self._shared.owner.is_here:
            self._resources.loop.abort(error)

    def close(self) -> None:
        """Leave in order, within about a second. Idempotent.

        Of a sub-group: this rank makes no more calls on it, and those under way end, at the latest
        by their deadlines. What it holds is released; other groups go on.
        """
        if not self._shared.owner.is_here:
            return
        if self._channel.number:
            self._leave()
            return
        shm = self._resources.shm
        if shm is not None:
            shm.leave()
        self._resources.loop.close()
        if shm is not None:
            shm.close()

    def _leave(self) -> None:
        if not self._is_left and self._shared.leave(self._channel):
            self._is_left, self._aside = True, None
            if self._finalizer is not None:
                self._finalizer.detach()

    # -- inside

    def _check_open(self) -> None:
        self._shared.owner.check()
        if self._is_left:
            raise GroupClosed("this sub-group was closed here", epoch=self.group.epoch)

    @property
    def _resources(self) -> GroupResources:
        self._shared.owner.check()
        return self._shared

    def _check_peer(self, peer: int) -> None:
        check_peer(peer, self.rank, self.world_size)
        if self.group.cut and self.group.is_cut(self._ranks[peer]):
            raise LinkError(
                f"{self.group.describe(self._ranks[peer])} can't be reached from "
                f"{self.group.describe(self.group.rank)} in epoch {self.group.epoch}: the network "
                "between the two is cut. Collectives go by way of other ranks; messages do not"
            )

    def _run_over_links(
        self,
        request: Request,
        *,
        parent_call: str = "",
        sequence: int = -1,
        work: Work | None = None,
    ) -> Work:
        """``sequence``: the call's, if it has one already; ``work``: likewise."""
        compiled = self._compiler.compile(request, parent_call)
        buffers = compiled.buffers(request.source, request.result)
        if work is None:
            work = Work(compiled.call.text, request.result)
        if not compiled.plan.steps and self.error is None:
            work.finish()
            return work
        deadline = deadline_after(request.timeout_s)
        residual = request.encoding.residual if request.encoding is not None else None
        with self._resources.lock:  # to the loop in the order of their sequence numbers
            if sequence < 0:
                sequence = self._channel.take_sequence(compiled.call)
            self._resources.loop.start(compiled, buffers, work, sequence, deadline, residual)
        return work

    # -- shared memory

    def run_instead(self, request: Request, work: SharedMemoryWork) -> None:
        """Run a call over links that has waited for shared memory."""
        self._run_over_links(request, sequence=request.sequence, work=work)

    def exchange(
        self, output: Array, mine: Array, call: str, sequence: int, timeout_s: float
    ) -> Work:
        """An all_gather over links, for setting up shared memory before ``call``."""
        return self._run_over_links(
            Request(
                Operation.ALL_GATHER,
                mine,
                output,
                algorithm=Algorithm.DIRECT,
                timeout_s=timeout_s,
            ),
            parent_call=call,
            sequence=sequence,
        )
