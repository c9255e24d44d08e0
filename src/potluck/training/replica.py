"""Replicas: a rank's copy of the trained state, as the elastic loop captures and restores it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from potluck.checkpoint.state import State, fingerprint


class Replica(Protocol):
    """One rank's copy of the model, its optimizer, and all other state that is equal on all ranks.

    ``device`` is a name for displays, for example ``cuda:0``. ``arithmetic`` says what rounds the
    updates: replicas with equal texts have equal bits after equal updates. A subclass leaves out
    the methods that it has no use for: they do nothing, and return None.
    """

    device: str
    arithmetic: str

    def capture(self) -> State:
        """The state that another rank needs to go on from here, as ``checkpoint/state.py`` defines
        states."""

    def fixed(self) -> State:
        """The part of ``capture()`` whose tensors have the same names, dtypes and shapes on all
        ranks at all times; another rank's state is compared with it before it is received."""
        return None

    def structure(self) -> dict[str, str]:
        """Descriptions of what has the same names, dtypes and shapes on all ranks, by name, in
        order; compared when a group has formed."""

    def restore(self, state: State) -> None:
        """Set the replica to ``state``, a result of ``capture`` on this or another rank."""

    def fingerprint(self) -> str:
        """Hex SHA-256 of the state that must be bit-identical on all ranks."""

    def shared(self) -> State:
        """The values that ``fingerprint`` is of. Its tensors have the same names, dtypes and shapes
        on all ranks."""

    def take_shared(self, state: State) -> None:
        """Set what ``shared()`` returns to ``state``, which is another rank's and differs by
        rounding."""

    def parameter_hash(self) -> str:
        """Hex SHA-256 of what was trained, for people to compare."""

    def remember(self, step: int) -> None:
        """At the start of step number ``step``: keep the state that the step may change before its
        commit."""
        return None

    def undo(self) -> None:
        """After a step that does not count: return to the state of the last ``remember``."""
        return None

    def weigh(self, weight: float) -> None:
        """Set this rank's weight in the next global mean of gradients."""
        return None

    def capture_own(self) -> State:
        """The state of this rank alone, for example of its random generators."""
        return None

    def restore_own(self, states: Sequence[State]) -> None:
        """Set this rank's own state to the first of ``states``, a result of ``capture_own`` of the
        same rank number. The others are of ranks that the world no longer has: what they owe to a
        sum over all ranks is added."""
        return None


@dataclass
class StateReplica(Replica):
    """A replica made of two functions, for scripts without torch.

    ``get_state()`` returns the whole state, which must be equal on all ranks; ``set_state(state)``
    sets it. A step must not change the state before its commit. ``describe()`` returns what
    ``structure`` does, for a state of fixed arrays. It has no ``fixed`` part, since arrays of a
    script may grow, and no state of this rank alone.
    """

    get_state: Callable[[], State]
    set_state: Callable[[State], None]
    device: str = "cpu"
    arithmetic: str = ""  # NumPy's elementwise operations round alike on all machines
    describe: Callable[[], dict[str, str]] = dict

    def capture(self) -> State:
        return self.get_state()

    def structure(self) -> dict[str, str]:
        return self.describe()

    def restore(self, state: State) -> None:
        self.set_state(state)

    def fingerprint(self) -> str:
        return fingerprint(self.get_state())

    def shared(self) -> State:
        return self.get_state()

    def take_shared(self, state: State) -> None:
        self.set_state(state)

    def parameter_hash(self) -> str:
        return self.fingerprint()
