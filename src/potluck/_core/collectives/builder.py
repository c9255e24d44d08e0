"""What a plan's builder is given and returns, and the arithmetic that all builders share.

Builders are plain functions ``(Rank) -> Draft``; ``registry.py`` turns a draft into a ``Plan``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from potluck._core.collectives.plan import Action, Step


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
