"""Masks, and numbers as whole numbers modulo 2**32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Words = NDArray[np.uint32]


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
    """How numbers become whole numbers: values from ``-limit`` to ``limit`` in equal steps, so many
    that the sum of ``num_clients`` values has one meaning modulo 2**32. ``max_samples``: the
    largest weight of a client."""

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

        Shape ``(n,)`` gives ``(n + 3,)``: then come the weight, how many values were cut off, and 1
        if the weight was.
        """
        num_cut = min(int((np.abs(values) > self.limit).sum()), self.levels)
        weight = min(num_samples / self.max_samples, 1.0)
        scaled = np.clip(values / self.limit, -1, 1) * (weight * self.levels)
        whole = np.floor(scaled + random.random(len(values)))
        whole = np.clip(whole, -self.levels, self.levels)
        heavy, is_cut = np.rint(weight * self.levels), num_samples > self.max_samples
        return np.concatenate([whole, [heavy, num_cut, is_cut]]).astype(np.int64).astype(np.uint32)

    def decode(self, total: Words) -> Decoded:
        """What the sum of the clients' words says. ValueError if no client has a weight."""
        whole = total.astype(np.int32).astype(np.float64)
        weight = whole[-3]
        if weight <= 0:
            raise ValueError("the sum of the weights is 0; max_samples is far too large")
        mean = whole[:-3] / weight * self.limit
        num_samples = weight / self.levels * self.max_samples
        return Decoded(mean, num_samples, int(whole[-2]), int(whole[-1]))


class Decoded(NamedTuple):
    """The weighted ``mean`` of the clients' values, the sum of their numbers of samples, and how
    many values, and how many clients' weights, were cut off."""

    mean: NDArray[np.float64]
    num_samples: float
    num_cut: int
    num_heavy: int


NUM_EXTRA = 3
"""Words of a client beside those of its values."""
