"""A model check of the consensus: every order of events of three nodes, within stated bounds.

Explicit-state search as by TLC or SPIN. The nodes are the real ``ViewAgreement`` objects (Paxos,
stable storage, recovery); the model has what lies around them:

- the network is the set of all messages ever sent, and any of them may arrive at any time: so
  messages are lost (never arrive), doubled (arrive again) and reordered;
- a disk that is written some time after ``Save``; what waits for it is lost in a crash;
- crashes at any time, and restarts as the next incarnation with what is on the disk;
- any node whose candidates are a majority may propose, again and again up to a bound;
- a node learns that another is banned, at any time, maybe as the only one: from then on it hears
  nothing of that node, and it may leave for a fork at any time;
- time is left out. Leases are replaced by what they guarantee: a node may subtract a dead one, or
  not, unless the dead one had accepted a view without it.

A node's step depends on its own state and the event alone, so each pair is executed once; the
search over all three nodes then works with numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from potluck._core.cluster.membership.agreement import ViewAgreement
from potluck._core.cluster.membership.events import Install, Save, Send
from potluck._core.cluster.membership.view import has_majority
from potluck._core.wire import nodes as wire
from potluck._core.wire.nodes import HistoryRecord, StableRecord, View, ViewMember
from support.paxos_node import HISTORY, Local, Wish, freeze, start, thaw

State = int
"""The number of each node's state, then the sets of the views decided and of the messages sent, as
one number: a search visits hundreds of thousands, and makes and compares it at once."""

LOCAL_BITS, VIEW_BITS = 20, 64
"""Of a ``State``: of the number of a node's state, and of the set of views."""

Change = tuple[int, int, int, Any]
"""What is added to a ``State``, and the bits that are set in it: of views found decided and of
messages sent. Then which node did so, by what event."""

OVER: list[Change] = []


class Violation(AssertionError):
    """An invariant does not hold."""


Message = tuple[str, int, str, wire.NodeMessage]
"""Sender, its incarnation, receiver, message."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an event did to a node: its next state, new messages, views known to be decided."""

    local: Local
    sent: tuple[Message, ...] = ()
    decided: tuple[View, ...] = ()


