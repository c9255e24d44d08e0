"""Which groups of a job the nodes have agreed on, and which workers hold the job's state. Pure.

``groups.membership`` announces a group; the group counts once the nodes have accepted a view that
has it. The nodes need to know which members hold the state of the group before: a group without any
of them may begin afresh only if all holders are known to have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from potluck._core.cluster.jobs.groups.events import Agreed, Announce, NotAgreed
from potluck._core.cluster.membership.events import WantGroup
from potluck._core.types import MeasuredPath, Member
from potluck._core.wire import jobs, worker_link
from potluck._core.wire.nodes import JobGroup


class GroupAgreement:
    """The groups of ``job``; ``group`` is the newest that was agreed on."""

    def __init__(self, job: str, group: JobGroup | None) -> None:
        self.group = group
        self._job = job
        self._announced: list[Announce] = []
        self._joining: set[str] = set()
        """The announced workers whose present processes have been in no agreed group yet."""
        self._holders: set[str] = set()
        self._ended: set[str] = set()

    # Events of the workers.

    def take(self, event: jobs.Event, joined: int) -> bool:
        """Take ``event`` of a worker that has been a member since epoch ``joined``. Returns
        whether it is the first to show that this worker holds the job's state."""
        if isinstance(event, worker_link.Entered):
            self._joining.discard(event.worker)  # its node was away; it had not left its group
        if not self._shows_state(event, joined) or event.worker in self._holders:
            return False
        self._holders.add(event.worker)
        return True

    def _shows_state(self, event: jobs.Event, joined: int) -> bool:
        if self.group is None:
            return False
        if isinstance(event, worker_link.Entered):
            # All members of the first group begin with the same state, so all of them hold it.
            return event.epoch == self.group.epoch == self.group.origin
        if isinstance(event, worker_link.WorkerProgress):
            return event.step >= 0 and event.epoch >= joined
        return False

    def ended(self, worker: str) -> None:
        """The process of ``worker`` ended, and its state with it."""
        self._ended.add(worker)
        self._holders.discard(worker)

    def away(self, workers: Iterable[str]) -> None:
        """The nodes of ``workers`` left the cluster's view: it is not known what these workers
        hold."""
        self._holders.difference_update(workers)

    # What to have agreed on.

    def announced(
        self, action: Announce, dead: Collection[str], paths: tuple[MeasuredPath, ...]
    ) -> WantGroup:
        """Membership announced a group; returns what to ask of the nodes. ``dead`` are nodes whose
        workers are known to have ended."""
        self._announced.append(action)
        self._joining |= set(action.joined) - set(action.back)
        if action.world is not None:
            # A fixed world's members hold what they need: the state of the world before is in the
            # script's checkpoint, and no member waits for workers that had it.
            kept, fresh = tuple(each.worker for each in action.members), True
        else:
            members = () if self.group is None else self.group.members
            gone = {member.worker for member in members if member.node in dead}
            kept, fresh = holders(
                self.group,
                action.members,
                joined=self._joining,
                heard=self._holders,
                ended=self._ended | gone,
            )
        return WantGroup(
            self._job,
            action.members,
            kept,
            action.reason,
            fresh,
            renew=True,
            paths=paths,
            world=action.world or 0,
            cut=action.cut,
        )

    def want_all_hold(self) -> WantGroup | None:
        """A request to record in the view that all members hold the state; None while they do
        not."""
        group = self.group
        if group is None or not group.entering or self._announced:
            return None
        if not set(group.entering) <= self._holders:
            return None
        names = tuple(member.worker for member in group.members)
        return WantGroup(self._job, group.members, names, f"all of job {self._job} hold its state")

    # Answers of the nodes.

    def installed(
        self, group: JobGroup, reason: str
    ) -> tuple[list[Agreed | NotAgreed], tuple[str, ...]]:
        """A view with ``group`` is in use, for this ``reason``. Returns the events for membership,
        and the workers that came in with the group."""
        is_new = self.group is None or group.epoch > self.group.epoch
        self.group = group
        if not is_new:
            return [], ()
        names, before = tuple(member.worker for member in group.members), self._announced
        for position in reversed(range(len(before))):
            action = before[position]
            if (action.members, action.cut) == (group.members, group.cut):
                self._announced = before[position + 1 :]
                self._ended -= set(action.joined)
                self._joining.difference_update(names)
                return [Agreed(group.epoch, names, action.epoch)], action.joined
        self._announced = []
        void = [NotAgreed(each.epoch, group.epoch, reason, each.reason) for each in before]
        return [*void, Agreed(group.epoch, names, 0, reason)], ()

    def refused(self, floor: int, reason: str) -> NotAgreed | None:
        """The nodes don't agree on what was announced last; None if nothing was."""
        if not self._announced:
            return None
        action = self._announced.pop()
        return NotAgreed(action.epoch, floor, reason, action.reason)


def holders(
    group: JobGroup | None,
    members: Iterable[Member],
    *,
    joined: Iterable[str],
    heard: Iterable[str],
    ended: Iterable[str],
) -> tuple[tuple[str, ...], bool]:
    """Which of ``members``, announced to follow ``group``, hold the job's state; and whether the
    job may begin afresh: none of them does, and all that did are known to have ended.

    ``joined`` are new in it, ``heard`` were heard to hold the state, ``ended`` have ended. Of a
    first group every member counts as a holder: they begin with the same state, and a step needs
    the votes of all. So a member that has left the group knows all that was committed in it, also
    if it had never entered it.
    """
    if group is None:
        return (), False
    staying = {member.worker for member in members} - set(joined)
    is_first = len(group.entering) == len(group.members)
    entering = () if is_first else group.entering
    known = set(heard) | {m.worker for m in group.members if m.worker not in entering}
    kept = tuple(m.worker for m in group.members if m.worker in staying & known)
    may_go_on = {m.worker for m in group.members} - set(ended)
    return kept, not kept and may_go_on <= staying & set(group.entering)
