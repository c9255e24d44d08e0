"""What every communicator promises, on every kind of link and for several world sizes.

With POTLUCK_CONFORMANCE=gloo (or mpi, env) this process is one rank of a world of that backend that
a launcher has started: ``tests/process/test_backends.py`` runs this file so.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from potluck import graphs
from potluck._core.collectives import doubling
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.collectives.registry import algorithms_for
from potluck._core.context import DistributedContext, all_reduce_mean, all_reduce_sum
from support.worlds import MAIN_KINDS, WORLD_KINDS, World, join_world, open_world

DTYPES = [
    np.dtype(name) for name in ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
] + [np.dtype(ml_dtypes.bfloat16)]
FLOATS = [dtype for dtype in DTYPES if dtype.kind not in "iu"] + [np.dtype("complex64")]
OPS = ("sum", "mean", "min", "max", "product")
FOLD = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 0, 2), (5, 1001)]
"""The last one takes several segments of SEGMENT_BYTES, and shared memory where there is any."""
SEGMENT_BYTES = 6 * 1024

WORLDS = [("inproc", 1), ("inproc", 8)]
WORLDS += [(kind, size) for kind in MAIN_KINDS for size in (2, 3, 5)]
WORLDS += [(kind, 3) for kind in (*WORLD_KINDS, "pipes") if kind not in MAIN_KINDS]
"""Sizes matter to plans and to shared memory: 2 and 3 ranks have one and several links each, 5 are
a power of two and one more, on two nodes 3 and 2. A link sees frames, whatever the size, so other
kinds have one: 3, the smallest where a rank sends over one link what it takes from another. A world
of one rank makes no link of any kind."""
BACKEND = os.environ.get("POTLUCK_CONFORMANCE", "")
if BACKEND:
    WORLDS = [(BACKEND, 0)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda each: f"{each[0]}-{each[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    kind, size = request.param
    if BACKEND:
        with join_world(kind) as joined:
            yield joined
        return
    with open_world(kind, size, segment_bytes=SEGMENT_BYTES) as opened:
        opened.run(lambda ctx: ctx.all_to_all(np.zeros((size, 1)), algorithm="direct"))
        opened.run(lambda ctx: ctx.barrier())
        yield opened


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any], salt: int = 0) -> np.ndarray:
    """Small whole numbers: every dtype adds and multiplies them exactly, in any order."""
    return drawn(rank, shape, dtype, salt).copy()


@functools.lru_cache(maxsize=64)  # every rank asks for those of all
def drawn(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any], salt: int) -> np.ndarray:
    count = int(np.prod(shape, dtype=int))
    numbers = np.random.default_rng([rank, salt, count]).integers(1, 3, count)
    return numbers.reshape(shape).astype(dtype)


def folded(op: str, arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0].copy()
    for other in arrays[1:]:
        total = np.asarray(FOLD[op](total, other), dtype=total.dtype).reshape(total.shape)
    if op == "mean" and len(arrays) > 1:
        total = np.asarray(total / total.dtype.type(len(arrays)), dtype=total.dtype)
    return total.reshape(arrays[0].shape)


def same(actual: np.ndarray, wanted: np.ndarray, case: object) -> None:
    assert actual.dtype == wanted.dtype, case
    assert actual.shape == wanted.shape, case
    assert actual.tobytes() == wanted.tobytes(), case


def cases(operation: Operation) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    names: list[str | None] = [None, *algorithms_for(operation)]
    yield from itertools.product(names, SHAPES)


def everyones(size: int, shape: tuple[int, ...], dtype: Any, salt: int = 0) -> list[np.ndarray]:
    return [values(rank, shape, np.dtype(dtype), salt) for rank in range(size)]


def test_all_reduce_with_every_algorithm_and_shape(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        for salt, (algorithm, shape) in enumerate(cases(Operation.ALL_REDUCE)):
            case = (algorithm, shape)
            arrays = everyones(ctx.world_size, shape, "float32", salt)
            mine = arrays[ctx.rank].copy()
            result = ctx.all_reduce(mine, "sum", algorithm=algorithm)
            assert result is mine, case
            same(mine, folded("sum", arrays), case)

    world.run(check)


def test_all_reduce_with_every_dtype_and_op(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        for dtype, op in itertools.product(DTYPES, OPS):
            arrays = everyones(ctx.world_size, (101,), dtype)
            mine = arrays[ctx.rank].copy()
            if op == "mean" and dtype.kind in "iu":
                with pytest.raises(TypeError, match="mean of"):
                    ctx.all_reduce(mine, op)
                continue
            ctx.all_reduce(mine, op)
            same(mine, folded(op, arrays), (dtype, op))

    world.run(check)


def test_the_mean_of_finite_values_is_finite(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        for dtype in FLOATS:
            top = float(ml_dtypes.finfo(dtype).max)
            row = np.tile(np.array([top, -top, 0.9 * top, 1, 0], dtype), 21)
            if dtype.kind == "c":
                row = row + row * dtype.type(1j)
            parts = np.stack([row] * size)
            root = size - 1
            found = [
                ctx.all_reduce(row.copy(), "mean"),
                ctx.reduce_scatter(parts, "mean"),
                ctx.reduce(row.copy(), root, "mean") if ctx.rank == root else None,
            ]
            if ctx.rank != root:
                kept = row.copy()
                ctx.reduce(kept, root, "mean")
                assert kept.tobytes() == row.tobytes(), "only the root's array changes"
            assert parts.tobytes() == np.stack([row] * size).tobytes(), "the input stays as it is"
            for each in found:
                if each is None:
                    continue
                exact, mean = (x.astype(np.complex256) for x in (row, each))
                assert np.isfinite(mean).all(), (dtype, size)
                unit = float(ml_dtypes.finfo(dtype).eps)
                assert (np.abs(mean - exact) <= size * unit * np.abs(exact)).all(), (dtype, size)

    world.run(check)


def test_random_floats_end_bit_identical_on_every_rank_with_every_algorithm(
    world: World, seed: int
) -> None:
    fold = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}
    normal = [
        np.random.default_rng([seed, rank]).normal(size=4321) for rank in range(world.world_size)
    ]
    calls = [
        (algorithm, op, np.dtype(dtype))
        for algorithm, op in itertools.product(algorithms_for(Operation.ALL_REDUCE), OPS)
        if algorithm is not Algorithm.DOUBLING or op in doubling.OPS
        for dtype in ("float64", ml_dtypes.bfloat16)
    ]

    def check(ctx: DistributedContext) -> list[bytes]:
        results = []
        for algorithm, op, dtype in calls:
            mine = normal[ctx.rank].astype(dtype)
            ctx.all_reduce(mine, op, algorithm=algorithm)
            results.append(mine.tobytes())
        return results

    first, *others = world.run(check)
    for other in others:
        assert other == first
    for (_, op, dtype), result in zip(calls, first, strict=True):
        given = np.stack(normal).astype(dtype).astype(np.float64)
        found = np.frombuffer(result, np.uint8).view(dtype).astype(np.float64)
        tolerance = 1e-12 if dtype.itemsize == 8 else 0.05
        np.testing.assert_allclose(found, fold[op](given, axis=0), rtol=tolerance, atol=tolerance)


def test_ranks_have_the_same_nans_whichever_they_contribute(world: World) -> None:
    def check(ctx: DistributedContext) -> list[bytes]:
        results = []
        for algorithm, op in itertools.product(algorithms_for(Operation.ALL_REDUCE), OPS[:2]):
            for dtype in FLOATS:
                some = np.array([np.nan, np.inf, -np.inf, 0, 1], dtype)[np.arange(40) % 5]
                mine = np.roll(some, ctx.rank * 3)
                parts = mine.view(np.float32) if dtype.kind == "c" else mine
                bits = parts.view(f"u{parts.itemsize}")
                bits[np.isnan(parts)] += bits.dtype.type(ctx.rank)
                ctx.all_reduce(mine, op, algorithm=algorithm)
                assert ctx.world_size == 1 or np.isnan(mine).any()
                results.append(mine.tobytes())
        return results

    first, *others = world.run(check)
    for other in others:
        assert other == first


def test_overflow_and_nan_are_what_floating_point_says_and_warn_nobody(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        big = np.array([6e4, -6e4, np.nan, 1.0], dtype=np.float16)
        ctx.all_reduce(big, "sum")
        if ctx.world_size > 1:
            np.testing.assert_array_equal(
                big, np.array([np.inf, -np.inf, np.nan, ctx.world_size], dtype=np.float16)
            )
        lost = np.array([np.nan if ctx.rank == ctx.world_size - 1 else 1.0])
        assert np.isnan(ctx.all_reduce(lost, "max")[0])

    world.run(check)


def test_reduce_scatter_leaves_its_input_unchanged(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        for algorithm, shape in cases(Operation.REDUCE_SCATTER):
            for op in ("sum", "max"):
                case = (algorithm, shape, op)
                size = ctx.world_size
                arrays = everyones(size, (size, *shape), "int32")
                mine = arrays[ctx.rank].copy()
                part = ctx.reduce_scatter(mine, op, algorithm=algorithm)
                same(np.asarray(part), folded(op, arrays)[ctx.rank], case)
                same(mine, arrays[ctx.rank], case)

    world.run(check)


def test_all_gather_brings_everyones_array_in_rank_order(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        for algorithm, shape in cases(Operation.ALL_GATHER):
            arrays = everyones(ctx.world_size, shape, "float64")
            mine = arrays[ctx.rank].copy()
            result = ctx.all_gather(mine, algorithm=algorithm)
            same(result, np.stack(arrays), (algorithm, shape))
            same(mine, arrays[ctx.rank], (algorithm, shape))

    world.run(check)


def test_broadcast_from_every_kind_of_root(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        for root in sorted({0, ctx.world_size // 2, ctx.world_size - 1}):
            for algorithm, shape in cases(Operation.BROADCAST):
                mine = values(ctx.rank, shape, np.dtype("uint8"), root)
                ctx.broadcast(mine, root, algorithm=algorithm)
                same(mine, values(root, shape, np.dtype("uint8"), root), (root, algorithm, shape))

    world.run(check)


def test_reduce_changes_only_the_roots_array(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        for root in sorted({0, ctx.world_size - 1}):
            for algorithm, shape in cases(Operation.REDUCE):
                case = (root, algorithm, shape)
                arrays = everyones(ctx.world_size, shape, "float32")
                mine = arrays[ctx.rank].copy()
                ctx.reduce(mine, root, "mean", algorithm=algorithm)
                wanted = folded("mean", arrays) if ctx.rank == root else arrays[ctx.rank]
                same(mine, wanted, case)

    world.run(check)


def test_scatter_and_gather(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        for root in sorted({0, size - 1}):
            for algorithm, shape in cases(Operation.SCATTER):
                parts = values(root, (size, *shape), np.dtype("int64"), 3)
                output = np.full(shape, -1, dtype=np.int64)
                ctx.scatter(output, parts if ctx.rank == root else None, root, algorithm=algorithm)
                same(output, parts[ctx.rank].reshape(shape), (root, algorithm, shape))
            for algorithm, shape in cases(Operation.GATHER):
                arrays = everyones(size, shape, "int8")
                result = ctx.gather(arrays[ctx.rank], root, algorithm=algorithm)
                if ctx.rank == root:
                    same(result, np.stack(arrays), (root, algorithm, shape))
                else:
                    assert result is None

    world.run(check)


def test_all_to_all_transposes(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        for algorithm, shape in cases(Operation.ALL_TO_ALL):
            arrays = everyones(size, (size, *shape), "float16")
            mine = arrays[ctx.rank].copy()
            result = ctx.all_to_all(mine, algorithm=algorithm)
            same(result, np.stack([array[ctx.rank] for array in arrays]), (algorithm, shape))
            same(mine, arrays[ctx.rank], (algorithm, shape))

    world.run(check)


def test_nobody_passes_a_barrier_before_everyone_has_come(world: World) -> None:
    for algorithm in (None, *algorithms_for(Operation.BARRIER)):

        def check(ctx: DistributedContext, algorithm: str | None = algorithm) -> list[float]:
            came = time.monotonic()  # one clock for all processes of a machine
            ctx.barrier(algorithm=algorithm)
            return [came, time.monotonic()]

        came, left = zip(*world.run(check), strict=True)
        assert max(came) <= min(left)


def test_arrays_that_are_not_contiguous(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        base = np.arange(48.0).reshape(6, 8) + ctx.rank
        total = np.arange(48.0).reshape(6, 8) * size + sum(range(size))
        for view in (np.s_[:, ::2], np.s_[::-1], np.s_[1:5, 3]):
            mine = base.copy()
            result = ctx.all_reduce(mine[view])
            np.testing.assert_array_equal(result, total[view])
            np.testing.assert_array_equal(mine[view], total[view])
        mine = base.T
        ctx.broadcast(mine, size - 1)
        np.testing.assert_array_equal(base, np.arange(48.0).reshape(6, 8) + size - 1)
        gathered = ctx.all_gather(base[:, 1])
        assert gathered.shape == (size, 6)

    world.run(check)


def test_functions_that_leave_their_argument_alone(world: World) -> None:
    world_size = world.world_size

    def check(ctx: DistributedContext) -> None:
        mine = np.full(3, ctx.rank + 1.0)
        mine.flags.writeable = False
        total = sum(range(1, world_size + 1))
        np.testing.assert_array_equal(all_reduce_sum(ctx, mine), np.full(3, total))
        np.testing.assert_array_equal(all_reduce_mean(ctx, mine), np.full(3, total / world_size))
        np.testing.assert_array_equal(mine, np.full(3, ctx.rank + 1.0))

    world.run(check)


def test_many_operations_in_flight_waited_for_in_another_order(world: World, seed: int) -> None:
    def check(ctx: DistributedContext) -> None:
        choose = random.Random(seed)  # the same on all ranks
        works = []
        for number in range(40):
            shape = (choose.choice([0, 1, 13, 900, 7000]),)
            kind = choose.choice(["all_reduce", "all_gather", "broadcast", "reduce_scatter"])
            size = ctx.world_size
            arrays = everyones(size, (size, *shape), "float32", number)
            mine = arrays[ctx.rank].copy()
            if kind == "all_reduce":
                algorithm = choose.choice(algorithms_for(Operation.ALL_REDUCE))
                work = ctx.all_reduce(mine, algorithm=algorithm, async_op=True)
                wanted = folded("sum", arrays)
            elif kind == "all_gather":
                work, wanted = ctx.all_gather(mine, async_op=True), np.stack(arrays)
            elif kind == "broadcast":
                root = choose.randrange(size)
                work, wanted = ctx.broadcast(mine, root, async_op=True), arrays[root]
            else:
                work = ctx.reduce_scatter(mine, async_op=True)
                wanted = folded("sum", arrays)[ctx.rank]
            works.append((number, kind, work, wanted))
        random.Random(seed + ctx.rank).shuffle(works)
        for number, kind, work, wanted in works:
            same(work.wait(), wanted, (number, kind))
            assert work.done()
            assert work.exception() is None

    world.run(check)


def test_overlapping_sub_groups_at_the_same_time_as_the_whole_group(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        choices = [
            list(range(size))[::-1],
            list(range(0, size, 2)),
            list(range(size // 2, size)),
            [size - 1, 0] if size > 1 else [0],
        ]
        groups = [(ranks, ctx.new_group(ranks)) for ranks in choices]
        works = []
        for number in range(5):
            whole = np.full(3000, float(ctx.rank))
            works.append((ctx.all_reduce(whole, async_op=True), sum(range(size))))
            for ranks, group in groups:
                if group is None:
                    assert ctx.rank not in ranks
                    continue
                assert (group.rank, group.world_size) == (ranks.index(ctx.rank), len(ranks))
                part = np.full(3000, float(ctx.rank + number))
                works.append(
                    (group.all_reduce(part, async_op=True), sum(ranks) + number * len(ranks))
                )
                root = group.broadcast(np.full(5, ctx.rank), root=0, async_op=True)
                works.append((root, ranks[0]))
        for work, wanted in reversed(works):
            assert (work.wait() == wanted).all()

    world.run(check)


@pytest.mark.parametrize("count", [0, 1, 1000, 8192, 8193, 50_001], ids=lambda n: f"{8 * n}-bytes")
def test_send_and_recv_in_both_directions_at_once(world: World, count: int) -> None:
    """Both sides of 64 KiB, below which messages travel at once; also through shared memory."""

    def check(ctx: DistributedContext) -> None:
        size, rank = ctx.world_size, ctx.rank
        if size == 1:
            with pytest.raises(ValueError, match="this rank"):
                ctx.send(np.zeros(1), 0)
            return
        after, before = (rank + 1) % size, (rank - 1) % size
        sent = values(rank, (count,), np.dtype("float64"), 5)
        going = ctx.send(sent, after, tag=rank, async_op=True)
        got = np.zeros(count)
        assert ctx.recv(got, before, tag=before) is got
        assert going.wait() is sent
        same(got, values(before, (count,), np.dtype("float64"), 5), count)

    world.run(check)


def test_tags_are_matched_out_of_order_and_equal_ones_in_order(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        if ctx.world_size == 1:
            return
        sizes = [3, 20_000, 1, 600, 9000]
        if ctx.rank == 0:
            for tag in (9, 2, 5):
                for number, count in enumerate(sizes):
                    ctx.send(np.full(count, 10.0 * tag + number), 1, tag=tag, async_op=True)
            ctx.barrier()
        elif ctx.rank == 1:
            for tag in (5, 9, 2):
                for number, count in enumerate(sizes):
                    got = ctx.recv(np.zeros(count), 0, tag=tag)
                    assert (got == 10.0 * tag + number).all(), (tag, number)
            ctx.barrier()
        else:
            ctx.barrier()

    world.run(check)


def test_any_source_takes_what_comes_and_says_whose_it_was(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        group = ctx.new_group(list(range(size))[::-1])
        assert group is not None
        for face in (ctx, group):
            for count in (5, 10_000):
                if face.rank == 0:
                    sources = []
                    for _ in range(size - 1):
                        array = np.zeros(count)
                        work = face.recv(array, -1, tag=4, async_op=True)
                        assert work.wait() is array
                        assert (array == work.source).all()
                        sources.append(work.source)
                    assert sorted(sources) == list(range(1, size))
                else:
                    face.send(np.full(count, float(face.rank)), 0, tag=4)
                ctx.barrier()

    world.run(check)


def lengths_of(size: int, salt: int) -> list[int]:
    return np.random.default_rng([size, salt]).integers(0, 1500, size).tolist()


def test_gathers_of_parts_of_any_length(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size, rank = ctx.world_size, ctx.rank
        for salt, lengths in enumerate(
            [[0] * size, [3] * size, [0, *range(1, size)], lengths_of(size, 1)]
        ):
            for dtype, shape in ((np.dtype("float32"), ()), (np.dtype(ml_dtypes.bfloat16), (2, 3))):
                case = (lengths, dtype, shape)
                arrays = [values(r, (lengths[r], *shape), dtype, salt) for r in range(size)]
                mine = arrays[rank].copy()
                going = ctx.all_gather_uneven(mine, async_op=True)
                root = salt % size
                at_root = ctx.gather_uneven(mine, root)
                for got in [going.wait()] + [at_root] * (rank == root):
                    assert len(got) == size
                    for part, wanted in zip(got, arrays, strict=True):
                        same(part, wanted, case)
                assert rank == root or at_root is None
                same(mine, arrays[rank], case)

    world.run(check)


def test_scatter_of_parts_of_any_length(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        for salt, root in enumerate({0, size - 1}):
            counts = lengths_of(size, salt)
            flat = values(root, (sum(counts), 2), np.dtype("int32"), salt)
            wanted = np.split(flat, np.cumsum(counts)[:-1])[ctx.rank]
            is_root = ctx.rank == root
            mine = ctx.scatter_uneven(flat if is_root else None, root, counts=counts)
            same(mine, wanted, counts)
            parts = np.split(flat, np.cumsum(counts)[:-1]) if is_root else None
            work = ctx.scatter_uneven(parts, root, async_op=True)
            same(work.wait(), wanted, counts)
        group = ctx.new_group(list(range(size))[::-1])
        assert group is not None
        parts = [np.full(n + 1, n) for n in range(size)] if group.rank == 0 else None
        assert group.scatter_uneven(parts).tolist() == [group.rank] * (group.rank + 1)

    world.run(check)


@pytest.mark.parametrize("wrong", ["counts", "parts", "nothing", "no array", "dtypes"])
def test_a_mistake_of_the_root_is_told_to_all_and_the_group_goes_on(
    world: World, wrong: str
) -> None:
    def check(ctx: DistributedContext) -> None:
        size, root = ctx.world_size, ctx.world_size - 1
        given: dict[str, Any] = {
            "counts": {"parts": np.zeros(size + 1), "counts": [1] * size},
            "parts": {"parts": [np.zeros(1)] * (size + 1)},
            "nothing": {},
            "no array": {"parts": ["text"] * size},
            "dtypes": {"parts": [np.zeros(1), *[np.zeros(1, np.int32)] * (size - 1)]},
        }[wrong]
        if wrong == "dtypes" and size == 1:
            return
        told = mistake_of_the_root(ctx, TypeError if wrong == "no array" else ValueError, given)
        expected = {
            "counts": "with the sum",
            "parts": "one part per rank",
            "nothing": "must pass",
            "dtypes": "differ in their first dimension only",
        }
        assert expected.get(wrong, "got str") in told
        parts = [np.full(2, rank) for rank in range(size)] if ctx.rank == root else None
        assert ctx.scatter_uneven(parts, root).tolist() == [ctx.rank] * 2

    world.run(check)


@pytest.mark.parametrize("kind", ["floats", "texts", "one number"])
def test_counts_that_are_not_whole_numbers_are_one_type_error_on_all_ranks(
    world: World, kind: str
) -> None:
    def check(ctx: DistributedContext) -> None:
        counts = {"floats": [1.0] * ctx.world_size, "texts": ["1"] * ctx.world_size}
        given = {"parts": np.zeros(ctx.world_size), "counts": counts.get(kind, ctx.world_size)}
        told = mistake_of_the_root(ctx, TypeError, given)
        assert "counts must be whole numbers, one for each rank, not " in told
        whole = np.ones(ctx.world_size, np.int64)
        root = ctx.world_size - 1
        flat = np.arange(ctx.world_size) if ctx.rank == root else None
        assert ctx.scatter_uneven(flat, root, counts=whole).tolist() == [ctx.rank]

    world.run(check)


def mistake_of_the_root(
    ctx: DistributedContext, kind: type[Exception], given: dict[str, Any]
) -> str:
    """What this rank is told, by an error of ``kind``, of what the last rank was given."""
    root = ctx.world_size - 1
    is_root = ctx.rank == root
    match = None if is_root else "the root, can't scatter what it was given"
    with pytest.raises(kind, match=match) as caught:
        ctx.scatter_uneven(root=root, **(given if is_root else {}))
    return str(caught.value)


def test_a_part_of_another_dtype_than_like_is_not_the_next_ones(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        parts = [[np.full(3, value, np.int64)] * size for value in (1, 2)]
        if ctx.rank == 0:
            for each in parts:
                ctx.scatter_uneven(each)
            return
        with pytest.raises(TypeError, match="the parts are int64, but like is float32"):
            ctx.scatter_uneven(like=np.zeros(0, np.float32))
        assert ctx.scatter_uneven().tolist() == [2, 2, 2]

    world.run(check)


def test_uneven_parts_are_apart_from_a_scripts_own_messages(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        if ctx.world_size == 1:
            return
        if ctx.rank == 1:
            ctx.send(np.full(4, 7.0), 0, async_op=True)
        got = ctx.gather_uneven(np.full(4 - 4 * (ctx.rank > 1), float(ctx.rank)))
        if ctx.rank == 0:
            assert got[1].tolist() == [1.0] * 4
            assert ctx.recv(np.zeros(4), 1).tolist() == [7.0] * 4
        ctx.barrier()

    world.run(check)


def test_messages_of_any_size_to_whoever_asks_for_them(world: World) -> None:
    """The receiver knows neither sizes nor types; arrays on both sides of 64 KiB."""

    def check(ctx: DistributedContext) -> None:
        size, rank = ctx.world_size, ctx.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        if size == 1:
            with pytest.raises(ValueError, match="this rank"):
                ctx.send_message(None, 0)
            return
        for count in (0, 3, 1000, 30_000):
            sent = {
                "w": values(rank, (count,), np.dtype("float32"), 5),
                "more": [(rank, "text"), np.arange(count, dtype="uint8"), b"bytes", None, 1.5],
            }
            going = ctx.send_message(sent, after, tag=rank, async_op=True)
            got = ctx.recv_message(before)
            assert going.wait() is None
            assert (got.source, got.tag) == (before, before)
            same(got.payload["w"], values(before, (count,), np.dtype("float32"), 5), count)
            pair, array, *rest = got.payload["more"]
            same(array, np.arange(count, dtype="uint8"), count)
            assert (pair, rest) == ((before, "text"), [b"bytes", None, 1.5])

    world.run(check)


def test_messages_are_matched_by_tag_and_source_in_any_order(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        group = ctx.new_group(list(range(size))[::-1])
        assert group is not None
        for face in (ctx, group):
            if face.rank > 0:
                for tag in (7, 2**31 - 1, 7):
                    face.send_message([tag, face.rank, np.zeros(50_000)], 0, tag, async_op=True)
            else:
                for source in range(1, size):
                    got = face.recv_message(source, tag=2**31 - 1)
                    assert got.payload[:2] == [2**31 - 1, source]
                sources = [face.recv_message(tag=7).source for _ in range(2 * (size - 1))]
                assert sorted(sources) == sorted([*range(1, size)] * 2)
            ctx.barrier()

    world.run(check)


def test_what_a_message_cannot_hold_harms_nobody(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        with pytest.raises(TypeError, match=r'payload\["a"\]\[1\] is of type set'):
            ctx.send_message({"a": [1, {2}]}, 0)
        with pytest.raises(ValueError, match="tag"):
            ctx.recv_message(tag=-2)
        ctx.barrier()

    world.run(check)


def test_averages_of_neighbours_are_the_product_with_the_mixing_matrix(world: World) -> None:
    nx = pytest.importorskip("networkx", reason="graphs of networkx are taken; torch brings it")

    def check(ctx: DistributedContext) -> None:
        size, rank = ctx.world_size, ctx.rank
        one_way = nx.gnp_random_graph(size, 0.5, seed=size, directed=True)
        star = nx.star_graph(size - 1).to_directed()
        choices = (graphs.ring(size), graphs.exponential(size), one_way, star)
        for graph, shape in itertools.product(choices, SHAPES):
            matrix = graphs.Graph.of(graph).matrix()
            arrays = everyones(size, shape, "float64")
            mine = arrays[rank].copy()
            assert ctx.neighbor_all_reduce(mine, graph) is mine
            wanted = np.tensordot(matrix[rank], np.stack(arrays), 1)
            np.testing.assert_allclose(mine, wanted, rtol=1e-14)
        for dtype in FLOATS:
            arrays = everyones(size, (101,), dtype)
            works = [
                ctx.neighbor_all_reduce(arrays[rank] * dtype.type(2), choices[1], async_op=True),
                ctx.neighbor_all_reduce(arrays[rank].copy(), choices[0], async_op=True),
            ]
            for work, graph, factor in zip(works, (choices[1], choices[0]), (2, 1), strict=True):
                matrix = graph.matrix()[rank]
                wanted = sum(
                    w * each.astype("complex128") for w, each in zip(matrix, arrays, strict=True)
                )
                got = work.wait()
                assert got.dtype == dtype
                np.testing.assert_allclose(
                    got.astype("complex128"), factor * wanted, rtol=2 * ml_dtypes.finfo(dtype).eps
                )

    world.run(check)


def test_base_graphs_bring_all_ranks_to_the_mean_in_finitely_many_calls(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size, rank = ctx.world_size, ctx.rank
        arrays = everyones(size, (5, 7), "float64")
        mine = arrays[rank].copy()
        for graph in graphs.base(size):
            ctx.neighbor_all_reduce(mine, graph)
        np.testing.assert_allclose(mine, np.mean(arrays, axis=0), rtol=1e-14)
        strided = np.asfortranarray(arrays[rank])
        ctx.neighbor_all_reduce(strided, graphs.ring(size))
        wanted = np.tensordot(graphs.ring(size).matrix()[rank], np.stack(arrays), 1)
        np.testing.assert_allclose(strided, wanted, rtol=1e-14)

    world.run(check)


def test_torch_tensors_are_reduced_in_place_without_a_copy(world: World) -> None:
    torch = pytest.importorskip("torch")

    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            tensor = torch.full((3, 500), ctx.rank + 1, dtype=dtype)
            where = tensor.data_ptr()
            assert ctx.all_reduce(tensor) is tensor
            assert tensor.data_ptr() == where
            assert (tensor == sum(range(1, size + 1))).all()
        parameter = torch.nn.Parameter(torch.full((4,), float(ctx.rank)))
        ctx.broadcast(parameter, size - 1)
        assert (parameter == size - 1).all()
        strided = torch.zeros(6, 4)
        ctx.all_reduce(strided[:, 1].add_(1))
        assert (strided[:, 1] == size).all()
        assert (strided[:, 0] == 0).all()
        parts = ctx.all_gather_uneven(torch.ones(ctx.rank, dtype=torch.bfloat16))
        assert [(len(part), part.dtype) for part in parts] == [
            (rank, torch.bfloat16) for rank in range(size)
        ]
        gathered = ctx.all_gather(torch.tensor(float(ctx.rank)))
        assert gathered.tolist() == [float(rank) for rank in range(size)]

    world.run(check)


def test_arguments_that_make_no_sense_are_the_callers_mistake_and_harm_nobody(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        size = ctx.world_size
        with pytest.raises(ValueError, match="unknown"):
            ctx.all_reduce(np.zeros(2), "median")
        with pytest.raises(ValueError, match="outside a world"):
            ctx.broadcast(np.zeros(2), size)
        with pytest.raises(ValueError, match="first dimension"):
            ctx.all_to_all(np.zeros((size + 1, 2)))
        with pytest.raises(ValueError, match="read-only"):
            ctx.all_reduce(np.broadcast_to(np.zeros(1), (3,)))
        with pytest.raises(TypeError, match="datetime64"):
            ctx.all_reduce(np.zeros(2, dtype="datetime64[s]"))
        with pytest.raises(TypeError, match="list"):
            ctx.all_reduce([1.0])
        with pytest.raises(ValueError, match="tag"):
            ctx.send(np.zeros(1), 0, tag=-1)
        with pytest.raises(ValueError, match="above 0"):
            ctx.barrier(timeout=0)
        with pytest.raises(ValueError, match="distinct"):
            ctx.new_group([0, 0])
        with pytest.raises(ValueError, match="1 to 8 dimensions"):
            ctx.all_gather_uneven(np.zeros(()))
        with pytest.raises(ValueError, match="outside a world"):
            ctx.gather_uneven(np.zeros(1), root=size)
        with pytest.raises(ValueError, match=f"has {size + 1} nodes, but there are {size} ranks"):
            ctx.neighbor_all_reduce(np.zeros(1), graphs.ring(size + 1))
        with pytest.raises(TypeError, match="pass a networkx"):
            ctx.neighbor_all_reduce(np.zeros(1), np.eye(size))
        with pytest.raises(TypeError, match="the mean of int64"):
            ctx.neighbor_all_reduce(np.zeros(1, np.int64), graphs.ring(size))
        assert ctx.all_reduce(np.ones(1))[0] == size

    world.run(check)


@pytest.mark.skipif(bool(BACKEND), reason=f"{BACKEND} has no shared memory of ours")
def test_payloads_between_workers_of_one_node_go_through_the_shared_memory() -> None:
    with open_world("tls+shm", 2, segment_bytes=64 * 1024) as world:
        world.run(lambda ctx: ctx.all_reduce(np.ones(100_000)))
        for ctx in world.contexts:
            (link,) = ctx.stats()["links"].values()
            assert 0.9 * link["bytes_sent"] < link["bytes_in_shared_memory"] <= link["bytes_sent"]
