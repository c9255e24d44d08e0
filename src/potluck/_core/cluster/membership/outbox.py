"""The outputs of the membership core: actions in their order, and the record on stable storage.

All parts of the core share one ``Outbox``. ``StableStorage``, in the Paxos papers' word, is the
record that outlives the agent, with the actions that wait until it is on disk. The agent's loop
writes it (``Save``, ``Saved``)."""

from __future__ import annotations

import msgspec

from potluck._core.cluster.membership.events import Action, Save, Send
from potluck._core.wire.nodes import (
    MAX_HISTORIES,
    HistoryRecord,
    NodeMessage,
    Proposal,
    StableRecord,
)


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


Continuation = tuple[Action, ...] | Proposal
"""What follows once a record is on disk: actions, or the proposal that may be reported as
accepted."""


class StableStorage:
    """One node's record. ``record`` is the newest, which may still be on its way to the disk."""

    def __init__(self, record: StableRecord, outbox: Outbox) -> None:
        self.record = record
        self._outbox = outbox
        self._num_saves = 0
        self._waiting: dict[int, Continuation] = {}

    def history(self, history: str) -> HistoryRecord | None:
        """What is known of ``history``, None if nothing is."""
        for each in self.record.histories:
            if each.view.history == history:
                return each
        return None

    def with_history(self, newest: HistoryRecord) -> StableRecord:
        """The record with ``newest`` in place of what it has of the same history."""
        others = [h for h in self.record.histories if h.view.history != newest.view.history]
        return msgspec.structs.replace(self.record, histories=(*others, newest)[-MAX_HISTORIES:])

    def save(self, record: StableRecord, then: Continuation = ()) -> None:
        """Have ``record`` written; ``then`` comes back from ``written``."""
        self.record = record
        self._num_saves += 1
        self._waiting[self._num_saves] = then
        self._outbox.act(Save(self._num_saves, record))

    def is_waiting(self, then: Continuation) -> bool:
        """Whether ``then`` waits for the disk."""
        return any(each is then for each in self._waiting.values())

    def written(self, number: int) -> list[Continuation]:
        """Save ``number`` and all before it are on disk: what follows, in their order."""
        done = sorted(each for each in self._waiting if each <= number)
        return [self._waiting.pop(each) for each in done]
