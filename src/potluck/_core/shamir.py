"""Shamir's secret sharing (Shamir 1979, "How to share a secret"), over a field of the caller's
choice. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

SECRET_BYTES = 32


class Field(Protocol):
    """A finite field. Its elements are the whole numbers from 0 to ``order - 1``."""

    @property
    def order(self) -> int: ...

    def plus(self, a: int, b: int) -> int: ...

    def minus(self, a: int, b: int) -> int: ...

    def times(self, a: int, b: int) -> int: ...

    def inverse(self, a: int) -> int: ...


@dataclass(frozen=True, slots=True)
class PrimeField:
    """The whole numbers modulo the prime ``order``."""

    order: int

    def plus(self, a: int, b: int) -> int:
        return (a + b) % self.order

    def minus(self, a: int, b: int) -> int:
        return (a - b) % self.order

    def times(self, a: int, b: int) -> int:
        return a * b % self.order

    def inverse(self, a: int) -> int:
        return pow(a, -1, self.order)


@dataclass(frozen=True, slots=True)
class BinaryField:
    """The polynomials over GF(2) modulo the irreducible ``modulus``, whose bits are coefficients.
    Not constant in time."""

    modulus: int

    @property
    def order(self) -> int:
        return 1 << (self.modulus.bit_length() - 1)

    def plus(self, a: int, b: int) -> int:
        return a ^ b

    minus = plus

    def times(self, a: int, b: int) -> int:
        product, order = 0, self.order
        while b:
            if b & 1:
                product ^= a
            a <<= 1
            if a & order:
                a ^= self.modulus
            b >>= 1
        return product

    def inverse(self, a: int) -> int:
        """By Euclid's algorithm (Hankerson, Menezes and Vanstone 2004, algorithm 2.48)."""
        assert 0 < a < self.order, "no inverse"
        u, v, of_u, of_v = a, self.modulus, 1, 0  # u = of_u * a, v = of_v * a
        while u != 1:
            ahead = u.bit_length() - v.bit_length()
            if ahead < 0:
                u, v, of_u, of_v, ahead = v, u, of_v, of_u, -ahead
            u ^= v << ahead
            of_u ^= of_v << ahead
        return of_u


WITH_CHECK = PrimeField(2**521 - 1)
"""Shares of 66 bytes. Shares that do not belong together make no secret of 32 bytes, but for one
time in 2^265."""
SHORT = BinaryField((1 << 256) | 0b100_0010_0101)  # x^256 + x^10 + x^5 + x^2 + 1
"""Shares of 32 bytes, as short as can be. All shares make some secret."""


def share_bytes(field: Field) -> int:
    """The length of a share in bytes."""
    return ((field.order - 1).bit_length() + 7) // 8


def split(secret: bytes, points: Sequence[int], threshold: int, field: Field) -> dict[int, bytes]:
    """A share of ``secret`` (32 bytes) for each of the ``points``, distinct numbers from 1. Any
    ``threshold`` of them give the secret, fewer say nothing about it."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(points) or len(set(points)) != len(points) or min(points) < 1:
        raise ValueError(f"{threshold} of {len(points)} shares: the points must be distinct")
    coefficients = [secrets.randbelow(field.order) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret))

    def value(point: int) -> int:  # Horner: the secret is the value at 0
        return reduce(lambda total, each: field.plus(field.times(total, point), each), coefficients)

    size = share_bytes(field)
    return {point: value(point).to_bytes(size) for point in points}


def join(shares: Mapping[int, bytes], field: Field) -> bytes:
    """The secret of ``threshold`` or more ``shares`` (Lagrange). ValueError for shares that belong
    to no secret of 32 bytes."""
    values = {point: int.from_bytes(share) for point, share in shares.items()}
    if any(value >= field.order for value in values.values()):
        raise ValueError("a share is no element of the field")
    total = 0
    for point, value in values.items():
        above, below = value, 1
        for other in values:
            if other != point:
                above = field.times(above, other)
                below = field.times(below, field.minus(other, point))
        total = field.plus(total, field.times(above, field.inverse(below)))
    if total >> (8 * SECRET_BYTES):
        raise ValueError("these shares do not belong together, or are too few")
    return total.to_bytes(SECRET_BYTES)
