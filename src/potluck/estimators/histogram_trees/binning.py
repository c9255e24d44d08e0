"""Bins of features: the same for every cut of the samples into shards.

A feature with at most ``max_bins`` distinct values on all ranks has one bin for each of them. The
bins of any other feature end at its quantiles, which are values of samples: they are found exactly,
by bisection of the 32 bits of a float32 with counts of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from potluck.estimators.shards import Array

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

MOST_BINS = 255
"""A sample's bin is a uint8."""

_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True)
class Bins:
    """The smallest and the largest value of each bin on all ranks, both float32 of shape (features,
    bins). The rows of features with fewer bins end with infinity."""

    low: Array
    high: Array

    @property
    def num(self) -> int:
        """The most bins that a feature has."""
        return int(self.high.shape[1])

    def codes(self, X: Array) -> Array:
        """The bin of each value of ``X`` (n, features), uint8 of shape (features, n)."""
        found = np.empty(X.shape[::-1], np.uint8)
        for feature, high in enumerate(self.high):
            last = max(int(np.isfinite(high).sum()) - 1, 0)
            found[feature] = np.minimum(np.searchsorted(high, X[:, feature]), last)
        return found


def find_bins(ctx: DistributedContext, X: Array, max_bins: int) -> Bins:
    """The bins of the features of all ranks' ``X``, float32 of shape (n, features).

    A collective call. Cost: an all_gather of ``4 features (max_bins + 1)`` bytes per rank and, if a
    feature has more than ``max_bins`` distinct values, 32 all_reduces of ``8 max_bins`` bytes for
    each such feature. Memory: one sorted copy of ``X``.
    """
    columns = np.sort(np.ascontiguousarray(X.T) + np.float32(0), axis=1)  # no negative zeros
    features = len(columns)
    high = np.full((features, max_bins), np.inf, np.float32)
    values = _all_distinct(ctx, columns, max_bins)
    for feature, found in enumerate(values):
        if found is not None:
            high[feature, : len(found)] = found
    many = [feature for feature, found in enumerate(values) if found is None]
    if many:
        for feature, found in zip(many, _quantiles(ctx, columns[many], max_bins), strict=True):
            ends = np.unique(found)
            high[feature, : len(ends)] = ends
    high = np.ascontiguousarray(high[:, : max(1, int(np.isfinite(high).sum(axis=1).max()))])
    return Bins(_next_values(ctx, columns, high), high)


def _all_distinct(ctx: DistributedContext, columns: Array, max_bins: int) -> list[Array | None]:
    """The distinct values of each feature on all ranks; None if they are more than ``max_bins``."""
    own = np.full((len(columns), max_bins + 1), np.inf, np.float32)
    for feature, column in enumerate(columns):
        is_new = np.diff(column, prepend=-np.float32(np.inf)) > 0
        found = column[is_new][: max_bins + 1]
        own[feature, : len(found)] = found
    rows = ctx.all_gather(own)
    result: list[Array | None] = []
    for feature in range(len(columns)):
        found = np.unique(rows[:, feature])
        found = found[np.isfinite(found)]
        result.append(found if len(found) <= max_bins else None)
    return result


def _quantiles(ctx: DistributedContext, columns: Array, max_bins: int) -> Array:
    """The ``max_bins`` quantiles of all ranks' samples of each feature, the last of which is the
    largest value: float32 of shape (features, max_bins)."""
    num = int(ctx.all_reduce(np.array([columns.shape[1]]))[0])
    wanted = -(-np.arange(1, max_bins + 1) * num // max_bins)  # this many samples are not larger
    keys = _keys(columns)
    first = np.zeros((len(columns), max_bins), np.uint64)
    last = np.full_like(first, (1 << 32) - 1)
    for _ in range(32):
        middle = (first + last) // 2
        counts = np.array(
            [
                np.searchsorted(own, guess.astype(np.uint32), side="right")
                for own, guess in zip(keys, middle, strict=True)
            ],
            np.int64,
        )
        ctx.all_reduce(counts)
        is_enough = counts >= wanted
        last = np.where(is_enough, middle, last)
        first = np.where(is_enough, first, middle + np.uint64(1))
    return _values(last.astype(np.uint32))


def _next_values(ctx: DistributedContext, columns: Array, high: Array) -> Array:
    """The smallest value of each bin: the next value on all ranks after the end of the bin before
    it. Infinity where there is none."""
    ends = np.concatenate([np.full((len(high), 1), -np.inf, np.float32), high[:, :-1]], axis=1)
    found = np.full(high.shape, np.inf, np.float32)
    for feature, column in enumerate(columns):
        at = np.searchsorted(column, ends[feature], side="right")
        is_there = at < len(column)
        found[feature, is_there] = column[at[is_there]]
    return np.asarray(ctx.all_reduce(found, "min"))


def _keys(values: Array) -> Array:
    """Numbers that are ordered as the float32 ``values`` are."""
    bits = values.view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _values(keys: Array) -> Array:
    """The float32 numbers that have these keys."""
    return np.where(keys & _SIGN, keys ^ _SIGN, ~keys).astype(np.uint32).view(np.float32)
