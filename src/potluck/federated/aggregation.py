"""Aggregations: which clients train in a round, and how their updates are combined. Without I/O,
clock or threads.

``FedAvg`` and ``FedProx`` take the weighted mean of the updates; ``FedAdam`` and ``FedYogi`` take
the mean update as a gradient of an optimizer on the server. ``Median``, ``TrimmedMean`` and
``Krum`` bear wrong or hostile updates. Numbers of samples have no weight in these three: a hostile
client could claim any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from potluck._core import hints
from potluck.federated.parameters import (
    MAX_SAMPLES,
    Array,
    Parameters,
    Update,
    arrays_of,
    flat,
    like,
)

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its ``number``, counted from 1, of ``total``, the global ``parameters`` at its
    start, and a ``seed`` of its own for random choices."""

    number: int
    total: int
    parameters: Parameters
    seed: int


class Aggregation(Protocol):
    """Chooses the clients of a round, with their configuration, and combines their updates.

    A class with these two methods is an aggregation; it needs no base class. Optional attributes:
    ``min_updates``, how many updates ``aggregate`` needs at least (1), ``max_samples``, with how
    many samples an update is refused (2**40), and ``takes_mean``, whether
    it depends on the updates only through their weighted mean (False). Secure aggregation and
    differential privacy need the latter.
    """

    def configure(self, round: Round, clients: Sequence[str]) -> Mapping[str, Config]:
        """The clients to ask, out of the live ``clients``, each with the configuration for its
        function: a dict of numbers, text and arrays."""

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The next global parameters. ``updates`` are in the order of ``configure``, checked: of
        the global shapes, finite, with samples."""


MakesConfig = Callable[[int], Config]


class FedAvg:
    """The mean of the updates, weighted by their numbers of samples (McMahan et al. 2017,
    "Communication-efficient learning of deep networks from decentralized data", algorithm 1).

    ``fraction`` of the live clients train in each round, at least one, chosen at random
    by the run's seed. With ``sampling="poisson"`` each client is chosen by itself with probability
    ``fraction``, which may choose none; accounts of differential privacy need that. ``config``
    (a dict, or a function of the round's number) goes to each client's function: local epochs, for
    example. An update with more than ``max_samples`` samples is refused, and its client named: set
    it to the most that a client can have, since one that claims far more than it has decides the
    mean. Cost: one pass over all updates, in float64.
    """

    takes_mean = True
    min_updates = 1

    @hints.arguments(hints.FEDAVG)
    def __init__(
        self,
        fraction: float = 1.0,
        *,
        config: Config | MakesConfig | None = None,
        sampling: Literal["fixed", "poisson"] = "fixed",
        max_samples: int = MAX_SAMPLES,
    ) -> None:
        if isinstance(max_samples, bool) or not isinstance(max_samples, int) or max_samples < 1:
            raise ValueError(f"max_samples is {max_samples!r}; a whole number from 1 is needed")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction is {fraction!r}; it must be above 0 and at most 1")
        if sampling not in ("fixed", "poisson"):
            raise ValueError(f"sampling is {sampling!r}; it is 'fixed' or 'poisson'")
        self.fraction = fraction
        self.sampling = sampling
        self.max_samples = max_samples
        self._config = config

    def configure(self, round: Round, clients: Sequence[str]) -> Mapping[str, Config]:
        """A random part of ``clients``, in their order, all with the same configuration."""
        config = self._config(round.number) if callable(self._config) else self._config
        chosen = self._chosen(round, clients)
        return {client: self.extended(dict(config or {})) for client in chosen}

    def extended(self, config: dict[str, Any]) -> Config:
        """``config`` with the entries of the aggregation itself."""
        return config

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The weighted mean of ``updates``."""
        return like(round.parameters, weighted_mean(updates))

    def _chosen(self, round: Round, clients: Sequence[str]) -> Sequence[str]:
        if self.fraction == 1:
            return clients
        random = np.random.default_rng(round.seed)
        if self.sampling == "poisson":
            drawn = random.random(len(clients)) < self.fraction
            return [client for client, is_in in zip(clients, drawn, strict=True) if is_in]
        num = max(1, round_half_up(self.fraction * len(clients)))
        numbers = random.choice(len(clients), min(num, len(clients)), replace=False)
        return [clients[number] for number in sorted(numbers)]


class FedProx(FedAvg):
    """FedAvg whose clients stay near the global parameters (Li et al. 2020, "Federated optimization
    in heterogeneous networks", section 3).

    Each client's ``config["proximal_mu"]`` is ``mu``: its function adds
    ``mu * (parameters - global parameters)`` to its gradients. ``mu=0`` is FedAvg.
    """

    def __init__(self, mu: float = 0.1, fraction: float = 1.0, **options: Any) -> None:
        """``options``: of FedAvg."""
        if not 0 <= mu < np.inf:
            raise ValueError(f"mu is {mu!r}; it must be 0 or more")
        super().__init__(fraction, **options)
        self.mu = mu

    def extended(self, config: dict[str, Any]) -> Config:
        """``config`` with ``proximal_mu``."""
        return config | {"proximal_mu": self.mu}


def weighted_mean(updates: Sequence[Update]) -> list[Array]:
    """The mean of the arrays of ``updates`` by numbers of samples, in float64."""
    total = sum(update.num_samples for update in updates)
    sums = [np.zeros(array.shape) for array in arrays_of(updates[0].parameters)]
    for update in updates:
        for place, array in zip(sums, arrays_of(update.parameters), strict=True):
            place += update.num_samples * array.astype(np.float64)
    return [np.asarray(each / total) for each in sums]


def round_half_up(value: float) -> int:
    """The whole number next to ``value``."""
    return int(np.floor(value + 0.5))


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
        """``options``: of FedAvg."""
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


class Median(FedAvg):
    """The median of each single parameter (Yin et al. 2018, "Byzantine-robust distributed learning:
    towards optimal statistical rates", option I). Bears less than half of the updates being wrong.
    Memory: all updates at once."""

    takes_mean = False

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The median over ``updates``."""
        medians = [np.median(stack, axis=0) for stack in _stacks(updates)]
        return like(round.parameters, medians)


class TrimmedMean(FedAvg):
    """The mean of each single parameter without the ``cut`` fraction of the smallest and of the
    largest values (Yin et al. 2018, option II). Bears less than ``cut`` of the updates being
    wrong."""

    takes_mean = False

    def __init__(self, cut: float = 0.1, fraction: float = 1.0, **options: Any) -> None:
        """``options``: of FedAvg."""
        if not 0 <= cut < 0.5:
            raise ValueError(f"cut is {cut!r}; it must be 0 or more and below 0.5")
        super().__init__(fraction, **options)
        self.cut = cut

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The trimmed mean over ``updates``. Of ``n`` values ``ceil(cut * n)`` go at each end."""
        num = len(updates)
        num_cut = min(int(np.ceil(self.cut * num - 1e-9)), (num - 1) // 2)
        means = [
            np.sort(stack, axis=0)[num_cut : num - num_cut].mean(axis=0)
            for stack in _stacks(updates)
        ]
        return like(round.parameters, means)


class Krum(FedAvg):
    """The updates nearest to their neighbours (Blanchard et al. 2017, "Machine learning with
    adversaries: Byzantine tolerant gradient descent", section 4).

    Of ``n`` updates each scores the sum of its squared distances to the ``n - f - 2`` nearest
    others; the mean of the ``keep`` updates with the lowest scores is taken (1: Krum, more:
    Multi-Krum). Bears ``f`` wrong updates; a round needs ``2 * f + 3``. Cost: all pairs of updates.
    """

    takes_mean = False

    def __init__(self, f: int = 1, fraction: float = 1.0, *, keep: int = 1, **options: Any) -> None:
        """``options``: of FedAvg."""
        if f < 0 or keep < 1:
            raise ValueError(f"f={f!r} must be 0 or more, keep={keep!r} 1 or more")
        super().__init__(fraction, **options)
        self.f = f
        self.keep = keep
        self.min_updates = max(2 * f + 3, keep)

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The mean of the best updates; ValueError for fewer than ``2 * f + 3``."""
        if len(updates) < self.min_updates:
            raise ValueError(
                f"Krum(f={self.f}) needs {self.min_updates} updates, not {len(updates)}"
            )
        scores = krum_scores(np.stack([flat(each.parameters) for each in updates]), self.f)
        best = sorted(np.argsort(scores, kind="stable")[: self.keep])
        stacks = _stacks([updates[number] for number in best])
        return like(round.parameters, [stack.mean(axis=0) for stack in stacks])


def krum_scores(vectors: Array, f: int) -> Array:
    """The score of each row of ``vectors``: float64, shape ``(n,)``; lower is better."""
    num = len(vectors)
    distances = np.full((num, num), np.inf)
    with np.errstate(over="ignore"):  # infinitely far is far
        for row in range(num - 1):
            # Not by |a|**2 + |b|**2 - 2ab, which cancels where both are far from 0.
            between = vectors[row + 1 :] - vectors[row]
            distances[row, row + 1 :] = np.einsum("ij,ij->i", between, between)
    distances = np.minimum(distances, distances.T)
    nearest = np.sort(distances, axis=1)[:, : num - f - 2]
    return np.asarray(nearest.sum(axis=1))


def _stacks(updates: Sequence[Update]) -> list[Array]:
    """The arrays of all updates, one on the other: first dimension the updates."""
    columns = zip(*(arrays_of(update.parameters) for update in updates), strict=True)
    return [np.stack(column) for column in columns]
