"""Copies of checkpoints on several machines: who writes them, when one counts, which one a training
goes on from.

All ranks of a training hold its state, so a copy is no transfer: a rank of another machine writes
the checkpoint, too. It *counts* when it lies whole on ``copies`` machines (on all, if there are
fewer), and only then others may be removed. So some checkpoint lies whole on two machines at any
time after the first, whichever machine is lost, with its disk.

A training has a *lineage*, a random id with its beginning, which stays when it is resumed. Numbers
of checkpoints rise within it, whoever writes them. So the newest is that of the highest number in
the lineage that began last; a folder of an older training, whatever its steps, is not taken for it.

No I/O here; ``saving.py`` does that.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LINEAGE, NUM_COPIES = "lineage", "copies"
"""Facts of a checkpoint's manifest."""
_LINEAGE = re.compile(r"[0-7][0-9a-f]{15}-[0-7][0-9a-f]{15}")


class Lineage(NamedTuple):
    """When a training began (milliseconds of Unix time at its rank 0; 0: unknown), and a random
    number of 63 bits."""

    began: int = 0
    random: int = 0

    @staticmethod
    def new() -> Lineage:
        """That of a training that begins now."""
        return Lineage(int(time.time() * 1e3), secrets.randbits(63))

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Lineage:
        """That of the checkpoint with these ``facts``; the unknown one if they have none."""
        text = facts.get(LINEAGE)
        if not isinstance(text, str) or not _LINEAGE.fullmatch(text):
            return Lineage()
        began, _, random = text.partition("-")
        return Lineage(int(began, 16), int(random, 16))

    def __str__(self) -> str:
        return f"{self.began:016x}-{self.random:016x}"


UNKNOWN = Lineage()


class Found(NamedTuple):
    """The newest whole checkpoint on a rank's machine (``step`` -1: none)."""

    lineage: Lineage = UNKNOWN
    number: int = 0
    step: int = -1


def newest(found: Sequence[Found]) -> int:
    """The rank with the checkpoint to go on from: of several the most senior. 0 if there is
    none."""
    whole = [rank for rank, each in enumerate(found) if each.step >= 0]
    return max(whole, key=lambda rank: (found[rank], -rank), default=0)


def holders(found: Sequence[Found], nodes: Sequence[str]) -> frozenset[str]:
    """The nodes with the checkpoint to go on from; empty if there is none."""
    best = found[newest(found)]
    return frozenset(
        node for node, each in zip(nodes, found, strict=True) if each == best and best.step >= 0
    )


@dataclass(slots=True)
class Copying:
    """One checkpoint on its way to ``copies`` machines. ``places`` has the first rank of each
    machine with a directory of its own, the most senior first."""

    places: Sequence[int]
    copies: int
    held: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    @property
    def needed(self) -> int:
        """How many machines must have it before it counts."""
        return min(self.copies, len(self.places))

    @property
    def writers(self) -> list[int]:
        """The ranks that write next, at one time; empty when it counts or nobody is left."""
        left = [rank for rank in self.places if rank not in self.held | self.failed]
        return left[: max(0, self.needed - len(self.held))]

    @property
    def counts(self) -> bool:
        """Whether it is on enough machines."""
        return len(self.held) >= self.needed

    def wrote(self, ranks: Collection[int], failed: Collection[int]) -> None:
        """The writers ``ranks`` have ended, of which these ``failed``."""
        self.held |= {rank for rank in ranks if rank not in failed}
        self.failed |= {rank for rank in ranks if rank in failed}


def places(nodes: Sequence[str], domains: Sequence[int]) -> list[int]:
    """The first rank of each machine, without those that share an earlier one's directory:
    ``domains`` has for each rank the lowest rank whose directory it sees."""
    first: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    return [rank for rank in first.values() if domains[rank] == rank]


def counted(whole: Sequence[int], needed: int) -> int:
    """The newest checkpoint that ``needed`` ranks or more have, by the number that each has whole
    (0: none); 0 if there is none."""
    return max((number for number in whole if whole.count(number) >= needed), default=0)
