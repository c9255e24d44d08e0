"""Clusters with one liar: a node that says anything the schemas allow, for 12 seconds.

An ``Outsider`` is linked to all nodes and in no view. A ``LyingMember`` runs the real protocol, is
a member, and lies beside it: it changes a part of what it sends, and adds messages of its own.
Both repeat real messages with changed fields, make random ones, and aim at what is worth an
attack (``Attacks``). After that an outsider is silent; a member's agent starts again without the
lies, or it is banned.

What must hold in spite of a liar (``LiarWorld``):

- no honest agent ends by an error, and what it keeps on disk can be read back;
- tables are bounded, and epochs far from their end;
- no honest node goes back in its epochs, and none uses a view with a node that it knows is banned;
- no member gets a better seniority than it had; no honest node leaves a view that a majority of its
  members, all of them honest, still uses (a view of one node without a job counts for nothing);
- an outsider's message changes neither view nor record of a node that has both a view and a
  majority;
- once the liar is honest again or silent, all honest nodes are in one view within ten seconds; if
  there were cuts or crashes beside the lies, at the latest when the agents are started again.

Without cuts and crashes between honest nodes a lying member can't break the agreement either: one
view per epoch. (Commits are compared only in worlds with an outsider.) With them it can, as in
every protocol that tolerates crashes only: it may vote for both sides of a cut.
``docs/security.md`` says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec

from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.claims import digest_of
from potluck._core.cluster.membership.failure_detector import MAX_PEERS, Timing
from potluck._core.cluster.membership.guard import MAX_RESIGNED
from potluck._core.wire import nodes as wire
from potluck._core.wire import peers
from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.nodes import NodeMessage, StableRecord, View, ViewMember
from potluck.errors import ProtocolError
from support.cluster_sim.faults import FAULTS_S, make_plan
from support.cluster_sim.hosts import Host
from support.cluster_sim.world import HEAL_S, Broken, World
from support.hostile import Hostile

LIES_S = (12.0, 24.0)
FRESH_S = 5.0
MAX_EPOCHS = 1 << 24
LIAR = "liar"


class Attacks:
    """Messages that each aim at something; ``view`` is what the liar knows of the cluster's."""

    def __init__(self, me: str, incarnation: int, hostile: Hostile) -> None:
        self.me, self.incarnation, self.hostile = me, incarnation, hostile
        self.view: View | None = None
        self.beat = wire.Heartbeat(1)

    def one(self) -> NodeMessage | None:
        """Any of them; None if it needs a view that the liar does not know."""
        return self.hostile.chance.choice(ALL)(self)

    def decided_for_me(self) -> NodeMessage | None:
        """A view that the liar leads."""
        return None if self.view is None else wire.Decided(self._mine(self.view))

    def decided_without(self) -> NodeMessage | None:
        """A view without some of its members."""
        if self.view is None:
            return None
        chance = self.hostile.chance
        kept = tuple(m for m in self.view.members if chance.random() < 0.5 or m.node == self.me)
        new = msgspec.structs.replace(self.view, epoch=self.view.epoch + 1, members=kept)
        return wire.Decided(new) if kept else None

    def propose_for_me(self) -> NodeMessage | None:
        """A proposal that makes the liar the leader, or says that others have ended."""
        if self.view is None:
            return None
        chance, view = self.hostile.chance, self.view
        new = self._mine(view) if chance.random() < 0.3 else self._without(view)
        if chance.random() < 0.2:
            ghost = ViewMember(f"ghost{chance.randrange(9)}", 1, new.epoch)
            new = msgspec.structs.replace(new, members=(*new.members, ghost))
        ended = tuple(set(view.nodes) - set(new.nodes))
        ballot = (new.epoch, self.me)
        return wire.Propose(wire.Proposal(ballot, view.epoch, new, ended, True))

    def prepare(self) -> NodeMessage | None:
        """A ballot that is hard to outbid."""
        if self.view is None:
            return None
        number = self.hostile.chance.choice([self.view.epoch + 1, self.view.epoch + 900, 2**31 - 1])
        return wire.Prepare(self.view.history, self.view.epoch, (number, self.me))

    def agree(self) -> NodeMessage | None:
        """Yes to a ballot that may be anybody's."""
        ballot = (
            self.hostile.chance.choice(self.hostile.numbers),
            self.hostile.chance.choice("abc"),
        )
        if self.hostile.chance.random() < 0.5:
            return wire.Accepted(ballot)
        return wire.Promise(ballot)

    def reject(self) -> NodeMessage | None:
        """No, with a ballot from the end of the numbers."""
        number = self.hostile.chance.choice(self.hostile.numbers)
        return wire.Rejected((number, "a"), (2**31 - 1, "a"), "no")

    def resign(self) -> NodeMessage | None:
        """Have the receiver give up all memberships that it will ever have."""
        return None if self.view is None else wire.RecoveryRequest(self.view.history, 2**31 - 1)

    def report(self) -> NodeMessage | None:
        """What the liar says to have found on its disk."""
        if self.view is None:
            return None
        new = self._without(self.view)
        accepted = wire.Proposal((new.epoch, self.me), self.view.epoch, new, (), True)
        found = wire.HistoryRecord(
            self.view if self.hostile.chance.random() < 0.5 else new, accepted
        )
        return wire.RecoveryReport(self.view.history, self.view.epoch, found)

    def reached(self) -> NodeMessage | None:
        """Whatever is silent is not."""
        return wire.Reached(self.hostile.chance.choice([*self.hostile.words, "a"]))

    def seize(self) -> NodeMessage | None:
        """A cluster that outranks every other."""
        return self.heartbeat(history="0", epoch=5, size=1, busy=True)

    def impostor(self) -> NodeMessage | None:
        """A newer view of the same history, of which the receiver has not heard."""
        if self.view is None:
            return None
        mine = self._mine(self.view)
        return self.heartbeat(
            history=mine.history, epoch=mine.epoch, size=1, busy=True, digest=digest_of(mine)
        )

    def last_epoch(self) -> NodeMessage | None:
        """The end of all epochs."""
        return self.heartbeat(installed=2**31 - 1, epoch=2**31 - 1)

    def fork(self) -> NodeMessage | None:
        """What an operator's fork would say."""
        if self.view is None:
            return None
        return self.heartbeat(history="0fork", epoch=9, size=1, fork_of=self.view.history)

    def no_links(self) -> NodeMessage | None:
        """Nobody can be reached."""
        return self.heartbeat(links=())

    def heartbeat(self, **changes: Any) -> wire.Heartbeat:
        """The liar's next heartbeat, with ``changes``."""
        return msgspec.structs.replace(self.beat, **changes)

    def _mine(self, view: View) -> View:
        epoch = view.epoch + self.hostile.chance.choice([1, 2, 1000])
        others = tuple(m for m in view.members if m.node != self.me)
        me = ViewMember(self.me, self.incarnation, 0)
        keep = self.hostile.chance.choice([others, others[:1], ()])
        return msgspec.structs.replace(view, epoch=epoch, members=(me, *keep))

    def _without(self, view: View) -> View:
        lost = self.hostile.chance.choice(view.nodes)
        kept = tuple(m for m in view.members if m.node != lost or m.node == self.me)
        return msgspec.structs.replace(view, epoch=view.epoch + 1, members=kept)


