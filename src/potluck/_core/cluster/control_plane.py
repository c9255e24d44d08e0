"""The I/O of cluster membership on one node.

The actions of ``MembershipProtocol`` are carried out here: messages are sent to other nodes,
records are written to disk, views are given to the parts of the agent that registered for them. The
protocol gets messages, time and the nodes that are barred as events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from potluck._core.background import Alarm, OnBroken, start_task, stop
from potluck._core.cluster.home.node_state import NodeState, PrivateState
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.failure_detector import Status
from potluck._core.cluster.membership.protocol import MembershipProtocol
from potluck._core.wire.jobs import ToLeader
from potluck._core.wire.nodes import NodeMessage, View
from potluck._core.wire.peers import Introduction


@dataclass(eq=False, repr=False)
class ControlPlane:
    """One node's part in the cluster. ``view`` is the one in use, which is on disk; ``protocol``
    may be ahead of it.

    ``on_broken(error)``: this node takes no part any more.
    """

    protocol: MembershipProtocol
    links: PeerLinks
    state: NodeState | PrivateState
    _: KW_ONLY
    on_note: Callable[[str], None]
    on_broken: OnBroken

    def __post_init__(self) -> None:
        self.view: View | None = None
        self.listeners: list[Callable[[events.Action], None]] = []
        self._saves: asyncio.Queue[events.Save] = asyncio.Queue()
        self._alarm = Alarm(self._tick)
        self._tasks: list[asyncio.Task[None]] = []
        self.links.on(NodeMessage, self._received)
        self.links.on_linked.append(self._linked)
        self.links.on_unreachable.append(self._unreachable)

    def start(self) -> None:
        """Take part from now on."""
        self._tasks = [
            start_task(self._save, name="keeping the view", on_broken=self.on_broken),
        ]
        self._tick()

    async def close(self) -> None:
        """Decide nothing more. No timer and no task stays."""
        self._alarm.set(None)
        await stop(*self._tasks)

    # What the other parts of the agent ask.

    @property
    def stands_still(self) -> str:
        """Why no group may commit here now; empty if it may."""
        return self.protocol.paused or ("in no cluster's view" if self.view is None else "")

    @property
    def is_banned(self) -> bool:
        """Whether this node was banned from the cluster."""
        return self.protocol.me in self.protocol.banned

    def is_dead(self, node: str) -> bool:
        """Whether the agent of ``node``, and so its workers, are known to have ended."""
        peer = self.protocol.detector.peers.get(node)
        return peer is not None and peer.status is Status.DEAD

    def busy(self) -> set[str]:
        """The nodes that have members of a job's group."""
        groups = () if self.view is None else self.view.groups
        return {member.node for group in groups for member in group.members}

    def to_leader(self, message: ToLeader) -> bool:
        """Send to the leader of the view; False without one."""
        return self.view is not None and self.links.send(self.view.leader, message)

    def bar(self, nodes: frozenset[str]) -> None:
        """``nodes`` may not take part, and no others are kept out."""
        self.handle(events.Barred(nodes))

    def watched(self) -> set[str]:
        """The nodes of this node's view, and the nodes that it hears or heard."""
        view = self.protocol.view
        return {*self.protocol.detector.peers, *(() if view is None else view.nodes)}

    def handle(self, event: events.Event) -> None:
        """Have the protocol decide about ``event``, and do what it decided."""
        try:
            for action in self.protocol.handle(event, asyncio.get_running_loop().time()):
                self._act(action)
        except Exception as error:
            self.on_broken(error)

    # What happens.

    def _linked(self, node: str, introduction: Introduction) -> None:
        self.handle(events.Linked(node, introduction.incarnation))

    def _received(self, node: str, message: NodeMessage) -> None:
        said = self.links.introduction(node)
        assert said is not None, "a message came over a link that is not there"
        self.handle(events.Received(node, said.incarnation, message))

    def _unreachable(self, node: str, incarnation: int) -> None:
        self.handle(events.ConnectionRefused(node, incarnation))

    def _tick(self) -> None:
        self.handle(events.Tick())
        try:
            self._alarm.set(self.protocol.next_wakeup())
        except Exception as error:  # no tick, no heartbeat
            self.on_broken(error)

    async def _save(self) -> None:
        while True:
            save = await self._saves.get()
            await asyncio.to_thread(self.state.write, save.record)
            self.handle(events.Saved(save.number))

    # What was decided.

    def _act(self, action: events.Action) -> None:
        match action:
            case events.Send(node, message) if node != self.protocol.me:
                self.links.send(node, message)
            case events.Save():
                self._saves.put_nowait(action)
            case events.Install(view, reason):
                self.on_note(reason)
                self.view = view
            case events.Leave():
                self.on_note(action.reason)
                self.view = None
            case events.Pause(reason) | events.Resume(reason) | events.Note(reason):
                self.on_note(reason)
            case events.GroupRefused(job, _, reason):
                self.on_note(f"job {job}: {reason}")
        for listen in self.listeners:
            listen(action)
