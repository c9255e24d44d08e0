"""Who writes copies of checkpoints, when one counts, what may be removed: tables, and histories of
machines that come and go with their disks."""

from __future__ import annotations

import random

import pytest

from potluck.checkpoint.store import kept
from potluck.training.copies import (
    Copying,
    Found,
    Lineage,
    counted,
    holders,
    newest,
    places,
)

OLD, NEW = Lineage(1000, 5), Lineage(2000, 3)


def test_the_newest_is_the_highest_number_of_the_training_that_began_last() -> None:
    nothing = Found(Lineage(3000, 1))
    assert newest([nothing, Found(OLD, 90, 9000), Found(NEW, 3, 30), Found(NEW, 4, 20)]) == 3
    assert newest([nothing, Found(NEW, 4, 40), Found(NEW, 4, 40)]) == 1
    assert newest([nothing, Found(Lineage(), 7, 70), Found(NEW, 1, 10)]) == 2
    assert newest([Found(Lineage(9000, 1)), Found(Lineage(9001, 1))]) == 0
    assert holders([nothing, Found(NEW, 4, 40), Found(NEW, 4, 40)], ["a", "b", "c"]) == {"b", "c"}
    assert holders([nothing, nothing], ["a", "b"]) == frozenset()


def test_a_lineage_is_told_in_facts_that_anybody_may_have_written() -> None:
    assert Lineage.of({"lineage": str(NEW)}) == NEW
    assert Lineage.new() != Lineage.new()
    for text in ("", "1", 7, None, ["x"], f"{NEW}0", f"f{str(NEW)[1:]}", str(NEW).upper() + "\n"):
        assert Lineage.of({"lineage": text}) == Lineage()
    assert Lineage.of({}) == Lineage()


def test_one_rank_of_each_machine_with_a_directory_of_its_own_writes() -> None:
    assert places(["a", "a", "b", "c"], [0, 0, 2, 3]) == [0, 2, 3]
    assert places(["a", "b", "c"], [0, 0, 2]) == [0, 2]  # a and b share a file system
    assert places(["a", "b"], [0, 0]) == [0]


def test_in_place_of_a_machine_that_cannot_write_the_next_one_does() -> None:
    copying = Copying([0, 2, 3], copies=2)
    assert copying.writers == [0, 2]
    copying.wrote([0, 2], failed=[0])
    assert not copying.counts
    assert copying.writers == [3]
    copying.wrote([3], failed=[0, 3])
    assert not copying.counts
    assert copying.writers == []
    assert Copying([0], copies=2).needed == 1
    assert Copying([0, 1, 2], copies=5).writers == [0, 1, 2]


def test_what_counts_is_whole_on_enough_machines() -> None:
    assert counted([7, 7], 2) == 7
    assert counted([7, 6], 2) == 0
    assert counted([7, 6, 6], 2) == 6
    assert counted([0, 0], 2) == 0


def test_what_counts_stays_when_newer_ones_lie_on_one_machine_only() -> None:
    assert kept([1, 2, 3, 4, 5], 2, None) == {4, 5}
    assert kept([1, 2, 3, 4, 5], 2, 3) == {3, 4, 5}
    assert kept([1, 2, 3, 4, 5], 2, 5) == {4, 5}
    assert kept([4, 5], 1, 3) == {5}


class Histories:
    """Machines with disks that save together, as ``saving.save`` drives them, and are lost at any
    moment, for a while or with their disks."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.disks: dict[str, set[int]] = {name: set() for name in "abcde"}
        self.safe = dict.fromkeys(self.disks, 0)
        self.up = list("abc")
        self.last = 0
        self.copies, self.keep = chance.choice((2, 3)), chance.choice((1, 2, 3))
        self.counted = self.needed = self.lost_disks = 0
        self.returned = False

    def has(self, disk: set[int]) -> bool:
        """Whether the last checkpoint that counted is there, or what may be in its place."""
        return self.counted in disk or (self.returned and max(disk, default=0) > self.counted)

    def lose(self, name: str) -> None:
        self.up.remove(name)
        if self.chance.random() < 0.5:
            self.lost_disks += self.has(self.disks[name])
            self.disks[name] = set()

    def prune(self, name: str, safe: int | None) -> None:
        self.disks[name] &= kept(sorted(self.disks[name]), self.keep, safe)
        assert len(self.disks[name]) <= self.keep + 1

    def save(self) -> None:
        """All of a save; a loss amid it ends it, as it ends the group."""
        self.last = max([self.last, *(number for disk in self.disks.values() for number in disk)])
        self.last += 1
        copying = Copying(places(self.up, range(len(self.up))), self.copies)
        safe = None if copying.needed == 1 else max(self.safe[name] for name in self.up)
        while writers := copying.writers:
            failed = set()
            for rank in self.chance.sample(writers, len(writers)):
                name = self.up[rank]
                fate = self.chance.random()
                if fate < 0.1 and len(self.up) > 1:  # before it is whole, or after
                    if self.chance.random() < 0.5:
                        self.disks[name].add(self.last)
                    self.lose(name)
                    return
                if fate < 0.2:
                    failed.add(rank)
                    continue
                self.disks[name].add(self.last)
                self.prune(name, safe)
            copying.wrote(writers, failed)
        held = [self.up[rank] for rank in copying.held]
        if not counted([self.last] * len(held), copying.needed):
            return
        self.counted, self.needed, self.lost_disks = self.last, copying.needed, 0
        self.returned = False
        for name in self.up:
            self.safe[name] = self.last
        if self.chance.random() < 0.1 and len(self.up) > 1:  # lost before it removes the others
            self.lose(held.pop())
        for name in held:
            self.prune(name, self.last)

    def step(self) -> None:
        fate, down = self.chance.random(), sorted(set(self.disks) - set(self.up))
        if fate < 0.2 and len(self.up) > 1:
            self.lose(self.chance.choice(self.up))
        elif fate < 0.4 and down:
            self.up.append(self.chance.choice(down))
            disk = self.disks[self.up[-1]]
            self.safe[self.up[-1]] = max(disk, default=0)
            self.returned |= max(disk, default=0) >= self.counted
        else:
            self.save()
        assert sum(map(self.has, self.disks.values())) >= self.needed - self.lost_disks


@pytest.mark.parametrize("seed", range(10))
def test_what_counted_is_there_as_long_as_a_disk_with_it_is(seed: int) -> None:
    """In 200 random histories of 40 events each: as many disks have the last checkpoint that
    counted as had it then, less those that were destroyed since; a machine that was away, and does
    not know what counted, may have a newer one in its place."""
    for number in range(20):
        history = Histories(random.Random(seed * 20 + number))
        for _ in range(40):
            history.step()
