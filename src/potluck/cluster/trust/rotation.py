"""Rotation of the cluster's secret while the cluster runs. No I/O: events in, actions out.

The leading node, on which the operator ordered the rotation, makes a new secret and sends it to
each linked node. Each node stores and *accepts* the new secret, but still shows the old one. After
all nodes have confirmed, the leading node sends them the order to *show* the new secret; the old
secret is accepted for another ``keyring.GRACE_S`` seconds. So participating nodes never refuse each
other. A node that misses the order shows the new secret when it meets a peer that does. A node that
was not linked at the beginning must join again.
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
"""Seconds after which a rotation fails if a node has not confirmed the new secret."""
PENDING_S = 60.0
"""Seconds without an order to use a new secret after which a node accepts another rotation."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to ``node``."""

    node: str
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Store:
    """Accept ``psk`` from now on: call ``keyring.store_next``."""

    psk: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Use:
    """Show the next secret from now on: call ``keyring.use_next``."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove the next secret: call ``keyring.drop_next``."""


@dataclass(frozen=True, slots=True)
class Say:
    """A message for the operator; ``ok`` is None during the rotation, else its success."""

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
    """The state of a rotation on the leading node. ``deadline`` is in seconds of the clock of
    ``tick``."""

    rotation: str
    waiting: set[str]
    stored: set[str]
    deadline: float


class Rotation:
    """A node's state in rotations, as the leading node or another. ``fixed`` is the reason why this
    node can't change its secret, or empty."""

    def __init__(self, fixed: str = "") -> None:
        self._fixed = fixed
        self._pending: _Pending | None = None
        self._order: _Order | None = None

    def next_wakeup(self) -> float | None:
        """The latest time for the next call of ``tick``, or None."""
        return None if self._order is None else self._order.deadline

    def order(self, rotation: str, psk: bytes, nodes: Iterable[str], now: float) -> list[Action]:
        """The operator orders a rotation to ``psk`` on this node and ``nodes``."""
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
        """A message of ``node`` arrived; messages of other kinds have no effect."""
        match message:
            case NewSecret(rotation, psk):
                return self._new_secret(node, rotation, psk, now)
            case UseSecret(rotation):
                return self._use(f"node {node[:12]} ordered it", rotation)
            case DropSecret(rotation) if self._pending and self._pending.rotation == rotation:
                self._pending = None
                return [Drop(), Say(f"node {node[:12]} ended the change of the secret")]
            case SecretStored(rotation, error):
                return self._stored(node, rotation, error)
        return []

    def linked(self, node: str, namespace: str) -> list[Action]:
        """A link to ``node`` was established; the node shows the secret of ``namespace``."""
        pending = self._pending
        if self._order is None and pending is not None and pending.namespace == namespace:
            return self._use(f"node {node[:12]} uses it already", pending.rotation)
        return []

    def lost(self, node: str) -> list[Action]:
        """The link to ``node`` ended: the rotation no longer waits for it."""
        if self._order is None or node not in self._order.waiting:
            return []
        self._order.waiting.discard(node)
        text = f"node {node[:12]} was lost before it had the new secret; it must join again"
        return [Say(text), *self._proceed()]

    def tick(self, now: float) -> list[Action]:
        """Fail the rotation after its deadline; ``now`` as for ``order``."""
        if self._order is None or now < self._order.deadline:
            return []
        silent = ", ".join(node[:12] for node in sorted(self._order.waiting))
        return self._fail(f"node {silent} did not store it within {STORE_S:g} s")

    def _new_secret(self, node: str, rotation: str, psk: bytes, now: float) -> list[Action]:
        if self._fixed:
            return [Tell(node, SecretStored(rotation, self._fixed))]
        if self._order is not None or self._is_pending(now, other_than=rotation):
            error = "another change of the secret is unfinished; try again in a minute"
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
            return self._fail(f"node {node[:12]} refused the new secret: {error}")
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

    def _fail(self, why: str) -> list[Action]:
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
