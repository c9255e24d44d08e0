"""What the next view should be: the members that can stay, newcomers, and changes of jobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from potluck._core.cluster.membership.events import GroupRefused, WantGroup
from potluck._core.cluster.membership.failure_detector import FailureDetector
from potluck._core.cluster.membership.outbox import Outbox
from potluck._core.cluster.membership.reachability import Reachability
from potluck._core.cluster.membership.view import following, newcomers, objection_to
from potluck._core.wire.nodes import MAX_NODES, JobGroup, View


@dataclass(frozen=True, slots=True)
class ViewDraft:
    """A view that this node would propose: ``build(epoch)`` makes it, with an epoch above
    ``floor``, the highest that a newcomer ever used."""

    build: Callable[[int], View]
    floor: int


class PendingChanges:
    """The changes of jobs that wait for the next view: groups that are wanted, jobs that ended."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._wanted: dict[str, WantGroup] = {}
        self._over: set[str] = set()

    def want(self, want: WantGroup) -> None:
        """Have a group in the next view."""
        self._wanted[want.job] = want
        self._over.discard(want.job)

    def end(self, job: str) -> None:
        """Have no group of ``job`` in the next view."""
        self._wanted.pop(job, None)
        self._over.add(job)

    def installed(self, view: View) -> None:
        """``view`` is in use: forget what it brought."""
        self._wanted = {
            job: want
            for job, want in self._wanted.items()
            if (group := view.group(job)) is None or not _brings(group, want)
        }
        self._over = {job for job in self._over if view.group(job) is not None}

    def clear(self) -> None:
        """There is no view any more that they could go into."""
        self._wanted.clear()
        self._over.clear()

    def draft(
        self,
        me: str,
        view: View,
        reachability: Reachability,
        detector: FailureDetector,
        banned: Collection[str],
    ) -> ViewDraft | None:
        """What ``me`` would propose to follow ``view``, None if nothing changes. Newcomers come in
        only while all members can reach each other. Groups that can't be had are refused."""
        joining: tuple[str, ...] = ()
        if not reachability.out and not reachability.broken:
            joining = _who_may_join(me, view, detector, banned)
        wanted = self._possible(view)
        over = frozenset(job for job in self._over if view.group(job) is not None)
        if not (reachability.out or joining or wanted or over):
            return None
        reasons = [*reachability.out.values(), *(f"{node} joins" for node in joining)]
        reasons += [want.reason for want in wanted]
        reasons += [f"job {job} is over" for job in sorted(over)]
        peers = detector.peers
        floors = [beat.installed for node in joining if (beat := peers[node].last) is not None]
        build = partial(
            following,
            view,
            kept=tuple(member.node for member in reachability.kept),
            joining=tuple((node, peers[node].incarnation) for node in joining),
            wanted=wanted,
            over=over,
            reason="; ".join(reasons)[:4096],
        )
        return ViewDraft(build, max(floors, default=0))

    def _possible(self, view: View) -> tuple[WantGroup, ...]:
        for job, want in list(self._wanted.items()):
            objection = objection_to(want, view)
            if objection:
                del self._wanted[job]
                reason = f"{want.reason}: {objection}"
                self._outbox.act(GroupRefused(job, view.epoch, reason))
        return tuple(self._wanted.values())


def _brings(group: JobGroup, want: WantGroup) -> bool:
    """Whether ``group`` is the wanted group. A renewed group may differ from the group before by
    the spared links alone."""
    return group.members == want.members and (group.cut == want.cut or not want.renew)


def _who_may_join(
    me: str, view: View, detector: FailureDetector, banned: Collection[str]
) -> tuple[str, ...]:
    links: dict[str, Iterable[str]] = {me: detector.up()}
    candidates = []
    for node in detector.up():
        beat = detector.peers[node].last
        assert beat is not None
        links[node] = beat.links
        is_free = not beat.history and beat.wants == view.history
        if is_free and node not in view.nodes and node not in banned:
            candidates.append(node)
    if not candidates:
        return ()
    chosen = newcomers({node: set(row) for node, row in links.items()}, view.nodes, candidates)
    return chosen[: MAX_NODES - len(view.members)]
