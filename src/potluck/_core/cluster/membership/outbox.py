"""The actions that one event leads to, in their order: all parts of the core share one outbox."""

from __future__ import annotations

from potluck._core.cluster.membership.events import Action, Send
from potluck._core.wire.nodes import NodeMessage


class Outbox:
    """Collects actions until ``take`` hands them over."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def act(self, *actions: Action) -> None:
        """Add ``actions``."""
        self._actions += actions

    def send(self, node: str, message: NodeMessage) -> None:
        """Add the sending of ``message`` to ``node``."""
        self._actions.append(Send(node, message))

    def take(self) -> list[Action]:
        """The actions since the last call."""
        taken, self._actions = self._actions, []
        return taken
