"""Fits of boosted trees: the rounds, each of which adds one iteration's trees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from sklearn.ensemble._hist_gradient_boosting._gradient_boosting import _update_raw_predictions
from sklearn.ensemble._hist_gradient_boosting.binning import _BinMapper
from sklearn.ensemble._hist_gradient_boosting.grower import TreeGrower
from sklearn.utils import validation
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads

from potluck.estimators import categories, classes, trees
from potluck.estimators.forest_fit import ForestFit
from potluck.estimators.histogram_trees.best_first import Samples, Tree, grow
from potluck.estimators.histogram_trees.binning import Bins, find_bins
from potluck.estimators.histogram_trees.growing import mixed
from potluck.estimators.histogram_trees.targets import in_units, unit_of
from potluck.estimators.rounds import DONE, Stage, State, from_first, refused
from potluck.estimators.shards import Array, Shard, seed_of, weights_of

_AUTO = 10_000
"""With more samples ``early_stopping="auto"`` stops early, as in scikit-learn."""

_BITS = 22
"""Gradients are rounded to this many bits: integers in float32, whose sums over up to ``2**31``
samples are integers in float64."""


@dataclass
class _Part:
    """Samples of this rank, for training or for validation: codes of bins, targets, weights, and
    the sums of the trees so far, float64 of shape (n, trees)."""

    codes: Array
    y: Array
    weights: Array
    raw: Array


class BoostingFit(ForestFit):
    """The fit of boosted trees, and this rank's samples in bins."""

    after_input = "bin"
    _frame: Any = None
    _parts: tuple[_Part, _Part] | None = None
    _num_added = 0
    _grown: tuple[Any, list[Tree]] = (None, [])

    def stages(self) -> dict[str, Stage]:
        return {**super().stages(), "bin": self._bin, "boost": self._boost}

    def grow(self) -> State:
        """Grow the trees, and set the model to them; the last state."""
        model = self.model
        first = {"seed": seed_of(model), "trees": [], "train": [], "validation": []}
        last = self.run(first, heavy=("trees", "low", "high"))
        known, model._n_features = last["categories"], model.n_features_in_
        model.is_categorical_ = known and np.array([each is not None for each in known])
        model._is_categorical_remapped = model.is_categorical_
        model.known_categories_, model._preprocessor = known, None
        if last["has_sample_weight"]:
            model._fitted_with_sw = True  # scikit-learn's partial dependence can't use counts then
        if self.is_classifier:
            model.classes_ = classes.classes_of(last)
        model._loss, model._bin_mapper = self._loss(last), self._mapper(last)
        model._baseline_prediction = last["baseline"][None]
        unpack = partial(trees.unpack_boosted, features=model.n_features_in_)
        model._predictors = [[unpack(tree) for tree in some] for some in last["trees"]]
        model.do_early_stopping_ = self._stops_early(last)
        model.train_score_ = np.array(last["train"])
        model.validation_score_ = np.array(last["validation"])
        return last

    # ------------------------------------------------------------ input

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        model, is_numeric, known = self.model, not self.is_classifier, None
        self.check_parameters()
        has_some = categories.find(model, X)
        if has_some is None:
            options = {"dtype": np.float64, "ensure_all_finite": False, "y_numeric": is_numeric}
            X, y = self.checked(X, y, **options)
        else:
            self._frame = validation.validate_data(model, X, skip_check_array=True)
            y = validation._check_y(y, y_numeric=is_numeric, estimator=model)
            validation.check_consistent_length(X, y)
            known = categories.known_in(X, has_some, model.max_bins)
            X = categories.encoded(X, known)
        signs = validation._check_monotonic_cst(model, model.monotonic_cst)
        if has_some is not None and signs[has_some].any():
            raise ValueError("Categorical features cannot have monotonic constraints.")
        together = model._check_interaction_cst(X.shape[1]) or ()
        y, facts = classes.targets_of(y, np.float64, is_classifier=self.is_classifier)
        if is_numeric and not model._get_loss(None).in_y_true_range(y):
            raise ValueError(f"loss={model.loss!r} needs y > 0 (gamma), or y >= 0 (poisson)")
        own = None if weights is None else weights_of(weights, X)
        facts |= {"nodes": trees.boosted_format(), "categories": known, "weighted": own is not None}
        facts["monotonic_cst"] = signs.tolist()
        facts["interaction_cst"] = sorted(sorted(map(int, each)) for each in together)
        return Shard(X, y, own, facts)

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        found = super().agree(state, rows)
        if found["num"] >= 1 << 31:
            raise ValueError(f"{found['num']} samples are too many: sums of 2**31 are exact")
        for name in ("monotonic_cst", "interaction_cst"):
            if any(row[name] != rows[0][name] for row in rows):
                raise ValueError(f"the ranks have different values of {name}: give all the same")
        self._loss({**found, "weighted": True})
        self.model._validate_parameters()
        given = any(row["weighted"] for row in rows)
        weighted = bool(given or getattr(self.model, "class_weight", None))
        known = categories.union(rows, self.model.max_bins)
        return {**found, "categories": known, "weighted": weighted, "has_sample_weight": given}

    # ------------------------------------------------------------ what follows from a state

    def _loss(self, state: State) -> Any:
        num = len(state["classes"])
        self.model.n_trees_per_iteration_ = num if num > 2 else 1
        return self.model._get_loss(sample_weight=True if state["weighted"] else None)

    def _stops_early(self, state: State) -> bool:
        given = self.model.early_stopping
        return bool(state["num"] > _AUTO if given == "auto" else given)

    def _mapper(self, state: State) -> Any:
        """The bins as scikit-learn's, of all ranks' samples."""
        bins, mapper = Bins(state["low"], state["high"]), _BinMapper(self.model.max_bins + 1)
        known = state["categories"] or [None] * len(bins.low)
        mapper.bin_thresholds_ = [
            bins.thresholds(feature) if values is None else np.arange(float(len(values)))
            for feature, values in enumerate(known)
        ]
        has_some = np.array([values is not None for values in known], np.uint8)
        num_bins = np.array([len(each) for each in mapper.bin_thresholds_], np.uint32)
        mapper.is_categorical_, mapper.n_bins_non_missing_ = has_some, num_bins + (1 - has_some)
        mapper.missing_values_bin_idx_ = self.model.max_bins
        return mapper

    def _data(self, state: State) -> tuple[Array, Array, Array, Array]:
        """This rank's samples: features (of categories, their numbers among all ranks'), targets,
        weights, and which are for validation.

        These are, of all ranks' samples in rank order, one at a random place of each of equal
        ranges. A worker that was started again has the same ones, a new worker none."""
        X, (y, weights) = self.shard.X, self.targets(state)
        if state["categories"] is not None:
            X = categories.encoded(self._frame, state["categories"])
        some = np.ones(len(y)) if weights is None else weights
        given, num = self.model.validation_fraction, state["num"]
        chosen = np.zeros(len(y), bool)
        if self._stops_early(state) and given is not None:
            wanted = max(1, min(given if given >= 1 else math.ceil(given * num), num - 1))
            width = num / wanted
            start = state["starts"].get(self.ctx.group.members[self.ctx.rank].worker, num)
            ranges = np.arange(start // width, (start + len(y)) // width + 1)
            ranges = ranges[ranges < wanted].astype(np.uint64)
            shift = mixed(ranges + np.uint64(state["seed"])) / 2.0**64
            first, stop = (ranges * width).astype(np.int64), ((ranges + 1) * width).astype(np.int64)
            places = first + (shift * (stop - first)).astype(np.int64) - start
            chosen[places[(places >= 0) & (places < len(y))]] = True
        return X, y.astype(np.float64), some, chosen

    # ------------------------------------------------------------ stages

    def _bin(self, state: State) -> State:
        """The bins of the features, and the prediction without a tree."""
        counts = self.ctx.all_gather(np.array([len(self.shard.X)], np.int64)).ravel()
        starts = zip(self.ctx.group.members, (np.cumsum(counts) - counts).tolist(), strict=True)
        state = {**state, "starts": {member.worker: start for member, start in starts}}
        self._parts, self._num_added = None, 0
        X, y, weights, is_validation = self._data(state)
        bins = find_bins(self.ctx, X if weights.all() else X[weights != 0], self.model.max_bins)
        held_out, y, weights = weights[is_validation], y[~is_validation], weights[~is_validation]
        columns = [weights, weights * y]
        if self.is_classifier:
            columns = [weights * (y == each) for each in range(len(state["classes"]))]
        *sums, of_held_out = self._sums(state, [*columns, held_out])
        totals, loss = np.array(sums), self._loss(state)
        weight = totals.sum() if self.is_classifier else totals[0]
        validates = self._stops_early(state) and self.model.validation_fraction is not None
        if not weight or (validates and not of_held_out):
            kind = "validation" if weight else "training"
            text = f"the samples for {kind} have no weight: choose another validation_fraction"
            return refused(state, ValueError(text))

        def without_trees() -> Array:
            values, factors = totals[1:] / totals[0], None
            if self.is_classifier:
                values, factors = np.arange(len(totals), dtype=np.float64), totals
            return np.ravel(loss.fit_intercept_only(y_true=values, sample_weight=factors))

        baseline = from_first(self.ctx, without_trees, (self.model.n_trees_per_iteration_,))
        return {**state, "stage": "boost", "low": bins.low, "high": bins.high, "baseline": baseline}

    def _boost(self, state: State) -> State:
        """Score the trees so far, and grow those of one more iteration."""
        model, mapper, loss = self.model, self._mapper(state), self._loss(state)
        training, held_out = self._up_to_date(state, mapper)
        stops_early = self._stops_early(state)
        if stops_early:
            scores = [*state["train"], self._score(state, loss, training)]
            state = {**state, "train": scores}
            if model.validation_fraction is not None:
                scores = [*state["validation"], self._score(state, loss, held_out)]
                state = {**state, "validation": scores}
            if len(state["trees"]) == model.max_iter or model._should_stop(scores):
                return {**state, "stage": DONE}
        rows = self._gradients(state, loss, training)
        ends, missing = mapper.bin_thresholds_, mapper.missing_values_bin_idx_
        most = [np.abs(column).max(initial=0) for column in rows]
        message = np.array([*most, *(training.codes == missing).any(axis=0)], np.float64)
        largest = self.ctx.all_gather(message).reshape(-1, len(message)).max(axis=0)
        if not np.isfinite(largest).all():
            return refused(state, ValueError("the loss has overflowed: lower the learning_rate"))
        for column, each in zip(rows, largest.tolist(), strict=False):
            _round(column, each)
        num, pairs = len(training.y), list(zip(rows[::2], rows[1::2], strict=True))
        sums = [[num, g.sum(dtype=np.float64), h.sum(dtype=np.float64)] for g, h in pairs]
        totals = self.ctx.all_reduce(np.array(sums))
        if loss.constant_hessian:
            totals[:, 2] = totals[:, 0]
        samples = Samples(
            *(model, loss.constant_hessian, training.codes, mapper.n_bins_non_missing_, missing),
            *(largest[len(rows) :].astype(np.uint8), mapper.is_categorical_),
            validation._check_monotonic_cst(model, model.monotonic_cst),
            model._check_interaction_cst(training.codes.shape[1]) or (),
        )
        first = (state["seed"] << 24) + len(state["trees"]) * len(pairs)
        growing = [
            Tree(samples, pair, totals[number], first + number) for number, pair in enumerate(pairs)
        ]
        grow(self.ctx, growing)
        packed = [trees.pack_boosted(TreeGrower.make_predictor(each, ends)) for each in growing]
        self._grown = packed, growing
        state = {**state, "trees": [*state["trees"], packed]}
        is_last = len(state["trees"]) == model.max_iter and not stops_early
        return {**state, "stage": DONE if is_last else "boost"}

    # ------------------------------------------------------------ steps of an iteration

    def _up_to_date(self, state: State, mapper: Any) -> tuple[_Part, _Part]:
        """This rank's samples for training and for validation, with the predictions so far."""
        if self._parts is None:
            X, y, weights, is_validation = self._data(state)
            codes = mapper.transform(X) if len(X) else np.zeros(X.shape, np.uint8)
            training, held_out = (
                _Part(
                    *(np.asfortranarray(codes[chosen]), y[chosen], weights[chosen]),
                    np.asfortranarray(np.tile(state["baseline"], (int(chosen.sum()), 1))),
                )
                for chosen in (~is_validation, is_validation)
            )
            self._parts = training, held_out
        num_threads = _openmp_effective_n_threads()
        for added in state["trees"][self._num_added :]:
            for number, packed in enumerate(added):
                for part in self._parts:
                    column = part.raw[:, number]
                    if added is self._grown[0] and part is self._parts[0]:
                        _update_raw_predictions(column, self._grown[1][number], num_threads)
                    else:
                        column += trees.unpack_boosted(packed, len(state["low"])).predict_binned(
                            part.codes, mapper.missing_values_bin_idx_, num_threads
                        )
        self._num_added = len(state["trees"])
        return self._parts

    def _gradients(self, state: State, loss: Any, part: _Part) -> list[Array]:
        """The gradients of the first tree's samples, their hessians, those of the second tree, and
        so on: float32 of shape (n,), or of shape (1,) for hessians that are constant."""
        num, num_trees = part.raw.shape
        gradients, hessians = loss.init_gradient_and_hessian(num, dtype=np.float32, order="F")
        compute = loss.gradient
        if not loss.constant_hessian:
            compute = partial(loss.gradient_hessian, hessian_out=hessians)
        compute(
            *(part.y, part.raw, part.weights if state["weighted"] else None),
            gradient_out=gradients,
            n_threads=_openmp_effective_n_threads(),
        )
        both = [each.reshape(len(each), num_trees, order="F").T for each in (gradients, hessians)]
        return [column for pair in zip(*both, strict=True) for column in pair]

    def _score(self, state: State, loss: Any, part: _Part) -> float:
        """Minus the mean loss of all ranks' samples of this kind."""
        losses, weights = loss.loss(part.y, part.raw), part.weights
        total, weight = self._sums(state, [losses * weights, weights])
        return float(-total / weight)

    def _sums(self, state: State, columns: list[Array]) -> Array:
        """The sum of each column over all ranks' samples, the same for every cut."""
        most = np.array([np.abs(column).max(initial=0.0) for column in columns])
        largest = self.ctx.all_gather(most).reshape(-1, len(most)).max(axis=0)
        units = [unit_of(each, state["num"]) for each in largest.tolist()]
        sums = [in_units(*pair).sum() * pair[1] for pair in zip(columns, units, strict=True)]
        return np.asarray(self.ctx.all_reduce(np.array(sums)))


def _round(values: Array, largest: float) -> None:
    """Round float32 ``values`` to multiples of a power of two, of which ``largest``, their largest
    on all ranks, has less than ``2**22``."""
    # -126: the exponent of the smallest normal float32.
    unit = np.float32(math.ldexp(1.0, max(math.frexp(largest)[1] - _BITS, -126)))
    values[...] = np.rint(values / unit) * unit
