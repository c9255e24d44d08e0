"""The product of PowerSGD's factors: the bits of NumPy's twin, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from potluck._core import native
from potluck.compressors.powersgd import product_in_python, product_into

SHAPES = [(1, 1, 1), (7, 5, 1), (33, 1025, 2), (5, 2050, 3), (64, 96, 4), (9, 1300, 7), (40, 50, 9)]


def factors(n: int, m: int, rank: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes from tiny to large: an order of sums, or a fused operation, would show."""
    rng = np.random.default_rng(n * m * rank)
    left, right = (
        rng.standard_normal((rows, rank)) * 2.0 ** rng.integers(-40, 40, (rows, rank))
        for rows in (n, m)
    )
    return left.astype(dtype), right.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_has_the_bits_of_the_twin(
    kernel_set: str, shape: tuple[int, int, int], dtype: type
) -> None:
    n, m, rank = shape
    left, right = factors(n, m, rank, dtype)
    memory = np.full(n * m + 3, 9, dtype)
    target, wanted = memory[1 : n * m + 1].reshape(n, m), np.empty((n, m), dtype)
    product_into(target, left, right)
    product_in_python(wanted, left, np.ascontiguousarray(right.T))
    assert np.array_equal(target.view(np.uint8), wanted.view(np.uint8))
    assert memory[[0, -2, -1]].tolist() == [9, 9, 9], "nothing beside the target is written"


def test_a_target_with_gaps_is_left_to_the_twin() -> None:
    left, right = factors(6, 8, 2, np.float32)
    target, wanted = np.zeros((6, 16), np.float32), np.empty((6, 8), np.float32)
    product_into(target[:, ::2], left, right)
    product_into(wanted, left, right)
    assert np.array_equal(target[:, ::2], wanted)
    assert not target[:, 1::2].any()


@pytest.mark.parametrize(
    ("dtype", "sizes", "rank", "message"),
    [
        (5, (12, 6, 8), 2, "only float32 and float64"),
        (3, (12, 6, 8), 0, "rank must be at least 1"),
        (3, (12, 5, 8), 2, "the factors are not of this rank"),
        (3, (13, 6, 8), 2, "the result is not of the right size"),
        (3, (9, 6, 8), 2, "the result is not of the right size"),
    ],
)
def test_sizes_that_do_not_fit(
    kernel_set: str, dtype: int, sizes: tuple[int, int, int], rank: int, message: str
) -> None:
    arrays = [np.zeros(size, np.float32) for size in sizes]
    with pytest.raises(ValueError, match=message):
        native.core.multiply(dtype, *arrays, rank)
