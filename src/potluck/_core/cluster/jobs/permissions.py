"""The sender that each message about jobs needs: one table, checked before a job gets the message.
Pure.

The bodies of messages are checked where they are used: a node reports about its own workers only
(``JobController``), and gets messages about jobs that it runs or started.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from potluck._core.wire import jobs
from potluck._core.wire.nodes import View


class Role(StrEnum):
    """What a sender has to be."""

    LEADER = "the leader of this node's view"
    MEMBER = "a member of this node's view"
    STARTER = "the node on which the job was started"


SENDERS: dict[type, Role] = {
    jobs.Order: Role.LEADER,
    jobs.JobList: Role.LEADER,
    jobs.JobStatus: Role.LEADER,
    jobs.StartWorker: Role.LEADER,
    jobs.SignalWorkers: Role.LEADER,
    jobs.TellWorkers: Role.LEADER,
    jobs.Submitted: Role.LEADER,
    jobs.Shown: Role.LEADER,
    jobs.JobNote: Role.LEADER,
    jobs.JobEnded: Role.LEADER,
    jobs.Submit: Role.STARTER,
    jobs.InterruptJob: Role.STARTER,
    jobs.Reported: Role.MEMBER,
    jobs.Happened: Role.MEMBER,
    jobs.Output: Role.MEMBER,
}
"""The role that the sender of each message needs."""


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


def may_lead_soon(node: str, view: View | None) -> bool:
    """Whether ``node`` may be the leader of the next view: then its orders are kept until that is
    installed. A node without a view knows nothing of its next one."""
    return view is None or view.member(node) is not None
