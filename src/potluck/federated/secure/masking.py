"""Masks, and the quantization of numbers to integers modulo 2**32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Words = NDArray[np.uint32]

HEAVIER = 8
_NUM_POWERS = 8

HIGH = 0.25
"""Of the limit: while no value is above that, half of the limit is enough, with room to grow."""


def derived(shared: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes from a ``shared`` secret, by HKDF-SHA256."""
    return HKDF(SHA256(), 32, salt=None, info=b"potluck federated " + purpose).derive(shared)


def mask(seed: bytes, length: int) -> Words:
    """``length`` words that look random to anyone without ``seed``: AES-256 in counter mode. A seed
    must be used for one mask only."""
    encryptor = Cipher(algorithms.AES256(seed), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * length)), dtype="<u4")


@dataclass(frozen=True, slots=True)
class Scale:
    """Quantization: values from ``-limit`` to ``limit`` in equal steps, so few that the sum of
    ``num_clients`` values does not overflow modulo 2**32. ``max_samples``: the largest weight of a
    client."""

    limit: float
    max_samples: float
    num_clients: int

    @property
    def levels(self) -> int:
        """The whole number for ``limit``."""
        half: int = 2**31 - 1
        return half // max(self.num_clients, 1)

    @property
    def step(self) -> float:
        """The distance of two values of weight ``max_samples`` that become neighbouring whole
        numbers: rounding moves each by less."""
        return self.limit / self.levels

    def encode(
        self, values: NDArray[np.float64], num_samples: int, random: np.random.Generator
    ) -> Words:
        """``values``, cut off at ``limit`` and weighted with ``num_samples``, cut off at
        ``max_samples``. Rounding is random, so that its mean error is 0.

        Shape ``(n,)`` gives ``(n + NUM_EXTRA,)``: then come the weight, how many values are high,
        how many were cut off, and, for each power of ``HEAVIER``, 1 if the weight is above it.
        """
        sizes = np.abs(values)
        num_high = min(int((sizes > self.limit * HIGH).sum()), self.levels)
        num_cut = min(int((sizes > self.limit).sum()), self.levels)
        weight = min(num_samples / self.max_samples, 1.0)
        scaled = np.clip(values / self.limit, -1, 1) * (weight * self.levels)
        whole = np.floor(scaled + random.random(len(values)))
        whole = np.clip(whole, -self.levels, self.levels)
        heavy = [num_samples > self.max_samples * HEAVIER**power for power in range(_NUM_POWERS)]
        extra = [np.rint(weight * self.levels), num_high, num_cut, *heavy]
        return np.concatenate([whole, extra]).astype(np.int64).astype(np.uint32)

    def decode(self, total: Words, num_summed: int) -> Decoded:
        """The values and weights in the sum of the words of ``num_summed`` clients. ValueError if
        no client has a weight, or if no clients' words can have this sum."""
        whole = total.astype(np.int32).astype(np.float64)
        values, (weight, num_high, num_cut, *num_heavy) = whole[:-NUM_EXTRA], whole[-NUM_EXTRA:]
        if weight == 0:
            raise ValueError("the sum of the weights is 0; max_samples is far too large")
        most = num_summed * len(values)
        if not (
            0 < weight <= num_summed * self.levels
            and 0 <= num_cut <= num_high <= most
            and num_summed >= num_heavy[0]
            and num_heavy == sorted(num_heavy, reverse=True)
            and num_heavy[-1] >= 0
            and np.abs(values).max(initial=0) <= weight + 2 * num_summed  # rounding
        ):
            raise ValueError(
                "this is no sum of clients' changes: one of them has sent something else, and "
                "masks hide which"
            )
        mean = values / weight * self.limit
        num_samples = weight / self.levels * self.max_samples
        return Decoded(mean, num_samples, int(num_high), int(num_cut), tuple(map(int, num_heavy)))


class Decoded(NamedTuple):
    """The weighted ``mean`` of the clients' values, the sum of their numbers of samples, how many
    values are above ``HIGH`` of the limit, how many were cut off, and, by power of ``HEAVIER``, how
    many clients' weights are above that multiple of ``max_samples``."""

    mean: NDArray[np.float64]
    num_samples: float
    num_high: int
    num_cut: int
    num_heavy: tuple[int, ...]


NUM_EXTRA = 3 + _NUM_POWERS
"""Words of a client beside its values."""
