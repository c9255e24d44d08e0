"""What a library under test must do, in a worker process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Case(NamedTuple):
    """One collective on buffers that stay: ``call`` runs it once and waits for its end, ``result``
    is this rank's outcome of the last call as NumPy memory. ``nbytes`` of memory are the user's:
    the input, and the output where that is another buffer.

    ``call`` costs as little as Python can: a ``partial``, or with keywords a lambda, which then
    costs less.
    """

    call: Callable[[], object]
    result: Callable[[], Floats]
    nbytes: int


class BenchLibrary(Protocol):
    """One rank of a group."""

    rank: int
    world_size: int

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        """``operation`` on this rank's input, root 0; None if the library has no such thing.

        Calls may overwrite ``mine``. Whatever can be made once, for all calls, is made here.
        """

    def barrier(self) -> object:
        """Return once all ranks have called it."""

    def describe(self) -> str:
        """Version, engine, and what it chose: one short line."""

    def close(self) -> None:
        """Leave the group."""
