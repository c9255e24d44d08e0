"""Classes: the labels of all shards, of which a shard may lack some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from potluck._core.context import DistributedContext
from potluck.estimators.rounds import Fit, State
from potluck.estimators.shards import Array, totals_of


def checked_labels(y: Any) -> Array:
    """The labels of a shard, of shape (n,). ValueError if they are no classes."""
    labels = column_or_1d(y, warn=True)
    if labels.dtype.kind in "mM":
        raise ValueError(f"the labels are of dtype {labels.dtype}: give numbers or strings")
    if len(labels):
        check_classification_targets(labels)
    return np.asarray(labels)


def facts_of(labels: Array) -> dict[str, Any]:
    """What the other ranks must know of this shard's labels."""
    return {"classes": np.unique(labels).tolist(), "label_dtype": labels.dtype.str}


def targets_of(y: Any, dtype: Any, *, is_classifier: bool) -> tuple[Array, dict[str, Any]]:
    """What the samples are trained on: labels, with their facts, or values of this ``dtype``."""
    if not is_classifier:
        return column_or_1d(y, warn=True).astype(dtype), {}
    labels = checked_labels(y)
    return labels, facts_of(labels)


def union(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sorted classes of all shards, and their dtype, as entries of a fit's state. ValueError if
    they have no order."""
    known = [row for row in rows if row["classes"]] or list(rows[:1])
    dtype = np.result_type(*(np.dtype(row["label_dtype"]) for row in known))
    kinds = {type(each).__name__ for row in known for each in row["classes"]}
    if len(kinds) > 1 and not kinds <= {"int", "float", "bool"}:
        raise ValueError(
            f"the shards have labels of the types {', '.join(sorted(kinds))}: give every rank "
            "labels of one type"
        )
    found = sorted({each for row in known for each in row["classes"]})
    return {"classes": found, "label_dtype": dtype.str}


def classes_of(state: Mapping[str, Any]) -> Array:
    """The sorted classes in the state of a fit, as the array ``classes_``."""
    return np.array(state["classes"], state["label_dtype"])


class ClassFit(Fit):
    """A fit of samples with labels, whose classes are known when the state has those of all
    ranks."""

    _codes: Array | None = None

    def codes(self, state: State) -> Array:
        """The number of each sample's class, int64 of shape (n,)."""
        if self._codes is None:
            assert self.shard.y is not None
            self._codes = np.searchsorted(classes_of(state), self.shard.y).astype(np.int64)
        return self._codes

    def samples(self, state: State) -> tuple[Array, Array, Array]:
        """The samples, the numbers of their classes, and their weights in float64."""
        X, weights = self.shard.X, self.shard.weights
        assert weights is not None
        return X, self.codes(state), weights.astype(np.float64, copy=False)


def weigh(
    ctx: DistributedContext, given: Any, state: State, codes: Array, weights: Array
) -> tuple[Array, Array]:
    """The factor of each class, float64 of shape (classes,), and the ``weights`` of each class's
    samples on all ranks, of this rank those with the classes ``codes``. A collective call.

    ``given`` is scikit-learn's ``class_weight``.
    """
    known = classes_of(state)
    totals = totals_of(codes, weights, len(known))
    ctx.all_reduce(totals)
    if given is None:
        return np.ones(len(known)), totals
    if isinstance(given, str):  # "balanced"
        balanced = totals.sum() / (len(known) * np.where(totals > 0, totals, 1.0))
        return np.asarray(balanced), totals
    return np.array([float(given.get(each, 1.0)) for each in known.tolist()]), totals
