"""Multi-layer perceptrons: one all_reduce of gradients per mini-batch."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn, Self

import numpy as np
from scipy.special import xlogy
from sklearn import neural_network
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network._base import ACTIVATIONS, DERIVATIVES
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer
from sklearn.preprocessing import LabelBinarizer
from sklearn.utils import shuffle
from sklearn.utils._param_validation import StrOptions

from potluck._core import hints
from potluck._core.context import DistributedContext
from potluck._core.portable_math import power
from potluck.estimators import classes
from potluck.estimators.rounds import DONE, Fit, Stage, State, context_of
from potluck.estimators.shards import (
    Array,
    OnShards,
    Shard,
    common_dtype,
    place_of,
    random_of,
    restored,
    saved,
)

_SOLVERS = {"solver": [StrOptions({"adam", "sgd"})]}
_OPTIONS = {"early_stopping": False, "warm_start": False}


class _Perceptron(OnShards):
    """What the classifier and the regressor share. Before scikit-learn's class among the bases."""

    @hints.arguments(hints.PERCEPTRON)
    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: str = "relu",
        *,
        solver: str = "adam",
        alpha: float = 0.0001,
        batch_size: Any = "auto",
        learning_rate: str = "constant",
        learning_rate_init: float = 0.001,
        power_t: float = 0.5,
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        momentum: float = 0.9,
        nesterovs_momentum: bool = True,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        n_iter_no_change: int = 10,
        ctx: DistributedContext | None = None,
    ) -> None:
        self._keep(locals(), **_OPTIONS)

    @hints.arguments({})
    def fit(self, X: Any, y: Any) -> Self:
        """Train on all ranks' ``X``, of shape (n, features), and labels or targets ``y``, of shape
        (n,).

        A collective call.
        """
        with context_of(self.ctx) as ctx:
            _Fit(self, ctx, X, y).train()
        return self

    @property
    def partial_fit(self) -> NoReturn:
        """Not offered: it would train on this rank's samples alone."""
        raise AttributeError(f"{type(self).__name__} has no partial_fit on shards: call fit")


class MLPClassifier(_Perceptron, neural_network.MLPClassifier):
    """A multi-layer perceptron for classification, on samples that are split among the ranks.

    scikit-learn's ``MLPClassifier`` with the solvers adam and sgd. A mini-batch has samples of all
    ranks, the samples that scikit-learn would take from the union of the shards with the same
    ``random_state``: ``loss_curve_`` and the weights are the same, to rounding. All ranks end with
    equal weights. A class may be missing on a shard. ``ctx`` is the context of the group; if None,
    that of ``potluck.init()``. No ``early_stopping``, ``warm_start``, ``partial_fit``, weights of
    samples, sparse input.

    A round is an epoch: a lost worker costs one. Cost: an all_reduce of all weights per mini-batch,
    a vote per epoch; 8 bytes of memory per sample of all ranks for their order.
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **neural_network.MLPClassifier._parameter_constraints,
        **_SOLVERS,
    }


class MLPRegressor(_Perceptron, neural_network.MLPRegressor):
    """A multi-layer perceptron for regression, on samples that are split among the ranks.

    As [MLPClassifier][potluck.estimators.MLPClassifier]. One output.
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's protocol)
        **neural_network.MLPRegressor._parameter_constraints,
        **_SOLVERS,
    }


