"""Tensors that live elsewhere go through host memory, the large ones in pieces.

The device here is a fake one, in the memory of this machine: no test of this file has seen a GPU.
What it hands over is there only once it was waited for, and host memory begins as NaN, so an
operation that posts too early, or brings back too little, gives another result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world
from potluck.torch.process_group import staging
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.torch.process_group.work import Completions
from potluck.torch.process_group.world import Comms
from support.process_groups import process_group

PIECES = 3
LENGTH = 2 * 1024 + 100
WORLD = 3
Operation = Callable[[PotluckProcessGroup], Sequence[Tensor]]


class FakeLane:
    """A device that keeps a diary, and whose copies are only there once they are waited for."""

    def __init__(self, diary: list[str]) -> None:
        self.diary = diary
        self._fetched = 0
        self._put: list[Callable[[], object]] = []

    def room(self, pieces: Sequence[Tensor]) -> Tensor:
        size = (len(pieces), pieces[0].numel())
        worthless = torch.nan if pieces[0].is_floating_point() else 77
        return torch.full(size, worthless, dtype=pieces[0].dtype)

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


def on_groups(
    monkeypatch: pytest.MonkeyPatch,
    operation: Operation,
    has_device: Callable[[int], bool],
    world_size: int = WORLD,
) -> list[tuple[list[Tensor], list[str]]]:
    """Each rank's results, and the diary of its fake device, if it has one."""
    here = threading.local()
    monkeypatch.setattr(staging, "is_elsewhere", lambda _: getattr(here, "diary", None) is not None)
    plain = staging.lane_for

    def lane_for(tensor: Tensor) -> staging.Lane:
        diary = getattr(here, "diary", None)
        return plain(tensor) if diary is None else FakeLane(diary)

    monkeypatch.setattr(staging, "lane_for", lane_for)
    any_device = any(has_device(rank) for rank in range(world_size))

    def rank(ctx: DistributedContext) -> tuple[list[Tensor], list[str]]:
        here.diary = [] if has_device(ctx.rank) else None
        with process_group(ctx, has_devices=any_device) as group:
            return list(operation(group)), here.diary or []

    found = run_world(world_size, rank)
    monkeypatch.undo()
    return found


def pieces_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", nbytes)


def mine(group: PotluckProcessGroup, count: int = 1000) -> Tensor:
    return torch.arange(float(count)) * 3 + group.rank()


def rooted(root: int, op: object = dist.ReduceOp.SUM) -> dist.ReduceOptions:
    options = dist.ReduceOptions()
    options.reduceOp, options.rootRank = op, root
    return options


def all_reduce(group: PotluckProcessGroup) -> list[Tensor]:
    total = mine(group)
    scaled = mine(group)
    counts = (torch.arange(1000) + group.rank()) * 5
    group.allreduce([total]).wait()
    group.allreduce([scaled], dist._make_nccl_premul_sum(2.0)).wait()
    group.allreduce([counts], dist.ReduceOp.AVG).wait()
    return [total, scaled, counts]


def reduce(group: PotluckProcessGroup) -> list[Tensor]:
    total, scaled = mine(group), mine(group)
    group.reduce([total], rooted(1)).wait()
    group.reduce([scaled], rooted(2, dist._make_nccl_premul_sum(0.5))).wait()
    return [total, scaled]


def broadcast(group: PotluckProcessGroup) -> list[Tensor]:
    tensor = mine(group)
    group.broadcast([tensor], rooted(2)).wait()
    return [tensor]


def all_gather(group: PotluckProcessGroup) -> list[Tensor]:
    single = torch.zeros(1000 * group.size(), 2)[:, 0]  # not contiguous
    several = [torch.zeros(1000) for _ in range(group.size())]
    group.all_gather_single(single, mine(group)).wait()
    group.allgather([several], [mine(group)]).wait()
    return [single, *several]


def reduce_scatter(group: PotluckProcessGroup) -> list[Tensor]:
    single, listed = torch.zeros(1000), torch.zeros(1000)
    source = mine(group, 1000 * group.size())
    group.reduce_scatter_single(single, source).wait()
    group.reduce_scatter([listed], [list(source.flip(0).chunk(group.size()))]).wait()
    return [single, listed]


