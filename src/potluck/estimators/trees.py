"""Trees of scikit-learn as plain arrays, to send and to keep without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.tree import DecisionTreeClassifier
from sklearn.tree._tree import NODE_DTYPE, Tree

Packed = dict[str, Any]


def node_format() -> str:
    """The fields of a node, which differ between versions of scikit-learn."""
    return str(NODE_DTYPE.descr)


def like(forest: Any) -> Any:
    """A tree with the parameters of the trees of ``forest``, not fitted."""
    options = {name: getattr(forest, name) for name in forest.estimator_params}
    return clone(forest.estimator).set_params(**options)


def pack(tree: Any, columns: Any, num_classes: int) -> Packed:
    """A fitted tree as a state: its nodes as bytes, its values as float64.

    For a classifier ``columns`` are the numbers of the tree's classes among all ``num_classes``;
    the values of the others are 0.
    """
    found = tree.tree_.__getstate__()
    values = found["values"]
    if num_classes and values.shape[2] != num_classes:
        values = np.zeros((*values.shape[:2], num_classes))
        values[:, :, columns] = found["values"]
    return {
        "nodes": np.frombuffer(found["nodes"].tobytes(), np.uint8),
        "values": np.ascontiguousarray(values),
        "max_depth": int(found["max_depth"]),
        "seed": int(tree.random_state),
    }


def packed(
    arrays: dict[str, Any], left: Any, right: Any, values: Any, max_depth: int, seed: int
) -> Packed:
    """A tree from arrays over its nodes, as a state. ``arrays`` has the other fields of a node by
    scikit-learn's names; the children of a leaf are -1. ``values`` has shape (nodes, classes), or
    (nodes, 1)."""
    nodes = np.zeros(len(left), NODE_DTYPE)
    for name, array in {"left_child": left, "right_child": right, **arrays}.items():
        nodes[name] = array
    is_leaf = nodes["left_child"] < 0
    nodes["feature"][is_leaf] = nodes["threshold"][is_leaf] = -2  # as scikit-learn's
    return {
        "nodes": np.frombuffer(nodes.tobytes(), np.uint8),
        "values": np.ascontiguousarray(values[:, None, :]),
        "max_depth": max_depth,
        "seed": seed,
    }


def unpack(packed: Packed, like: Any, features: int, num_classes: int) -> Any:
    """The tree that was packed, as a fitted estimator with the parameters of ``like``."""
    nodes = np.frombuffer(packed["nodes"].tobytes(), NODE_DTYPE)
    inner = Tree(features, np.array([max(num_classes, 1)], np.intp), 1)
    inner.__setstate__(
        {
            "max_depth": packed["max_depth"],
            "node_count": len(nodes),
            "nodes": nodes,
            "values": packed["values"],
        }
    )
    tree = like.set_params(random_state=packed["seed"])
    tree.n_features_in_, tree.n_outputs_, tree.tree_ = features, 1, inner
    tree.max_features_ = features
    if isinstance(tree, DecisionTreeClassifier):
        tree.n_classes_ = np.int64(num_classes)
        tree.classes_ = np.arange(num_classes, dtype=np.float64)
    return tree
