"""Changing the cluster's secret while it works. Pure: events in, actions out.

The node on which the operator orders it makes a new secret and sends it to every node it has a link
to. Each stores it and *accepts* it, but still shows the old one. Once all have said so, all are
told to *show* it; the old one is accepted for a time of grace after that (``keyring.GRACE_S``). At
no moment do two nodes that took part refuse each other. A node that misses the order to switch
switches when it meets a peer that has. One that was away from the beginning must join again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from potluck.transport.credentials import namespace_of
from potluck.wire.peers import (
    DropSecret,
    NewSecret,
    PeerMessage,
    SecretStored,
    UseSecret,
)

STORE_S = 10.0
"""How long nodes have to store the new secret before the change is given up."""
PENDING_S = 60.0
"""How long a node keeps a new secret that it is not told to use, before it takes another."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to ``node``."""

    node: str
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Store:
    """Accept ``psk`` from now on (``keyring.store_next``)."""

    psk: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Use:
    """Show it from now on (``keyring.use_next``)."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget it (``keyring.drop_next``)."""


@dataclass(frozen=True, slots=True)
class Say:
    """Something for people; ``ok`` is None while the change goes on, else how it ended."""

    text: str
    ok: bool | None = None


Action = Tell | Store | Use | Drop | Say


@dataclass(slots=True)
class _Pending:
    """A new secret that this node accepts and does not show yet."""

    rotation: str
    namespace: str
    since: float


@dataclass(slots=True)
class _Order:
    """What the node that leads a change waits for."""

    rotation: str
    waiting: set[str]
    stored: set[str]
    deadline: float


class Rotation:
    """One node's part in changes of the secret, as the one that leads or as one that follows.
    ``fixed`` says why this node can't change its own, empty if it can."""

    def __init__(self, fixed: str = "") -> None:
        self._fixed = fixed
        self._pending: _Pending | None = None
        self._order: _Order | None = None

    def next_wakeup(self) -> float | None:
        """When ``tick`` has to be called at the latest."""
        return None if self._order is None else self._order.deadline

    def order(self, rotation: str, psk: bytes, nodes: Iterable[str], now: float) -> list[Action]:
        """The operator wants ``psk`` to be the secret of this node and ``nodes``."""
        if self._fixed:
            return [Say(self._fixed, ok=False)]
        if self._order is not None or self._is_pending(now):
            return [Say("the secret is being changed already; try again in a minute", ok=False)]
        waiting = set(nodes)
        self._pending = _Pending(rotation, namespace_of(psk), now)
        self._order = _Order(rotation, waiting, set(), now + STORE_S)
        actions: list[Action] = [Store(psk)]
        actions += [Tell(node, NewSecret(rotation, psk)) for node in sorted(waiting)]
        return actions + self._proceed()

    def received(self, node: str, message: PeerMessage, now: float) -> list[Action]:
        """``node`` said something; other messages than those about secrets lead to nothing."""
        match message:
            case NewSecret(rotation, psk):
                return self._new_secret(node, rotation, psk, now)
            case UseSecret(rotation):
                return self._use(f"node {node[:12]} said so", rotation)
            case DropSecret(rotation) if self._pending and self._pending.rotation == rotation:
                self._pending = None
                return [Drop(), Say("the change of the secret was given up")]
            case SecretStored(rotation, error):
                return self._stored(node, rotation, error)
        return []

    def linked(self, node: str, namespace: str) -> list[Action]:
        """There is a link to ``node``, which shows the secret of ``namespace``."""
        pending = self._pending
        if self._order is None and pending is not None and pending.namespace == namespace:
            return self._use(f"node {node[:12]} shows it already", pending.rotation)
        return []

    def lost(self, node: str) -> list[Action]:
        """The link to ``node`` ended: it is not waited for."""
        if self._order is None or node not in self._order.waiting:
            return []
        self._order.waiting.discard(node)
        text = f"node {node[:12]} went away before it had the new secret; it must join again"
        return [Say(text), *self._proceed()]

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self._order is None or now < self._order.deadline:
            return []
        silent = ", ".join(node[:12] for node in sorted(self._order.waiting))
        return self._give_up(f"node {silent} did not store it within {STORE_S:g} s")

    def _new_secret(self, node: str, rotation: str, psk: bytes, now: float) -> list[Action]:
        if self._fixed:
            return [Tell(node, SecretStored(rotation, self._fixed))]
        if self._order is not None or self._is_pending(now, other_than=rotation):
            error = "another change of the secret is under way"
            return [Tell(node, SecretStored(rotation, error))]
        self._pending = _Pending(rotation, namespace_of(psk), now)
        return [
            Store(psk),
            Tell(node, SecretStored(rotation)),
            Say(f"node {node[:12]} changes the cluster's secret; the new one is accepted"),
        ]

    def _stored(self, node: str, rotation: str, error: str) -> list[Action]:
        order = self._order
        if order is None or order.rotation != rotation or node not in order.waiting:
            return []
        if error:
            return self._give_up(f"node {node[:12]} could not take it: {error}")
        order.waiting.discard(node)
        order.stored.add(node)
        return self._proceed()

    def _proceed(self) -> list[Action]:
        order = self._order
        if order is None or order.waiting:
            return []
        self._order = self._pending = None
        tell: list[Action] = [
            Tell(node, UseSecret(order.rotation)) for node in sorted(order.stored)
        ]
        count = len(order.stored) + 1
        nodes = "this node has" if count == 1 else f"{count} nodes have"
        return [Use(), *tell, Say(f"{nodes} the new secret", ok=True)]

    def _use(self, why: str, rotation: str) -> list[Action]:
        if self._pending is None or self._pending.rotation != rotation:
            return []
        self._pending = None
        return [Use(), Say(f"the new secret is in use: {why}")]

    def _give_up(self, why: str) -> list[Action]:
        assert self._order is not None
        nodes = sorted(self._order.waiting | self._order.stored)
        rotation = self._order.rotation
        self._order = self._pending = None
        tell: list[Action] = [Tell(node, DropSecret(rotation)) for node in nodes]
        text = f"the secret was not changed: {why}. Ban that node or stop it, then try again"
        return [Drop(), *tell, Say(text, ok=False)]

    def _is_pending(self, now: float, *, other_than: str = "") -> bool:
        pending = self._pending
        if pending is None or pending.rotation == other_than:
            return False
        return now - pending.since < PENDING_S
