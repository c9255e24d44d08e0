"""Fits of random forests: what all have in common, and forests whose trees grow on shards."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from sklearn import ensemble
from sklearn.base import is_classifier

from potluck.estimators import classes, trees
from potluck.estimators.rounds import DONE, Stage, State, refused
from potluck.estimators.shards import Array, Shard, seed_of, weights_of
from potluck.training.transfer import broadcast_state


class ForestFit(classes.ClassFit):
    """One fit: the stages that all forests begin with.

    A subclass has further stages; ``after_input`` names the first of them.
    """

    after_input = ""

    @property
    def is_classifier(self) -> bool:
        return bool(is_classifier(self.model))

    def stages(self) -> dict[str, Stage]:
        return {"weigh": self._weigh}

    def refuse(self, shard: Shard) -> None:
        """ValueError for parameters and samples that this kind of forest does not take."""

    def grow(self) -> State:
        """Grow the forest, and set the model to it; the last state."""
        model = self.model
        last = self.run({"seed": seed_of(model), "trees": []}, heavy=("trees",))
        num_classes = len(last["classes"])
        model.n_outputs_ = 1
        model._n_samples = last["num"]
        model.estimator_ = model.estimator
        model.estimators_ = [
            trees.unpack(packed, trees.like(model), model.n_features_in_, num_classes)
            for packed in last["trees"]
        ]
        return last

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        found = classes.union(rows) if self.is_classifier else {"classes": [], "label_dtype": ""}
        if len({row["nodes"] for row in rows}) > 1:
            raise ValueError(
                "the ranks have versions of scikit-learn with different trees: install the "
                "same version on every machine"
            )
        return {
            **found,
            "num": sum(row["num"] for row in rows),
            "stage": "weigh" if self.is_classifier else self.after_input,
            "factors": None,
        }

    def _weigh(self, state: State) -> State:
        """The factor of each class's weights."""
        given = self.model.class_weight
        if given is None:
            return {**state, "stage": self.after_input}
        codes = self.codes(state)
        factors, _ = classes.weigh(self.ctx, given, state, codes, np.ones(len(codes)))
        return {**state, "stage": self.after_input, "factors": factors}

    def targets(self, state: State) -> tuple[Array, Array | None]:
        """The values of this rank's samples, or the numbers of their classes; and their weights, if
        they have any."""
        shard = self.shard
        assert shard.y is not None
        if not self.is_classifier:
            return shard.y, shard.weights
        codes = self.codes(state)
        if state["factors"] is None:
            return codes, shard.weights
        ones = np.ones(len(codes)) if shard.weights is None else shard.weights
        return codes, ones * state["factors"][codes]

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        model = self.model
        finite = "allow-nan" if model.__sklearn_tags__().input_tags.allow_nan else True
        X, y = self.checked(
            *(X, y), dtype=np.float32, ensure_all_finite=finite, y_numeric=not self.is_classifier
        )
        y, facts = classes.targets_of(y, np.float64, is_classifier=self.is_classifier)
        own = None if weights is None else weights_of(weights, X).astype(np.float64)
        shard = Shard(X, y, own, facts | {"nodes": trees.node_format()})
        self.refuse(shard)
        return shard


class ShardsFit(ForestFit):
    """The fit of a forest whose trees grow on shards, and this rank's own forest."""

    after_input = "grow"

    own: Any = None
    """The forest on this rank's samples, which gets more trees round by round."""
    offered = (0, 0, 0)
    """Of the last round: the trees of the forest before it, and the range of this rank's trees in
    it."""

    def stages(self) -> dict[str, Stage]:
        return {**super().stages(), "grow": self._grow}

    def _grow(self, state: State) -> State:
        """Grow trees on every rank with samples, and send them to all ranks."""
        ctx, shard = self.ctx, self.shard
        jobs = _num_jobs(self.model.n_jobs)
        rows = ctx.all_gather(np.array([len(shard.X) > 0, jobs], np.int64))
        wanted = _shares(rows, self.model.n_estimators - len(state["trees"]))
        mine = self._more_trees(state, wanted[ctx.rank]) if wanted[ctx.rank] else []
        grown = list(state["trees"])
        for rank, count in enumerate(wanted):
            if not count:
                continue
            sent = broadcast_state(ctx, mine if rank == ctx.rank else None, rank, wanted=True)
            for each in sent:
                if fault := trees.fault_of(each, shard.X.shape[1], len(state["classes"])):
                    text = f"a tree of {ctx.group.describe(rank)} is damaged: {fault}"
                    return refused(state, ValueError(text))
            grown += sent
        is_last = len(grown) >= self.model.n_estimators
        return {**state, "stage": DONE if is_last else "grow", "trees": grown}

    def _more_trees(self, state: State, count: int) -> list[trees.Packed]:
        target, weights = self.targets(state)
        if self.own is None:
            self.own = self._forest(state)
        # Trees of a round that is repeated are used again.
        num_used = self._num_used(state)
        have = len(getattr(self.own, "estimators_", []))
        if have < num_used + count:
            self.own.set_params(n_estimators=num_used + count)
            self.own.fit(self.shard.X, target, sample_weight=weights)
        columns = getattr(self.own, "classes_", None)
        chosen = self.own.estimators_[num_used : num_used + count]
        packed = [trees.pack(tree, columns, len(state["classes"])) for tree in chosen]
        self.offered = (len(state["trees"]), num_used, num_used + count)
        return packed

    def _num_used(self, state: State) -> int:
        """The number of this rank's trees that earlier rounds have used."""
        at, before, after = self.offered
        return before if len(state["trees"]) == at else after

    def _forest(self, state: State) -> Any:
        base = (
            ensemble.RandomForestClassifier
            if self.is_classifier
            else ensemble.RandomForestRegressor
        )
        options = self.model.get_params(deep=False)
        for own in self.model.own_parameters:
            del options[own]
        options |= {"class_weight": None} if self.is_classifier else {}
        seed: Any = state["seed"]
        if self.ctx.world_size > 1 or state["trees"]:
            mixed = np.random.RandomState([seed, self.ctx.rank, len(state["trees"])])
            seed = int(mixed.randint(2**31 - 1))
        return base(**options | {"random_state": seed, "warm_start": True})


def _num_jobs(n_jobs: int | None) -> int:
    """The threads that scikit-learn's ``n_jobs`` stands for: -1 is one per core."""
    if n_jobs is None or n_jobs > 0:
        return n_jobs or 1
    return max(1, (os.cpu_count() or 1) + 1 + n_jobs)


def _shares(rows: Array, remaining: int) -> list[int]:
    """The trees that each rank grows in this round: ``rows`` are (has samples, jobs) by rank."""
    wanted = []
    for has_samples, jobs in rows.reshape(-1, 2):
        count = min(int(jobs), remaining) if has_samples else 0
        wanted.append(count)
        remaining -= count
    return wanted
