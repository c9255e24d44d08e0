"""Partitions: every sample belongs to one rank, and the parts have the sizes that the mode says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import potluck
from potluck.training.partition import MODES, DataPartitioner

SIZES = st.integers(0, 200)
WORLDS = st.integers(1, 12)


def parts_of(partitioner: DataPartitioner) -> list[np.ndarray]:
    parts = [partitioner.get_indices(rank) for rank in range(partitioner.world_size)]
    assert [len(part) for part in parts] == [
        partitioner.partition_size(rank) for rank in range(partitioner.world_size)
    ]
    return parts


def options_of(mode: str, total: int, world: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    if mode == "weighted":
        return {"weights": random.uniform(0.1, 10, world).tolist()}
    if mode in ("stratified", "dirichlet", "shards"):
        return {"labels": random.integers(0, 5, total)}
    return {}


@pytest.mark.parametrize("mode", MODES)
@given(total=SIZES, world=WORLDS, seed=st.integers(0, 2**40))
def test_every_sample_belongs_to_exactly_one_rank(
    mode: str, total: int, world: int, seed: int
) -> None:
    options = options_of(mode, total, world, seed)
    parts = parts_of(potluck.DataPartitioner(total, world, mode, seed, **options))
    assert sorted(np.concatenate(parts)) == list(range(total))
    again = parts_of(potluck.DataPartitioner(total, world, mode, seed, **options))
    assert all(map(np.array_equal, parts, again))
    assert {part.dtype for part in parts} == {np.dtype(np.int64)}


@given(total=SIZES, world=WORLDS)
def test_contiguous_parts_are_those_of_array_split_and_strided_parts_a_stride(
    total: int, world: int
) -> None:
    contiguous = DataPartitioner(total, world)
    strided = DataPartitioner(total, world, "strided")
    for rank, expected in enumerate(np.array_split(np.arange(total), world)):
        assert np.array_equal(contiguous.get_indices(rank), expected)
        start, end = contiguous.get_partition(rank)
        assert np.array_equal(np.arange(start, end), expected)
        assert np.array_equal(strided.get_indices(rank), np.arange(total)[rank::world])


@given(total=SIZES, world=WORLDS, seed=st.integers(0, 2**20))
def test_strata_differ_by_one_at_most_in_size_and_in_each_class(
    total: int, world: int, seed: int
) -> None:
    labels = np.array(["ant", "bee", "cat"])[np.random.default_rng(seed).integers(0, 3, total)]
    parts = parts_of(DataPartitioner(total, world, "stratified", seed, labels=labels))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    for kind in ("ant", "bee", "cat"):
        counts = [int((labels[part] == kind).sum()) for part in parts]
        assert max(counts) - min(counts) <= 1


@given(total=st.integers(50, 500), weights=st.lists(st.floats(0.5, 5), min_size=1, max_size=8))
def test_weighted_parts_follow_the_weights(total: int, weights: list[float]) -> None:
    partitioner = DataPartitioner(total, len(weights), "weighted", weights=weights)
    for rank, weight in enumerate(weights):
        ideal = total * weight / sum(weights)
        assert abs(partitioner.partition_size(rank) - ideal) < len(weights) + 1


def test_a_small_alpha_gives_few_classes_and_a_large_one_all_in_equal_parts() -> None:
    labels = np.repeat(np.arange(10), 1000)

    def largest_fraction(alpha: float) -> float:
        """Of a rank's samples, those of its most frequent class: the mean over ranks with any."""
        parts = parts_of(DataPartitioner(10_000, 10, "dirichlet", 3, labels=labels, alpha=alpha))
        counts = [np.bincount(labels[part], minlength=10) for part in parts if len(part)]
        return float(np.mean([count.max() / count.sum() for count in counts]))

    assert largest_fraction(1e-3) > 0.7
    assert largest_fraction(1e6) < 0.11
    assert largest_fraction(1e-3) > largest_fraction(0.5) > largest_fraction(100)


def test_shards_give_a_rank_at_most_as_many_classes_as_it_has_shards() -> None:
    labels = np.repeat(np.arange(10), 60)
    parts = parts_of(DataPartitioner(600, 10, "shards", 1, labels=labels, shards_per_rank=2))
    assert {len(part) for part in parts} == {60}
    assert max(len(np.unique(labels[part])) for part in parts) <= 2


def test_random_partitions_are_what_they_were_on_the_day_they_were_written_down() -> None:
    """Machines with different NumPy versions must agree, so the values are pinned."""
    labels = [0, 0, 0, 0, 1, 1, 1, 1]
    dirichlet = DataPartitioner(8, 2, "dirichlet", 7, labels=labels)
    shards = DataPartitioner(8, 2, "shards", 7, labels=labels)
    assert [part.tolist() for part in parts_of(dirichlet)] == [[1, 2, 3], [0, 4, 5, 6, 7]]
    assert [part.tolist() for part in parts_of(shards)] == [[0, 2, 5, 7], [1, 3, 4, 6]]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((10, 0), {}, "world_size is 0; it must be at least 1"),
        ((-1, 2), {}, "total_size is -1"),
        ((10, 2, "random"), {}, "mode is 'random'; it must be one of contiguous, strided"),
        ((10, 2, "weighted"), {}, "weights are for mode 'weighted', and needed there"),
        ((10, 2), {"weights": [1, 1]}, "mode is 'contiguous'"),
        ((10, 2, "weighted"), {"weights": [1]}, "1 weights for 2 ranks"),
        ((10, 2, "weighted"), {"weights": [1, 0]}, "positive and finite"),
        ((10, 2, "stratified"), {}, "labels are for the modes"),
        ((10, 2, "stratified"), {"labels": [1, 2]}, r"labels have shape \(2,\)"),
        ((2, 2, "dirichlet"), {"labels": [1, 2], "alpha": 0}, "alpha is 0"),
        ((2, 2, "shards"), {"labels": [1, 2], "shards_per_rank": 0}, "shards_per_rank is 0"),
        ((10, 2, "contiguous", -1), {}, "seed is -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DataPartitioner(*arguments, **options)


def test_the_sizes_of_huge_partitions_take_no_memory() -> None:
    sizes = [
        DataPartitioner(2**40, 3, mode).partition_size(2) for mode in ("contiguous", "strided")
    ]
    assert sizes == [(2**40 - 1) // 3] * 2


def test_a_rank_out_of_range_and_a_part_that_is_no_range_are_refused() -> None:
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"rank is {rank}"):
            DataPartitioner(10, 2).get_indices(rank)
    with pytest.raises(ValueError, match=r"no ranges of samples: use get_indices\(rank\)"):
        DataPartitioner(10, 2, "strided").get_partition(0)
    with pytest.raises(TypeError, match=r"world_size is 2\.5; it must be a whole number"):
        DataPartitioner(10, 2.5)  # type: ignore[arg-type]
