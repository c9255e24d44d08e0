"""Linear classifiers by stochastic gradient descent: one all_reduce per mini-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn import linear_model
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import Interval, StrOptions

from potluck._core.context import DistributedContext
from potluck._core.portable_math import power
from potluck.estimators import classes
from potluck.estimators.rounds import DONE, Stage, State, context_of, refused
from potluck.estimators.shards import (
    Array,
    OnShards,
    Place,
    Shard,
    common_dtype,
    place_of,
    seed_of,
    weights_of,
)

Loss = Callable[[Array], tuple[Array, Array]]


def _log_loss(margins: Array) -> tuple[Array, Array]:
    return np.logaddexp(0, -margins), -expit(-margins)


def _hinge(margins: Array) -> tuple[Array, Array]:
    return np.maximum(1 - margins, 0), -(margins <= 1).astype(np.float64)


def _perceptron(margins: Array) -> tuple[Array, Array]:
    return np.maximum(-margins, 0), -(margins <= 0).astype(np.float64)


def _squared_hinge(margins: Array) -> tuple[Array, Array]:
    short = np.maximum(1 - margins, 0)
    return short**2, -2 * short


def _modified_huber(margins: Array) -> tuple[Array, Array]:
    short = np.maximum(1 - margins, 0)
    is_far = margins < -1
    return np.where(is_far, -4 * margins, short**2), np.where(is_far, -4.0, -2 * short)


LOSSES: dict[str, Loss] = {
    "hinge": _hinge,
    "log_loss": _log_loss,
    "modified_huber": _modified_huber,
    "perceptron": _perceptron,
    "squared_hinge": _squared_hinge,
}
"""Loss and its derivative, both as functions of the margin: the score, negative for a sample of the
other class."""

_SCHEDULES = {"constant", "optimal", "invscaling", "adaptive"}
_OPTIONS = {"early_stopping": False, "warm_start": False, "average": False}


class SGDClassifier(OnShards, linear_model.SGDClassifier):
    """A linear classifier by stochastic gradient descent on samples split among the ranks.

    scikit-learn's ``SGDClassifier`` with the losses of classification, and ``batch_size``. An
    update takes the mean of the gradients of ``batch_size`` samples, drawn from all ranks alike;
    scikit-learn's takes the gradient of one. With the same ``alpha``, ``eta0`` and schedule an
    epoch so has ``batch_size`` times fewer and less noisy updates, and a fit needs more epochs.
    With ``batch_size=1`` and ``shuffle=False`` the coefficients are those of scikit-learn on the
    union of the shards, to rounding (without an L1 penalty, which is applied here by soft
    thresholding after each update: Duchi and Singer 2009). The loss that ``tol`` is compared with
    has the weights of samples and classes, which scikit-learn leaves out of it. The result does not
    depend on how the samples are split, to rounding. For more than two classes there is one
    classifier for each against the rest. A class may be missing on a shard. ``t_`` is one more than
    the number of updates. ``ctx`` is the context of the group; if None, that of ``potluck.init()``.
    No ``early_stopping``, ``warm_start``, ``average``, ``"pa1"`` and ``"pa2"``, sparse input.

    A round is an epoch: a lost worker costs one. Cost: an all_reduce of
    ``8 (features + 2) classes`` bytes per mini-batch (for two classes half of that), a vote per
    epoch; 8 bytes of memory per sample of all ranks for their order. Over a network choose
    ``batch_size`` so large that its computation takes longer than the all_reduce.
    """

    own_parameters = ("ctx", "batch_size")
    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **linear_model.SGDClassifier._parameter_constraints,
        "loss": [StrOptions(set(LOSSES))],
        "learning_rate": [StrOptions(_SCHEDULES)],
        "batch_size": [Interval(Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        loss: str = "hinge",
        *,
        penalty: str | None = "l2",
        alpha: float = 0.0001,
        l1_ratio: float = 0.15,
        fit_intercept: bool = True,
        max_iter: int = 1000,
        tol: float | None = 1e-3,
        shuffle: bool = True,
        batch_size: int = 32,
        random_state: Any = None,
        learning_rate: str = "optimal",
        eta0: float = 0.01,
        power_t: float = 0.5,
        n_iter_no_change: int = 5,
        class_weight: Any = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals(), **_OPTIONS)

    def fit(self, X: Any, y: Any, *, sample_weight: Any = None) -> SGDClassifier:
        """Find the coefficients from all ranks' ``X``, of shape (n, features), and ``y``, of shape
        (n,). A collective call. ``sample_weight`` has shape (n,)."""
        for name in ("classes_", "coef_", "intercept_", "t_"):
            if hasattr(self, name):
                delattr(self, name)
        last = self._train(X, y, sample_weight)
        if self.tol is not None and last["running"].any():
            warnings.warn(
                f"Maximum number of iterations ({self.max_iter}) reached before convergence: raise "
                "max_iter, or scale the data",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> SGDClassifier:
        """One epoch over all ranks' ``X`` and ``y``, from the coefficients so far. A collective
        call. ``classes`` are those of all ranks and calls; the first call needs them."""
        self._train(X, y, sample_weight, classes, is_partial=True)
        return self

    def _train(
        self, X: Any, y: Any, weights: Any, known: Any = None, *, is_partial: bool = False
    ) -> State:
        with context_of(self.ctx) as ctx:
            last = _Fit(self, ctx, X, y, weights, known, is_partial=is_partial).search()
        self.classes_ = classes.classes_of(last)
        found = last["at"].astype(np.dtype(last["dtype"]))
        self.coef_ = np.ascontiguousarray(found[:, :-1])
        self.intercept_ = found[:, -1].copy()
        self.n_iter_, self.t_ = last["epoch"], float(last["t"])
        return last


class _Fit(classes.ClassFit):
    def __init__(
        self,
        model: SGDClassifier,
        ctx: DistributedContext,
        X: Any,
        y: Any,
        weights: Any,
        known: Any,
        *,
        is_partial: bool,
    ) -> None:
        self.known, self.is_partial = known, is_partial
        self.epochs = 1 if is_partial else model.max_iter
        super().__init__(model, ctx, X, y, weights)

    def stages(self) -> dict[str, Stage]:
        return {"weigh": self._weigh, "epoch": self._epoch}

    def search(self) -> State:
        """Train from the coefficients so far; the last state."""
        model = self.model
        first: State = {"seed": seed_of(model), "at": np.zeros((0, 0)), "t": 1}
        if hasattr(model, "coef_"):
            at = np.column_stack([model.coef_, model.intercept_]).astype(np.float64)
            first |= {"at": at, "t": int(model.t_)}
        return self.run(first)

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        found = classes.union(rows)
        num = len(found["classes"])
        shape = (1 if num == 2 else num, rows[0]["features"] + 1)
        at = state["at"] if state["at"].size else np.zeros(shape)
        if num < 2:
            raise ValueError("The number of classes has to be greater than one; got 1 class")
        if at.shape != shape:
            raise ValueError(
                f"the coefficients so far have shape {at.shape}, these samples and classes "
                f"need {shape}: call partial_fit on every rank since the first call"
            )
        return {**found, "stage": "weigh", "dtype": common_dtype(rows).name, "at": at}

    def _weigh(self, state: State) -> State:
        """The weight of each class's samples, which "balanced" weights are made of."""
        _, codes, _ = self.samples(state)
        given, ones = self.model.class_weight, np.ones(len(codes))
        num_rows = len(state["at"])
        return {
            **state,
            "stage": "epoch",
            "factors": classes.weigh(self.ctx, given, state, codes, ones)[0],
            "epoch": 0,
            "rates": np.full(num_rows, float(self.model.eta0)),
            "best": np.full(num_rows, np.inf),
            "num_worse": np.zeros(num_rows, np.int64),
            "running": np.ones(num_rows, bool),
        }

    def _epoch(self, state: State) -> State:
        """One pass over the samples of all ranks, by the classifiers that still improve."""
        model = self.model
        place = place_of(self.ctx, len(self.samples(state)[0]))
        at, t, epoch = state["at"].copy(), state["t"], state["epoch"] + 1
        running = state["running"]
        objective = np.zeros(len(at))
        with np.errstate(over="ignore", invalid="ignore"):  # looked for below
            for size, mine in self._batches(state, place):
                message = self._evaluate(state, at, mine)
                self.ctx.all_reduce(message)
                objective += message[:, 0] + size * self._penalty(at)
                moved = self._updated(at, message[:, 1:] / size, self._rates(state, t))
                at[running] = moved[running]
                t += 1
        if not np.isfinite(at).all():
            problem = ValueError(
                f"Floating-point under-/overflow occurred at epoch #{epoch}. Scaling input data "
                "with StandardScaler or MinMaxScaler might help."
            )
            return refused(state, problem)
        objective /= place.num
        after = {**state, "at": at, "t": t, "epoch": epoch, "loss": float(objective.sum())}
        tol = -np.inf if model.tol is None else model.tol
        is_worse = (objective > state["best"] - tol) if np.isfinite(tol) else np.zeros(1, bool)
        num_worse = np.where(is_worse, state["num_worse"] + 1, 0)
        after["best"] = np.minimum(state["best"], objective)
        is_stuck = num_worse >= model.n_iter_no_change
        rates = state["rates"]
        if model.learning_rate == "adaptive":
            is_slowed = is_stuck & (rates > 1e-6)
            rates, is_stuck = np.where(is_slowed, rates / 5, rates), is_stuck & ~is_slowed
            num_worse[is_slowed] = 0
        after |= {"rates": rates, "num_worse": num_worse, "running": running & ~is_stuck}
        is_last = epoch >= self.epochs or not after["running"].any()
        return {**after, "stage": DONE if is_last else "epoch"}

    def _batches(self, state: State, place: Place) -> Any:
        order = np.arange(place.num)
        if self.model.shuffle:
            random = np.random.RandomState([state["seed"], state["epoch"], state["t"] % 2**32])
            order = random.permutation(order)
        return place.batches(order, self.model.batch_size)

    def _rates(self, state: State, t: int) -> Array:
        """The learning rate of update ``t`` for each classifier."""
        model = self.model
        if model.learning_rate == "optimal":
            typical = np.sqrt(1 / np.sqrt(model.alpha))  # of the weights; the first rate
            rate = 1 / (model.alpha * (1 / (typical * model.alpha) + t - 1))
            return np.full(len(state["at"]), rate)
        if model.learning_rate == "invscaling":
            return np.full(len(state["at"]), model.eta0 / power(t, model.power_t))
        return np.asarray(state["rates"])

    def _evaluate(self, state: State, at: Array, mine: Array) -> Array:
        """The sums over this rank's samples of a batch: for each classifier one row, of the losses
        and of their gradient."""
        X, codes, weights = self.samples(state)
        message = np.zeros((len(at), 1 + at.shape[1]))
        if not len(mine):
            return message
        X, codes, weights = X[mine], codes[mine], weights[mine]
        scores = (X @ at[:, :-1].T.astype(X.dtype)).astype(np.float64) + at[:, -1]
        if len(at) == 1:
            is_own = (codes == 1)[:, None]
            factors = state["factors"][codes][:, None]
        else:
            is_own = codes[:, None] == np.arange(len(at))
            factors = np.where(is_own, state["factors"], 1.0)
        signs = np.where(is_own, 1.0, -1.0)
        losses, slopes = LOSSES[self.model.loss](signs * scores)
        slopes = slopes * signs * factors * weights[:, None]
        message[:, 0] = (losses * factors * weights[:, None]).sum(axis=0)
        message[:, 1:-1] = slopes.T.astype(X.dtype) @ X
        if self.model.fit_intercept:
            message[:, -1] = slopes.sum(axis=0)
        return message

    def _updated(self, at: Array, gradient: Array, rates: Array) -> Array:
        """The coefficients after one update."""
        model, ridge, lasso = self.model, *self._strengths()
        rates = rates[:, None]
        after = np.empty_like(at)
        after[:, :-1] = at[:, :-1] * np.maximum(0, 1 - rates * ridge) - rates * gradient[:, :-1]
        after[:, -1] = at[:, -1] - rates[:, 0] * gradient[:, -1]
        if lasso:
            shrunk = np.maximum(np.abs(after[:, :-1]) - rates * lasso, 0)
            after[:, :-1] = np.sign(after[:, :-1]) * shrunk
        assert model.fit_intercept or not after[:, -1].any()
        return after

    def _penalty(self, at: Array) -> Array:
        ridge, lasso = self._strengths()
        coefficients = at[:, :-1]
        squares = ridge / 2 * np.sum(coefficients**2, axis=1)
        return np.asarray(squares + lasso * np.abs(coefficients).sum(axis=1))

    def _strengths(self) -> tuple[float, float]:
        """The strengths of the L2 and of the L1 penalty."""
        model = self.model
        ratio = {None: 0.0, "l2": 0.0, "l1": 1.0, "elasticnet": model.l1_ratio}[model.penalty]
        alpha = 0.0 if model.penalty is None else model.alpha
        return alpha * (1 - ratio), alpha * ratio

    def check_parameters(self) -> None:
        super().check_parameters()
        self.model._more_validate_params()

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        model, known = self.model, self.known
        is_first = not hasattr(model, "classes_")
        X, y = self.checked(X, y, order="C", reset=is_first)
        labels = classes.checked_labels(y)
        facts = classes.facts_of(labels)
        if self.is_partial:
            if model.class_weight == "balanced":
                raise ValueError(
                    "class_weight 'balanced' is not supported for partial_fit: give a dict of "
                    "weights"
                )
            if is_first and known is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            given = np.unique(model.classes_ if known is None else known)
            wanted = given if is_first else model.classes_
            if not np.array_equal(given, wanted):
                raise ValueError(
                    f"`classes={known!r}` is not the same as on last call to partial_fit, was: "
                    f"{wanted!r}"
                )
            unknown = np.setdiff1d(labels, wanted)
            if len(unknown):
                raise ValueError(f"y has labels that are not in classes: {unknown.tolist()}")
            facts = classes.facts_of(wanted)
        return Shard(X, labels, weights_of(weights, X), facts)
