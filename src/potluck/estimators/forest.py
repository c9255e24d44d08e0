"""Random forests whose trees grow on shards."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from sklearn import ensemble
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.validation import validate_data

from potluck.context import DistributedContext
from potluck.estimators import classes, trees
from potluck.estimators.rounds import DONE, State, context_of, refused, run_rounds
from potluck.estimators.shards import (
    Array,
    OnShards,
    Shard,
    check,
    column_names,
    compare,
    totals_of,
    weights_of,
)
from potluck.training.transfer import broadcast_state


class RandomForestClassifier(OnShards, ensemble.RandomForestClassifier):
    """A random forest of classification trees, each of which grows on the samples of one rank.

    With samples on several ranks this is *not* the forest that scikit-learn grows on their union:
    a tree sees the samples of one shard only (bagging of shards). Shards should be random samples
    of about equal sizes; where each shard has its own part of the feature space, the trees of the
    other shards can't know that part. In a world of one it is scikit-learn's forest, bit by bit.

    ``fit`` leaves the whole forest on every rank; all ranks with samples grow equal numbers of
    trees. A class may be missing on a shard. ``predict`` and its kin are local. ``ctx`` is the
    context of the group; if None, that of ``potluck.init()``. One output; no ``oob_score``, no
    ``warm_start``, no sparse input.

    Cost: every tree is sent to all ranks, 64 bytes per node and 8 per node and class. A round grows
    ``n_jobs`` trees on each rank, and a lost worker costs one round.
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **ensemble.RandomForestClassifier._parameter_constraints,
        "class_weight": [StrOptions({"balanced"}), dict, None],
    }

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "gini",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: Any = "sqrt",
        max_leaf_nodes: int | None = None,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = True,
        n_jobs: int | None = None,
        random_state: Any = None,
        class_weight: Any = None,
        ccp_alpha: float = 0.0,
        max_samples: Any = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        super().__init__(
            n_estimators,
            criterion=criterion,
            max_depth=max_depth,
            min_samples_split=min_samples_split,
            min_samples_leaf=min_samples_leaf,
            min_weight_fraction_leaf=min_weight_fraction_leaf,
            max_features=max_features,
            max_leaf_nodes=max_leaf_nodes,
            min_impurity_decrease=min_impurity_decrease,
            bootstrap=bootstrap,
            n_jobs=n_jobs,
            random_state=random_state,
            class_weight=class_weight,
            ccp_alpha=ccp_alpha,
            max_samples=max_samples,
        )
        self.ctx = ctx

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> RandomForestClassifier:
        """Grow the forest from all ranks' ``X``, of shape (n, features), and ``y``, of shape (n,).

        A collective call. ``sample_weight`` has shape (n,).
        """
        with context_of(self.ctx) as ctx:
            last = _Fit(self, ctx, X, y, sample_weight).run()
        self.classes_ = classes.array_of(last["classes"], last["label_dtype"])
        self.n_classes_ = len(self.classes_)
        return self


