"""Tensors that live elsewhere go through host memory in pieces. The device here is a fake one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from potluck.context import DistributedContext
from potluck.engine.layout import Array
from potluck.engine.work import Work
from potluck.testing.world import run_world
from potluck.torch.process_group import staging
from potluck.torch.process_group.seat import Seat
from potluck.torch.process_group.work import Completions
from potluck.types import ReduceOp

PIECES = 3
LENGTH = 2 * 1024 + 100


class FakeLane:
    """A device that keeps a diary, and whose copies are only there once they are waited for."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self._fetched = 0
        self._put: list[Callable[[], object]] = []

    def room(self, piece: Tensor) -> Tensor:
        return torch.full(piece.shape, torch.nan, dtype=piece.dtype)

    def fetch(self, piece: Tensor, host: Tensor) -> Callable[[], None]:
        number = self._fetched
        self._fetched += 1
        self.diary.append(f"fetch {number}")

        def arrive() -> None:
            self.diary.append(f"arrived {number}")
            host.copy_(piece)

        return arrive

    def put(self, host: Tensor, piece: Tensor) -> None:
        self.diary.append("put")
        self._put.append(lambda: piece.copy_(host))

    def finish(self) -> None:
        for copy in self._put:
            copy()
        self.diary.append("finish")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 4096)


def run(is_on_device: Callable[[int], bool], tensor: Callable[[int], Tensor]) -> list[list[str]]:
    """All ranks sum their tensors; the diary of each rank whose tensor is on the fake device."""

    def body(ctx: DistributedContext) -> list[str]:
        completions = Completions()
        seat = Seat(ctx.communicator, ctx.communicator, completions, 10.0, has_devices=True)
        lane = FakeLane() if is_on_device(ctx.rank) else None
        mine = tensor(ctx.rank)
        diary = lane.diary if lane else []

        def post(array: Array) -> Work:
            diary.append("post")
            return ctx.communicator.all_reduce(array, ReduceOp.SUM, timeout_s=10.0)

        assert staging.is_staged(seat, mine)
        work = staging.in_pieces(seat, mine, post, lane=lane)
        assert work.wait()
        expected = sum((tensor(rank) for rank in range(1, ctx.world_size)), tensor(0))
        assert torch.equal(mine, expected)
        completions.close()
        return diary

    return run_world(2, body)


def test_the_network_has_one_piece_while_the_next_is_on_its_way_from_the_device() -> None:
    diaries = run(lambda _: True, lambda rank: torch.arange(float(LENGTH)) + rank)
    for diary in diaries:
        assert diary[:PIECES] == [f"fetch {n}" for n in range(PIECES)]
        posts = [f for n in range(PIECES) for f in (f"arrived {n}", "post")]
        assert diary[PIECES : 3 * PIECES] == posts
        assert diary[3 * PIECES :] == ["put"] * PIECES + ["finish"]


def test_a_rank_with_an_accelerator_and_one_without_cut_alike() -> None:
    diaries = run(lambda rank: rank == 0, lambda rank: torch.arange(float(LENGTH)) * (rank + 1))
    assert [diary.count("post") for diary in diaries] == [PIECES, PIECES]


def test_a_tensor_that_is_not_contiguous_on_the_device_gets_its_result_too() -> None:
    run(lambda _: True, lambda rank: (torch.arange(2.0 * LENGTH) + rank).view(LENGTH, 2)[:, 0])


def test_tensors_are_left_whole_where_no_rank_has_an_accelerator_or_one_piece_is_enough() -> None:
    def body(ctx: DistributedContext) -> tuple[bool, bool]:
        def seat(has_devices: bool) -> Seat:
            return Seat(ctx.communicator, ctx.communicator, Completions(), 10.0, has_devices)

        large, small = torch.empty(LENGTH), torch.empty(1024)
        return staging.is_staged(seat(False), large), staging.is_staged(seat(True), small)

    assert run_world(1, body) == [(False, False)]