def gather_and_scatter(group: PotluckProcessGroup) -> list[Tensor]:
    is_root = group.rank() == 1
    gathered = [torch.zeros(1000) for _ in range(group.size())] if is_root else []
    group.gather([gathered] if is_root else [], [mine(group)], rooted(1)).wait()
    scattered = torch.zeros(1000)
    parts = [mine(group) * (number + 1) for number in range(group.size())] if is_root else []
    group.scatter([scattered], [parts] if is_root else [], rooted(1)).wait()
    return [*gathered, scattered]


def all_to_all(group: PotluckProcessGroup) -> list[Tensor]:
    rank, size = group.rank(), group.size()
    listed = [torch.zeros(300 * (rank + 1)) for _ in range(size)]
    group.alltoall(listed, [mine(group, 300 * (other + 1)) for other in range(size)]).wait()
    single = torch.zeros(400 * size * (rank + 1), 2)
    sizes = [400 * (other + 1) for other in range(size)]
    source = mine(group, 2 * sum(sizes)).view(-1, 2)
    group.all_to_all_single(single, source, [400 * (rank + 1)] * size, sizes).wait()
    return [*listed, single]


def messages(group: PotluckProcessGroup) -> list[Tensor]:
    rank, size = group.rank(), group.size()
    found, any_source = torch.zeros(2, 500).t(), torch.zeros(1000)
    works = [
        group.recv([found], (rank - 1) % size, 1),
        group.recv_anysource([any_source], 2),
        group.send([mine(group).view(500, 2)], (rank + 1) % size, 1),
        group.send([mine(group)], (rank - 1) % size, 2),
    ]
    for work in works:
        work.wait()
    assert works[1].source_rank() == (rank + 1) % size
    return [found, any_source]


OPERATIONS = [
    *(all_reduce, reduce, broadcast, all_gather, reduce_scatter),
    *(gather_and_scatter, all_to_all, messages),
]


@pytest.mark.parametrize("piece", [1024, 1 << 20], ids=["pieces", "whole"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_every_operation_on_devices_equals_that_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, operation: Operation, piece: int
) -> None:
    expected = on_groups(monkeypatch, operation, lambda _: False)
    for has_device in (lambda _: True, lambda rank: rank == 0):
        pieces_of(monkeypatch, piece)
        found = on_groups(monkeypatch, operation, has_device)
        for rank, ((results, diary), (wanted, _)) in enumerate(zip(found, expected, strict=True)):
            assert bool(diary) == has_device(rank), "it did not go through the device's lane"
            for result, want in zip(results, wanted, strict=True):
                assert torch.equal(result, want)


@pytest.mark.parametrize("operation", OPERATIONS[:-2], ids=lambda operation: operation.__name__)
def test_every_collective_is_cut_into_pieces_that_are_fetched_before_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    pieces_of(monkeypatch, 1024)
    diaries = [diary for _, diary in on_groups(monkeypatch, operation, lambda _: True)]
    pieces_of(monkeypatch, 1 << 20)
    whole = [diary for _, diary in on_groups(monkeypatch, operation, lambda _: True)]
    for cut, uncut in zip(diaries, whole, strict=True):
        assert sum(line.startswith(("fetch", "put")) for line in cut) >= PIECES * sum(
            line.startswith(("fetch", "put")) for line in uncut
        )
        for number, line in enumerate(cut):
            if line == "arrived 0" and "fetch 1" in cut:  # the second was on its way already
                assert cut[number - 1].startswith("fetch ")
                assert cut[number - 1] != "fetch 0"


def test_the_network_has_one_piece_while_the_next_is_on_its_way_from_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces_of(monkeypatch, 4096)

    def operation(group: PotluckProcessGroup) -> list[Tensor]:
        total = torch.arange(float(LENGTH)) + group.rank()
        group.allreduce([total]).wait()
        return [total]

    for _, diary in on_groups(monkeypatch, operation, lambda _: True, 2):
        assert diary[:PIECES] == [f"fetch {n}" for n in range(PIECES)]
        assert diary[PIECES : 2 * PIECES] == [f"arrived {n}" for n in range(PIECES)]
        assert diary[2 * PIECES :] == ["put"] * PIECES + ["finish"]


def test_tensors_are_left_whole_where_no_rank_has_an_accelerator_or_one_piece_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces_of(monkeypatch, 4096)

    def body(ctx: DistributedContext) -> tuple[bool, bool]:
        def comms(has_devices: bool) -> Comms:
            return Comms(ctx.communicator, Completions(), 10.0, has_devices)

        large, small = torch.empty(LENGTH), torch.empty(1024)
        return staging.is_staged(comms(False), large), staging.is_staged(comms(True), small)

    assert run_world(1, body) == [(False, False)]