class _Fit(Fit):
    _targets: Array | None = None

    @property
    def is_classifier(self) -> bool:
        return isinstance(self.model, MLPClassifier)

    def stages(self) -> dict[str, Stage]:
        return {"epoch": self._epoch}

    def train(self) -> None:
        model = self.model
        last = self.run({"random": saved(random_of(model))})
        self._adopt(last)
        model.n_iter_ = len(model.loss_curve_)
        model.t_ = model.n_iter_ * last["num"]
        if not last["converged"]:
            warnings.warn(
                f"Stochastic Optimizer: Maximum iterations ({model.max_iter}) reached and the "
                "optimization hasn't converged yet.",
                ConvergenceWarning,
                stacklevel=3,
            )

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        """Also the first weights, as scikit-learn draws them."""
        found = classes.union(rows) if self.is_classifier else {"classes": [], "label_dtype": ""}
        model, features, num_classes = self.model, rows[0]["features"], len(found["classes"])
        outputs = num_classes if num_classes > 2 else 1
        random = restored(state["random"])
        self._set_classes(found)
        sizes = [int(size) for size in np.atleast_1d(model.hidden_layer_sizes)]
        model._random_state = random
        dtype = common_dtype(rows)
        model._initialize(np.empty((1, outputs)), [features, *sizes, outputs], dtype)
        weights = [*model.coefs_, *model.intercepts_]
        for each in weights:  # multiples of random numbers, which a compiler may round otherwise
            self.ctx.broadcast(each)
        return {
            **found,
            "stage": "epoch",
            "num": sum(row["num"] for row in rows),
            "random": saved(random),
            "weights": weights,
            "optimizer": {},
            "order": np.arange(0),
            "curve": [],
            "best": float("inf"),
            "num_worse": 0,
            "converged": False,
        }

    def _epoch(self, state: State) -> State:
        """One pass over the samples of all ranks."""
        model, ctx = self.model, self.ctx
        self._adopt(state)
        place = place_of(ctx, len(self._samples()[1]))
        num = place.num  # fewer than at the start if a worker was lost
        params = [*model.coefs_, *model.intercepts_]
        optimizer = _optimizer(model, params, state["optimizer"])
        random = restored(state["random"])
        total = 0.0
        order = state["order"] if len(state["order"]) == num else np.arange(num)
        if model.shuffle:
            order = shuffle(order, random_state=random)
        wanted = model.batch_size
        batch_size = min(200, num) if wanted == "auto" else int(np.clip(wanted, 1, num))
        for size, mine in place.batches(order, batch_size):
            loss, gradients = self._gradients(mine, size)
            optimizer.update_params(params, gradients)
            total += loss * size
        curve = [*state["curve"], total / num]
        after = {
            **state,
            "random": saved(random),
            "order": order,
            "curve": curve,
            "loss": curve[-1],
            "num_worse": state["num_worse"] + 1 if curve[-1] > state["best"] - model.tol else 0,
            "best": min(state["best"], curve[-1]),
        }
        optimizer.iteration_ends(len(curve) * num)
        is_over = False
        if after["num_worse"] > model.n_iter_no_change:
            is_over = bool(optimizer.trigger_stopping("", False))
            after["num_worse"] = 0
        after["weights"], after["optimizer"] = params, _saved_optimizer(optimizer)
        after["converged"] = is_over
        is_last = is_over or len(curve) >= model.max_iter
        return {**after, "stage": DONE if is_last else "epoch"}

    def _gradients(self, mine: Array, size: int) -> tuple[float, list[Array]]:
        """Loss and gradients of a batch of ``size`` samples, of which this rank has ``mine``."""
        model = self.model
        X, targets = self._samples()
        loss, gradients = _backward(model, X[mine], targets[mine])
        if self.ctx.is_master:  # whose dot products count
            loss += 0.5 * model.alpha * sum(float(np.vdot(w, w)) for w in model.coefs_)
        message = np.concatenate([[loss], *(each.ravel() for each in gradients)])
        self.ctx.all_reduce(message)
        message /= size
        sums, at = [], 1
        for each in gradients:
            sums.append(message[at : at + each.size].reshape(each.shape).astype(each.dtype))
            at += each.size
        for weights, gradient in zip(model.coefs_, sums, strict=False):
            gradient += model.alpha * weights / size
        return float(message[0]), sums

    def _samples(self) -> tuple[Array, Array]:
        shard = self.shard
        if self._targets is None:
            y = shard.y
            assert y is not None
            if self.is_classifier and len(y):
                y = self.model._label_binarizer.transform(y)
            shape = (len(y), self.model.n_outputs_)
            self._targets = np.asarray(y, shard.X.dtype).reshape(shape)
        return shard.X, self._targets

    def _adopt(self, state: State) -> None:
        """Set the model to ``state``, with weights of its own."""
        model = self.model
        self._set_classes(state)
        weights = [each.copy() for each in state["weights"]]
        half = len(weights) // 2
        model.coefs_, model.intercepts_ = weights[:half], weights[half:]
        model.n_layers_, model.n_outputs_ = half + 1, weights[-1].shape[0]
        model.out_activation_ = "identity"
        if self.is_classifier:
            model.out_activation_ = "softmax" if len(state["classes"]) > 2 else "logistic"
        model.loss_curve_ = list(state["curve"])
        model.loss_ = model.loss_curve_[-1] if model.loss_curve_ else np.inf
        model.best_loss_ = state["best"]

    def _set_classes(self, state: State) -> None:
        if self.is_classifier:
            self.model.classes_ = classes.classes_of(state)
            self.model._label_binarizer = LabelBinarizer().fit(self.model.classes_)

    def check_parameters(self) -> None:
        super().check_parameters()
        sizes = self.model.hidden_layer_sizes
        if np.any(np.atleast_1d(sizes) <= 0):
            raise ValueError(f"hidden_layer_sizes must be > 0, got {sizes}.")

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        X, y = self.checked(X, y, dtype=(np.float64, np.float32), y_numeric=not self.is_classifier)
        y, facts = classes.targets_of(y, X.dtype, is_classifier=self.is_classifier)
        return Shard(X, y, facts=facts)