Attack = Callable[[Attacks], NodeMessage | None]
ALL: list[Attack] = [
    Attacks.decided_for_me,
    Attacks.decided_without,
    Attacks.propose_for_me,
    Attacks.prepare,
    Attacks.agree,
    Attacks.reject,
    Attacks.resign,
    Attacks.report,
    Attacks.reached,
    Attacks.seize,
    Attacks.impostor,
    Attacks.last_epoch,
    Attacks.fork,
    Attacks.no_links,
]


class LyingMember(Host):
    """A member that lies. ``is_lying()`` says when."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hostile = Hostile(self.chance)
        self.seen: list[NodeMessage] = []
        self.share = self.chance.choice([0.0, 0.1, 0.5])
        self.pace_s = self.chance.choice([0.02, 0.1, 0.5])
        self.only = self.chance.choice([None, None, self.chance.choice(ALL)])

    @property
    def is_lying(self) -> bool:
        return LIES_S[0] <= self.queue.now < LIES_S[1] and self.node is not None

    def start(self) -> None:
        super().start()
        self.attacks = Attacks(self.name, self.incarnation, self.hostile)
        self._speak(self.incarnation)

    def receive(self, source: str, incarnation: int, message: object) -> None:
        self._saw(message)
        super().receive(source, incarnation, message)

    def send(self, node: str, message: NodeMessage) -> None:
        self._saw(message)
        if isinstance(message, wire.Heartbeat):
            self.attacks.beat = message
        if self.is_lying and self.chance.random() < self.share:
            message = self.hostile.changed(message)
        self._say(node, message)

    def _say(self, node: str, message: NodeMessage) -> None:
        """Send what the wire lets through."""
        if not self.is_lying:
            super().send(node, message)
        elif (sent := over_the_wire(message)) is not None:
            super().send(node, sent)

    def _saw(self, message: Any) -> None:
        if not self.is_lying and self.queue.now < LIES_S[0] - 2:
            return
        if len(self.seen) < 400 or self.chance.random() < 0.1:
            self.seen = [*self.seen[-400:], message]
            self.hostile.saw(message)

    def _known_view(self) -> View | None:
        return None if self.node is None else self.node.view

    def _speak(self, incarnation: int) -> None:
        if self.incarnation != incarnation or self.node is None:
            return
        if self.is_lying:
            self.attacks.view = self._known_view() or self.attacks.view
            message = self._lie()
            if message is not None:
                for name in self.others:
                    if self.chance.random() < 0.7:
                        self._say(name, message)
        self.queue.after(
            self.pace_s * self.chance.uniform(0.5, 1.5), partial(self._speak, incarnation)
        )

    def _lie(self) -> NodeMessage | None:
        if self.only is not None:
            return self.only(self.attacks)
        roll = self.chance.random()
        if roll < 0.5:
            return self.attacks.one()
        if roll < 0.75 and self.seen:
            message = self.hostile.changed(self.chance.choice(self.seen))
        else:
            message = self.hostile.anything(NodeMessage)
        return cast("NodeMessage", message)


class Outsider(LyingMember):
    """A node that is linked to all others, hears them, and never comes in."""

    def start(self) -> None:
        super().start()
        self.node = _Silent()  # type: ignore[assignment]
        self.worker = None

    def receive(self, source: str, incarnation: int, message: object) -> None:
        self._saw(message)
        if isinstance(message, wire.Decided):
            self.attacks.view = message.view
        if isinstance(message, wire.Heartbeat):
            links = tuple(sorted(self.others))
            self.number = getattr(self, "number", 0) + 1
            beat = wire.Heartbeat(self.number, message.number, links=links, wants="nothing")
            self.attacks.beat = beat
            self._say(source, beat)
            if self.is_lying and self.chance.random() < 0.5:
                lie = self.chance.choice([Attacks.seize, Attacks.impostor, Attacks.fork])
                self.number += 1
                self.attacks.beat = msgspec.structs.replace(beat, number=self.number)
                told = lie(self.attacks)
                if told is not None:
                    self._say(source, told)

    def handle(self, event: events.Event) -> None:
        pass

    def _known_view(self) -> View | None:
        """Of the cluster's views an outsider knows what it was told; be it too well informed."""
        views = [host.node.view for host in self.others.values() if host.node is not None]
        return next((view for view in views if view is not None), None)

    def _tick(self, incarnation: int) -> None:
        pass

    def _work(self, incarnation: int) -> None:
        pass


