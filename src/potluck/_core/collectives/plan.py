"""What a collective is: one rank's list of steps over named chunks of a buffer.

A *chunk* is a part of the data that plans name by number. Numbers are global: chunk 3 means the
same data on every rank. The engine cuts a chunk into *segments*, which plans never see.

Three rules give a plan its meaning, on any engine:

1. steps on the same chunk run in plan order;
2. steps on one link and in one direction run in plan order;
3. everything else may overlap.

How chunks are named, by operation (``w`` is the world size):

=====================================  ==========================================================
all_reduce, reduce, broadcast, barrier  ``num_chunks`` near-equal parts of the one buffer
all_gather, gather, reduce_scatter,     ``w`` chunks; chunk ``r`` is what rank ``r`` contributes
scatter                                 (gathers) or ends with (scatters)
all_to_all                              ``w * w`` chunks; chunk ``src * w + dst``
=====================================  ==========================================================

The second half is for the builders of plans: plain functions ``(Rank) -> Draft``, and the
arithmetic that they share. ``registry.py`` turns a draft into a ``Plan``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple


class Operation(StrEnum):
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


class Algorithm(StrEnum):
    RING = "ring"
    TREE = "tree"
    DIRECT = "direct"
    CENTRALIZED = "centralized"
    DOUBLING = "doubling"
    HIERARCHICAL = "hierarchical"
    SHARED_MEMORY = "shared_memory"
    """Through memory that the ranks of one node share; no plan: see ``engine/shm/``."""
    SPANNING_TREE = "spanning_tree"

    @classmethod
    def _missing_(cls, value: object) -> Algorithm:
        own: Algorithm | None = None
        if isinstance(value, str):
            own = OWN_ALGORITHMS.get(value) or {str(each): each for each in cls}.get(value.lower())
        if own is None:
            names = ", ".join((*cls, *OWN_ALGORITHMS))
            raise ValueError(f"there is no algorithm {value!r}; the algorithms are {names}")
        return own


OWN_ALGORITHMS: dict[str, Algorithm] = {}
"""By name, those that were registered; ``list(Algorithm)`` has only potluck's own."""


def own_algorithm(name: str) -> Algorithm:
    """The algorithm of this name, made if there is none."""
    if name not in OWN_ALGORITHMS:
        made = str.__new__(Algorithm, name)
        made._name_, made._value_ = name.upper(), name
        OWN_ALGORITHMS[name] = made
    return OWN_ALGORITHMS[name]


class Action(IntEnum):
    SEND = 0
    COPY = 1
    """Receive and overwrite."""
    REDUCE = 2
    """Receive and combine."""


class Step(NamedTuple):
    action: Action
    peer: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``rank`` does in one collective. Pure data: no buffer, no dtype, no clock."""

    operation: Operation
    algorithm: Algorithm
    world_size: int
    rank: int
    num_chunks: int
    steps: tuple[Step, ...]
    root: int = 0


class Draft(NamedTuple):
    """What a builder returns: into how many chunks the data is cut, and one rank's steps."""

    num_chunks: int
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of ``world_size``. ``nodes[r]`` is the node index of rank ``r``, and
    ``sites[level][r]`` its group of nodes, the innermost level first (hierarchical); ``cut`` are
    pairs of ranks that can't reach each other (spanning tree)."""

    world_size: int
    rank: int
    root: int = 0
    nodes: tuple[int, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()
    sites: tuple[tuple[int, ...], ...] = ()

    @property
    def position(self) -> int:
        """How many places to the right of the root this rank is."""
        return (self.rank - self.root) % self.world_size

    def right(self, places: int = 1) -> int:
        """The rank ``places`` to the right of this one."""
        return (self.rank + places) % self.world_size

    def left(self, places: int = 1) -> int:
        """The rank ``places`` to the left of this one."""
        return (self.rank - places) % self.world_size

    def rank_at(self, position: int) -> int:
        """The rank that is ``position`` places to the right of the root."""
        return (self.root + position) % self.world_size

    def others(self) -> list[int]:
        """All other ranks, starting at the right neighbour, so that no two ranks begin alike."""
        return [self.right(i) for i in range(1, self.world_size)]


Builder = Callable[[Rank], Draft]


def send(peer: int, chunk: int) -> Step:
    return Step(Action.SEND, peer, chunk)


def copy(peer: int, chunk: int) -> Step:
    return Step(Action.COPY, peer, chunk)


def reduce_from(peer: int, chunk: int) -> Step:
    return Step(Action.REDUCE, peer, chunk)