class Model:
    """The search from ``nodes``: at most ``num_proposals`` proposals and ``num_crashes`` crashes,
    by and of any nodes; at most ``num_bans`` times a node learns of a ban."""

    def __init__(
        self,
        nodes: tuple[Local, ...],
        *,
        num_proposals: int,
        num_crashes: int,
        num_bans: int = 0,
        forgetful: str = "",
    ) -> None:
        """The nodes in ``forgetful`` restart with an empty disk: a mutation."""
        self.first = nodes
        self.forgetful = forgetful
        self.num_proposals, self.num_crashes = num_proposals, num_crashes
        self.num_bans = num_bans
        self.names = [local.node for local in nodes]
        self.locals: list[Local] = []
        self.messages: list[Message] = []
        self.views: list[View] = []
        self.num_states = 0
        self.num_steps = 0
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple[int, Any], tuple[int, int, int]] = {}
        self._parents: dict[View, int] = {}
        self._successors: dict[int, int] = {}
        self._views_at = LOCAL_BITS * len(nodes)
        self._sent_at = self._views_at + VIEW_BITS
        self._came_from: dict[State, State] = {}
        self._own_changes: dict[int, list[Change]] = {}
        self._deliveries: dict[int, list[Change]] = {}
        self._mail = [0] * len(nodes)
        """By receiver, the set of the messages that were ever sent to it."""

    # One node.

    def _number(self, thing: Any, among: list[Any]) -> int:
        number = self._numbers.get((type(thing), thing))
        if number is None:
            number = self._numbers[type(thing), thing] = len(among)
            among.append(thing)
        return number

    def _step(self, local: int, event: Any) -> tuple[int, int, int]:
        """The next state, and as sets of bits the messages sent and the views decided."""
        known = self._steps.get((local, event))
        if known is None:
            step = self._execute(self.locals[local], event)
            sent = decided = 0
            for message in step.sent:
                bit = 1 << self._number(message, self.messages)
                sent |= bit
                self._mail[self.names.index(message[2])] |= bit
            for view in step.decided:
                number = self._number(view, self.views)
                decided |= 1 << number
                parent = self._parents.get(view, -1)
                self._successors[parent] = self._successors.get(parent, 0) | 1 << number
            known = self._number(step.local, self.locals), sent, decided
            self._steps[local, event] = known
            self.num_steps += 1
        return known

    def _execute(self, local: Local, event: Any) -> Step:
        match event:
            case int():
                return self._deliver(local, self.messages[event])
            case "write":
                return self._run(local, lambda node: node.written(1, 0.0), writes=1)
            case "crash":
                return Step(replace(local, memory=None, writes=(), record=local.disk))
            case "restart":
                disk = StableRecord() if local.node in self.forgetful else local.disk
                again = start(local.node, local.incarnation + 1, disk)
                memory, number = again.memory, again.incarnation
                changed = replace(local, incarnation=number, memory=memory, record=disk, disk=disk)
                return Step(changed)
            case "bar", str(node):
                return Step(replace(local, barred=local.barred | {node}))
            case "fork":
                return self._run(local, lambda node: node.leave(0.0, "a fork"))
            case ViewMember():
                return self._run(local, lambda node: node.subtract(event.node, event.incarnation))
            case "ask", str(node), int(epoch):
                request = wire.RecoveryRequest(HISTORY, epoch)
                return Step(local, ((local.node, local.incarnation, node, request),))
            case Wish() as wish, ended, floor:
                more = replace(local, num_proposals=local.num_proposals + 1)
                return self._run(
                    more,
                    lambda node: node.propose(
                        wish.kept, wish, 0.0, floor=floor, ended=ended, ends_at=0.0
                    ),
                )
        raise AssertionError(event)

    def _deliver(self, local: Local, message: Message) -> Step:
        sender, incarnation, _, content = message
        if sender in local.barred:
            return Step(local)

        def hear(node: ViewAgreement) -> None:
            match content:
                case wire.Decided(view):
                    node.learn(view, 0.0, sender)
                case wire.RecoveryRequest():
                    node.asked_for_report(sender, content)
                case wire.RecoveryReport():
                    node.reported(sender, incarnation, content, 0.0)
                case wire.Prepare() | wire.Promise() | wire.Propose() | wire.Accepted():
                    node.heard(sender, incarnation, content, 0.0)

        return self._run(local, hear)

    def _run(self, local: Local, act: Callable[[ViewAgreement], None], writes: int = 0) -> Step:
        """Have the real node ``act``; ``writes`` records reach its disk first."""
        node, storage, outbox = thaw(local)
        before = local.view
        act(node)
        disk = local.writes[writes - 1][0] if writes else local.disk
        queue = list(local.writes[writes:])
        used, left_out = local.used, local.left_out
        sent: list[Message] = []
        decided: list[View] = []
        for action in outbox.take():
            match action:
                case Send(_, wire.Rejected()):
                    pass  # ends attempts early, and nothing else: as if it were lost
                case Send(target, message):
                    sent.append((local.node, local.incarnation, target, message))
                    if isinstance(message, wire.Decided):
                        decided.append(message.view)
                case Install(view):
                    if view.epoch <= used:
                        raise Violation(f"{local.node} went from epoch {used} back to {view.epoch}")
                    if disk.installed < view.epoch:
                        raise Violation(
                            f"{local.node} uses epoch {view.epoch} before it is on disk"
                        )
                    used = view.epoch
                case Save(number, record):
                    then = storage._waiting[number]
                    if (record, then) not in queue:  # of a doubled message
                        queue.append((record, then))
                    if isinstance(then, wire.Proposal):
                        assert before is not None
                        self._parents[then.view] = then.parent
                        out = set(before.nodes) - set(then.view.nodes)
                        left_out |= {(local.incarnation, each) for each in out}
        if node.view is not None and node.view != before:
            decided.append(node.view)
            left_out -= {(local.incarnation, each) for each in node.view.nodes}
        after = replace(
            local,
            memory=freeze(node),
            record=storage.record,
            disk=disk,
            writes=tuple(queue),
            used=used,
            left_out=left_out,
        )
        return Step(after, tuple(sent), tuple(decided))

    # All nodes.

    def run(self) -> None:
        """Visit every state. ``Violation`` for the first that breaks an invariant."""
        first = sum(
            self._number(local, self.locals) << LOCAL_BITS * index
            for index, local in enumerate(self.first)
        )
        came_from = self._came_from
        came_from[first] = first
        views = (1 << self._sent_at) - (1 << self._views_at)
        states = [first]
        for state in states:  # it grows meanwhile
            for added, bits, _, _ in self._changes(state):
                after = state + added | bits
                if after not in came_from:
                    came_from[after] = state
                    states.append(after)
                    if (after ^ state) & views:
                        self._check(after)
        assert len(self.locals) <= 1 << LOCAL_BITS
        assert len(self.views) <= VIEW_BITS
        self.num_states = len(states)

    def _changes(self, state: State) -> list[Change]:
        """All that can happen next."""
        numbers = state & ((1 << self._views_at) - 1)
        own = self._own_changes.get(numbers)
        if own is None:
            own = self._own_changes[numbers] = self._changes_without_messages(numbers)
        if own is OVER:
            return OVER
        found = own.copy()
        sent = state >> self._sent_at
        for index, mail in enumerate(self._mail):
            local = numbers & ((1 << LOCAL_BITS) - 1)
            numbers >>= LOCAL_BITS
            inbox = sent & mail
            known = self._deliveries.get(inbox << LOCAL_BITS | local)
            if known is None:
                known = self._received(index, local, inbox)
                self._deliveries[inbox << LOCAL_BITS | local] = known
            found += known
        return found

    def _change(self, index: int, local: int, event: Any) -> Change:
        after, sent, decided = self._step(local, event)
        bits = sent << self._sent_at | decided << self._views_at
        return ((after - local) << LOCAL_BITS * index, bits, index, event)

    def _received(self, index: int, local: int, inbox: int) -> list[Change]:
        """What the messages of ``inbox`` can change in a node, or have it send."""
        if self.locals[local].memory is None:
            return []
        numbers = [number for number in range(inbox.bit_length()) if inbox >> number & 1]
        changes = [self._change(index, local, number) for number in numbers]
        return [each for each in changes if each[0] or each[1] >> self._sent_at]

    def _changes_without_messages(self, numbers: int) -> list[Change]:
        """What else can happen to the nodes, whose numbers are in the bits of ``numbers``. OVER if
        nothing can be decided any more."""
        mask = (1 << LOCAL_BITS) - 1
        places = [numbers >> LOCAL_BITS * index & mask for index in range(len(self.names))]
        nodes = [self.locals[place] for place in places]
        has_round = any(each.memory and each.memory[5] and each.memory[5][2] for each in nodes)
        if not has_round and sum(each.num_proposals for each in nodes) >= self.num_proposals:
            return OVER
        return [self._change(i, places[i], event) for i, event in self._events(nodes)]

    def _check(self, state: State) -> None:
        """At most one view is decided to follow each view."""
        views = state >> self._views_at & ((1 << VIEW_BITS) - 1)
        for parent, successors in self._successors.items():
            both = views & successors
            if both & (both - 1):
                names = [f"{v.epoch}: {v.nodes}" for i, v in enumerate(self.views) if both >> i & 1]
                text = f"two views follow epoch {parent}: {' and '.join(names)}"
                raise Violation("\n".join([text, *self._story(state)]))

    def _story(self, state: State) -> list[str]:
        """How the search came to ``state``, one event a line."""
        lines: list[str] = []
        while (before := self._came_from[state]) != state:
            index, event = next(
                (index, event)
                for added, bits, index, event in self._changes(before)
                if before + added | bits == state
            )
            state = before
            if isinstance(event, int):
                sender, incarnation, _, message = self.messages[event]
                event = f"hears {message} of {sender}, {incarnation}"
            lines.append(f"{self.names[index]}: {event}")
        return lines[::-1]

    def _events(self, nodes: list[Local]) -> Iterator[tuple[int, Any]]:
        """What can happen next besides messages, and to which node."""
        num_crashes = sum(
            local.incarnation - first.incarnation + (local.memory is None)
            for local, first in zip(nodes, self.first, strict=True)
        )
        may_propose = sum(local.num_proposals for local in nodes) < self.num_proposals
        for index, local in enumerate(nodes):
            if local.memory is None:
                yield index, "restart"
                continue
            if local.writes:
                yield index, "write"
            if local.view is not None:
                yield from self._bans(index, local, nodes)
            if num_crashes < self.num_crashes:
                yield index, "crash"
            if local.view is not None:
                for other in nodes:
                    yield from self._about(index, local, other)
                if may_propose:
                    yield from self._wishes(index, local, nodes)

    def _bans(self, index: int, local: Local, nodes: list[Local]) -> Iterator[tuple[int, Any]]:
        """A ban that ``local`` may learn of, and the fork that may follow."""
        assert local.view is not None
        if not local.barred.isdisjoint(local.view.nodes):
            yield index, "fork"
        if sum(len(each.barred) for each in nodes) < self.num_bans:
            for other in nodes:
                if other is not local and other.node not in local.barred:
                    yield index, ("bar", other.node)

    def _about(self, index: int, local: Local, other: Local) -> Iterator[tuple[int, Any]]:
        """What ``local`` may find out about ``other``, a member of its view, without a message."""
        assert local.view is not None
        member = local.view.member(other.node)
        if member is None or other is local:
            return
        has_ended = other.memory is None or other.incarnation > member.incarnation
        had_lease = (member.incarnation, local.node) not in other.left_out
        if has_ended and had_lease and member not in local.subtracted:
            yield index, member
        if other.memory is not None and other.view is None:
            yield index, ("ask", other.node, local.view.epoch)

    def _wishes(self, index: int, local: Local, nodes: list[Local]) -> Iterator[tuple[int, Any]]:
        """What ``local`` may propose: itself with any less senior members that are up, or all of
        them and a newcomer. As in the protocol, it has to be a majority."""
        view = local.view
        assert view is not None
        up = {each.node for each in nodes if each.memory is not None}
        stays = {
            m.node
            for m in view.members
            if m.node in up - local.barred
            and any(n.node == m.node and n.incarnation == m.incarnation for n in nodes)
        }
        juniors = view.nodes[view.nodes.index(local.node) + 1 :]
        subtracted = {member.node for member in local.subtracted}
        for size in range(len(juniors) + 1):
            for chosen in combinations(juniors, size):
                kept = (local.node, *chosen)
                if not stays.issuperset(kept):
                    continue
                if not has_majority(view.members, kept, subtracted):
                    continue
                out = set(view.nodes) - set(kept)
                if out:
                    yield index, (Wish(view, kept), tuple(sorted(out - stays)), 0)
                    continue
                for other in nodes:
                    if other.memory is not None and other.node not in {*view.nodes, *local.barred}:
                        wish = Wish(view, kept, ((other.node, other.incarnation),))
                        yield index, (wish, (), other.record.installed)


MEMBERS = tuple(ViewMember(name, 1, 1) for name in "abc")


def three(**bounds: Any) -> Model:
    """Three members of a view."""
    view = View(HISTORY, 1, MEMBERS)
    record = StableRecord(1, (HistoryRecord(view),))
    return Model(tuple(start(name, 1, record, view) for name in "abc"), **bounds)


def newcomer(**bounds: Any) -> Model:
    """Two members of a view, and a node that used a higher epoch before, elsewhere: it may join."""
    view = View(HISTORY, 5, MEMBERS[:2])
    record = StableRecord(5, (HistoryRecord(view),))
    two = [start(name, 1, record, view) for name in "ab"]
    return Model((*two, start("c", 2, StableRecord(9))), **bounds)
