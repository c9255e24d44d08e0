"""Collectives with a codec on every kind of link: the same bits on all ranks, within bounds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from potluck._core.codecs import NAMES, Codec, codec_of
from potluck._core.context import DistributedContext
from potluck.errors import Desync
from potluck.testing.world import WorldError
from support.worlds import MAIN_KINDS, WORLD_KINDS, World, open_world

SEGMENT_BYTES = 6 * 1024
WORLDS = [(kind, 3) for kind in WORLD_KINDS] + [(kind, 2) for kind in MAIN_KINDS]
WORLDS += [("inproc", 1), ("inproc", 5)]
COUNTS = (0, 5, 12_345)
"""The last one takes several segments, whose ends are not the ends of int8's blocks."""


@pytest.fixture(scope="module", params=WORLDS, ids=lambda each: f"{each[0]}-{each[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    kind, size = request.param
    with open_world(kind, size, segment_bytes=SEGMENT_BYTES) as opened:
        make_links(opened)
        yield opened


def make_links(world: World) -> None:
    """What is made on first use is not the first test's."""
    world.run(lambda ctx: ctx.all_to_all(np.zeros((ctx.world_size, 1)), algorithm="direct"))
    world.run(lambda ctx: ctx.barrier())


def numbers(rank: int, count: int, salt: int = 0) -> np.ndarray:
    return np.random.default_rng([rank, count, salt]).standard_normal(count).astype(np.float32)


def largest(*arrays: np.ndarray) -> float:
    return max(float(np.abs(array).max(initial=0)) for array in arrays)


def bound(codec: Codec, world_size: int, contributions: list[np.ndarray]) -> float:
    """Each of the other ranks' parts is encoded once, then the sum once."""
    if world_size == 1:
        return 0.0
    once = sum(codec.error_bound(largest(array)) for array in contributions)
    return once + codec.error_bound(sum(largest(array) for array in contributions)) + 1e-5


def test_all_reduce(world: World) -> None:
    size = world.world_size

    def check(ctx: DistributedContext) -> bytes:
        ended = b""
        for name, count in itertools.product(NAMES, COUNTS):
            codec = codec_of(name)
            everyones = [numbers(rank, count) for rank in range(size)]
            for op in ("sum", "mean"):
                mine = everyones[ctx.rank].copy()
                assert ctx.all_reduce(mine, op, codec=name) is mine
                exact = np.sum(everyones, axis=0, dtype=np.float64)
                scale = size if op == "mean" else 1
                error = np.abs(mine - exact / scale).max(initial=0)
                assert error <= bound(codec, size, everyones) / scale, (name, count, op)
                ended += mine.tobytes()
        return ended

    assert len(set(world.run(check))) == 1, "the ranks ended with different bits"


def test_reduce_scatter_and_all_gather(world: World) -> None:
    size = world.world_size

    def check(ctx: DistributedContext) -> bytes:
        ended = b""
        for name, count in itertools.product(NAMES, COUNTS):
            codec = codec_of(name)
            everyones = [numbers(rank, size * count).reshape(size, count) for rank in range(size)]
            mine = everyones[ctx.rank].copy()
            part = ctx.reduce_scatter(mine, codec=name)
            assert np.array_equal(mine, everyones[ctx.rank]), "the input stays as it is"
            exact = np.sum([each[ctx.rank] for each in everyones], axis=0, dtype=np.float64)
            error = np.abs(part - exact).max(initial=0)
            assert error <= bound(codec, size, everyones), (name, count)
            kept = part.copy()
            parts = ctx.all_gather(part, codec=name)
            assert np.array_equal(part, kept), "the input stays as it is"
            error = np.abs(parts[ctx.rank] - part).max(initial=0)
            once = codec.error_bound(largest(part)) if size > 1 else 0
            assert error <= once, (name, count)
            ended += parts.tobytes()
        return ended

    assert len(set(world.run(check))) == 1, "the ranks ended with different bits"


def test_every_engine_gives_the_same_bits() -> None:
    def reduced(ctx: DistributedContext) -> bytes:
        return b"".join(
            ctx.all_reduce(numbers(ctx.rank, 12_345), codec=name).tobytes() for name in NAMES
        )

    ends = set()
    for kind in WORLD_KINDS:
        with open_world(kind, 3, segment_bytes=SEGMENT_BYTES) as opened:
            ends.update(opened.run(reduced))
    assert len(ends) == 1


TCP_KINDS = [kind for kind in WORLD_KINDS if kind not in ("inproc", "shm")]
"""Those whose ranks are on several nodes."""
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 0, 1, 2, 2, 1)]


