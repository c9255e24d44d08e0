"""Bins of features: the same for every cut of the samples into shards.

A feature with at most ``max_bins`` distinct values on all ranks has one bin for each of them. The
bins of any other feature end at its quantiles, which are values of samples: they are found exactly,
by bisection of the bits of a float with counts of all ranks. Missing values (NaN) are in no bin.
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


@dataclass(frozen=True)
class Bins:
    """The smallest and the largest value of each bin on all ranks, both of shape (features, bins)
    and of the samples' dtype. The rows of features with fewer bins end with infinity."""

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

    def thresholds(self, feature: int) -> Array:
        """The middles between the bins of ``feature``, ascending: a value up to the first one is in
        the first bin. float64."""
        low, high = (each[feature, np.isfinite(each[feature])] for each in (self.low, self.high))
        return np.asarray(high[:-1] / 2 + low[1:] / 2, np.float64)


def find_bins(ctx: DistributedContext, X: Array, max_bins: int) -> Bins:
    """The bins of the features of all ranks' ``X``, float32 or float64 of shape (n, features), of
    one dtype on all ranks. Infinite values count as the largest finite ones.

    A collective call. Cost: an all_gather of ``features (max_bins + 1)`` values per rank and, if a
    feature has more than ``max_bins`` distinct values, for each bit of a value an all_reduce of
    ``8 max_bins`` bytes for each such feature. Memory: one sorted copy of ``X``.
    """
    table = np.sort(np.ascontiguousarray(X.T) + X.dtype.type(0), axis=1)  # no negative zeros
    largest = np.finfo(X.dtype).max
    np.clip(table, -largest, largest, out=table)
    columns = [row[: len(row) - np.isnan(row).sum()] for row in table]
    features = len(columns)
    high = np.full((features, max_bins), np.inf, X.dtype)
    values = _all_distinct(ctx, columns, max_bins)
    for feature, found in enumerate(values):
        if found is not None:
            high[feature, : len(found)] = found
    many = [feature for feature, found in enumerate(values) if found is None]
    if many:
        found_in_many = _quantiles(ctx, [columns[feature] for feature in many], max_bins)
        for feature, found in zip(many, found_in_many, strict=True):
            ends = np.unique(found)
            high[feature, : len(ends)] = ends
    high = np.ascontiguousarray(high[:, : max(1, int(np.isfinite(high).sum(axis=1).max()))])
    return Bins(_next_values(ctx, columns, high), high)


def _all_distinct(
    ctx: DistributedContext, columns: list[Array], max_bins: int
) -> list[Array | None]:
    """The distinct values of each feature on all ranks; None if they are more than ``max_bins``."""
    own = np.full((len(columns), max_bins + 1), np.inf, columns[0].dtype)
    for feature, column in enumerate(columns):
        is_new = column[1:] != column[:-1]
        is_new = np.concatenate([np.ones(min(1, len(column)), bool), is_new])
        found = column[is_new][: max_bins + 1]
        own[feature, : len(found)] = found
    rows = ctx.all_gather(own)
    result: list[Array | None] = []
    for feature in range(len(columns)):
        found = np.unique(rows[:, feature])
        found = found[np.isfinite(found)]
        result.append(found if len(found) <= max_bins else None)
    return result


def _quantiles(ctx: DistributedContext, columns: list[Array], max_bins: int) -> Array:
    """The ``max_bins`` quantiles of all ranks' samples of each feature, the last of which is the
    largest value, of shape (features, max_bins)."""
    num = ctx.all_reduce(np.array([[len(column)] for column in columns], np.int64))
    wanted = -(-np.arange(1, max_bins + 1) * num // max_bins)  # this many samples are not larger
    keys = [_keys(column) for column in columns]
    dtype = keys[0].dtype
    first = np.zeros((len(columns), max_bins), np.uint64)
    last = np.full_like(first, np.iinfo(dtype).max)
    for _ in range(8 * dtype.itemsize):
        middle = first + (last - first) // np.uint64(2)
        counts = np.array(
            [
                np.searchsorted(own, guess.astype(dtype), side="right")
                for own, guess in zip(keys, middle, strict=True)
            ],
            np.int64,
        )
        ctx.all_reduce(counts)
        is_enough = counts >= wanted
        last = np.where(is_enough, middle, last)
        first = np.where(is_enough, first, middle + np.uint64(1))
    return _values(last.astype(dtype))


def _next_values(ctx: DistributedContext, columns: list[Array], high: Array) -> Array:
    """The smallest value of each bin: the next value on all ranks after the end of the bin before
    it. Infinity where there is none."""
    ends = np.concatenate([np.full((len(high), 1), -np.inf, high.dtype), high[:, :-1]], axis=1)
    found = np.full_like(high, np.inf)
    for feature, column in enumerate(columns):
        at = np.searchsorted(column, ends[feature], side="right")
        is_there = at < len(column)
        found[feature, is_there] = column[at[is_there]]
    return np.asarray(ctx.all_reduce(found, "min"))


def _keys(values: Array) -> Array:
    """Unsigned integers of the same size that are ordered as the floats ``values`` are."""
    bits = values.view(f"u{values.itemsize}")
    sign = bits.dtype.type(1 << 8 * bits.itemsize - 1)
    return np.where(bits & sign, ~bits, bits | sign)


def _values(keys: Array) -> Array:
    """The floats that have these keys."""
    sign = keys.dtype.type(1 << 8 * keys.itemsize - 1)
    return np.where(keys & sign, keys ^ sign, ~keys).view(f"f{keys.itemsize}")
