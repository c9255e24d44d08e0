"""The swarm, simulated: links shared fairly between pairs of nodes, no sockets, no clock."""

from __future__ import annotations

import numpy as np
import pytest

from potluck._core.cluster.content.swarm import LANES, PATIENCE_S, Run, Swarm
from potluck._core.wire.bulk import CHUNK_BYTES
from potluck.errors import ProtocolError

CHUNKS = 512
"""2 GiB."""
RATE = 6.0
"""Chunks a second, 200 Mbit/s."""
BOUND_S = CHUNKS / RATE


class Network:
    """Node 0 is the source of ``CHUNKS`` chunks; nodes fetch from it and from each other. Each has
    a rate up and one down, which pairs of nodes share max-min fairly; of a pair one request is
    served after the other."""

    def __init__(self, *rates: float) -> None:
        self.rates = rates
        self.swarms: dict[int, Swarm] = {}
        self.alive = {0}
        self.flows: list[list[float]] = []
        self.runs: list[tuple[int, int, Run]] = []
        self.sent = np.zeros(len(rates))
        self.done: dict[int, float] = {}
        self.now = 0.0

    def join(self, node: int) -> None:
        sizes, none = np.full(CHUNKS, CHUNK_BYTES, np.int64), np.zeros(CHUNKS, bool)
        swarm = self.swarms[node] = Swarm(sizes, none, me=str(node))
        for other in self.alive:
            theirs = self.swarms.get(other)
            has, awaits = (~none, none) if theirs is None else (theirs.has, theirs.awaits)
            swarm.joined(str(other), has, awaits, is_fetching=theirs is not None)
            if theirs is not None:
                theirs.joined(str(node), none, none, is_fetching=True)
        self.alive.add(node)

    def die(self, node: int) -> None:
        self.alive.discard(node)
        kept = [at for at, (to, by, _) in enumerate(self.runs) if node not in (to, by)]
        self.runs = [self.runs[at] for at in kept]
        self.flows = [self.flows[at] for at in kept]
        for other in self.alive - {0}:
            self.swarms[other].left(str(node))

    def run(self, *events: tuple[float, str, int]) -> None:
        """Play until all that live have everything; at these times nodes join and die."""
        waiting = sorted(events)
        while True:
            self._ask()
            rates = self._fair()
            steps = [self.flows[at][0] / rate for at, rate in rates.items()]
            if waiting:
                steps.append(waiting[0][0] - self.now)
            if not steps:
                return
            step = min(steps)
            for at, rate in rates.items():
                self.flows[at][0] -= rate * step
                self.sent[self.runs[at][1]] += rate * step
            self.now += step
            if waiting and waiting[0][0] <= self.now:
                _, what, node = waiting.pop(0)
                (self.join if what == "join" else self.die)(node)
            self._arrive()

    def _ask(self) -> None:
        for node in sorted(self.alive - {0}):
            for other in sorted(self.alive - {node}):
                while (run := self.swarms[node].next(str(other), self.now)) is not None:
                    self.runs.append((node, other, run))
                    self.flows.append([float(len(run.chunks))])
                    self._tell(node, awaits=[(run.first, run.last)])

    def _tell(self, node: int, **what: list[tuple[int, int]]) -> None:
        for other in self.alive - {0, node}:
            self.swarms[other].heard(str(node), **what)

    def _fair(self) -> dict[int, float]:
        """The rate of each flow that is served."""
        first: dict[tuple[int, int], int] = {}
        for at, (to, by, _) in enumerate(self.runs):
            first.setdefault((to, by), at)
        left, rate = dict(first), dict[int, float]()
        room = [list(self.rates), list(self.rates)]
        while left:
            shares = {
                (end, node): room[end][node] / sum(pair[end] == node for pair in left)
                for end in (0, 1)
                for node in {pair[end] for pair in left}
            }
            (end, node), share = min(shares.items(), key=lambda each: each[1])
            for pair in [pair for pair in left if pair[end] == node]:
                rate[left.pop(pair)] = share
                for other in (0, 1):
                    room[other][pair[other]] -= share
        return rate

    def _arrive(self) -> None:
        for at in reversed(range(len(self.runs))):
            if self.flows[at][0] < 1e-9:
                node, _, run = self.runs.pop(at)
                self.flows.pop(at)
                self.swarms[node].arrived(run, self.now)
                self._tell(node, got=[(run.first, run.last)])
                if self.swarms[node].is_done:
                    self.done.setdefault(node, self.now)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_all_have_it_in_hardly_more_than_the_time_of_one_copy(count: int) -> None:
    network = Network(*[RATE] * (count + 1))
    for node in range(1, count + 1):
        network.join(node)
    network.run()
    assert max(network.done.values()) <= 1.03 * BOUND_S
    assert len(network.done) == count
    assert network.sent[0] <= 1.03 * CHUNKS, "the source sends it about once"


