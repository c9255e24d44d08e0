"""What one node of a cluster decides: who is there, which view follows, when it pauses.

``Node.handle(event, now) -> actions`` puts the smaller cores together (``health``, ``standing``,
``succession``, ``lineages``). It sees no socket, clock or disk; ``now`` is this node's monotonic
clock in seconds. The protocol and why it is safe: ``docs/membership.md``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import assert_never

import msgspec

from potluck.cluster.views import lineages
from potluck.cluster.views.election import explain_minority, newcomers
from potluck.cluster.views.events import (
    Action,
    Ban,
    ContinueAlone,
    Event,
    Found,
    GroupRefused,
    JobOver,
    Linked,
    Note,
    Pause,
    Received,
    Refused,
    Resume,
    Saved,
    Tick,
    WantGroup,
)
from potluck.cluster.views.health import AskOthers, Changed, Status, Timing, Verdict
from potluck.cluster.views.standing import Observer, Standing
from potluck.cluster.views.succession import Succession
from potluck.cluster.views.view import first_view, following, objection_to
from potluck.cluster.views.voter import Voter
from potluck.wire import nodes as wire
from potluck.wire.nodes import Record, View


class Node(Voter):
    """The control plane's decisions on one node, in one life of its agent.

    ``record`` is what was on disk; ``life`` must be higher than in any run before.
    """

    def __init__(
        self, me: str, life: int, record: Record, now: float, timing: Timing | None = None
    ) -> None:
        super().__init__(me, life, record, now, timing or Timing())
        self._observer = Observer(me, self.health)
        self._due = now
        self._num_founded = 0

    def next_wakeup(self) -> float:
        """When a Tick is due."""
        return self._due

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done about ``event``, in this order. Never raises for one that comes late,
        twice, or from a node that is out."""
        self._actions = []
        match event:
            case Tick():
                self._tick(now)
            case Received(node, life, message):
                self._received(node, life, message, now)
            case Linked(node, life):
                self.health.meet(node, life)
            case Refused(node, life):
                self._verdicts(self.health.refused(node, life, now), now)
            case Saved(number):
                self._written(number, now)
                self._renew(now)
            case WantGroup():
                self._want(event, now)
            case JobOver(job):
                self._wanted.pop(job, None)
                self._over.add(job)
                self._renew(now)
            case Ban(node):
                self._learn_bans((node,), now)
            case ContinueAlone():
                self._continue_alone(now)
            case Found():
                if self.view is None:
                    self._found(now, "ordered")
            case _:
                assert_never(event)
        return self._actions

    # Time.

    def _tick(self, now: float) -> None:
        late = now - self._due
        self._due = now + self.timing.beat_s
        self._verdicts(self.health.tick(now, late), now, renew=False)
        self._beat(now)
        if self._succession is not None:
            self._take(self._succession.expire(now), now)
        if self.view is None:
            self._seek(now)
        else:
            self._renew(now)
            self._meet(now)

    def _beat(self, now: float) -> None:
        view = self.view
        number, bans = self.health.next_beat(now), checksum(self.record.banned)
        links = self.health.up()
        for node, peer in self.health.peers.items():
            if peer.status is Status.DEAD:
                continue
            if node in self.record.banned:
                if view is not None and view.seat(node) is not None:
                    self._send(node, wire.Bans(self.record.banned))
                    self._send(node, wire.Ask(view.lineage, view.epoch))
                continue
            echo, held_s, lease = self.health.echo(node, now)
            self._send(
                node,
                wire.Heartbeat(
                    number,
                    echo,
                    held_s,
                    lease,
                    links,
                    lineage="" if view is None else view.lineage,
                    epoch=0 if view is None else view.epoch,
                    size=0 if view is None else len(view.seats),
                    busy=view is not None and bool(view.groups),
                    paused=bool(self.paused),
                    fork_of="" if view is None else view.fork_of,
                    wants=self.wants,
                    installed=self.record.installed,
                    bans=bans,
                ),
            )

    # Messages.

    def _received(self, node: str, life: int, message: wire.NodeMessage, now: float) -> None:
        peer = self.health.peers.get(node)
        if peer is not None and (life < peer.life or (life == peer.life and self._has_ended(node))):
            return
        if node in self.record.banned and not isinstance(message, wire.Testimony):
            return
        match message:
            case wire.Heartbeat():
                self._heard(node, life, message, now)
            case wire.Probe(target):
                self._send(target, wire.Ping(node))
            case wire.Ping(origin):
                self._send(node, wire.Pong(origin))
            case wire.Pong(origin):
                self._send(origin, wire.Reached(node))
            case wire.Reached(target):
                self._verdicts(self.health.reached(target, now), now)
            case wire.Decided(view):
                self._learn(view, now, node)
            case wire.Ask(lineage, epoch):
                self._testify(node, lineage, epoch)
            case wire.Testimony():
                self._hear_testimony(node, life, message, now)
                self._renew(now)
            case wire.Bans(banned):
                self._learn_bans(banned, now)
            case wire.Prepare() | wire.Promise() | wire.Propose():
                self._vote(node, life, message, now)
            case wire.Accepted() | wire.Rejected():
                self._vote(node, life, message, now)
            case _:
                assert_never(message)

    def _has_ended(self, node: str) -> bool:
        return self.health.status(node) is Status.DEAD

    def _heard(self, node: str, life: int, beat: wire.Heartbeat, now: float) -> None:
        before = self.health.peers.get(node)
        if before is not None and life > before.life and self.health.has_lease(node, now):
            self._bury(node, before.life)  # it ended while it could not have left me out
        mine = self.view
        same_view = mine is not None and beat.lineage == mine.lineage and beat.epoch <= mine.epoch
        verdicts = self.health.heard(node, life, beat, now, same_view=same_view)
        self._verdicts(verdicts, now)
        peer = self.health.peers[node]
        if peer.last is not beat:
            return
        if beat.bans != checksum(self.record.banned) and self.record.banned:
            self._send(node, wire.Bans(self.record.banned))
        self._bring_up_to_date(node, beat)
        view = self.view
        seat = None if view is None else view.seat(node)
        succession = self._succession
        if view is None or succession is None or seat is None or beat.lineage == view.lineage:
            return
        if seat in self._gone and (succession.accepted is None or node in succession.testimony):
            return
        is_coming = beat.wants == view.lineage and beat.installed < view.epoch
        if life != seat.life or not is_coming:
            self._send(node, wire.Ask(view.lineage, view.epoch))

    def _bring_up_to_date(self, node: str, beat: wire.Heartbeat) -> None:
        """Send ``node`` the newest view of a lineage that it has missed."""
        view = self.view
        if view is not None and view.lineage == (beat.lineage or beat.wants):
            known = view
        else:
            past = self._past(beat.lineage or beat.wants)
            if past is None:
                return
            known = past.view
        if beat.lineage:
            if beat.epoch < known.epoch:
                self._send(node, wire.Decided(known))
        elif known.seat(node) is not None and beat.installed < known.epoch:
            self._send(node, wire.Decided(known))

    # The next view.

    def _renew(self, now: float) -> None:
        """Pause or resume; propose, if a new view is due and it is on me."""
        view, succession = self.view, self._succession
        if view is None or succession is None:
            return
        standing = self._observer.look(
            view,
            gone=self._gone,
            banned=self.record.banned,
            installed_at=self._installed_at,
            now=now,
        )
        self._renounce(view, succession, standing)
        if not standing.undecided:
            self._set_pause(view, standing)
        kept = [seat.node for seat in standing.kept]
        if succession.round is not None:
            if succession.round.asked <= set(kept):
                return
            succession.round = None
        if not kept or kept[0] != self.me or standing.undecided or self.paused:
            return
        if now < self._retry_at or any(self.health.status(n) is not Status.UP for n in kept[1:]):
            return
        out = [seat for seat in view.seats if seat.node not in kept]
        if any(s.node not in standing.ended and self._holds_lease(s, now) for s in out):
            return
        self._propose(view, succession, standing, kept, now)

    def _propose(
        self,
        view: View,
        succession: Succession,
        standing: Standing,
        kept: list[str],
        now: float,
    ) -> None:
        joining: tuple[str, ...] = ()
        if not standing.out and not standing.broken:
            joining = self._who_may_join(view)
        wanted = self._wanted_in(view)
        over = {job for job in self._over if view.group(job) is not None}
        if not (standing.out or joining or wanted or over):
            return
        reasons = [*standing.out.values(), *(f"{node} joins" for node in joining)]
        reasons += [want.reason for want in wanted]
        reasons += [f"job {job} is over" for job in sorted(over)]
        peers = self.health.peers
        lives = [(node, peers[node].life) for node in joining]
        floors = [beat.installed for node in joining if (beat := peers[node].last) is not None]

        def build(epoch: int) -> View:
            return following(
                view,
                epoch,
                kept=kept,
                joining=lives,
                wanted=wanted,
                over=over,
                reason="; ".join(reasons)[:4096],
            )

        self._take(
            succession.propose(
                kept,
                build,
                floor=max([self.record.installed, *floors]),
                dead=self._dead(),
                ended=standing.ended,
                ends_at=now + self.timing.round_s * (1 + min(self._num_failures, 3)),
            ),
            now,
        )

    def _wanted_in(self, view: View) -> list[WantGroup]:
        for job, want in list(self._wanted.items()):
            objection = objection_to(want, view)
            if objection:
                del self._wanted[job]
                self._act(GroupRefused(job, view.epoch, f"{want.reason}: {objection}"))
        return list(self._wanted.values())

    def _who_may_join(self, view: View) -> tuple[str, ...]:
        links: dict[str, Iterable[str]] = {self.me: self.health.up()}
        candidates = []
        for node in self.health.up():
            beat = self.health.peers[node].last
            assert beat is not None
            links[node] = beat.links
            is_free = not beat.lineage and beat.wants == view.lineage
            if is_free and node not in view.nodes and node not in self.record.banned:
                candidates.append(node)
        if not candidates:
            return ()
        return newcomers({node: set(row) for node, row in links.items()}, view.nodes, candidates)

    # Pauses, bans, the end of seats.

    def _set_pause(self, view: View, standing: Standing) -> None:
        if standing.majority:
            if self.paused:
                self.paused = ""
                self._act(Resume("a majority can be reached again"))
            return
        names = [seat.node for seat in standing.kept]
        reached = [n for n in names if n == self.me or self.health.status(n) is Status.UP]
        reason = explain_minority(view.seats, reached, self._dead())
        if not self.paused:
            self._act(Pause(f"paused: {reason}; {'; '.join(standing.out.values())}"))
        self.paused = reason

    def _renounce(self, view: View, succession: Succession, standing: Standing) -> None:
        """Grant no leases to those who are to be left out though I hear them, and to those whom I
        accepted to leave out."""
        out = set(self.banned & set(view.nodes))
        if standing.majority:
            out |= standing.out.keys()
        if succession.accepted is not None:
            out |= set(view.nodes) - set(succession.accepted.view.nodes)
        self.health.renounce(out)

    def _learn_bans(self, nodes: Iterable[str], now: float) -> None:
        new = sorted(set(nodes) - self.banned)
        if not new:
            return
        known = tuple(sorted({*self.record.banned, *new}))
        self._save(msgspec.structs.replace(self.record, banned=known), [])
        self._act(Note(f"banned: {', '.join(new)}"))
        if self.me in new:
            self._leave(now, "this node is banned from the cluster")
            return
        for node in self.health.up():
            self._send(node, wire.Bans(known))
        self._renew(now)

    def _verdicts(self, verdicts: Iterable[Verdict], now: float, *, renew: bool = True) -> None:
        for verdict in verdicts:
            match verdict:
                case AskOthers(target, via, _):
                    for node in via:
                        self._send(node, wire.Probe(target))
                case Changed(node, status, reason):
                    self._act(Note(reason))
                    peer = self.health.peers[node]
                    if status is Status.DEAD and peer.leased_death:
                        self._bury(node, peer.life)
        if renew and verdicts:
            self._renew(now)

    # Lineages.

    def _seek(self, now: float) -> None:
        """In no view: ask to be let in somewhere, or found a lineage."""
        if self.me in self.record.banned:
            return
        peers = self.health.peers.values()
        sights = lineages.seen(peers)
        self.wants = lineages.to_join(sights) or self.wants
        if any(sight.lineage == self.wants for sight in sights):
            return
        self.wants = ""
        has_waited = now - self._alone_since >= self.timing.settle_s
        if has_waited and lineages.may_found(self.me, peers, sights):
            self._found(now, "no other cluster is heard")

    def _found(self, now: float, why: str) -> None:
        view = self._first_view(f"{self.me} founds a cluster: {why}")
        self._install(view, now, told=False)

    def _first_view(self, reason: str) -> View:
        self._num_founded += 1
        lineage = f"{self.me}-{self.life}-{self._num_founded}"
        return first_view(lineage, self.me, self.life, self.record.installed + 1, reason)

    def _meet(self, now: float) -> None:
        """Give way to another lineage as a whole."""
        if self.view is None or self._succession is None or self._succession.round is not None:
            return
        peers = self.health.peers
        sights = lineages.seen(peers.values())
        other = lineages.gives_way_to(self.view, bool(self.paused), peers, sights)
        if other is not None:
            self._leave(now, f"this node's cluster joins {', '.join(other.nodes)}")
            self.wants = other.lineage

    def _continue_alone(self, now: float) -> None:
        view = self.view
        if view is None or not self.paused:
            self._act(Note("this node is not paused: there is nothing to override"))
            return
        fork = self._first_view(f"the operator ordered {self.me} to continue alone: a fork")
        groups = []
        for group in view.groups:
            members = tuple(member for member in group.members if member.node == self.me)
            if members:
                groups.append(
                    wire.JobGroup(group.job, fork.epoch, members, fork.epoch, world=group.world)
                )
        self._leave(now, "the operator ordered a fork")
        fork = msgspec.structs.replace(fork, groups=tuple(groups), fork_of=view.lineage)
        self._install(fork, now, told=False)

    def _want(self, want: WantGroup, now: float) -> None:
        view = self.view
        if view is None or view.leader != self.me:
            floor = self.record.installed
            self._act(GroupRefused(want.job, floor, "this node does not lead the cluster"))
            return
        self._wanted[want.job] = want
        self._over.discard(want.job)
        self._renew(now)


def checksum(banned: Iterable[str]) -> int:
    """What two nodes compare to see whether they know of the same bans; 0 for none."""
    return zlib.crc32("\n".join(banned).encode()) if banned else 0
