"""The interface of strategies: how a flat float32 array becomes fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from potluck.codecs.codec import Bytes, Floats


class Strategy(ABC):
    """A way to compress gradients. Immutable and stateless: the residual belongs to the caller.

    Arrays are flat and contiguous. ``step`` is the number of the call, equal on all ranks: random
    choices follow from it. The result is the same on all machines and engines.
    """

    @abstractmethod
    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        """The payload that stands for ``source``, or with a residual for ``source + residual``.

        The residual becomes what the payload has lost, and zero where that is not finite.
        """

    @abstractmethod
    def decompress(self, payload: Bytes, count: int, step: int) -> Floats:
        """The ``count`` elements that the payload stands for, a new array."""

    def add_to(self, target: Floats, payload: Bytes, step: int) -> None:
        """Add what the payload stands for to ``target``."""
        target += self.decompress(payload, target.size, step)

    @abstractmethod
    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        """False if ``source`` or what the payload stands for may hold inf or NaN. Cheap: it reads
        the payload where that shows every such value."""
