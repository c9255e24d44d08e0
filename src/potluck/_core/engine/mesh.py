"""``Mesh``: the links of one group over TCP, one connection for each pair of ranks.
``Switchboard``: gives the connections that arrive at this process's listener to the mesh of the
group that they name.

Either rank of a pair may connect first. If both do at once, the attempt of the lower rank wins: it
refuses the other's HELLO ("collision"), and the other rank accepts. A HELLO for an epoch that this
process has not reached yet waits a while; a HELLO for an epoch that is over is refused ("stale").
"""

from __future__ import annotations

import threading
import time
from dataclasses import KW_ONLY, dataclass
from functools import partial

from potluck._core.background import start_thread, why
from potluck._core.engine.failures.group_errors import refusal_of
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.handshake import connect
from potluck._core.transport.link import Deliver, Fail
from potluck._core.transport.listener import Admission, Admit, Listener
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import Group
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import LinkError, Refused

_LATE = {"collision", "not_ready"}

REACHED = "reached"
"""The kind of a HELLO that only asks whether this process can be reached, and the code of the
refusal that answers it."""

_SILENT_S = 2.0
"""A member counts as unreachable if its listener has not answered for so long: a listener has a
thread of its own, and answers in milliseconds."""

_NUM_REFUSALS = 16

_PART_S = 0.2
"""How long attempts to connect go on after the group has ended here. A peer that has sent WELCOME
would take a link that ends at once for a death; in this time it is told the reason instead."""


class Switchboard:
    """Hands the connections that arrive at one listener to the mesh of their epoch."""

    def __init__(self, listener: Listener, credentials: Credentials, *, wait_s: float) -> None:
        """``wait_s``: how long a connection for a later epoch may wait for this process."""
        self.listener = listener
        self.credentials = credentials
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._mesh: Mesh | None = None
        self._refusals: dict[int, Refusal] = {}
        self._epoch = 0
        self._is_closed = False
        self._others: dict[str, Admit] = {}
        listener.serve(self._admit)

    def answer(self, kind: str, admit: Admit) -> None:
        """Connections of another ``kind`` than data go to ``admit``."""
        with self._changed:
            self._others[kind] = admit
            self._changed.notify_all()

    def connect_mesh(self, mesh: Mesh) -> None:
        """``mesh`` answers from now on; earlier epochs are stale."""
        with self._changed:
            self._mesh = mesh
            self._epoch = mesh.group.epoch
            self._changed.notify_all()

    def disconnect_mesh(self, mesh: Mesh, refusal: Refusal) -> None:
        """``mesh`` has closed: callers that name its epoch get ``refusal`` from now on."""
        with self._changed:
            if self._mesh is mesh:
                self._mesh = None
                self._refusals[mesh.group.epoch] = refusal
                while len(self._refusals) > _NUM_REFUSALS:
                    del self._refusals[min(self._refusals)]
                self._changed.notify_all()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._mesh = None
            self._changed.notify_all()
        self.listener.close()

    def _admit(self, hello: Hello, node: str) -> Admission:
        if hello.kind == REACHED:
            return _refuse(REACHED, "this worker can be reached")
        if hello.kind != "data":
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or hello.kind in self._others, self._wait_s
                )
                admit = self._others.get(hello.kind)
            if admit is None:
                return _refuse("kind", f"this port does not take {hello.kind!r} connections")
            return admit(hello, node)
        deadline = time.monotonic() + self._wait_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._epoch >= hello.epoch,
                deadline - time.monotonic(),
            )
            mesh, epoch = self._mesh, self._epoch
            refusal = self._refusals.get(hello.epoch)
        if refusal is not None and (refusal.code != "left" or hello.epoch == epoch):
            return Admission(refusal)  # says more than "stale": why that group is over
        if hello.epoch < epoch:
            return _refuse("stale", f"epoch {hello.epoch} is over; this worker is in {epoch}")
        if mesh is None or hello.epoch > epoch:
            return _refuse(
                "not_ready", f"this worker has not formed epoch {hello.epoch} (it is at {epoch})"
            )
        return mesh.admit(hello, node)