def test_when_one_dies_the_others_have_it_in_time() -> None:
    network = Network(*[RATE] * 4)
    for node in (1, 2, 3):
        network.join(node)
    network.run((20.0, "die", 3))
    assert max(network.done[1], network.done[2]) <= 1.03 * BOUND_S


def test_one_that_joins_later_slows_nobody_and_gets_its_own_at_its_own_rate() -> None:
    network = Network(*[RATE] * 4)
    for node in (1, 2):
        network.join(node)
    network.run((20.0, "join", 3))
    assert max(network.done[1], network.done[2]) <= 1.05 * BOUND_S
    assert network.done[3] - 20.0 <= 1.05 * BOUND_S


def test_one_slow_node_hardly_slows_the_others() -> None:
    network = Network(RATE, RATE, RATE, RATE / 2)
    for node in (1, 2, 3):
        network.join(node)
    network.run()
    assert max(network.done[1], network.done[2]) <= 1.1 * BOUND_S
    assert network.done[3] <= 2.05 * BOUND_S


def swarm_of(count: int, *members: str, size: int = CHUNK_BYTES) -> Swarm:
    none = np.zeros(count, bool)
    swarm = Swarm(np.full(count, size, np.int64), none, me="me")
    for node in members:
        swarm.joined(node, ~none, none, is_fetching=False)
    return swarm


def test_requests_are_open_at_every_member_and_never_twice_for_one_chunk() -> None:
    swarm = swarm_of(16, "a", "b")
    runs = [swarm.next(node, 0.0) for node in "ab" * LANES]
    assert len({run.first for run in runs if run}) == 2 * LANES
    assert swarm.next("a", 0.0) is None
    assert swarm.next("b", 0.0) is None
    assert swarm.num_open == 2 * LANES


def test_what_few_have_or_await_comes_first_and_what_is_preferred_before_all() -> None:
    swarm = swarm_of(8, "a")
    rare, none = np.zeros(8, bool), np.zeros(8, bool)
    rare[5] = True
    swarm.joined("b", ~rare, none, is_fetching=True)
    first = swarm.next("a", 0.0)
    assert first is not None
    assert first.chunks == range(5, 6), "b has all others"
    swarm.heard("b", awaits=[(5, 5)])
    swarm.prefer([7])
    second = swarm.next("a", 0.0)
    assert second is not None
    assert second.chunks == range(7, 8)
    swarm.prefer([2], turn=2)
    swarm.prefer([4], turn=1)
    swarm.prefer([1, 4], turn=3)
    found = []
    for _ in range(3):
        swarm.arrived(second, 0.0)
        second = swarm.next("a", 0.0)
        assert second is not None
        found += second.chunks
    assert found == [4, 2, 1], "in the order of their turns; of two the first one counts"