def _backward(model: Any, X: Array, y: Array) -> tuple[float, list[Array]]:
    """The sums of the losses and of their gradients over the samples, without the penalty."""
    outputs = [X]
    last = model.n_layers_ - 2
    for layer in range(last + 1):
        outputs.append(outputs[-1] @ model.coefs_[layer] + model.intercepts_[layer])
        ACTIVATIONS[model.activation if layer < last else model.out_activation_](outputs[-1])
    found = outputs[-1]
    eps = np.finfo(found.dtype).eps
    if model.out_activation_ == "identity":
        loss = 0.5 * np.sum((found - y) ** 2)
    elif model.out_activation_ == "softmax":
        loss = -np.sum(xlogy(y, np.clip(found, eps, 1 - eps)))
    else:
        clipped = np.clip(found, eps, 1 - eps)
        loss = -np.sum(xlogy(y, clipped) + xlogy(1 - y, 1 - clipped))
    delta = found - y
    coefs: list[Array] = []
    intercepts: list[Array] = []
    for layer in range(last, -1, -1):
        coefs.insert(0, outputs[layer].T @ delta)
        intercepts.insert(0, delta.sum(axis=0))
        if layer:
            delta = delta @ model.coefs_[layer].T
            DERIVATIVES[model.activation](outputs[layer], delta)
    return float(loss), [*coefs, *intercepts]


class _Exact(float):
    """A number whose powers are equal on all machines."""

    def __pow__(self, exponent: Any, modulus: None = None) -> float:
        return power(self, exponent)

    def __rpow__(self, base: Any, modulus: None = None) -> float:
        return power(base, self)


_KEPT = {"adam": ("t", "ms", "vs", "learning_rate"), "sgd": ("velocities", "learning_rate")}


def _optimizer(model: Any, params: list[Array], saved: State) -> Any:
    rate = model.learning_rate_init
    if model.solver == "adam":
        betas = _Exact(model.beta_1), _Exact(model.beta_2)
        made = AdamOptimizer(params, rate, *betas, model.epsilon)
    else:
        nesterov = model.nesterovs_momentum
        schedule = model.learning_rate
        exponent = _Exact(model.power_t)
        made = SGDOptimizer(params, rate, schedule, model.momentum, nesterov, exponent)
    for name, value in saved.items():
        # An optimizer may change its arrays in place, and the state must stay as it is.
        copied = [each.copy() for each in value] if isinstance(value, list) else value
        setattr(made, name, copied)
    return made


def _saved_optimizer(optimizer: Any) -> State:
    kind = "adam" if isinstance(optimizer, AdamOptimizer) else "sgd"
    found = {name: getattr(optimizer, name) for name in _KEPT[kind]}
    return {
        name: list(value) if isinstance(value, list) else value for name, value in found.items()
    }
