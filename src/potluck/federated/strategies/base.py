"""The shape of a strategy: two methods, without I/O, clock or threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from potluck.federated.parameters import Parameters
from potluck.federated.updates import Update

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its ``number``, counted from 1, of ``total``, the global ``parameters`` at its
    start, and a ``seed`` of its own for random choices."""

    number: int
    total: int
    parameters: Parameters
    seed: int


class Strategy(Protocol):
    """Which clients train in a round, with which configuration, and what their updates make.

    A class with these two methods is a strategy; it needs no base class. Optional attributes:
    ``min_updates``, how many updates ``aggregate`` needs at least (1), ``max_samples``, with how
    many samples an update is refused (2**40), and ``takes_mean``, whether
    it depends on the updates only through their weighted mean (False). Secure aggregation and
    differential privacy need the latter.
    """

    def configure(self, round: Round, clients: Sequence[str]) -> Mapping[str, Config]:
        """The clients to ask, of those that are there, each with the configuration that its
        function gets: a dict of numbers, text and arrays."""

    def aggregate(self, round: Round, updates: Sequence[Update]) -> Parameters:
        """The next global parameters. ``updates`` are in the order of ``configure``, checked: of
        the global shapes, finite, with samples."""
