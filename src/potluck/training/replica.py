"""What is trained, as the elastic loop sees it: a thing whose whole state can be taken and set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from potluck.checkpoint.state import State, fingerprint


class Replica(Protocol):
    """One rank's copy of the model, its optimizer, and whatever else must be equal on all ranks.

    ``device`` is its name for people.
    """

    device: str

    def capture(self) -> State:
        """Everything another rank needs to go on from here (see checkpoint/state.py)."""

    def restore(self, state: State) -> None:
        """Become what ``capture`` returned, maybe on another rank."""

    def fingerprint(self) -> str:
        """Hex SHA3-256 of what must be equal on all ranks, bit by bit."""

    def remember(self) -> None:
        """A step begins: keep what it may change before its commit."""

    def undo(self) -> None:
        """The step did not count: be as at the last ``remember``."""

    def weigh(self, weight: float) -> None:
        """This rank's part in the next global mean is ``weight``."""

    def capture_own(self) -> State:
        """What belongs to this rank alone: the state of its random generators."""

    def restore_own(self, state: State) -> None:
        """Become what ``capture_own`` returned on the same rank of an earlier group."""


@dataclass
class StateReplica:
    """A Replica out of two functions, for scripts without torch.

    ``get_state`` returns all of the state; it is compared between ranks as a whole. Steps must
    not change any of it before their commit.
    """

    get_state: Callable[[], State]
    set_state: Callable[[State], None]
    device: str = "cpu"

    def capture(self) -> State:
        return self.get_state()

    def restore(self, state: State) -> None:
        self.set_state(state)

    def fingerprint(self) -> str:
        return fingerprint(self.get_state())

    def remember(self) -> None:
        return None

    def undo(self) -> None:
        return None

    def weigh(self, weight: float) -> None:
        return None

    def capture_own(self) -> State:
        return None

    def restore_own(self, state: State) -> None:
        return None
