"""Features with categories: the categories of all shards as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.utils import _safe_indexing, check_array, validation

from potluck.estimators.shards import Array


def find(model: Any, X: Any) -> Any:
    """Which features have categories by the model's parameter, bool; None if none has."""
    if hasattr(model, "_check_categorical_features"):  # scikit-learn 1.6
        return model._check_categorical_features(X)
    return validation._check_categorical_features(X, model.categorical_features)


def known_in(X: Any, is_categorical: Array, most: int) -> list[list[Any] | None]:
    """The categories of each feature of a shard, None for a feature without. ValueError if they
    have no order, or are more than ``most``."""
    return [
        _sorted(feature, set(_column(X, feature)), most) if is_one else None
        for feature, is_one in enumerate(is_categorical)
    ]


def union(rows: Sequence[Mapping[str, Any]], most: int) -> list[list[Any] | None] | None:
    """The categories of all shards' features; None if no feature has any. ValueError as of
    ``known_in``, and if the shards do not agree which features have some."""
    known = [row["categories"] for row in rows]
    if len({None if each is None else tuple(one is None for one in each) for each in known}) > 1:
        raise ValueError(
            "the ranks have categories in different features: give every rank data frames with the "
            "same dtypes, or name the features in categorical_features"
        )
    return known[0] and [
        None if values[0] is None else _sorted(feature, set().union(*values), most)
        for feature, values in enumerate(zip(*known, strict=True))
    ]


def encoded(X: Any, known: Sequence[Sequence[Any] | None]) -> Array:
    """``X`` as float64, with the numbers of categories; NaN for missing and unknown ones."""
    found = np.full((X.shape[0], len(known)), np.nan)
    plain = [feature for feature, each in enumerate(known) if each is None]
    if plain and len(found):
        options = {"dtype": np.float64, "ensure_all_finite": False}
        found[:, plain] = check_array(_safe_indexing(X, plain, axis=1), **options)
    for feature, categories in enumerate(known):
        if categories is not None:
            numbers = {each: number for number, each in enumerate(categories)}
            found[:, feature] = [numbers.get(each, np.nan) for each in _column(X, feature)]
    return found


def _column(X: Any, feature: int) -> list[Any]:
    return list(np.asarray(_safe_indexing(X, [feature], axis=1)).ravel().tolist())


def _sorted(feature: int, values: set[Any], most: int) -> list[Any]:
    """The categories of a feature, without what stands for a missing one."""
    values = {each for each in values if each is not None and each == each}
    if len(values) > most:
        raise ValueError(
            f"Categorical feature at index {feature} is expected to have a cardinality <= {most} "
            f"but actually has a cardinality of {len(values)}."
        )
    kinds = {type(each).__name__ for each in values}
    if not (kinds <= {"str"} or kinds <= {"bool", "int", "float"}):
        raise ValueError(
            f"the categories of feature {feature} are of the types {', '.join(sorted(kinds))}: "
            "give every rank categories that are all text, or all numbers"
        )
    return sorted(values)