def test_small_chunks_are_asked_for_together_up_to_a_full_one() -> None:
    swarm = swarm_of(40, "a", size=CHUNK_BYTES // 16)
    run = swarm.next("a", 0.0)
    assert run is not None
    assert len(run.chunks) in range(1, 17)
    swarm = swarm_of(2000, "a", size=10)
    run = swarm.next("a", 0.0)
    assert run is not None
    assert len(run.chunks) == 1024


def test_a_member_that_is_lost_gives_its_requests_back() -> None:
    swarm = swarm_of(4, "a", "b")
    lost = [swarm.next("a", 0.0), swarm.next("a", 0.0)]
    assert swarm.left("a") == lost
    assert swarm.left("a") == []
    for _ in range(4):
        run = swarm.next("b", 0.0)
        assert run is not None
        swarm.arrived(run, 0.0)
    assert swarm.is_done


def test_a_slow_member_is_overtaken_by_another_that_has_nothing_else_to_send() -> None:
    swarm = swarm_of(1, "slow", "fast")
    slow = swarm.next("slow", 0.0)
    assert slow is not None
    assert swarm.next("fast", PATIENCE_S) is None, "not yet"
    fast = swarm.next("fast", PATIENCE_S + 0.1)
    assert fast is not None
    assert fast.chunks == slow.chunks
    swarm.failed(slow)
    assert swarm.next("slow", 3.0) is None, "the other one is still open"
    swarm.arrived(fast, 3.0)
    assert swarm.is_done


def test_an_announcement_of_chunks_that_are_none_is_refused() -> None:
    swarm = swarm_of(4, "a")
    swarm.heard("nobody", got=[(0, 9)])
    for ranges in ([(0, 4)], [(3, 2)]):
        with pytest.raises(ProtocolError, match="a chunk that is none"):
            swarm.heard("a", got=ranges)
    run = swarm.next("a", 0.0)
    assert run is not None


def test_slow_members_hold_nothing_that_a_fast_one_has_and_get_little_to_do() -> None:
    """Of one that sends a byte now and then, the requests pass to the others."""
    swarm = swarm_of(64, "slow", "fast")
    held, now, num_slow = [swarm.next("slow", 0.0), swarm.next("slow", 0.0)], 0.0, 2
    while not swarm.is_done:
        run = swarm.next("fast", now)
        assert run is not None
        now += 1.0
        run.num_bytes = CHUNK_BYTES
        swarm.arrived(run, now)
        for each in [each for each in held if each is not None]:
            each.num_bytes += 1
            if swarm.is_void(each, now):
                swarm.failed(each, now)
                held.remove(each)
        if (again := swarm.next("slow", now)) is not None:
            held.append(again)
            num_slow += 1
    assert num_slow <= 8, "one request each half minute, to see whether it is still slow"
    assert now == 64.0


def test_a_slow_member_that_alone_has_something_is_asked_for_that() -> None:
    swarm = swarm_of(8, "slow")
    most, none = np.ones(8, bool), np.zeros(8, bool)
    most[3:] = False
    swarm.joined("fast", most, none, is_fetching=True)
    now, alone = 0.0, list[int]()
    while not swarm.is_done:
        now += 100.0
        run = swarm.next("slow", now - 100.0)
        while (quick := swarm.next("fast", now - 1.0)) is not None:
            quick.began = now - 1.0
            swarm.arrived(quick, now)
        assert run is not None
        run.num_bytes = CHUNK_BYTES // 2
        if not swarm.is_void(run, now):
            swarm.arrived(run, now)
            alone += run.chunks
        else:
            swarm.failed(run, now)
    assert set(alone) >= {3, 4, 5, 6, 7}


def test_where_all_are_as_slow_nothing_is_taken_from_anybody() -> None:
    swarm = swarm_of(64, "a", "b", "c")
    runs = [run for node in "abc" * LANES if (run := swarm.next(node, 0.0))]
    for run in runs:
        run.num_bytes = CHUNK_BYTES // 4
    assert not any(swarm.is_void(run, 60.0, is_full=True) for run in runs)


def test_of_slow_members_that_take_all_room_one_gives_it_to_a_member_that_was_not_asked() -> None:
    swarm = swarm_of(64, "a", "b", "c")
    runs = [run for node in "ab" * LANES if (run := swarm.next(node, 0.0))]
    for count, run in enumerate(runs):
        run.num_bytes = count + 1
    late = PATIENCE_S + 1
    assert not [run for run in runs if swarm.is_void(run, late)]
    none = np.zeros(64, bool)
    swarm.joined("a", ~none, none, is_fetching=True)  # again, which changes nothing
    assert [run for run in runs if swarm.is_void(run, late, is_full=True)] == runs[:1]
    swarm.failed(runs[0], late)
    run = swarm.next("c", late)
    assert run is not None
    swarm.arrived(run, late + 1)
    assert all(swarm.is_void(each, late + 1) for each in runs[1:]), "it is fast"
