"""FedAvg and FedProx: the weighted mean of the updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from potluck._core import hints
from potluck.federated.parameters import Array, Parameters, arrays_of, like
from potluck.federated.strategies.base import Config, Round
from potluck.federated.updates import MAX_SAMPLES, Update

MakesConfig = Callable[[int], Config]


class FedAvg:
    """The mean of the updates, weighted by their numbers of samples (McMahan et al. 2017,
    "Communication-efficient learning of deep networks from decentralized data", algorithm 1).

    ``fraction`` of the clients that are there train in each round, at least one, chosen at random
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
        """``config`` with what the strategy itself tells clients."""
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
        """``options`` are those of FedAvg."""
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
