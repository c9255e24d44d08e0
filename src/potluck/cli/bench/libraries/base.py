"""The interface of a library under test, as a worker process uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Case(NamedTuple):
    """One collective on fixed buffers. ``call`` runs it once and returns when it has ended;
    ``result`` returns this rank's result of the last call as a NumPy array. ``nbytes`` is the
    memory that a user allocates: the input, and the output if that is another buffer.

    ``call`` should add little time: a ``partial``, or a lambda for calls with keywords, where a
    lambda is faster.
    """

    call: Callable[[], object]
    result: Callable[[], Floats]
    nbytes: int


class BenchLibrary(Protocol):
    """One rank of a group."""

    rank: int
    world_size: int

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        """``operation`` with root 0 on this rank's input; None if the library does not have it.

        Calls may overwrite ``mine``. Everything that all calls share is prepared here.
        """

    def barrier(self) -> object:
        """Return once all ranks have called it."""

    def describe(self) -> str:
        """The version, the engine and the algorithms that were chosen, in one short line."""

    def close(self) -> None:
        """Leave the group."""
