"""One node's part in the membership protocol, for tests that tell stories: the messages of the
others are written by hand."""

from __future__ import annotations

from typing import Any

from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.claims import digest_of
from potluck._core.cluster.membership.events import Install, Received, Save, Saved, Send
from potluck._core.cluster.membership.protocol import MembershipProtocol
from potluck._core.wire import nodes as wire
from potluck._core.wire.nodes import JobGroup, StableRecord, View, ViewMember


class Story:
    """A node whose disk is slow only when told so; ``sent`` and ``did`` hold what came of it."""

    def __init__(
        self, record: StableRecord | None = None, incarnation: int = 1, me: str = "a"
    ) -> None:
        self.now = 1000.0
        self.node = MembershipProtocol(me, incarnation, record or StableRecord(), self.now)
        self.disk = record or StableRecord()
        self.slow_disk = False
        self.sent: list[Send] = []
        self.did: list[events.Action] = []

    def tell(self, event: events.Event) -> list[events.Action]:
        did = list(self.node.handle(event, self.now))
        saves = [action for action in did if isinstance(action, Save)]
        while saves and not self.slow_disk:
            save = saves.pop(0)
            self.disk = save.record
            more = self.node.handle(Saved(save.number), self.now)
            saves += [action for action in more if isinstance(action, Save)]
            did += more
        self.did = did
        self.sent += [action for action in did if isinstance(action, Send)]
        return did

    def hear(
        self, node: str, message: wire.NodeMessage, incarnation: int = 1
    ) -> list[events.Action]:
        return self.tell(Received(node, incarnation, message))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.node.next_wakeup() <= until:
            self.now = max(self.now, self.node.next_wakeup())
            self.tell(events.Tick())
        self.now = until

    def messages(self, kind: type, to: str) -> list[wire.NodeMessage]:
        return [s.message for s in self.sent if s.node == to and isinstance(s.message, kind)]

    def installed(self) -> list[View]:
        return [action.view for action in self.did if isinstance(action, Install)]


def view(names: str, epoch: int = 5, *groups: JobGroup, history: str = "L") -> View:
    members = tuple(ViewMember(name, 1, joined) for joined, name in enumerate(names, 1))
    return View(history, epoch, members, groups)


def without_b() -> tuple[ViewMember, ...]:
    """Members a and c of the view of a, b, c."""
    return tuple(member for member in view("abc").members if member.node != "b")


class Member3(Story):
    """``b`` in the view of a, b, c, which it was told of; a and c beat."""

    def __init__(self) -> None:
        super().__init__(me="b")
        self.numbers = {"a": 0, "c": 0}
        for name in self.numbers:
            self.tell(events.Linked(name, 1))
        self.digest = digest_of(view("abc"))
        self.beats(3, size=2)
        self.hear("a", wire.Decided(view("abc")))
        self.beats(3)

    def beats(self, count: int, who: str = "ac", **changes: Any) -> None:
        facts: dict[str, Any] = {"history": "L", "epoch": 5, "size": 3}
        facts |= {"digest": self.digest} | changes
        for _ in range(count):
            self.now = self.node.next_wakeup()
            self.tell(events.Tick())
            for name in who:
                self.numbers[name] += 1
                links = tuple(sorted({"a", "b", "c"} - {name}))
                beat = wire.Heartbeat(
                    self.numbers[name], self.node.detector.number, links=links, **facts
                )
                self.hear(name, beat)

    def use(self, new: View, who: str = "ac") -> None:
        """``who`` use the view ``new`` from now on, and say so."""
        self.digest = digest_of(new)
        self.beats(1, who, history=new.history, epoch=new.epoch, size=len(new.members))

    def propose(self, names: str, number: int = 6, dead: tuple[str, ...] = ()) -> wire.NodeMessage:
        members = tuple(member for member in view("abc").members if member.node in names)
        new = View("L", number, members)
        self.sent.clear()
        self.hear("a", wire.Prepare("L", 5, (number, "a")))
        self.hear("a", wire.Propose(wire.Proposal((number, "a"), 5, new, dead)))
        return self.sent[-1].message
