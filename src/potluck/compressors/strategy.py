"""The interface of strategies: how a float32 array becomes fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from potluck.codecs.codec import Bytes, Floats

Shape = tuple[int, ...]


class Strategy(ABC):
    """A way to compress gradients. Immutable and stateless: the residual belongs to the caller.

    Arrays are contiguous float32 arrays of any shape; ``DDP`` passes a bucket of several gradients
    as one flat array. ``step`` is the number of the call, equal on all ranks: random choices follow
    from it. The result is the same on all machines and engines, and the size of a payload follows
    from the shape.
    """

    start_step: int = 0
    """The first step of a training in which gradients are compressed."""

    def applies_to(self, shape: Shape) -> bool:
        """Whether a tensor of this shape is compressed. Others are sent as they are."""
        return True

    @abstractmethod
    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        """The payload that stands for ``source``, or with a residual for ``source + residual``.

        The residual, of the shape of ``source``, becomes what the payload has lost, and zero where
        that is not finite.
        """

    @abstractmethod
    def decompress(self, payload: Bytes, shape: Shape, step: int) -> Floats:
        """The array of this shape that the payload stands for, a new one."""

    def add_to(self, target: Floats, payload: Bytes, step: int) -> None:
        """Add what the payload stands for to ``target``, which may be float64."""
        target += self.decompress(payload, target.shape, step)

    @abstractmethod
    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        """False if ``source`` or what the payload stands for may hold inf or NaN. Cheap: it reads
        the payload where that shows every such value."""


def check_ratio(name: str, ratio: Any) -> None:
    """TypeError for what is no number, ValueError unless 0 < ``ratio`` <= 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise TypeError(f"{name}(ratio={ratio!r}): ratio must be a number")
    if not 0 < ratio <= 1:
        raise ValueError(f"{name}(ratio={ratio}): ratio must be above 0 and at most 1")


def check_seed(name: str, seed: Any) -> None:
    """TypeError for what is no int, ValueError for a negative one."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{name}(seed={seed!r}): seed must be an int")
    if seed < 0:
        raise ValueError(f"{name}(seed={seed}): seed must not be negative")
