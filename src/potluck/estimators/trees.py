"""Trees of scikit-learn as plain arrays, to send and to keep without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE
from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor
from sklearn.tree import DecisionTreeClassifier
from sklearn.tree._tree import NODE_DTYPE, TREE_LEAF, Tree

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


def packed(arrays: dict[str, Any], left: Any, right: Any, values: Any, seed: int) -> Packed:
    """A tree from arrays over its nodes, as a state. ``arrays`` has the other fields of a node by
    scikit-learn's names; the children of a leaf are -1. ``values`` has shape (nodes, classes), or
    (nodes, 1)."""
    nodes = np.zeros(len(left), NODE_DTYPE)
    for name, array in {"left_child": left, "right_child": right, **arrays}.items():
        nodes[name] = array
    is_leaf = nodes["left_child"] == TREE_LEAF
    nodes["feature"][is_leaf] = nodes["threshold"][is_leaf] = -2  # as scikit-learn's
    return {
        "nodes": np.frombuffer(nodes.tobytes(), np.uint8),
        "values": np.ascontiguousarray(values[:, None, :]),
        "max_depth": _depth(nodes),
        "seed": seed,
    }


def unpack(packed: Packed, like: Any, features: int, num_classes: int) -> Any:
    """The tree that was packed, as a fitted estimator with the parameters of ``like``. ValueError
    if ``packed`` has a fault (``fault_of``)."""
    if fault := fault_of(packed, features, num_classes):
        raise ValueError(f"a tree of a forest is damaged: {fault}")
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


def fault_of(packed: Any, features: int, num_classes: int) -> str:
    """What is wrong with a packed tree, which may be untrusted; empty if nothing is.

    scikit-learn follows children and features without a check, and takes memory for paths by
    ``max_depth``: a wrong one would have it read or write beyond its arrays, or run for ever.
    """
    try:
        data, values, max_depth = packed["nodes"], packed["values"], packed["max_depth"]
        nodes = np.frombuffer(data.tobytes(), NODE_DTYPE)
        shape = values.shape
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"it has no whole nodes and values ({error!r:.100})"
    if not len(nodes) or shape != (len(nodes), 1, max(num_classes, 1)):
        return f"its {len(nodes)} nodes have values of shape {shape}, for {num_classes} classes"
    is_leaf = nodes["left_child"] == TREE_LEAF
    for side in ("left_child", "right_child"):
        child = nodes[side]
        is_behind = (child > np.arange(len(nodes))) & (child < len(nodes))
        for node in np.flatnonzero(~np.where(is_leaf, child == TREE_LEAF, is_behind))[:1]:
            return (
                f"the {side} of node {node} is {child[node]}; children lie behind their parent and "
                f"within the {len(nodes)} nodes, those of a leaf are -1"
            )
    feature = nodes["feature"]
    for node in np.flatnonzero(~is_leaf & ((feature < 0) | (feature >= features)))[:1]:
        return f"node {node} is split by feature {feature[node]}, and there are {features}"
    if max_depth != (depth := _depth(nodes)):
        return f"its max_depth is {max_depth!r:.40}, and its nodes have {depth} levels"
    return ""


def _depth(nodes: Any) -> int:
    """The number of levels below the root, of nodes that lie behind their parents."""
    depth, level = 0, np.zeros(1, np.int64)
    while len(level := level[nodes["left_child"][level] != TREE_LEAF]):
        level = np.unique([nodes["left_child"][level], nodes["right_child"][level]])
        depth += 1
    return depth


# -------------------------------------------------------------------- boosted trees


def boosted_format() -> str:
    """The fields of a node of a boosted tree, which differ between versions of scikit-learn."""
    return str(PREDICTOR_RECORD_DTYPE.descr)


def pack_boosted(tree: Any) -> Packed:
    """A TreePredictor as a state: its nodes as bytes, its sets of categories as uint32."""
    return {
        "nodes": np.frombuffer(tree.nodes.tobytes(), np.uint8),
        "binned": np.array(tree.binned_left_cat_bitsets),
        "raw": np.array(tree.raw_left_cat_bitsets),
    }


def unpack_boosted(packed: Packed, features: int) -> Any:
    """The TreePredictor that was packed. ValueError if it is damaged: scikit-learn follows
    children, features and sets without a check."""
    nodes = np.frombuffer(packed["nodes"].tobytes(), PREDICTOR_RECORD_DTYPE).copy()
    binned, raw = packed["binned"], packed["raw"]
    at, num = np.flatnonzero(nodes["is_leaf"] == 0), len(nodes)
    is_sound = num > 0 and binned.shape == raw.shape == (len(raw), 8)
    for name, least, end in (("left", at, num), ("right", at, num), ("feature_idx", -1, features)):
        is_sound &= bool(((nodes[name][at] > least) & (nodes[name][at] < end)).all())
    sets = nodes["bitset_idx"][at][nodes["is_categorical"][at] != 0]
    if not is_sound or (sets >= len(raw)).any():
        raise ValueError(
            f"a boosted tree of {num} nodes is damaged: children, features or sets out of bounds"
        )
    return TreePredictor(nodes, binned, raw)
