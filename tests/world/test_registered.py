"""Codecs and plans of one's own: they run on any engine, and ranks that disagree are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from potluck._core import codecs, collectives
from potluck._core.codecs import Codec
from potluck._core.collectives import Action, Draft, Rank, Step
from potluck._core.collectives.registry import digest
from potluck._core.context import DistributedContext
from potluck.compressors.encoded import Encoded
from potluck.errors import Desync
from potluck.testing.world import WorldError, run_world
from potluck.torch import DDP


class Eighths(Codec):
    """Multiples of 1/8 up to 15 in magnitude, one byte each."""

    name = "eighths"

    def encoded_bytes(self, count: int) -> int:
        return count

    def encode(self, encoded: Any, source: Any) -> None:
        encoded.view(np.int8)[:] = np.rint(source * 8).clip(-127, 127)

    def decode(self, target: Any, encoded: Any) -> None:
        target[:] = encoded.view(np.int8) / np.float32(8)

    def error_bound(self, largest: float) -> float:
        return max(1 / 16, largest - 127 / 8)


class OwnCodec(Encoded):
    @property
    def codec(self) -> Codec:
        return codecs.codec_of("eighths")


codecs.register(Eighths())


def chain(rank: Rank) -> Draft:
    steps, last = [], rank.world_size - 1
    if rank.rank < last:
        steps.append(Step(Action.REDUCE, rank.rank + 1, 0))
    if rank.rank:
        steps += [Step(Action.SEND, rank.rank - 1, 0), Step(Action.COPY, rank.rank - 1, 0)]
    if rank.rank < last:
        steps.append(Step(Action.SEND, rank.rank + 1, 0))
    return Draft(1, steps)


def mine(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_codec_of_ones_own_gives_the_same_bits_everywhere_and_keeps_what_it_loses(
    size: int, count: int
) -> None:
    def work(ctx: DistributedContext) -> tuple[np.ndarray, np.ndarray]:
        array, residual = mine(ctx.rank, count), np.zeros(count, np.float32)
        found = ctx.all_reduce(array, codec="eighths", residual=residual)
        assert found is array
        return array, residual

    results = run_world(size, work)
    for array, _ in results:
        assert np.array_equal(array, results[0][0])
    total = results[0][0] + sum(residual for _, residual in results)
    np.testing.assert_allclose(total, sum(mine(r, count) for r in range(size)), atol=1e-5)
    if count == 1000 and size > 1:
        assert np.abs(results[0][1]).max() > 0.01


def test_the_mean_of_tensors_beside_other_calls() -> None:
    def work(ctx: DistributedContext) -> None:
        tensor = torch.full((40, 25), float(ctx.rank))
        works = [ctx.all_reduce(tensor, "mean", codec="eighths", async_op=True)]
        works.append(ctx.all_reduce(np.ones(3), async_op=True))
        assert torch.equal(works[0].wait(), torch.full((40, 25), 0.5))
        assert works[1].wait().tolist() == [2, 2, 2]

    run_world(2, work)


def test_ddp_with_a_codec_of_ones_own() -> None:
    def work(ctx: DistributedContext) -> torch.Tensor:
        torch.manual_seed(0)
        model = DDP(nn.Linear(30, 30), ctx, compression=OwnCodec(), dense_below=100)
        (model(torch.ones(2, 30)) * (1 + ctx.rank)).sum().backward()
        return model.module.weight.grad

    first, second = run_world(2, work)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.full((30, 30), 3.0))


def test_ranks_with_other_codecs_of_one_name_are_told() -> None:
    """Threads share one registry, so rank 1 plays a rank whose codec has another hash."""

    def work(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            with pytest.raises(Desync, match="rank 1 has another codec 'eighths' than rank 0"):
                ctx.all_reduce(np.ones(10, np.float32), codec="eighths")
        else:
            ctx.all_to_all(np.zeros((2, 8 + 5), np.uint8))

    run_world(2, work)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plan_of_ones_own_is_verified_and_run(size: int) -> None:
    collectives.register("chain", "all_reduce", chain)

    def work(ctx: DistributedContext) -> np.ndarray:
        return ctx.all_reduce(mine(ctx.rank, 100_000), algorithm="chain")

    results = run_world(size, work)
    assert all(np.array_equal(each, results[0]) for each in results)
    np.testing.assert_allclose(results[0], sum(mine(r, 100_000) for r in range(size)), atol=1e-5)
    if size > 1:
        stats = run_world(size, lambda ctx: (work(ctx), ctx.stats())[1])[0]
        assert stats["operations"]["all_reduce"]["algorithms"] == {"chain": 1}


def test_a_wrong_plan_is_an_error_of_the_call_on_every_rank() -> None:
    collectives.register("nothing", "all_reduce", lambda rank: Draft(1, []))

    def work(ctx: DistributedContext) -> float:
        with pytest.raises(ValueError, match="lacking the contribution"):
            ctx.all_reduce(np.ones(3), algorithm="nothing")
        return float(ctx.all_reduce(np.ones(1))[0])

    assert run_world(2, work) == [2, 2]


def test_ranks_whose_plans_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from potluck._core.engine import compiler

    collectives.register("chain", "all_reduce", chain)
    seen = iter("ab")
    monkeypatch.setattr(compiler, "digest", lambda *call: digest(*call) and next(seen))

    def work(ctx: DistributedContext) -> None:
        ctx.all_reduce(np.ones(3), algorithm="chain")

    with pytest.raises(WorldError, match=r"Desync.*a registered algorithm"):
        run_world(2, work)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ctx, x: ctx.all_gather(x, codec="eighths"), ValueError, "for all_reduce of a"),
        (lambda ctx, x: ctx.all_reduce(x, "max", codec="eighths"), ValueError, "sum or mean"),
        (lambda ctx, x: ctx.all_reduce(x.astype(int), codec="eighths"), TypeError, "not int64"),
        (lambda ctx, x: ctx.all_reduce(x, codec="none"), ValueError, "int2, eighths"),
        (
            lambda ctx, x: ctx.all_reduce(x, codec="eighths", algorithm="ring"),
            ValueError,
            "without algorithm",
        ),
        (
            lambda ctx, x: ctx.all_reduce(x, codec="eighths", residual=np.zeros(2, np.float32)),
            ValueError,
            "the residual holds one float32",
        ),
    ],
)
def test_calls_that_have_no_meaning(call: Any, error: type[Exception], message: str) -> None:
    def work(ctx: DistributedContext) -> None:
        with pytest.raises(error, match=message):
            call(ctx, np.ones(8, np.float32))

    run_world(2, work)


class Named(Eighths):
    name = "named"


class TooFar(Named):
    def error_bound(self, largest: float) -> float:
        return 0.0


class Forgets(Named):
    def encode(self, encoded: Any, source: Any) -> None:
        super().encode(encoded[1:], source[1:])


class Changes(Named):
    def encode(self, encoded: Any, source: Any) -> None:
        source *= 8
        encoded.view(np.int8)[:] = np.rint(source).clip(-127, 127)


class Builtin(Named):
    name = "int8"


class Other(Eighths):
    def encode(self, encoded: Any, source: Any) -> None:
        encoded.view(np.int8)[:] = np.floor(source * 8).clip(-127, 127)

    def error_bound(self, largest: float) -> float:
        return 2 * super().error_bound(largest)


@pytest.mark.parametrize(
    ("codec", "error", "message"),
    [
        (TooFar(), ValueError, "error_bound promises 0"),
        (Forgets(), ValueError, "does it fill all encoded_bytes"),
        (Changes(), ValueError, "changes the array that it encodes"),
        (Builtin(), ValueError, "'int8' can't be the name of a codec"),
        (Other(), ValueError, "there is another codec 'eighths' already"),
        ("int8", TypeError, "make a subclass of potluck._core.codecs.Codec"),
    ],
)
def test_codecs_that_are_refused(codec: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        codecs.register(codec)