@dataclass(eq=False, repr=False)
class Mesh:
    """The Connector of one group over TCP.

    ``connect_s``: how long to try for a link before its rank counts as lost.
    """

    group: Group
    switchboard: Switchboard
    _: KW_ONLY
    connect_s: float
    max_retries: int | None
    memory: tuple[int, int] | None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._calling: set[int] = set()
        self._unanswered_since: dict[int, float] = {}
        self._unreachable: set[int] = set()
        self._linked: set[int] = set()
        self._is_closed = threading.Event()
        self._gives_up_at = 0.0
        self._refusal = Refusal("left", "this worker has left the group of this epoch")
        self._deliver: Deliver | None = None
        self._fail: Fail | None = None

    @property
    def is_native(self) -> bool:
        """Whether its links are the native core's."""
        return self.switchboard.credentials.is_native

    def start(self, deliver: Deliver, fail: Fail) -> None:
        self._deliver, self._fail = deliver, fail
        self.switchboard.connect_mesh(self)

    def request(self, rank: int) -> None:
        with self._lock:
            if self._is_closed.is_set() or rank in self._linked or rank in self._calling:
                return
            self._calling.add(rank)
            self._unanswered_since[rank] = time.monotonic()
            thread = start_thread(
                partial(self._call, rank),
                name=f"potluck-connect-{rank}",
                on_broken=partial(self._give_up, rank),
            )
            self._threads.append(thread)

    def unreachable(self) -> frozenset[int]:
        """The ranks to which this rank could make no link, or could not so far, since they do not
        answer; also after the end of the group."""
        with self._lock:
            self._note_silent()
            return frozenset(self._unreachable - self._linked)

    def _note_silent(self) -> None:
        long_ago = time.monotonic() - _SILENT_S
        for rank in self._calling - self._linked:
            if self._unanswered_since[rank] < long_ago:
                self._unreachable.add(rank)

    def close(self, error: BaseException) -> None:
        self._refusal = refusal_of(self.group, error)
        self.switchboard.disconnect_mesh(self, self._refusal)
        self._gives_up_at = time.monotonic() + _PART_S
        with self._lock:
            self._note_silent()
            self._is_closed.set()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def admit(self, hello: Hello, node: str) -> Admission:
        """Decide on a connection that names this epoch."""
        group = self.group
        refusal = objection_to(group, hello, node)
        if refusal is not None:
            return Admission(refusal)
        with self._lock:
            if self._is_closed.is_set():
                return Admission(self._refusal)
            if hello.rank in self._linked:
                return _refuse(
                    "duplicate",
                    f"rank {hello.rank} is connected already: is RANK set to the same number on "
                    "two workers?",
                )
            # Both ranks call each other at once: the lower rank's call wins, so that exactly one of
            # the two calls is refused.
            if hello.rank in self._calling and group.rank < hello.rank:
                return _refuse("collision", f"rank {group.rank} is calling rank {hello.rank}")
            # Before WELCOME is sent, so that a second HELLO of this rank is refused meanwhile.
            self._linked.add(hello.rank)
        return Admission(
            Welcome(rank=group.rank),
            lambda link: self._hand_over(hello.rank, link),
            lambda: self._withdraw(hello.rank),
        )

    def _withdraw(self, rank: int) -> None:
        """``rank`` hung up before its WELCOME; it wanted a link, so now this side calls."""
        with self._lock:
            self._linked.discard(rank)
        self.request(rank)

    def _hand_over(self, rank: int, link: TcpLink) -> None:
        assert self._deliver is not None
        self._deliver(rank, link)  # also when the group is over: then the peer is told why

    def _call(self, rank: int) -> None:
        """Connect to ``rank``, unless its own call arrives first."""
        error: Exception
        deadline = time.monotonic() + self.connect_s
        while True:
            try:
                link = self._connect(rank, deadline)
            except Exception as failure:  # an address may be anything, and the loop must hear of it
                error = failure
                # The peer calls this rank, or has not formed this epoch yet: try again for a while.
                if isinstance(failure, Refused) and failure.code in _LATE:
                    self._unanswered_since[rank] = time.monotonic()
                    if self._wait_for_call(rank, failure, deadline):
                        return
                    if time.monotonic() < deadline:
                        continue
                break
            with self._lock:
                self._calling.discard(rank)
                is_first = rank not in self._linked
                self._linked.add(rank)
            if is_first:
                self._hand_over(rank, link)
            else:
                link.close()
            return
        with self._lock:
            self._calling.discard(rank)
            if rank in self._linked or self._is_closed.is_set():
                return  # the peer's own call has come meanwhile, or no link is wanted any more
            if isinstance(error, LinkError) and not isinstance(error, Refused):
                self._unreachable.add(rank)
        self._give_up(rank, error)

    def _give_up(self, rank: int, error: BaseException) -> None:
        assert self._fail is not None
        if not isinstance(error, Exception):
            error = LinkError(why(error))
        self._fail(rank, error)

    def _connect(self, rank: int, deadline: float) -> TcpLink:
        group = self.group
        member = group.members[rank]
        if not member.port:
            raise LinkError(f"{group.describe(rank)} has no address")
        hello = Hello(
            kind="data",
            job=group.job,
            epoch=group.epoch,
            rank=group.rank,
            to_rank=rank,
            worker=group.me.worker,
        )
        link, _ = connect(
            member.host,
            member.port,
            hello,
            self.switchboard.credentials,
            deadline=deadline,
            max_retries=self.max_retries,
            memory=self.memory,
            cancelled=self._has_given_up,
        )
        check_node_of(group, rank, link)
        return link

    def _has_given_up(self) -> bool:
        return self._is_closed.is_set() and time.monotonic() >= self._gives_up_at

    def _wait_for_call(self, rank: int, refusal: Refused, deadline: float) -> bool:
        """After a refusal that is only about timing: True if the peer's call has come."""
        patience = 0.5 if refusal.code == "collision" else 0.02
        limit = min(deadline, time.monotonic() + patience)
        while time.monotonic() < limit and not self._is_closed.wait(0.005):
            with self._lock:
                if rank in self._linked:
                    self._calling.discard(rank)
                    return True
        return self._is_closed.is_set()


