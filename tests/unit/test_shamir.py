"""Secrets in shares, over both fields."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core.shamir import SHORT, WITH_CHECK, BinaryField, Field, join, share_bytes, split

FIELDS = pytest.mark.parametrize(
    "field", [WITH_CHECK, SHORT], ids=["of whole numbers", "of polynomials"]
)
SMALL = BinaryField(0x11B)
"""That of AES: 8 bits."""


@FIELDS
@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_threshold_of_the_shares_gives_the_secret(
    field: Field, secret: bytes, threshold: int, chance: random.Random
) -> None:
    shares = split(secret, range(1, 8), threshold, field)
    assert {len(share) for share in shares.values()} == {share_bytes(field)}
    some = dict(chance.sample(sorted(shares.items()), threshold))
    assert join(some, field) == secret


def test_shares_that_do_not_belong_together_are_found_in_the_field_for_that() -> None:
    shares = split(b"s" * 32, range(1, 6), 3, WITH_CHECK)
    with pytest.raises(ValueError, match="do not belong together, or are too few"):
        join({point: shares[point] for point in (1, 2)}, WITH_CHECK)
    with pytest.raises(ValueError, match="no element of the field"):
        join({1: b"\xff" * 66}, WITH_CHECK)
    with pytest.raises(ValueError, match="no element of the field"):
        join({1: b"\xff" * 33}, SHORT)


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    """One share of three, and any guess of the secret's lowest byte, belong to some third."""
    share = split(b"s" * 32, (1, 2, 3), 2, SHORT)[1]
    fits = {join({1: share, 2: bytes([guess]) + bytes(31)}, SHORT)[0] for guess in range(256)}
    assert len(fits) == 256


@FIELDS
def test_shares_of_one_point_are_uniform(field: Field) -> None:
    """The lowest byte of one share of one secret, shared anew 4,096 times: the sum of squares is
    within 7 standard deviations."""
    counts = Counter(split(bytes(32), (1, 2), 2, field)[1][-1] for _ in range(4096))
    assert abs(sum((counts[byte] - 16) ** 2 / 16 for byte in range(256)) - 255) < 7 * 22.6


@pytest.mark.parametrize("points", [(), (0, 1), (1, 1)])
def test_points_that_would_give_the_secret_away_or_nothing_are_refused(
    points: tuple[int, ...],
) -> None:
    with pytest.raises(ValueError, match="the points must be distinct"):
        split(bytes(32), points, 2, SHORT)
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        split(bytes(31), (1, 2), 2, SHORT)


def test_the_modulus_of_the_short_shares_is_irreducible() -> None:
    """Rabin's test: x^(2^256) = x, and x^(2^128) - x has no factor in common with it."""

    def squared(times: int) -> int:
        power = 2
        for _ in range(times):
            power = SHORT.times(power, power)
        return power

    assert squared(256) == 2
    a, b = SHORT.modulus, squared(128) ^ 2
    while b:
        while a.bit_length() >= b.bit_length():
            a ^= b << (a.bit_length() - b.bit_length())
        a, b = b, a
    assert a == 1


def test_the_field_of_polynomials_of_eight_bits_is_that_of_aes() -> None:
    assert SMALL.order == 256
    assert SMALL.times(0x57, 0x83) == 0xC1  # FIPS 197, 4.2
    assert all(SMALL.times(each, SMALL.inverse(each)) == 1 for each in range(1, 256))
    assert all(
        SHORT.times(each, SHORT.inverse(each)) == 1 for each in (1, 2, 3, SHORT.order - 1, 1 << 200)
    )
