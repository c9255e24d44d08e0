"""Differential privacy on the level of clients: clipped changes, Gaussian noise, and the account of
a published library."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck._core.optional import require
from potluck.errors import FederationError

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DifferentialPrivacy:
    """What the model tells of any one client is bounded (McMahan et al. 2018, "Learning
    differentially private recurrent language models", algorithm 1).

    Each client's change is clipped to the L2 norm ``clip``, all with weight 1. The server adds
    Gaussian noise of standard deviation ``noise_multiplier * clip`` to their sum, and divides by
    the expected number of clients. Each round reports ``epsilon`` for ``delta``, so far, as the
    library dp-accounting computes it (Renyi accountant; one client's change is added or removed):
    ``pip install 'potluck[privacy]'``. It covers all private runs of a federation together. Clients
    that drop out count as changes of zero, and every round is released, with noise alone if no
    update came: a round that is left out would show which clients were not asked. With
    SecureAggregation a round of fewer than three clients has noise alone, so the third one moves
    the sum by more than ``clip``: the chance that a round hangs on one client so is a part of
    ``delta``, and settings with which that would take more than half of it are refused. Where
    clients drop out until one more or fewer decides whether there is a sum, ``epsilon`` is infinite
    from then on.

    The bound holds for what the server publishes, the parameters; the server itself sees changes
    without noise: of each client, or with SecureAggregation their sum. Metrics of clients and
    evaluations are outside of it. A ``fraction`` of clients needs ``sampling="poisson"``. A
    aggregation of another kind must have its ``sampling_probability`` here, at least that of any
    client. The noise is the system's secure random numbers, and they seed the choice of the clients
    of a round, unless ``seed`` is given (for tests); the federation's own seed has no part in it.
    The bound does not cover how many clients are there, nor the reports' lists of clients: keep
    them to yourself.
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


class PrivacyLoss:
    """The releases with noise of a federation, in all of its runs."""

    def __init__(self) -> None:
        self._released: Counter[tuple[float, float]] = Counter()

    def note(self, noise_multiplier: float, probability: float) -> None:
        """One release, of clients that were asked with ``probability``. With a
        ``noise_multiplier`` of 0: one in which a client had no bound, with ``probability``."""
        self._released[noise_multiplier, probability] += 1

    @property
    def unbounded(self) -> float:
        """The probability (a bound) that a client had no bound in some release. It is part of
        delta: given which others were asked in each round, the account holds or not."""
        return sum(chance * num for (noise, chance), num in self._released.items() if noise == 0)

    def state_dict(self) -> list[list[float]]:
        """Noise multiplier, probability and number of each kind of release."""
        return [[noise, chance, float(num)] for (noise, chance), num in self._released.items()]

    def load_state_dict(self, state: Iterable[Iterable[float]]) -> None:
        """Count these releases, and no others."""
        self._released.clear()
        for noise, chance, num in state:
            self._released[noise, chance] = int(num)

    def epsilon(self, delta: float) -> float:
        """The privacy loss so far, for ``delta``."""
        if not self._released:
            return 0.0
        if self.unbounded >= delta:
            return math.inf
        rdp = _accounting().rdp
        orders = rdp.RdpAccountant().orders
        total = np.zeros(len(orders))
        with _without_orders_left_out():
            for (noise_multiplier, probability), num in self._released.items():
                if noise_multiplier:
                    total += num * _divergences(noise_multiplier, probability)
            return float(rdp.compute_epsilon(orders, total, delta - self.unbounded)[0])


@lru_cache(maxsize=16)
def _divergences(noise_multiplier: float, probability: float) -> Vector:
    """The Renyi divergences of one release, at the orders of the accounting library. They add up,
    and take it 50 ms: a round has those of the round before it."""
    library = _accounting()
    event = library.GaussianDpEvent(noise_multiplier)
    if probability < 1:
        event = library.PoissonSampledDpEvent(probability, event)
    return np.asarray(library.rdp.RdpAccountant().compose(event).rdp)


@contextmanager
def _without_orders_left_out() -> Iterator[None]:
    """Drop the library's warnings of Renyi orders that it leaves out, eight for each round of usual
    settings: epsilon, the least over the other orders, is a bound all the same."""

    def is_shown(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


class PrivateMean:
    """The noisy means of one run."""

    def __init__(
        self,
        settings: DifferentialPrivacy,
        aggregation: Any,
        loss: PrivacyLoss,
        *,
        fewest: int = 1,
    ) -> None:
        """``fewest``: fewer clients give noise alone. ValueError if the probability that
        ``aggregation`` asks a client is not known; MissingDependency without dp-accounting."""
        self._settings = settings
        self.clip = settings.clip
        self._fewest = fewest
        self._probability = self._fraction = probability_of(settings, aggregation)
        if fewest > 1 and settings.sampling_probability is not None:
            if getattr(aggregation, "fraction", None) is None:
                raise ValueError(
                    f"{type(aggregation).__name__} does not say how many clients it asks, which "
                    "the account of secure= with privacy= needs: take FedAvg(fraction, "
                    "sampling='poisson') or one like it"
                )
            self._fraction = probability_of(
                replace(settings, sampling_probability=None), aggregation
            )
        self._loss = loss
        self._noise = Noise(settings.seed)
        _accounting()

    def check(self, num_available: int, num_rounds: int) -> None:
        """FederationError if the chance that a round hangs on one client would take more than half
        of delta, in ``num_rounds`` more rounds with ``num_available`` clients."""
        most = (self._settings.delta / 2 - self._loss.unbounded) / max(1, num_rounds)

        def is_right(num_available: int) -> bool:
            return self._hanging(num_available) <= most

        if self._fewest == 1 or is_right(num_available):
            return
        enough = num_available
        while most > 0 and not is_right(enough):
            enough += max(1, enough // 100)
        raise FederationError(
            f"of {num_available} clients, each asked with probability {self._fraction:g}, a "
            f"round with secure= may ask fewer than {self._fewest + 1}: then one client decides "
            "whether there is a sum, which moves it by more than clip. In "
            f"{num_rounds} rounds that is likelier than half of delta={self._settings.delta:g}. "
            + (
                f"Enough are {enough} clients (Patience(min_clients={enough})), or a greater "
                "fraction of them"
                if most > 0
                else "Nothing is left of delta: give a greater one"
            )
        )

    def hung_on_one(self) -> None:
        """Count a release whose existence depended on a single client."""
        self._loss.note(0.0, 1.0)

    def _hanging(self, num_available: int) -> float:
        """The probability that a client decides whether a round has a sum (a bound: that fewer
        than ``fewest`` others are asked)."""
        chance, others = self._fraction, max(0, num_available - 1)
        if chance == 1:
            return float(others < self._fewest)
        return sum(
            math.comb(others, num) * chance**num * (1 - chance) ** (others - num)
            for num in range(min(others + 1, self._fewest))
        )

    def mean(self, total: Vector, num_available: int) -> Vector:
        """``total``, the sum of clipped changes, with noise, as the mean of the clients that were
        to be expected. Counts as released."""
        settings = self._settings
        self._loss.note(settings.noise_multiplier, self._probability)
        if self._fewest > 1:
            self._loss.note(0.0, self._hanging(num_available))
        noise = self._noise.normal(len(total)) * (settings.noise_multiplier * settings.clip)
        return np.asarray((total + noise) / max(1.0, self._probability * num_available))

    @property
    def epsilon(self) -> float:
        """The privacy loss of the federation so far."""
        return self._loss.epsilon(self._settings.delta)


class Noise:
    """Standard normal values from the system's secure random numbers; with a ``seed``, from a
    generator that anybody can repeat."""

    def __init__(self, seed: int | None) -> None:
        self._bytes = os.urandom if seed is None else np.random.default_rng(seed).bytes

    def normal(self, size: int) -> Vector:
        """``size`` values, each half of the sum of four.

        A float64 that was made of one pair of random numbers can only be one of 2**53 values, and
        its last bits may show what it was added to; the sum of four has no such pattern (Holohan
        and Braghin 2021, "Secure random sampling in differential privacy").
        """
        return sum((self._one(size) for _ in range(4)), np.zeros(size)) / 2

    def _one(self, size: int) -> Vector:
        """Box and Muller 1958."""
        half = (size + 1) // 2
        words = np.frombuffer(self._bytes(16 * half), np.uint64) >> np.uint64(11)
        first, second = (words[:half] + np.uint64(1)) * 2.0**-53, words[half:] * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


def _accounting() -> ModuleType:
    return require("dp_accounting", "privacy")


def clipped(change: Vector, clip: float) -> Vector:
    """``change`` with an L2 norm of at most ``clip``."""
    norm = float(np.linalg.norm(change))
    return change if norm <= clip else change * (clip / norm)


def clipped_sum(changes: Iterable[Vector], clip: float, size: int) -> Vector:
    """The sum of the ``changes``, of ``size`` values, each clipped; of none it is 0."""
    return sum((clipped(each, clip) for each in changes), np.zeros(size))


def probability_of(settings: DifferentialPrivacy, aggregation: Any) -> float:
    """The probability with which ``aggregation`` asks a client in a round."""
    fraction = getattr(aggregation, "fraction", None)
    if settings.sampling_probability is not None:
        return settings.sampling_probability
    if fraction is None:
        raise ValueError(
            f"{type(aggregation).__name__} does not say how it samples clients: give "
            "DifferentialPrivacy its sampling_probability"
        )
    if fraction < 1 and getattr(aggregation, "sampling", "fixed") != "poisson":
        raise ValueError(
            f"the account of a fraction of clients needs random sampling of each by itself: "
            f"{type(aggregation).__name__}({fraction}, sampling='poisson')"
        )
    return float(fraction)
