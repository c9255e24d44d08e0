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

import gc
from collections import deque
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

State = tuple[int, ...]
"""The number of each node's state, the set of messages sent, the set of views decided."""


Change = tuple[int, Any, int, int, int]
"""Which node, by what event, its state after, the messages sent, the views found decided."""

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
        self._came_from: dict[State, tuple[State, int, Any] | None] = {}
        self._changes: dict[State, list[Change]] = {}
        self._deliveries: dict[tuple[int, int], list[Change]] = {}
        self._inboxes: dict[tuple[int, int], tuple[int, ...]] = {}

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
                sent |= 1 << self._number(message, self.messages)
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
        gc.disable()  # no state is in a cycle, and looking for one takes a fifth of the time
        try:
            self._search()
        finally:
            gc.enable()

    def _search(self) -> None:
        first = (*(self._number(local, self.locals) for local in self.first), 0, 0)
        came_from = self._came_from
        came_from[first] = None
        queue = deque([first])
        while queue:
            state = queue.popleft()
            *nodes, sent, decided = state
            changes = self._changes.get(state[:-2])
            if changes is None:
                changes = self._changes[state[:-2]] = self._own_changes(nodes)
            if changes is OVER:
                continue
            received = [
                change for i in range(len(nodes)) for change in self._received(i, nodes[i], sent)
            ]
            for index, event, local, posted, found in (*changes, *received):
                nodes_after = (*nodes[:index], local, *nodes[index + 1 :])
                after = (*nodes_after, sent | posted, decided | found)
                if after not in came_from:
                    came_from[after] = (state, index, event)
                    queue.append(after)
                    if found & ~decided:
                        self._check(after)
        self.num_states = len(came_from)

    def _change(self, index: int, local: int, event: Any) -> Change:
        return (index, event, *self._step(local, event))

    def _received(self, index: int, local: int, sent: int) -> list[Change]:
        """What the messages among ``sent`` can change in a node."""
        known = self._deliveries.get((local, sent))
        if known is None:
            known = self._deliveries[local, sent] = []
            if self.locals[local].memory is not None:
                for number in self._inbox(index, sent):
                    change = self._change(index, local, number)
                    if change[2] != local or change[3] & ~sent:
                        known.append(change)
        return known

    def _own_changes(self, numbers: list[int]) -> list[Change]:
        """What else can happen to the nodes. OVER if nothing can be decided any more."""
        nodes = [self.locals[number] for number in numbers]
        has_round = any(each.memory and each.memory[5] and each.memory[5][2] for each in nodes)
        if not has_round and sum(each.num_proposals for each in nodes) >= self.num_proposals:
            return OVER
        return [self._change(i, numbers[i], event) for i, event in self._events(nodes)]

    def _check(self, state: State) -> None:
        """At most one view is decided to follow each view."""
        views = state[-1]
        for parent, successors in self._successors.items():
            both = views & successors
            if both & (both - 1):
                names = [f"{v.epoch}: {v.nodes}" for i, v in enumerate(self.views) if both >> i & 1]
                text = f"two views follow epoch {parent}: {' and '.join(names)}"
                raise Violation("\n".join([text, *self._story(state)]))

    def _story(self, state: State) -> list[str]:
        """How the search came to ``state``, one event a line."""
        lines: list[str] = []
        while (before := self._came_from[state]) is not None:
            state, index, event = before
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

    def _inbox(self, index: int, sent: int) -> tuple[int, ...]:
        """The numbers of the messages among ``sent`` that are for a node."""
        known = self._inboxes.get((index, sent))
        if known is None:
            name = self.names[index]
            known = tuple(
                number
                for number in range(sent.bit_length())
                if sent >> number & 1 and self.messages[number][2] == name
            )
            self._inboxes[index, sent] = known
        return known

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
