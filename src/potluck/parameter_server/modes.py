"""What a parameter server does with the gradients of its workers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from potluck._core.types import AnyCase


@dataclass(frozen=True, slots=True)
class Synchronous:
    """One update for each step, by the mean gradient of the workers.

    The first ``n - backup_workers`` gradients of the ``n`` workers count; a later one is dropped
    and counted (Chen et al., "Revisiting distributed synchronous SGD", 2016). ``automatic``: the
    update is made as soon as they are there; else by ``apply_gradients``.
    """

    backup_workers: int = 0
    automatic: bool = True

    def __post_init__(self) -> None:
        if self.backup_workers < 0:
            raise ValueError(f"backup_workers is {self.backup_workers}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """One update for each gradient, when it arrives.

    The staleness of a gradient is the number of updates since the pull of the parameters that it
    was computed on. No worker computes on parameters that are more than ``max_staleness`` updates
    old when its gradient is applied: a pull or a push that would lead there waits. 0: one worker
    at a time. None: eight for each worker, so that a worker may be eight times slower than the
    others before they wait for it.

    ``lr_by_staleness`` divides the learning rate of a gradient by its staleness, if that is above 1
    (Zhang et al., "Staleness-aware async-SGD", 2016).
    """

    max_staleness: int | None = None
    lr_by_staleness: bool = True

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness is {self.max_staleness}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class ElasticAveraging:
    """Workers and server pull each other.

    ``of="gradients"``: the server keeps a gradient, and makes it ``alpha * local + (1 - alpha) *
    global`` with each that arrives, and updates by that.

    ``of="parameters"``: each worker trains parameters of its own, and from time to time calls
    ``average_parameters``: worker and server move towards each other by ``alpha`` of their
    difference (Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", 2015,
    algorithm 1). Choose ``alpha`` near ``0.9 / n``.
    """

    alpha: float = 0.5
    of: str = "gradients"

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha!r}; it must be above 0 and at most 1")
        if self.of not in ("gradients", "parameters"):
            raise ValueError(f"of is {self.of!r}; it must be 'gradients' or 'parameters'")


Mode = Synchronous | Asynchronous | ElasticAveraging


class AggregationMethod(enum.Enum, metaclass=AnyCase):
    """The modes of a parameter server, each with its defaults."""

    SYNCHRONOUS = Synchronous()
    ASYNCHRONOUS = Asynchronous()
    ELASTIC_AVERAGING = ElasticAveraging()
