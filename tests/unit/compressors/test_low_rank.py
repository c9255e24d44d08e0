"""The arithmetic of PowerSGD that must give the same bits on all machines."""

from __future__ import annotations

import math

import numpy as np
import pytest

from potluck.compressors.powersgd import orthonormal, product_into, uniform


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, columns)).astype(np.float32)


def in_plain_python(columns: list[list[float]]) -> list[list[float]]:
    """What ``orthonormal`` computes, one operation of IEEE 754 after the other."""

    def total(values: list[float]) -> float:
        values = values + [0.0] * (-len(values) % 128)
        lanes = values[:128]
        for at in range(128, len(values), 128):
            lanes = [a + b for a, b in zip(lanes, values[at : at + 128], strict=True)]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[half + i] for i in range(half)]
        return lanes[0]

    done: list[list[float]] = []
    for column in columns:
        before = total([x * x for x in column])
        for _ in range(2 if done else 0):
            shares = [total([a * b for a, b in zip(c, column, strict=True)]) for c in done]
            for share, other in zip(shares, done, strict=True):
                column = [x - share * y for x, y in zip(column, other, strict=True)]
        left = total([x * x for x in column])
        length = math.sqrt(left)
        zero = left <= before * 2.0**-40
        done.append([0.0 if zero else x / length for x in column])
    return done


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (5, 3), (127, 2), (128, 4), (300, 8)])
def test_the_basis_has_the_bits_that_the_definition_has(rows: int, rank: int) -> None:
    source = matrix(rows, rank)
    wanted = in_plain_python([[float(x) for x in column] for column in source.T])
    assert np.array_equal(orthonormal(source), np.array(wanted).T)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(7, 5, 1), (300, 200, 4), (3, 70_000, 2)])
def test_the_product_has_the_bits_that_the_definition_has(shape, dtype: type) -> None:
    n, m, rank = shape
    left, right = matrix(n, rank, 1).astype(dtype), matrix(m, rank, 2).astype(dtype)
    target = np.empty((n, m), dtype)
    product_into(target, left, right)
    wanted = left[:, :1] * right[:, 0]
    for k in range(1, rank):
        wanted = wanted + left[:, k : k + 1] * right[:, k]
    assert np.array_equal(target, wanted)


def test_a_basis_spans_what_the_columns_span_and_is_zero_where_they_depend() -> None:
    source = matrix(200, 4)
    source[:, 2] = 3 * source[:, 0] - source[:, 1]
    basis = orthonormal(source)
    assert not basis[:, 2].any()
    whole = np.delete(basis, 2, axis=1)
    np.testing.assert_allclose(whole.T @ whole, np.eye(3), atol=1e-14)
    np.testing.assert_allclose(basis @ (basis.T @ source), source, atol=1e-5)
    assert not orthonormal(np.zeros((9, 2), np.float32)).any()
    assert not orthonormal(np.zeros((0, 2), np.float32)).size


def test_nan_stays_visible() -> None:
    source = matrix(20, 3)
    source[4, 1] = np.nan
    basis = orthonormal(source)
    assert np.isfinite(basis[:, 0]).all()
    assert np.isnan(basis[:, 1:]).all()


def test_the_random_numbers_never_change() -> None:
    """Ranks with other versions of NumPy must draw alike."""
    drawn = uniform(2, 2, 7, "layer.weight", 3)
    assert drawn.tolist() == DRAWN
    assert np.abs(uniform(1000, 3, 0, "", 0)).max() < 1
    assert not np.array_equal(drawn, uniform(2, 2, 7, "layer.bias", 3))
    assert not np.array_equal(drawn, uniform(2, 2, 7, "layer.weight", 4))


DRAWN = [[0.42863788543436, -0.022468065149556127], [0.673661009711114, -0.33775738149084056]]
