"""Who may pull and who must wait: over all schedules nobody's parameters get too old."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.parameter_server import SGD, Asynchronous
from potluck.parameter_server.layout import Placement
from potluck.parameter_server.log import Entry, Update
from potluck.parameter_server.model import Gradient, Leases, Model, is_feasible

NEVER = 1e9
WORKERS = [str(number) for number in range(5)]


class Story:
    """Workers that pull, compute and push in any order; pulls and pushes that wait do so here."""

    def __init__(self, num_workers: int, max_staleness: int) -> None:
        self.workers = WORKERS[:num_workers]
        mode = Asynchronous(max_staleness, scale_by_staleness=False)
        here = Placement(("0",), 1, ("0",))
        self.model = Model("m", mode, SGD(1.0), here, self.decide)
        self.bound = max_staleness
        self.computes: dict[str, int] = {}
        self.pushed: dict[str, tuple[int, int]] = {}
        self.num_pushes = 0
        self.num_updates = 0
        self.model.set("0", 0, {})  # the tensors do not matter

    def act(self, worker: str) -> bool:
        """What ``worker`` does next; whether it could."""
        if worker in self.pushed:
            push, version = self.pushed[worker]
            outcome = self.model.outcome(worker, push)
            if outcome is None:
                return False
            assert outcome.counted
            del self.pushed[worker]
            return True
        if worker in self.computes:
            version = self.computes.pop(worker)
            self.num_pushes += 1
            gradient = Gradient(worker, int(worker), self.num_pushes, version)
            self.model.push(gradient, self.workers)
            self.pushed[worker] = self.num_pushes, version
            return True
        if not self.model.may_pull(worker, self.workers, NEVER):
            return False
        self.computes[worker] = self.model.version
        return True

    def decide(self, entry: Entry) -> None:
        self.model.follow(entry)
        self.num_updates += isinstance(entry, Update)

    def check(self) -> None:
        now = self.model.version
        for version in self.computes.values():
            assert now - version <= self.bound
        assert self.model.counts["max staleness"] <= self.bound
        assert self.num_updates == now


@settings(max_examples=300, deadline=None)
@given(
    num_workers=st.integers(1, 5),
    max_staleness=st.integers(0, 6),
    schedule=st.lists(st.integers(0, 4), max_size=80),
)
def test_nobody_computes_on_parameters_that_are_too_old(
    num_workers: int, max_staleness: int, schedule: list[int]
) -> None:
    story = Story(num_workers, max_staleness)
    for number in schedule:
        story.act(story.workers[number % num_workers])
        story.check()
    # And nobody waits for ever: if all go on in turns, each gradient is applied.
    goal = story.num_pushes + 10
    for _ in range(100 * num_workers):
        for worker in story.workers:
            story.act(worker)
            story.check()
        if story.model.version >= goal:
            return
    raise AssertionError("the workers wait for each other")


def test_with_a_bound_of_0_one_worker_computes_at_a_time() -> None:
    story = Story(2, 0)
    assert story.act("0")
    assert not story.act("1")
    assert story.act("0")  # pushes, and is applied
    assert story.act("1")


def test_a_fast_worker_waits_for_the_slow_one_just_before_its_parameters_get_too_old() -> None:
    story = Story(2, 3)
    assert story.act("1")
    for _ in range(3):
        assert all(story.act("0") for _ in range(3))
    assert story.model.version == 3
    assert all(story.act("0") for _ in range(2))
    assert story.model.version == 3  # its push waits: after it worker 1 would be too late
    assert not story.act("0")
    assert story.model.waits_for(story.workers).startswith("worker 1, which computes on the oldest")
    assert story.act("1")
    assert story.model.version == 5
    assert story.act("0")


def test_a_worker_that_pushes_nothing_is_waited_for_only_until_its_lease_ends() -> None:
    leases = Leases(1)
    assert leases.pull("0", 0, expires_at=5.0)
    assert leases.pull("1", 0, expires_at=9.0)
    assert leases.apply("1", 0) == 0
    assert leases.pull("1", 1, expires_at=9.0)
    assert leases.apply("1", 1) is None
    assert leases.expire(4.9) == []
    assert leases.expire(5.0) == ["0"]
    assert leases.apply("1", 1) == 0


@pytest.mark.parametrize(
    ("now", "outstanding", "bound", "expected"),
    [
        (0, [], 0, True),
        (0, [0], 0, True),
        (0, [0, 0], 0, False),
        (0, [0, 0], 1, True),
        (5, [3], 1, False),
        (5, [5, 4, 4], 2, True),
        (5, [4, 4, 4], 2, False),
    ],
)
def test_feasible_is_what_the_oldest_first_can_do(
    now: int, outstanding: list[int], bound: int, expected: bool
) -> None:
    assert is_feasible(now, outstanding, bound) is expected


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.lists(st.integers(0, 6), max_size=5), st.integers(0, 5))
def test_feasible_agrees_with_trying_every_order(
    now: int, outstanding: list[int], bound: int
) -> None:
    def possible(at: int, left: list[int]) -> bool:
        if not left:
            return True
        return any(
            at - version <= bound and possible(at + 1, left[:place] + left[place + 1 :])
            for place, version in enumerate(left)
        )

    check: Callable[[int, list[int], int], bool] = is_feasible
    assert check(now, outstanding, bound) == possible(now, outstanding)


def test_a_bound_that_shrinks_with_the_workers_stops_nobody() -> None:
    """Two leases older than the new bound: the oldest goes first, then the other."""
    leases = Leases(24)
    assert leases.pull("0", 0, NEVER)
    assert leases.pull("1", 0, NEVER)
    leases.max_staleness = 16
    assert [leases.apply(worker, 22) for worker in ("0", "1")] == [22, 22]
