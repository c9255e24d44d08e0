"""Packed trees, which other ranks send: what scikit-learn would follow blindly is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")

from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.tree._tree import NODE_DTYPE

from potluck import DistributedRandomForestTrainer, estimators
from potluck._core.context import DistributedContext
from potluck.estimators import forest_fit, trees
from support.shards import refusal

X, Y = load_iris(return_X_y=True)
FOREST = RandomForestClassifier(1, random_state=0).fit(X, Y)
NUM = FOREST.estimators_[0].tree_.node_count
LEAF = int(np.flatnonzero(FOREST.estimators_[0].tree_.children_left < 0)[0])


def packed() -> dict[str, Any]:
    return trees.pack(FOREST.estimators_[0], np.arange(3), 3)


def damaged(node: int, **fields: int) -> dict[str, Any]:
    """The tree with other fields of one node."""
    tree = packed()
    nodes = np.frombuffer(tree["nodes"].tobytes(), NODE_DTYPE).copy()
    for name, value in fields.items():
        nodes[name][node] = value
    return tree | {"nodes": np.frombuffer(nodes.tobytes(), np.uint8)}


def test_a_tree_is_the_same_after_its_way() -> None:
    tree = trees.unpack(packed(), trees.like(FOREST), 4, 3)
    assert np.array_equal(tree.predict(X), FOREST.estimators_[0].predict(X))
    assert tree.tree_.max_depth == FOREST.estimators_[0].tree_.max_depth


@pytest.mark.parametrize(
    ("hostile", "what"),
    [
        (damaged(0, left_child=10**9), "left_child of node 0 is 1000000000"),
        (damaged(0, right_child=NUM), f"right_child of node 0 is {NUM}"),
        (damaged(0, left_child=0), "left_child of node 0 is 0"),
        (damaged(0, left_child=-7), "left_child of node 0 is -7"),
        (damaged(0, right_child=-1), "right_child of node 0 is -1"),
        (damaged(LEAF, right_child=0), f"right_child of node {LEAF} is 0"),
        (damaged(LEAF, left_child=0, right_child=NUM - 1), f"left_child of node {LEAF} is 0"),
        (damaged(0, feature=4), "split by feature 4"),
        (damaged(0, feature=-1), "split by feature -1"),
        (packed() | {"max_depth": 0}, "max_depth is 0"),
        (packed() | {"max_depth": None}, "max_depth is None"),
        (packed() | {"values": np.zeros((NUM - 1, 1, 3))}, "values of shape"),
        (packed() | {"nodes": np.zeros(63, np.uint8)}, "no whole nodes"),
        (packed() | {"nodes": np.zeros(0, np.uint8), "values": np.zeros((0, 1, 3))}, "0 nodes"),
        (packed() | {"nodes": "x"}, "no whole nodes"),
        ({}, "no whole nodes"),
        (7, "no whole nodes"),
    ],
)
def test_a_hostile_tree_is_refused(hostile: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"a tree of a forest is damaged: .*{what}"):
        trees.unpack(hostile, trees.like(FOREST), 4, 3)


def test_a_fit_names_the_rank_that_sent_a_hostile_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def more_trees(self: Any, state: Any, count: int) -> list[Any]:
        return [damaged(0, left_child=10**9) if self.ctx.rank == 1 else packed()]

    monkeypatch.setattr(forest_fit.ShardsFit, "_more_trees", more_trees)

    def fit(ctx: DistributedContext, shard: Any) -> Any:
        return estimators.RandomForestClassifier(2, random_state=0, ctx=ctx).fit(*shard)

    parts = list(zip(np.split(X, [75]), np.split(Y, [75]), strict=True))
    text = refusal(parts, fit)
    assert "rank 1" in text
    assert "is damaged: the left_child of node 0 is 1000000000" in text


def test_a_trainer_refuses_the_parameters_of_a_hostile_tree() -> None:
    def refused(ctx: DistributedContext, shard: Any) -> None:
        trainer = DistributedRandomForestTrainer(ctx, 1, random_state=0)
        trainer.train_epoch(*shard)
        parameters = trainer.get_parameters()
        parameters["0.facts"][0] += 1
        trainer.set_parameters(parameters)

    assert "max_depth" in refusal([(X, Y)], refused)
