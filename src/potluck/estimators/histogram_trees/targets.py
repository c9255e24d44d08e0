"""The targets of trees: sums over samples that have the same bits in any order.

Every sum is of integers, and below 2**53, so that float64 holds it exactly. Weights and values that
are not integers are rounded to multiples of a *unit*, a power of two that follows from the largest
of them on all ranks and the number of samples: of 2**20 samples each keeps 32 bits, relative to the
largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from potluck.estimators.shards import Array

_BITS = 52
_LEAST_EXPONENT = -1000


def unit_of(largest: float, num: float) -> float:
    """The unit in which the sum of ``num`` numbers up to ``largest`` is below 2**52."""
    exponent = math.frexp(largest)[1] + math.frexp(num)[1] - _BITS
    return math.ldexp(1.0, max(exponent, _LEAST_EXPONENT))


def in_units(numbers: Array, unit: float) -> Array:
    """``numbers`` in units, rounded to integers, float64."""
    return np.asarray(np.rint(numbers / unit))


@dataclass(frozen=True)
class Classes:
    """The targets of classification: the number of each sample's class, int64 of shape (n,).

    A sum has the weight of each class, in ``unit``. ``weights`` are integers, float64 of shape
    (n,); None stands for ones.
    """

    numbers: Array
    num: int
    criterion: str
    weights: Array | None = None
    unit: float = 1.0

    @property
    def width(self) -> int:
        """The numbers of a sum."""
        return self.num

    def sums(self, groups: Array, num_groups: int, rows: Array, times: Array) -> Array:
        """The sum over the samples ``rows`` of each group, of shape (groups, classes)."""
        weights = times if self.weights is None else times * self.weights[rows]
        cells = groups * self.num + self.numbers[rows]
        found = np.bincount(cells, weights=weights, minlength=num_groups * self.num)
        return found.astype(np.float64, copy=False).reshape(num_groups, self.num)

    def totals(self, groups: Array, num_groups: int, rows: Array, times: Array) -> Array:
        """As ``sums``."""
        return self.sums(groups, num_groups, rows, times)

    def extremes(self, groups: Array, num_groups: int, rows: Array) -> None:
        """None: the totals tell whether a node is pure."""

    def is_pure(self, totals: Array, extremes: Array | None) -> Array:
        return np.asarray(totals.max(axis=1) == totals.sum(axis=1))

    def weight(self, sums: Array) -> Array:
        return np.asarray(sums.sum(axis=1) * self.unit)

    def quality(self, sums: Array) -> Array:
        """The weight times one minus the impurity (gini), or times minus the impurity (entropy)."""
        weight = sums.sum(axis=1)
        if self.criterion == "gini":
            return np.asarray((sums * sums).sum(axis=1) / weight * self.unit)
        share = sums / weight[:, None]
        logs = np.log2(share, out=np.zeros_like(share), where=share > 0)
        return np.asarray((sums * logs).sum(axis=1) * self.unit)

    def impurity(self, totals: Array) -> Array:
        best = 1.0 if self.criterion == "gini" else 0.0
        return np.maximum(best - self.quality(totals) / self.weight(totals), 0.0)

    def values(self, totals: Array) -> Array:
        """The share of each class, of shape (nodes, classes)."""
        return np.asarray(totals / totals.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Values:
    """The targets of regression. ``moments`` has for each sample its weight, the weight times its
    value's distance from ``center``, and the weight times the square of that, each as integers in
    its unit of ``units``: float64 of shape (3, n). ``y`` are the values themselves.

    A sum has the first two, totals have all three.
    """

    y: Array
    moments: Array
    units: tuple[float, float, float]
    center: float

    @property
    def width(self) -> int:
        """The numbers of a sum."""
        return 2

    def sums(self, groups: Array, num_groups: int, rows: Array, times: Array) -> Array:
        """The sum over the samples ``rows`` of each group, of shape (groups, 2)."""
        return self._moments(2, groups, num_groups, rows, times)

    def totals(self, groups: Array, num_groups: int, rows: Array, times: Array) -> Array:
        """As ``sums``, of shape (groups, 3)."""
        return self._moments(3, groups, num_groups, rows, times)

    def _moments(
        self, num: int, groups: Array, num_groups: int, rows: Array, times: Array
    ) -> Array:
        found = np.empty((num_groups, num))
        for column in range(num):
            weights = times * self.moments[column, rows]
            found[:, column] = np.bincount(groups, weights=weights, minlength=num_groups)
        return found

    def extremes(self, groups: Array, num_groups: int, rows: Array) -> Array:
        """The largest value of each group, and the largest negative one, of shape (groups, 2)."""
        found = np.full((num_groups, 2), -np.inf)
        np.maximum.at(found[:, 0], groups, self.y[rows])
        np.maximum.at(found[:, 1], groups, -self.y[rows])
        return found

    def is_pure(self, totals: Array, extremes: Array | None) -> Array:
        assert extremes is not None
        return np.asarray(extremes[:, 0] == -extremes[:, 1])

    def weight(self, sums: Array) -> Array:
        return np.asarray(sums[:, 0] * self.units[0])

    def quality(self, sums: Array) -> Array:
        """The weight times the square of the mean."""
        total = sums[:, 1] * self.units[1]
        return np.asarray(total * total / self.weight(sums))

    def impurity(self, totals: Array) -> Array:
        weight = self.weight(totals)
        squares = totals[:, 2] * self.units[2] - self.quality(totals)
        return np.maximum(squares / weight, 0.0)

    def values(self, totals: Array) -> Array:
        """The mean value, of shape (nodes, 1)."""
        mean = totals[:, 1] * self.units[1] / self.weight(totals)
        return np.asarray(self.center + mean)[:, None]


Targets = Classes | Values