class _Silent:
    """In the place of an outsider's protocol: it has a link, and no more."""

    view = None
    paused = ""
    banned: frozenset[str] = frozenset()


class LiarWorld(World):
    """One cluster with a liar: in odd seeds a lying member, in even ones an outsider. ``attack``:
    the liar says only this, over and over."""

    def __init__(self, seed: int, attack: Attack | None = None) -> None:
        chance = random.Random(f"liar {seed}")
        self.is_member = bool(seed % 2)
        self.is_quiet = seed % 4 < 2
        count = chance.choice([1, 2, 3, 3, 4]) + self.is_member
        names = [chr(ord("a") + i) for i in range(count)]
        plan = [] if self.is_quiet or count == 1 else make_plan(chance, names)
        plan = [fault for fault in plan if fault.kind != "ban"]
        super().__init__(seed, plan, count)
        kind: type[LyingMember]
        if self.is_member:
            kind, name = LyingMember, chance.choice(names)
        else:
            kind, name = Outsider, LIAR
            self.network.add(name)
        self.liar = kind(name, self.queue, self.network, self.chance, self)
        self.liar.only = attack or self.liar.only
        self.hosts[name] = self.liar
        for host in self.hosts.values():
            host.others = {each: other for each, other in self.hosts.items() if other is not host}
            host.timing = Timing(fresh_s=FRESH_S)
            host.judged = partial(self._judged, host)
        self.ban = chance.random() < 0.5
        self.was_restarted = False
        self._joined: dict[tuple[str, str, int], int] = {}

    @property
    def honest(self) -> list[Host]:
        return [host for host in self.hosts.values() if host is not self.liar]

    # What honest hosts do.

    def installed(self, host: Host, view: View) -> None:
        if host is self.liar:
            return
        for member in view.members:
            key = (view.history, member.node, member.incarnation)
            if self.is_quiet and self._joined.setdefault(key, member.joined) > member.joined:
                raise self.broken(f"{member.node} has become more senior in {view}")
        if view.epoch > MAX_EPOCHS:
            raise self.broken(f"{host.name} is in epoch {view.epoch}")
        if self.is_quiet or not self.is_member:
            super().installed(host, view)
            return
        before = self._epochs.get(host.name, 0)
        if view.epoch <= before:
            raise self.broken(f"{host.name} went from epoch {before} back to {view.epoch}")
        self._epochs[host.name] = view.epoch

    def committed(self, host: Host, branch: str, step: int, epoch: int) -> None:
        if host is not self.liar and self.is_quiet and not self.is_member:
            super().committed(host, branch, step, epoch)
        else:
            self.num_commits += 1

    def noted(self, host: Host, action: events.Action) -> None:
        if isinstance(action, events.Save) and host is not self.liar:
            self._check_record(host, action.record)
        super().noted(host, action)

    def _check_record(self, host: Host, record: StableRecord) -> None:
        data = msgspec.msgpack.encode(record)
        if msgspec.msgpack.decode(data, type=StableRecord) != record:
            raise self.broken(f"{host.name} can't read back what it wrote: {record}")

    def _judged(self, host: Host, event: events.Event, handle: Callable[[], None]) -> None:
        """Watch ``host``, which is honest, handle ``event``."""
        node = host.node
        if node is None or host is self.liar:
            handle()
            return
        view, record, is_free = node.view, node.record, bool(node.paused)
        is_young = host.now - node._history_since <= FRESH_S
        was_used = self._is_used(host, view)
        status = node.detector.status(self.liar.name)
        handle()
        # That a link works is a reason to look at once at what is due anyway: a newcomer, say.
        is_news = node.detector.status(self.liar.name) is not status
        after = node.view
        if view is not None and (after is None or after.history != view.history):
            gone = node.me in node.banned
            if was_used and not is_young and not gone and not view.fork_of and self.is_quiet:
                raise self.broken(f"{host.name} left {view}, which a majority used, for {event}")
        if (
            isinstance(event, events.Received)
            and event.node == self.liar.name
            and not self.is_member
            and not (view is None or is_free or is_young or is_news)
            and (node.view, node.record) != (view, record)
        ):
            raise self.broken(f"{host.name} changed its view or record for {event.message}")
        if len(node.detector.peers) > MAX_PEERS or len(node._agreement.resigned) > MAX_RESIGNED:
            raise self.broken(f"a table of {host.name} has no bound")

    def _is_used(self, host: Host, view: View | None) -> bool:
        if view is None or (len(view.members) == 1 and not view.groups):
            return False  # a node alone and without a job joins any other that is alone
        using = [h for h in self.honest if h.node is not None and h.node.view == view]
        return 2 * len(using) > len(view.members)

    # The run.

    def run(self) -> None:
        self.begin()
        for fault in self.plan:
            self.queue.at(fault.at, partial(self._strike, fault))
        self.queue.run(FAULTS_S)
        self.network.heal()
        self._silence()
        self.queue.run(FAULTS_S + 0.001)
        self.say("-- the liar is silent")
        self.queue.run(FAULTS_S + HEAL_S)
        if not self.is_member:
            del self.hosts[self.liar.name]
        try:
            self.check_converged()
        except Broken:
            if self.is_quiet:
                raise
            self._restart_all()
            self.check_converged()

    def _restart_all(self) -> None:
        """The operators start all agents again. That must be enough in every case; it takes a lie
        about a cut, told to a node that could ask no other, to make it necessary."""
        self.was_restarted = True
        self._crash(list(self.hosts.values()), 0.5, is_seen=True)
        self.queue.run(FAULTS_S + 2 * HEAL_S)

    def _silence(self) -> None:
        """The end of the lies."""
        if self.ban:
            up = [host for host in self.honest if host.node is not None]
            for host in up[:1]:
                host.bar(frozenset({self.liar.name}))
        self._crash([self.liar], 0.5 if self.is_member else 1e9, is_seen=True)


def over_the_wire(message: NodeMessage) -> NodeMessage | None:
    """``message`` as it arrives; None if it can't be sent, or is refused as malformed."""
    try:
        data = peers.MESSAGE.encode(message)[PREFIX_BYTES:]
    except (ProtocolError, OverflowError, msgspec.MsgspecError):
        return None
    try:
        return peers.MESSAGE.decode(data)  # type: ignore[return-value]
    except ProtocolError:
        return None
