"""The inquiry: finds the members to blame when a group does not work and no member is known to have
ended.

All members are probed. A member that does not answer is evicted. If all answer, the members that
are blamed and not blocked themselves are evicted. If no member is to blame, the same members get a
new epoch. Members that can't reach each other, although both answer, stay both (``cut_links.py``).
"""

from __future__ import annotations

from dataclasses import replace

from potluck._core.cluster.jobs.groups import cut_links
from potluck._core.cluster.jobs.groups.events import Note, SendProbe
from potluck._core.cluster.jobs.groups.roster import Inquiry, LossReport, Phase, Turn
from potluck._core.wire.worker_link import Lost, ProbeReply


def lost(turn: Turn, event: Lost) -> None:
    worker = turn.state.worker(event.worker)
    if worker.member is not None and worker.phase in (Phase.EVICTED, Phase.AWAY):
        turn.update(worker.name, phase=Phase.READY, after=event.epoch)
    group = turn.state.group(event.epoch)
    if worker.phase is not Phase.MEMBER or group is None:
        return
    blamed = group.members[event.rank] if 0 <= event.rank < len(group.members) else None
    if blamed is not None and turn.state.worker(blamed).phase is not Phase.MEMBER:
        turn.end_groups({event.epoch}, f"worker {blamed} has left")
        return
    silent = tuple(
        group.members[rank] for rank in event.unreachable if 0 <= rank < len(group.members)
    )
    report = LossReport(worker.name, event.epoch, blamed, event.certain, silent)
    if _follows_from_a_join(turn, report):
        return
    inquiry = turn.state.inquiry or _open(turn, event)
    turn.change(
        inquiry=replace(
            inquiry,
            waiting=inquiry.waiting - {worker.name},
            reports=(*inquiry.reports, report),
        )
    )


def _follows_from_a_join(turn: Turn, report: LossReport) -> bool:
    """Whether the reporting worker only lost a member that left in order for the next group, which
    members have entered already. A loop of rounds leaves between two steps, while another rank may
    wait for it in a call. The reporting worker enters the next group, too."""
    newest = turn.state.newest_group
    if newest is None or newest.epoch <= report.epoch or report.worker not in newest.members:
        return False
    is_entered = any(worker.entered >= newest.epoch for worker in turn.state.having(Phase.MEMBER))
    return is_entered and report.certain and not report.unreachable


def _open(turn: Turn, event: Lost) -> Inquiry:
    probe = turn.state.num_probes + 1
    names = [worker.name for worker in turn.state.having(Phase.MEMBER)]
    others = tuple(name for name in names if name != event.worker)
    reason = f"worker {event.worker} can't go on in epoch {event.epoch}: {event.cause}"
    turn.change(num_probes=probe)
    turn.actions.append(SendProbe(probe, others, reason))
    deadline = turn.now + turn.state.policy.probe_timeout_s
    return Inquiry(probe, deadline, frozenset(names), ())


def probe_reply(turn: Turn, event: ProbeReply) -> None:
    inquiry = turn.state.inquiry
    if inquiry is not None and inquiry.probe == event.probe:
        blocked = inquiry.blocked | {event.worker} if event.blocked else inquiry.blocked
        waiting = inquiry.waiting - {event.worker}
        turn.change(inquiry=replace(inquiry, waiting=waiting, blocked=blocked))


def judge(turn: Turn) -> None:
    inquiry = turn.state.inquiry
    if inquiry is None:
        return
    policy = turn.state.policy
    members = {worker.name for worker in turn.state.having(Phase.MEMBER)}
    reports = tuple(
        report
        for report in inquiry.reports
        if turn.state.group(report.epoch) or (not report.certain and report.blamed in members)
        if not _follows_from_a_join(turn, report)
    )
    waiting = inquiry.waiting & members
    inquiry = replace(inquiry, waiting=waiting, reports=reports)
    turn.change(inquiry=inquiry if reports else None)
    if not reports:
        return
    if waiting and turn.now >= inquiry.deadline:
        if turn.now > inquiry.deadline + policy.late_s:
            turn.change(inquiry=replace(inquiry, deadline=turn.now + policy.probe_timeout_s))
            turn.actions.append(Note("this agent was late itself: it waits for probes longer"))
            return
        turn.change(inquiry=None)
        for name in sorted(waiting):
            reason = f"worker {name} gave no sign of life for {policy.probe_timeout_s:g} s"
            turn.remove({name}, Phase.EVICTED, certain=False, reason=reason)
    elif not waiting and inquiry.closing_at is None:
        turn.change(inquiry=replace(inquiry, closing_at=turn.now + policy.grace_s))
    elif inquiry.closing_at is not None and turn.now >= inquiry.closing_at:
        turn.change(inquiry=None)
        _conclude(turn, inquiry, members)


def _conclude(turn: Turn, inquiry: Inquiry, members: set[str]) -> None:
    """All members answered the probe: spare links that can't be made, evict members that
    hold the others up, or renew the group."""
    epochs = {report.epoch for report in inquiry.reports}
    pairs = cut_links.pairs_of(
        (report.worker, name)
        for report in inquiry.reports
        for name in report.unreachable
        if {report.worker, name} <= members
    )
    if pairs:
        cut_links.noted(turn, pairs, epochs)
        return
    silences = [report for report in inquiry.reports if not report.certain]
    excused = inquiry.blocked | {report.worker for report in inquiry.reports}
    for report in silences:
        excused |= _still_busy(turn, report.epoch)
    blamed = {report.blamed for report in silences if report.blamed in members} - excused
    if silences and not blamed:
        groups = (turn.state.group(report.epoch) for report in silences)
        blamed = {name for group in groups if group for name in group.members}
        blamed = (blamed & members) - excused
    for name in sorted(filter(None, blamed)):
        reason = f"worker {name} did not take part while others waited for it"
        turn.remove({name}, Phase.EVICTED, certain=False, reason=reason)
    if not blamed:
        turn.end_groups(epochs, "its links failed and nobody is to blame")


def _still_busy(turn: Turn, epoch: int) -> set[str]:
    """The members that rightly have not entered ``epoch``: as long as none of their group has,
    they are in a long step there, and only the newcomers wait."""
    seniors = [worker for worker in turn.state.having(Phase.MEMBER) if worker.joined < epoch]
    if any(worker.entered >= epoch for worker in seniors):
        return set()
    return {worker.name for worker in seniors}