@pytest.fixture(scope="module", params=TCP_KINDS)
def hosts(request: pytest.FixtureRequest) -> Iterator[list[World]]:
    """Worlds of several nodes with several workers, of one kind."""
    with contextlib.ExitStack() as stack:
        worlds = [
            stack.enter_context(
                open_world(request.param, len(nodes), nodes=nodes, segment_bytes=SEGMENT_BYTES)
            )
            for nodes in LAYOUTS
        ]
        for world in worlds:
            make_links(world)
        yield worlds


def node_sums(nodes: Sequence[int], everyones: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [
        np.sum([each for each, at in zip(everyones, nodes, strict=True) if at == node], axis=0)
        for node in sorted(set(nodes))
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_hierarchical_all_reduce_encodes_the_sum_of_a_node(hosts: list[World], name: str) -> None:
    codec = codec_of(name)
    for world, nodes in zip(hosts, LAYOUTS, strict=True):

        def check(ctx: DistributedContext, nodes: tuple[int, ...] = nodes) -> bytes:
            ended = b""
            for count in COUNTS:
                everyones = [numbers(rank, count) for rank in range(len(nodes))]
                within = bound(codec, len(set(nodes)), node_sums(nodes, everyones))
                for op in ("sum", "mean"):
                    mine = everyones[ctx.rank].copy()
                    ctx.all_reduce(mine, op, codec=name, algorithm="hierarchical")
                    exact = np.sum(everyones, axis=0, dtype=np.float64)
                    scale = len(nodes) if op == "mean" else 1
                    error = np.abs(mine - exact / scale).max(initial=0)
                    assert error <= within / scale, (count, op)
                    ended += mine.tobytes()
            return ended

        assert len(set(world.run(check))) == 1, "the ranks ended with different bits"


def test_a_residual_keeps_what_nodes_have_lost(hosts: list[World]) -> None:
    count, times = 2000, 24
    for world, nodes in zip(hosts, LAYOUTS, strict=True):

        def check(ctx: DistributedContext, nodes: tuple[int, ...] = nodes) -> None:
            everyones = [numbers(rank, count) for rank in range(len(nodes))]
            exact = np.sum(everyones, axis=0, dtype=np.float64)
            for name in NAMES:
                mine, residual = everyones[ctx.rank], np.zeros(count, np.float32)
                total = np.zeros(count)
                for _ in range(times):
                    total += ctx.all_reduce(
                        mine.copy(), codec=name, residual=residual, algorithm="hierarchical"
                    )
                error = np.abs(total / times - exact).max()
                once = bound(codec_of(name), len(set(nodes)), node_sums(nodes, everyones))
                assert error <= 4 * once / times + 1e-6, name

        world.run(check)


def test_both_loops_give_the_same_bits_between_nodes() -> None:
    def reduced(ctx: DistributedContext) -> bytes:
        arrays = [numbers(ctx.rank, 12_345) for _ in NAMES]
        for array, name in zip(arrays, NAMES, strict=True):
            ctx.all_reduce(array, codec=name, algorithm="hierarchical")
        return b"".join(array.tobytes() for array in arrays)

    ends = set()
    for kind in TCP_KINDS:
        with open_world(kind, 5, nodes=LAYOUTS[1], segment_bytes=SEGMENT_BYTES) as opened:
            ends.update(opened.run(reduced))
    assert len(ends) == 1


@pytest.mark.parametrize("kind", TCP_KINDS)
def test_fewer_bytes_cross_between_nodes_and_as_many_within(kind: str) -> None:
    nodes = LAYOUTS[0]

    def sent(ctx: DistributedContext) -> np.ndarray:
        """Within the node, and to others."""
        links = ctx.stats()["links"].items()
        to_others = [nodes[int(peer.split()[1])] != nodes[ctx.rank] for peer, _ in links]
        moved = [link["bytes_sent"] for _, link in links]
        return np.bincount(to_others, weights=moved, minlength=2)

    def traffic(ctx: DistributedContext) -> list[list[float]]:
        found = []
        for codec in (None, "fp16", "bf16", "int8"):
            before = sent(ctx)
            ctx.all_reduce(numbers(ctx.rank, 100_000), algorithm="hierarchical", codec=codec)
            ctx.barrier()
            found.append((sent(ctx) - before).tolist())
        return found

    with open_world(kind, len(nodes), nodes=nodes, segment_bytes=64 * 1024) as opened:
        plain, *coded = np.sum(opened.run(traffic), axis=0)
    for (within, between), share in zip(coded, (0.5, 0.5, 0.25), strict=True):
        assert within / plain[0] == pytest.approx(1, abs=0.01)
        assert between / plain[1] == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_fewer_bytes_cross_the_links(kind: str) -> None:
    """The traffic is the codec's share of float32's, and no copy of it in float32 besides."""

    def sent(ctx: DistributedContext) -> int:
        return sum(link["bytes_sent"] for link in ctx.stats()["links"].values())

    def traffic(ctx: DistributedContext) -> list[int]:
        moved = []
        for codec in (None, "fp16", "bf16", "int8"):
            before = sent(ctx)
            ctx.all_reduce(numbers(ctx.rank, 100_000), algorithm="direct", codec=codec)
            ctx.barrier()
            moved.append(sent(ctx) - before)
        return moved

    with open_world(kind, 2, segment_bytes=64 * 1024) as opened:
        for plain, fp16, bf16, int8 in opened.run(traffic):
            # Besides payloads there are headers, and acknowledgements as the clock has them.
            assert fp16 / plain == pytest.approx(0.5, abs=0.01)
            assert bf16 / plain == pytest.approx(0.5, abs=0.01)
            assert int8 / plain == pytest.approx(0.25, abs=0.01)


def test_what_is_not_finite_reaches_every_rank(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        for name in NAMES:
            array = np.ones(600, np.float32)
            if ctx.rank == ctx.world_size - 1:
                array[5] = np.inf
            ctx.all_reduce(array, codec=name)
            assert not np.isfinite(array[5]), name

    world.run(check)


BEYOND = {"fp16": 6e4, "bf16": 3e38, "int8": 3e38, "int4": 3e38, "int2": 3e38}


def test_a_sum_beyond_the_range_is_the_largest_number_of_it_and_counted(world: World) -> None:
    """Each contribution is within the range, so only the owner of a chunk counts, of its sums."""

    def check(ctx: DistributedContext) -> int:
        num_before, found = num_beyond(ctx), 0
        for name, value in BEYOND.items():
            array = np.tile(np.float32([value, -value, 1]), 200)
            ctx.all_reduce(array, codec=name)
            assert np.isfinite(array).all(), name
            if ctx.world_size > 1:
                sums = np.tile(np.float32([1, -1]) * np.float32(codec_of(name).largest), 200)
                assert (np.abs(np.delete(array, slice(2, None, 3)) / sums - 1) <= 1e-6).all(), name
            parts = np.tile(np.float32([value, -value]), (ctx.world_size, 150))
            assert np.isfinite(ctx.reduce_scatter(parts, codec=name)).all(), name
            found = num_beyond(ctx) - num_before
        return found

    found = world.run(check)
    assert sum(found) == (len(BEYOND) * 400 if world.world_size > 1 else 0)


def num_beyond(ctx: DistributedContext) -> int:
    counts = ctx.stats()["operations"].get("all_reduce", {}).get("beyond_range", {})
    return int(sum(counts.values()))


def test_a_residual_keeps_what_was_lost(world: World) -> None:
    """With error feedback the mean over many calls comes as close as one likes to the truth."""
    size, count, times = world.world_size, 2000, 24

    def check(ctx: DistributedContext) -> None:
        for name in NAMES:
            mine, residual = numbers(ctx.rank, count), np.zeros(count, np.float32)
            total = np.zeros(count)
            for _ in range(times):
                total += ctx.all_reduce(mine.copy(), codec=name, residual=residual)
            everyones = [numbers(rank, count) for rank in range(size)]
            exact = np.sum(everyones, axis=0, dtype=np.float64)
            error = np.abs(total / times - exact).max()
            assert error <= 4 * bound(codec_of(name), size, everyones) / times + 1e-6, name
            assert (largest(residual) > 0) == (size > 1)

    world.run(check)


@pytest.mark.parametrize("kind", WORLD_KINDS)
@pytest.mark.parametrize("theirs", [None, "bf16"])
def test_ranks_that_name_different_codecs_get_desync(kind: str, theirs: str | None) -> None:
    def call(ctx: DistributedContext) -> None:
        ctx.all_reduce(
            np.ones(5000, np.float32), algorithm="direct", codec=theirs if ctx.rank else "fp16"
        )

    with (
        open_world(kind, 2, segment_bytes=SEGMENT_BYTES) as opened,
        pytest.raises(WorldError) as caught,
    ):
        opened.run(call)
    assert {type(error) for error in caught.value.errors.values()} == {Desync}
    assert "codec fp16" in str(caught.value)


@pytest.mark.parametrize("kind", TCP_KINDS)
def test_a_desync_of_coded_calls_names_the_algorithm_of_the_peer(kind: str) -> None:
    def call(ctx: DistributedContext) -> None:
        algorithm = "hierarchical" if ctx.rank else "direct"
        ctx.all_reduce(np.ones(5000, np.float32), algorithm=algorithm, codec="fp16")

    with (
        open_world(kind, 2, segment_bytes=SEGMENT_BYTES) as opened,
        pytest.raises(WorldError) as caught,
    ):
        opened.run(call)
    for rank, error in caught.value.errors.items():
        assert isinstance(error, Desync), rank
        names = "direct" if error.rank == 0 else "hierarchical"
        theirs = f"called all_reduce(float32, 5000 elements, op sum, {names}, codec fp16)"
        assert theirs in str(error)


def wrong_calls(ctx: DistributedContext) -> list[tuple[type[Exception], str, Any]]:
    floats, doubles = np.ones(8, np.float32), np.ones(8)
    short = np.zeros(7, np.float32)
    return [
        (TypeError, "codec='int8' encodes float32", lambda: ctx.all_reduce(doubles, codec="int8")),
        (ValueError, "no codec 'int3'", lambda: ctx.all_reduce(floats, codec="int3")),
        (ValueError, "sum or mean", lambda: ctx.all_reduce(floats, "max", codec="int8")),
        (ValueError, "direct", lambda: ctx.all_reduce(floats, algorithm="ring", codec="int8")),
        (ValueError, "name the codec", lambda: ctx.all_reduce(floats, residual=floats)),
        (ValueError, "each of the 8", lambda: ctx.all_reduce(floats, codec="fp16", residual=short)),
    ]


def test_what_can_not_be_encoded_is_refused_before_anything_moves(world: World) -> None:
    def check(ctx: DistributedContext) -> None:
        for error, text, call in wrong_calls(ctx):
            with pytest.raises(error, match=text):
                call()
        ctx.barrier()

    world.run(check)
