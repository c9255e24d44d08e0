"""One rank's part of a round, and its report to the other ranks. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.checkpoint.state import State
from potluck.training.ledger import Deal, Span


@dataclass(eq=False, slots=True)
class Report:
    """One rank's work in a round: ``num_samples`` from offset ``start`` in ``num_steps``.

    ``ends``: Ctrl-C ends the training, with a checkpoint. ``num_recent``: of a round without
    samples, which reduces all fragments, how many this rank has computed in the rounds whose
    changes are in it.
    """

    number: int
    start: int = 0
    num_samples: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    inner_hash: int = 0
    saves: bool = False
    stops: bool = False
    ends: bool = False
    num_recent: int = 0

    def row(self) -> NDArray[np.float64]:
        """The report as numbers; ``of`` is the inverse."""
        return np.array([getattr(self, each.name) for each in fields(Report)], np.float64)

    @classmethod
    def of(cls, row: Any) -> Report:
        return cls(*(kind(each) for kind, each in zip(_KINDS, row.tolist(), strict=True)))

    @property
    def span(self) -> Span:
        return self.start, self.start + self.num_samples


_KINDS = (int, int, int, int, float, int, bool, bool, bool, int)


@dataclass(eq=False, slots=True)
class RoundPart(Report):
    """This rank's part of a round that is not committed yet, which is also its report.

    ``batches`` are the offsets of its steps, empty if others were dealt the round before this rank
    was a member. ``is_urgent``: the group has changed since it was dealt, so its exchange is not
    delayed. ``epoch`` is the group in which the exchange was started, 0 before; ``dealt_in`` is the
    one in which ``batches`` were dealt. ``num_dealt``: the samples that all ranks have in it.
    ``is_weighed``: the weights in it add up to 1.
    """

    deal: Deal = field(kw_only=True)
    batches: list[Span] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_weight: int = 0
    is_closed: bool = False
    is_urgent: bool = False
    is_delayed: bool = False
    epoch: int = 0
    dealt_in: int = 0
    num_dealt: int = 0
    is_weighed: bool = False
    wait: Callable[[], list[Report]] | None = None
    reports: list[Report] = field(default_factory=list)
    inner: State = None

    @property
    def loss(self) -> float:
        return self.loss_sum / self.loss_weight if self.loss_weight else math.nan

    def fill(self, batches: list[Span], epoch: int) -> None:
        """The steps that this rank was dealt, in the group ``epoch``."""
        self.batches, self.dealt_in = batches, epoch
        self.start = batches[0][0] if batches else 0

    def drop(self) -> None:
        """Forget what this rank has computed, for its samples were dealt to other ranks."""
        self.fill([], 0)
        self.num_samples = self.num_steps = self.loss_weight = 0
        self.seconds = self.loss_sum = 0.0


WINDOW = 4
"""The number of rounds whose times count."""

SLACK = 0.1
"""The least time beyond the median, as a fraction of it, since equal machines differ a little."""


class Arrivals:
    """The seconds that the ranks took for the steps of the last rounds."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, ...]] = deque(maxlen=WINDOW)

    def add(self, seconds: Iterable[float]) -> None:
        """Add the times of a round, of the ranks that computed in it."""
        arrived = tuple(each for each in seconds if each > 0)
        if arrived:
            self._rounds.append(arrived)

    @property
    def longest_s(self) -> float:
        """The longest time known, 0 without any."""
        return max((max(each) for each in self._rounds), default=0.0)

    def deadline_s(self, num_deviations: float) -> float | None:
        """Median + ``num_deviations`` median absolute deviations; None before the first round."""
        times = [each for arrived in self._rounds for each in arrived]
        if not times:
            return None
        middle = statistics.median(times)
        deviation = statistics.median(abs(each - middle) for each in times)
        return middle + max(num_deviations * deviation, SLACK * middle)
