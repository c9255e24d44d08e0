"""Differential privacy on the level of clients: clipped changes, Gaussian noise, and the account of
a published library."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.errors import MissingDependency

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DifferentialPrivacy:
    """What the model tells of any one client is bounded (McMahan et al. 2018, "Learning
    differentially private recurrent language models", algorithm 1).

    Each client's change is clipped to the L2 norm ``clip``, all with weight 1. The server adds
    Gaussian noise of standard deviation ``noise_multiplier * clip`` to their sum, and divides by
    the expected number of clients. Each round reports ``epsilon`` for ``delta``, so far, as the
    library dp-accounting computes it (Renyi accountant; one client's change is added or removed):
    ``pip install dp-accounting``. Clients that drop out count as changes of zero.

    The bound holds for what the server publishes, the parameters; the server itself sees changes
    without noise: of each client, or with SecureAggregation their sum. Metrics of clients and
    evaluations are outside of it. A ``fraction`` of clients needs ``sampling="poisson"``. A
    strategy of another kind must have its ``sampling_probability`` here, at least that of any
    client. Which clients are asked in a round, and the noise (NumPy's), come from the system's
    entropy unless ``seed`` is given (for tests); the federation's own seed has no part in it. The
    bound does not cover the reports' lists of clients: keep those to yourself.
    """

    noise_multiplier: float
    clip: float
    delta: float = 1e-5
    sampling_probability: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf or not 0 < self.clip < math.inf:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r} and clip={self.clip!r} must be above 0"
            )
        if not 0 < self.delta < 1:
            raise ValueError(f"delta is {self.delta!r}; it must be between 0 and 1")
        if self.sampling_probability is not None and not 0 < self.sampling_probability <= 1:
            raise ValueError(f"sampling_probability is {self.sampling_probability!r}")


class PrivateMean:
    """The noisy means of one run, and their privacy loss."""

    def __init__(self, settings: DifferentialPrivacy, strategy: Any) -> None:
        """ValueError if the probability that ``strategy`` asks a client is not known;
        MissingDependency without dp-accounting."""
        self._settings = settings
        self._probability = probability_of(settings, strategy)
        self._library = _accounting()
        self._num_released = 0
        self._random = np.random.default_rng(settings.seed)

    def mean(self, total: Vector, num_available: int) -> Vector:
        """``total``, the sum of clipped changes, with noise, as the mean of the clients that were
        to be expected. Counts as released."""
        self._num_released += 1
        deviation = self._settings.noise_multiplier * self._settings.clip
        noise = self._random.normal(0.0, deviation, total.shape)
        return np.asarray((total + noise) / max(1.0, self._probability * num_available))

    @property
    def epsilon(self) -> float:
        """The privacy loss so far."""
        if not self._num_released:
            return 0.0
        library = self._library
        event = library.GaussianDpEvent(self._settings.noise_multiplier)
        if self._probability < 1:
            event = library.PoissonSampledDpEvent(self._probability, event)
        accountant = library.rdp.RdpAccountant()
        accountant.compose(event, self._num_released)
        return float(accountant.get_epsilon(self._settings.delta))


def _accounting() -> ModuleType:
    """The library. It is no extra of potluck: its bound on attrs would hold back the newer one that
    other extras are tested with."""
    try:
        return importlib.import_module("dp_accounting")
    except ModuleNotFoundError as error:
        if error.name != "dp_accounting":
            raise
        raise MissingDependency(
            "the account of differential privacy needs the Python package 'dp-accounting', which "
            "is not installed: pip install dp-accounting",
            name=error.name,
        ) from None


def clipped(change: Vector, clip: float) -> Vector:
    """``change`` with an L2 norm of at most ``clip``."""
    norm = float(np.linalg.norm(change))
    return change if norm <= clip else change * (clip / norm)


def clipped_sum(changes: Sequence[Vector], clip: float) -> Vector:
    """The sum of the ``changes``, each clipped."""
    return np.asarray(np.sum([clipped(each, clip) for each in changes], axis=0))


def probability_of(settings: DifferentialPrivacy, strategy: Any) -> float:
    """The probability with which ``strategy`` asks a client in a round."""
    fraction = getattr(strategy, "fraction", None)
    if settings.sampling_probability is not None:
        return settings.sampling_probability
    if fraction is None:
        raise ValueError(
            f"{type(strategy).__name__} does not say how it samples clients: give "
            "DifferentialPrivacy its sampling_probability"
        )
    if fraction < 1 and getattr(strategy, "sampling", "fixed") != "poisson":
        raise ValueError(
            f"the account of a fraction of clients needs random sampling of each by itself: "
            f"{type(strategy).__name__}({fraction}, sampling='poisson')"
        )
    return float(fraction)