def objection_to(group: Group, hello: Hello, node: str) -> Refusal | None:
    """Why the caller on ``node`` is not the rank of ``group`` that it says it is, None if it is."""
    if hello.job != group.job:
        return Refusal("job", f"this worker is in job {group.job!r}, not {hello.job!r}")
    if hello.to_rank != group.rank:
        return Refusal("rank", f"this worker is rank {group.rank}, not {hello.to_rank}")
    if not 0 <= hello.rank < group.world_size or hello.rank == group.rank:
        return Refusal(
            "duplicate",
            f"rank {hello.rank} can't call rank {group.rank} in a world of {group.world_size}: "
            "is RANK set to the same number on two workers?",
        )
    expected = group.members[hello.rank].node
    if expected and expected != node:
        return Refusal(
            "identity", f"rank {hello.rank} is on node {expected[:12]}, not on {node[:12]}"
        )
    return None


def check_node_of(group: Group, rank: int, link: TcpLink) -> None:
    """Close ``link`` with LinkError if another node than that of ``rank`` is at its other end."""
    expected = group.members[rank].node
    if expected and link.peer_node != expected:
        link.close()
        raise LinkError(
            f"{group.describe(rank)} should be on node {expected[:12]}, but node "
            f"{link.peer_node[:12]} answered there"
        )


def _refuse(code: str, reason: str) -> Admission:
    return Admission(Refusal(code, reason))
