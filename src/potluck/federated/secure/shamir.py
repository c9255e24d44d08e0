"""Shamir's secret sharing over a prime field (Shamir 1979, "How to share a secret")."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1
SHARE_BYTES = 66
SECRET_BYTES = 32


def split(secret: bytes, points: Sequence[int], threshold: int) -> dict[int, bytes]:
    """A share of ``secret`` (32 bytes) for each of the ``points``, distinct numbers from 1. Any
    ``threshold`` of them give the secret, fewer say nothing about it."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(points) or len(set(points)) != len(points) or min(points) < 1:
        raise ValueError(f"{threshold} of {len(points)} shares: the points must be distinct")
    coefficients = [int.from_bytes(secret)]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return {point: _value(coefficients, point).to_bytes(SHARE_BYTES) for point in points}


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret of ``threshold`` or more ``shares``. ValueError for shares that belong to no
    secret of 32 bytes."""
    values = {point: int.from_bytes(share) for point, share in shares.items()}
    if any(not 0 <= value < PRIME for value in values.values()):
        raise ValueError("a share is no element of the field")
    total = 0
    for point, value in values.items():
        above, below = 1, 1
        for other in values:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        total = (total + value * above * pow(below, -1, PRIME)) % PRIME
    if total >> (8 * SECRET_BYTES):
        raise ValueError("these shares do not belong together, or are too few")
    return total.to_bytes(SECRET_BYTES)


def _value(coefficients: Sequence[int], point: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * point + coefficient) % PRIME
    return total
