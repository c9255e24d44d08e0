"""The interface of strategies: how a float32 array becomes fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from potluck._core.codecs.codec import Bytes, Floats

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


def text_of(strategy: Strategy) -> str:
    """The class with its options that are numbers or text: equal for equal strategies on all ranks
    and in all processes, where a ``repr`` may hold addresses."""
    plain = int | float | str | bytes | None
    options = getattr(strategy, "__dict__", {}).items()
    shown = ", ".join(f"{name}={value!r}" for name, value in options if isinstance(value, plain))
    return f"{type(strategy).__name__}({shown})"
