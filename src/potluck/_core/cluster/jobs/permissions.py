"""Which messages about jobs a node acts on: now, after its next view, or never.

``SENDERS`` is the role that the sender of each message needs; it is checked before a job gets the
message. The bodies of messages are checked where they are used: a node reports about its own
workers only (``JobController``), and gets messages about jobs that it runs or started.

``DeferredMessages`` keeps the messages that this node may act on only after its next view:

- Orders of a node that does not lead this node's view. The view that makes the sender the leader
  may still be on its way to this node's disk. After the next view the leader's orders are carried
  out, and all others dropped. A node that orders too much meanwhile is cut off (``keep_orders``);
  if it is the new leader, it repeats all orders over its next link.
- Reports of nodes to a leader that reaches no majority. They are taken after the pause; of too many
  the oldest are dropped (``keep_newest``)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum

from potluck._core.wire import jobs, peers
from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.nodes import View
from potluck.errors import ProtocolError


class Role(StrEnum):
    """What a sender has to be."""

    LEADER = "the leader of this node's view"
    MEMBER = "a member of this node's view"
    STARTER = "the node on which the job was started"
    CANCELLER = "the node on which the job was started, or an admin of the cluster"
    READER = "a node that started the job or ran it, or whose jobs run on the asked machine"


SENDERS: dict[type, Role] = {
    jobs.Order: Role.LEADER,
    jobs.JobList: Role.LEADER,
    jobs.JobWaits: Role.LEADER,
    jobs.JobStatus: Role.LEADER,
    jobs.StartWorker: Role.LEADER,
    jobs.SignalWorkers: Role.LEADER,
    jobs.SendToWorkers: Role.LEADER,
    jobs.Submitted: Role.LEADER,
    jobs.LabelledOutput: Role.LEADER,
    jobs.JobNote: Role.LEADER,
    jobs.JobEnded: Role.LEADER,
    jobs.Submit: Role.STARTER,
    jobs.InterruptJob: Role.STARTER,
    jobs.NodeReport: Role.MEMBER,
    jobs.WorkerEvent: Role.MEMBER,
    jobs.Output: Role.MEMBER,
}
"""The role that the sender of each message needs."""

ASKERS: dict[type, Role] = {
    jobs.HistoryRequest: Role.MEMBER,
    jobs.KeepEnd: Role.LEADER,
    jobs.LogRequest: Role.READER,
    jobs.CancelJob: Role.CANCELLER,
}
"""The role of a node that asks about jobs; a node's own commands ask in its name."""


def may_send(
    node: str, message: jobs.JobMessage, view: View | None, starter_of: Callable[[str], str]
) -> bool:
    """Whether ``node`` may send ``message`` to a node that uses ``view``. ``starter_of(job)`` is
    the node on which a job was started; empty if that is not known here."""
    if view is None or view.member(node) is None:
        return False
    match SENDERS[type(message)]:
        case Role.LEADER:
            return node == view.leader
        case Role.STARTER if isinstance(message, jobs.Submit):
            return node == message.spec.starter
        case Role.STARTER if isinstance(message, jobs.InterruptJob):
            return node == starter_of(message.job)
    return True


def objection_to_asking(
    node: str,
    question: jobs.HistoryQuestion,
    view: View | None,
    *,
    me: str,
    is_reader: bool = False,
    is_canceller: bool = False,
) -> str:
    """Why ``node`` gets no answer to ``question`` from node ``me``, which uses ``view``; empty if
    it gets one. ``is_reader``, ``is_canceller``: it has that role for the job."""
    role = ASKERS[type(question)]
    is_member = node == me or (view is not None and view.member(node) is not None)
    if not is_member:
        return "it is asked about jobs by members of its cluster's view only"
    if role is Role.LEADER and (view is None or node != view.leader):
        return "only the leader of its view may tell that"
    if role is Role.READER and not is_reader:
        return (
            "the log of this job is read on machines that started or ran it, and on those whose "
            "scripts run here: ask the owner of this machine for `potluck allow`"
        )
    if role is Role.CANCELLER and not is_canceller:
        return "it is cancelled on the machine that started it, or by an admin of the cluster"
    return ""


def may_lead_soon(node: str, view: View | None) -> bool:
    """Whether ``node`` may be the leader of the next view: then its orders are kept until that is
    installed. A node without a view knows nothing of its next one."""
    return view is None or view.member(node) is not None


OF_ONE_NODE = 4 << 20
MAX_BYTES = 16 << 20
"""Bounds on the bytes kept. A leader sends a few KiB for each job of its cluster."""

_EACH = 128
"""Bytes of memory that a message takes beside its encoding, about."""


class DeferredMessages:
    """Messages of nodes, encoded, in order of arrival. ``nbytes``: the memory that they take."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._messages: deque[tuple[str, bytes]] = deque()
        self._nbytes_of: Counter[str] = Counter()

    def keep_newest(self, node: str, message: jobs.JobMessage) -> None:
        """Keep ``message`` of ``node``; the oldest messages of all nodes make room for it."""
        self._append(node, message)
        while self.nbytes > MAX_BYTES:
            self._forget(*self._messages.popleft())

    def keep_orders(self, node: str, order: jobs.JobMessage) -> None:
        """Keep ``order`` of ``node``. If there is no room for it, all orders of ``node`` are
        dropped, and ProtocolError is raised: it is to cut ``node`` off."""
        self._append(node, order)
        kept = self._nbytes_of[node]
        if kept <= OF_ONE_NODE and self.nbytes <= MAX_BYTES:
            return
        before, self._messages = self._messages, deque()
        for sender, data in before:
            if sender == node:
                self._forget(sender, data)
            else:
                self._messages.append((sender, data))
        raise ProtocolError(
            f"it does not lead the cluster, and ordered more than is kept until it does: "
            f"{kept / 2**20:.1f} MiB after {self.nbytes / 2**20:.1f} of others"
        )

    def take(self) -> list[tuple[str, peers.PeerMessage]]:
        """All messages, in order of arrival; none is kept any more."""
        taken, self._messages, self.nbytes = self._messages, deque(), 0
        self._nbytes_of.clear()
        return [(node, peers.MESSAGE.decode(data)) for node, data in taken]

    def _append(self, node: str, message: jobs.JobMessage) -> None:
        data = peers.MESSAGE.encode(message)[PREFIX_BYTES:]
        self._messages.append((node, data))
        self._nbytes_of[node] += len(data) + _EACH
        self.nbytes += len(data) + _EACH

    def _forget(self, node: str, data: bytes) -> None:
        self._nbytes_of[node] -= len(data) + _EACH
        self.nbytes -= len(data) + _EACH
