"""Nodes of a test that ask each other, over the formats of the wire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from potluck._core.cluster.code_store.job_folders import Ask
from potluck._core.cluster.content.download import PATIENCE_S
from potluck._core.cluster.content.store import ContentStore
from potluck._core.wire import bulk, peers
from potluck.errors import LinkError, PotluckError

T = TypeVar("T")


def asking(answer: Callable[[str, Any], Any], me: str) -> Ask:
    """Asks, in the name of node ``me``, a part that answers by ``answer(node, request)``."""

    async def ask(node: str, request: Any, kind: type[T], *, timeout_s: float | None) -> T:
        sent = decoded(peers.Request(1, request))
        try:
            content = answer(me, sent.content)
            content = await content if isinstance(content, Awaitable) else content
        except (PotluckError, OSError) as error:
            raise LinkError(str(error)) from None
        found = decoded(peers.Response(1, content)).content
        assert isinstance(found, kind)
        return found

    return ask


def decoded(message: Any) -> Any:
    """``message`` as it arrives."""
    return peers.MESSAGE.decode(peers.MESSAGE.encode(message)[4:])


Change = Callable[[str, bulk.Request, bulk.Response], bulk.Response]


class Nodes:
    """Nodes that fetch from each other, by id. ``asked`` has (who, whom, request); ``change`` plays
    a node that lies: by its id, a function of (who asks, request, answer)."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[str, bulk.Request], Awaitable[bulk.Response]]] = {}
        self.told: dict[str, Callable[[str, bulk.Announce], None]] = {}
        self.change: dict[str, Change] = {}
        self.asked: list[tuple[str, str, bulk.Request]] = []
        self.notes: list[str] = []
        self.patience_s = PATIENCE_S

    def store(self, root: Path, me: str) -> ContentStore:
        """The content store of node ``me``."""
        store = ContentStore(
            root, me, self.seen_by(me), on_note=self.notes.append, patience_s=self.patience_s
        )
        self.answers[me], self.told[me] = store.answer, store.told
        return store

    def seen_by(self, me: str) -> OtherNodes:
        return OtherNodes(self, me)

    def parts(self, whom: str) -> list[bulk.PartRequest]:
        """What was asked of the node."""
        found = (request for _, node, request in self.asked if node == whom)
        return [each for each in found if isinstance(each, bulk.PartRequest)]


class OtherNodes:
    """``Members`` of a fetch by node ``me``."""

    def __init__(self, nodes: Nodes, me: str) -> None:
        self._all = nodes
        self._me = me

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for node in self._all.answers if node != self._me)

    def part_bytes(self, node: str) -> int:
        return bulk.MAX_PART

    async def ask(self, node: str, request: bulk.Request, kind: type[T]) -> T:
        if node not in self._all.answers:
            raise LinkError(f"there is no link to node {node[:12]}")
        sent = over_the_wire(bulk.Asked(1, request)).content
        self._all.asked.append((self._me, node, sent))
        try:
            answer = await self._all.answers[node](self._me, sent)
        except (PotluckError, OSError) as error:
            raise LinkError(str(error)) from None
        if node in self._all.change:
            answer = self._all.change[node](self._me, sent, answer)
        found = over_the_wire(bulk.Answered(1, answer)).content
        assert isinstance(found, kind)
        return found

    def tell(self, node: str, message: bulk.Announce) -> None:
        if node in self._all.told:
            self._all.told[node](self._me, over_the_wire(message))


def over_the_wire(message: Any) -> Any:
    """``message`` as it arrives on a bulk connection."""
    return bulk.MESSAGE.decode(bulk.MESSAGE.encode(message)[4:])
