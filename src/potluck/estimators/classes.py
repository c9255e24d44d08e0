"""Classes: the labels of all shards, of which a shard may lack some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from potluck.estimators.shards import Array, Checked


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


def union(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], str]:
    """The sorted classes of all shards, and their dtype. ValueError if they have no order."""
    known = [row for row in rows if row["classes"]] or list(rows[:1])
    dtype = np.result_type(*(np.dtype(row["label_dtype"]) for row in known))
    kinds = {type(each).__name__ for row in known for each in row["classes"]}
    if len(kinds) > 1 and not kinds <= {"int", "float", "bool"}:
        raise ValueError(
            f"the shards have labels of the types {', '.join(sorted(kinds))}: give every rank "
            "labels of one type"
        )
    found = sorted({each for row in known for each in row["classes"]})
    return found, dtype.str


def array_of(classes: list[Any], dtype: str) -> Array:
    """The sorted classes as the array ``classes_``."""
    return np.array(classes, dtype)


def encoded(labels: Array, classes: Array) -> Array:
    """The number of each label's class, int64 of shape (n,)."""
    return np.searchsorted(classes, labels).astype(np.int64)


class CodedShard:
    """A shard's samples with the numbers of their classes, which are known when the state of the
    fit has the classes of all ranks."""

    def __init__(self, checked: Checked) -> None:
        self._checked = checked
        self._codes: Array | None = None

    def of(self, state: Mapping[str, Any]) -> tuple[Array, Array, Array]:
        """The samples, the numbers of their classes, and their weights in float64."""
        shard = self._checked.shard
        assert shard is not None
        assert shard.y is not None
        assert shard.weights is not None
        if self._codes is None:
            known = array_of(state["classes"], state["label_dtype"])
            self._codes = encoded(shard.y, known)
        return shard.X, self._codes, shard.weights.astype(np.float64, copy=False)


def class_weights(given: Any, classes: Array, totals: Array) -> Array:
    """The factor of each class, float64 of shape (classes,).

    ``given`` is scikit-learn's ``class_weight``, ``totals`` the weights of each class's samples on
    all ranks.
    """
    if given is None:
        return np.ones(len(classes))
    if isinstance(given, str):  # "balanced"
        return np.asarray(totals.sum() / (len(classes) * np.where(totals > 0, totals, 1.0)))
    return np.array([float(given.get(each, 1.0)) for each in classes.tolist()])
