"""FedAdam and FedYogi: the mean update as a gradient of an adaptive optimizer on the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from potluck.federated.parameters import Array, Parameters, arrays_of, like
from potluck.federated.strategies.averaging import FedAvg, weighted_mean
from potluck.federated.strategies.base import Round
from potluck.federated.updates import Update


class FedAdam(FedAvg):
    """Adam on the server (Reddi et al. 2021, "Adaptive federated optimization", algorithm 2).

    With the mean change ``d`` of a round: ``m = beta1 * m + (1 - beta1) * d``,
    ``v = beta2 * v + (1 - beta2) * d**2``, and the parameters grow by
    ``learning_rate * m / (sqrt(v) + tau)``; ``v`` begins as ``tau**2``, and there is no correction
    of bias, as in the paper. Memory: two float64 values a parameter.
    """

    def __init__(
        self,
        fraction: float = 1.0,
        *,
        learning_rate: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        **options: Any,
    ) -> None:
        """``options`` are those of FedAvg."""
        if not (learning_rate > 0 and tau > 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(
                f"learning_rate={learning_rate!r} and tau={tau!r} must be above 0, beta1={beta1!r} "
                f"and beta2={beta2!r} from 0 to below 1"
            )
        super().__init__(fraction, **options)
        self.learning_rate = learning_rate
        self.beta1 = beta1
        self.beta2 = beta2
        self.tau = tau
        self._first: list[Array] = []
        self._second: list[Array] = []

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """One step of the optimizer."""
        old = arrays_of(round.parameters)
        changes = [new - was for new, was in zip(weighted_mean(updates), old, strict=True)]
        if not self._first:
            self._first = [np.zeros(each.shape) for each in changes]
            self._second = [np.full(each.shape, self.tau**2) for each in changes]
        self._first = [
            self.beta1 * m + (1 - self.beta1) * d for m, d in zip(self._first, changes, strict=True)
        ]
        self._second = [self._next(v, d * d) for v, d in zip(self._second, changes, strict=True)]
        steps = [
            self.learning_rate * m / (np.sqrt(v) + self.tau)
            for m, v in zip(self._first, self._second, strict=True)
        ]
        return like(round.parameters, [was + step for was, step in zip(old, steps, strict=True)])

    def state_dict(self) -> dict[str, list[Array]]:
        """The moments."""
        return {"first": self._first, "second": self._second}

    def load_state_dict(self, state: Mapping[str, list[Array]]) -> None:
        """Go on from these moments."""
        self._first = [np.array(each) for each in state["first"]]
        self._second = [np.array(each) for each in state["second"]]

    def _next(self, second: Array, squared: Array) -> Array:
        return np.asarray(self.beta2 * second + (1 - self.beta2) * squared)


class FedYogi(FedAdam):
    """Yogi on the server (Reddi et al. 2021, algorithm 2): as FedAdam, but
    ``v = v - (1 - beta2) * d**2 * sign(v - d**2)``, which grows and shrinks more slowly."""

    def _next(self, second: Array, squared: Array) -> Array:
        return np.asarray(second - (1 - self.beta2) * squared * np.sign(second - squared))