class RandomForestRegressor(OnShards, ensemble.RandomForestRegressor):
    """A random forest of regression trees, each of which grows on the samples of one rank.

    All that is said of [RandomForestClassifier][potluck.estimators.RandomForestClassifier] holds
    here, too: with samples on several ranks it is another estimator than scikit-learn's forest on
    their union.
    """

    def __init__(
        self,
        n_estimators: int = 100,
        *,
        criterion: str = "squared_error",
        max_depth: int | None = None,
        min_samples_split: float = 2,
        min_samples_leaf: float = 1,
        min_weight_fraction_leaf: float = 0.0,
        max_features: Any = 1.0,
        max_leaf_nodes: int | None = None,
        min_impurity_decrease: float = 0.0,
        bootstrap: bool = True,
        n_jobs: int | None = None,
        random_state: Any = None,
        ccp_alpha: float = 0.0,
        max_samples: Any = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        super().__init__(
            n_estimators,
            criterion=criterion,
            max_depth=max_depth,
            min_samples_split=min_samples_split,
            min_samples_leaf=min_samples_leaf,
            min_weight_fraction_leaf=min_weight_fraction_leaf,
            max_features=max_features,
            max_leaf_nodes=max_leaf_nodes,
            min_impurity_decrease=min_impurity_decrease,
            bootstrap=bootstrap,
            n_jobs=n_jobs,
            random_state=random_state,
            ccp_alpha=ccp_alpha,
            max_samples=max_samples,
        )
        self.ctx = ctx

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> RandomForestRegressor:
        """Grow the forest from all ranks' ``X``, of shape (n, features), and ``y``, of shape (n,).

        A collective call. ``sample_weight`` has shape (n,).
        """
        with context_of(self.ctx) as ctx:
            _Fit(self, ctx, X, y, sample_weight).run()
        return self


class _Fit:
    """One fit: the stages, and this rank's shard and its own forest."""

    def __init__(self, model: Any, ctx: DistributedContext, X: Any, y: Any, weights: Any) -> None:
        self.model, self.ctx = model, ctx
        self.is_classifier = isinstance(model, RandomForestClassifier)
        self.checked = check(ctx, lambda: self._shard(X, y, weights))
        self.own: Any = None
        """The forest on this rank's samples, which gets more trees round by round."""
        self.offered = (0, 0, 0)
        """Of the last round: the trees of the forest before it, and the range of this rank's trees
        in it."""

    def run(self) -> State:
        model = self.model
        seed = model.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        stages = {"input": self._compare, "weigh": self._weigh, "grow": self._grow}
        last = run_rounds(
            self.ctx,
            type(model).__name__,
            {"seed": int(seed), "trees": []},
            stages,
            heavy=("trees",),
        )
        num_classes = len(last["classes"])
        model.n_outputs_ = 1
        model._n_samples = last["num"]
        model.estimator_ = model.estimator
        model.estimators_ = [
            trees.unpack(packed, trees.like(model), model.n_features_in_, num_classes)
            for packed in last["trees"]
        ]
        return last

    def _compare(self, state: State) -> State:
        """The shards fit together; the classes of all of them."""
        rows, problem = compare(self.ctx, self.checked, name=type(self.model).__name__)
        known: list[Any] = []
        label_dtype = ""
        if problem is None:
            try:
                if self.is_classifier:
                    known, label_dtype = classes.union(rows)
                formats = {row["nodes"] for row in rows}
                if len(formats) > 1:
                    raise ValueError(
                        "the ranks have versions of scikit-learn with different trees: install the "
                        "same version on every machine"
                    )
            except ValueError as error:
                problem = error
        if problem is not None:
            return refused(state, problem)
        num = sum(row["num"] for row in rows)
        after = {**state, "num": num, "classes": known, "label_dtype": label_dtype}
        return {**after, "stage": "weigh" if self.is_classifier else "grow", "factors": None}

    def _weigh(self, state: State) -> State:
        """The factor of each class's weights."""
        shard, given = self.checked.shard, self.model.class_weight
        if given is None:
            return {**state, "stage": "grow"}
        assert shard is not None
        known = classes.array_of(state["classes"], state["label_dtype"])
        codes = classes.encoded(_not_none(shard.y), known)
        totals = totals_of(codes, np.ones(len(codes)), len(known))
        self.ctx.all_reduce(totals)
        return {**state, "stage": "grow", "factors": classes.class_weights(given, known, totals)}

    def _grow(self, state: State) -> State:
        """Grow trees on every rank with samples, and send them to all ranks."""
        ctx, shard = self.ctx, self.checked.shard
        assert shard is not None
        jobs = _num_jobs(self.model.n_jobs)
        rows = ctx.all_gather(np.array([len(shard.X) > 0, jobs], np.int64))
        wanted = _shares(rows, self.model.n_estimators - len(state["trees"]))
        mine = self._more_trees(state, wanted[ctx.rank]) if wanted[ctx.rank] else []
        grown = list(state["trees"])
        for rank, count in enumerate(wanted):
            if count:
                grown += broadcast_state(ctx, mine if rank == ctx.rank else None, rank, wanted=True)
        is_last = len(grown) >= self.model.n_estimators
        return {**state, "stage": DONE if is_last else "grow", "trees": grown}

    def _more_trees(self, state: State, count: int) -> list[trees.Packed]:
        shard = self.checked.shard
        assert shard is not None
        target = shard.y
        weights = shard.weights
        if self.is_classifier:
            known = classes.array_of(state["classes"], state["label_dtype"])
            target = classes.encoded(_not_none(shard.y), known)
            if state["factors"] is not None:
                ones = np.ones(len(shard.X)) if weights is None else weights
                weights = ones * state["factors"][target]
        if self.own is None:
            self.own = self._forest(state)
        # Trees of a round that is repeated are used again.
        num_used = self._num_used(state)
        have = len(getattr(self.own, "estimators_", []))
        if have < num_used + count:
            self.own.set_params(n_estimators=num_used + count)
            self.own.fit(shard.X, target, sample_weight=weights)
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
        del options["ctx"]
        options |= {"class_weight": None} if self.is_classifier else {}
        seed: Any = state["seed"]
        if self.ctx.world_size > 1 or state["trees"]:
            mixed = np.random.RandomState([seed, self.ctx.rank, len(state["trees"])])
            seed = int(mixed.randint(2**31 - 1))
        return base(**options | {"random_state": seed, "warm_start": True})

    def _shard(self, X: Any, y: Any, weights: Any) -> Shard:
        model = self.model
        model._validate_params()
        finite = "allow-nan" if model.__sklearn_tags__().input_tags.allow_nan else True
        X, y = validate_data(
            *(model, X, y),
            dtype=np.float32,
            ensure_all_finite=finite,
            ensure_min_samples=0,
            y_numeric=not self.is_classifier,
        )
        facts = {"names": column_names(model), "nodes": trees.node_format()}
        if self.is_classifier:
            y = classes.checked_labels(y)
            facts |= classes.facts_of(y)
        else:
            y = column_or_1d(y, warn=True).astype(np.float64)
        own = None if weights is None else weights_of(weights, X).astype(np.float64)
        return Shard(X, y, own, facts)


def _num_jobs(n_jobs: int | None) -> int:
    """The threads that scikit-learn's ``n_jobs`` stands for: -1 is one per core."""
    if n_jobs is None or n_jobs > 0:
        return n_jobs or 1
    return max(1, (os.cpu_count() or 1) + 1 + n_jobs)


def _not_none(array: Array | None) -> Array:
    assert array is not None
    return array


def _shares(rows: Array, remaining: int) -> list[int]:
    """The trees that each rank grows in this round: ``rows`` are (has samples, jobs) by rank."""
    wanted = []
    for has_samples, jobs in rows.reshape(-1, 2):
        count = min(int(jobs), remaining) if has_samples else 0
        wanted.append(count)
        remaining -= count
    return wanted
