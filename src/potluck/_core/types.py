"""The types that all floors share: engines, members, groups, reductions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import EnumType, StrEnum
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from potluck._core import hints


class AnyCase(EnumType):
    """Members in any case: ``ReduceOp.Sum`` is ``ReduceOp.SUM``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_") or name == name.upper():
            raise AttributeError(hints.of_enum(cls.__name__, name, cls.__members__), name=name)
        return getattr(cls, name.upper())


class ReduceOp(StrEnum, metaclass=AnyCase):
    """The element-wise reduction of a collective.

    | value | dtypes |
    |---|---|
    | ``SUM`` ``"sum"``, ``PRODUCT`` ``"product"`` | all |
    | ``MEAN`` ``"mean"`` (also ``AVG`` ``"avg"``, ``AVERAGE`` ``"average"``) | floats, complex |
    | ``MIN`` ``"min"``, ``MAX`` ``"max"`` | all but complex |
    | ``BAND`` ``"band"``, ``BOR`` ``"bor"``, ``BXOR`` ``"bxor"``: bit by bit | integers, bool |

    Operations accept the member or its value, and raise TypeError for an unsupported dtype,
    ValueError for another value.
    """

    SUM = "sum"
    MEAN = "mean"
    AVG = "mean"
    AVERAGE = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        if value in ("avg", "average"):
            return cls.MEAN
        raise ValueError(hints.operation(value, [op.value for op in cls]))


_cached = lru_cache(maxsize=64)(ReduceOp)


def reduce_op(value: str) -> ReduceOp:
    """``ReduceOp(value)`` in a fraction of its time, from a cache."""
    try:
        return _cached(value)
    except TypeError:  # an unhashable value of another library
        return ReduceOp(value)


class Engine(StrEnum):
    """The progress loop that moves a worker's bytes: the native core's, or its twin in Python.

    Both speak the same protocol, so a group may have workers of either.
    """

    NATIVE = "native"
    PYTHON = "python"


MAX_SITE = 64
_MAX_LEVELS = 4
Site = Annotated[
    str,
    msgspec.Meta(
        max_length=MAX_SITE,
        pattern=rf"^(?:[\w.-]+(?:/[\w.-]+){{0,{_MAX_LEVELS - 1}}})?\Z",
    ),
]
"""Where a node stands, the outermost level first: ``home/rack1``; empty if nobody said."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as a member of a group.

    ``worker`` is stable for the whole job (``"2"`` stays ``"2"`` after a restart) while the rank
    may change from group to group. ``node`` is the hex id of its node. ``host`` and ``port`` are
    the address of its listener, as this process calls it (the loopback's on its own node); they are
    empty for in-process workers. ``machine`` is what people call the node, empty outside of a
    cluster. ``engine`` is the engine that the worker reported, ``site`` where its node stands;
    NATIVE and empty in a group that is formed without messages (from a list of addresses).
    """

    worker: str
    node: str = ""
    host: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    local_rank: int = 0
    engine: Engine = Engine.NATIVE
    machine: str = ""
    site: Site = ""

    def __str__(self) -> str:
        where = f" at {self.machine or self.host}:{self.port}" if self.port else ""
        return f"worker {self.worker}{where}"


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    """The measurement of one direction between two nodes: one-way latency in seconds, bandwidth in
    bytes per second."""

    source: str
    target: str
    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Group:
    """An immutable membership: the members of epoch ``epoch``, and the rank of this process.

    Members are in rank order. Rank 0 is the most senior member. A change of membership is a new
    group with a higher epoch, never a change of this one. ``job`` keeps two jobs of one cluster
    apart. ``paths`` are the measured links between the members' nodes when the group was formed,
    equal on all ranks; empty without measurements. ``cut`` are the pairs of ranks that can't reach
    each other, in rising order, the lower rank first; equal on all ranks.
    """

    epoch: int
    rank: int
    members: tuple[Member, ...]
    job: str = ""
    paths: tuple[MeasuredPath, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.members):
            raise ValueError(
                f"rank {self.rank} is not in a group of {len(self.members)}; "
                f"ranks are 0 to {len(self.members) - 1}"
            )

    @property
    def world_size(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def engine(self) -> Engine:
        """The slowest engine among the members: NATIVE if all run the native core."""
        is_native = all(member.engine is Engine.NATIVE for member in self.members)
        return Engine.NATIVE if is_native else Engine.PYTHON

    @property
    def me(self) -> Member:
        """The member of this process."""
        return self.members[self.rank]

    def rank_of(self, worker: str) -> int:
        """The rank of ``worker``, -1 if it is no member."""
        for rank, member in enumerate(self.members):
            if member.worker == worker:
                return rank
        return -1

    def is_cut(self, rank: int) -> bool:
        """Whether this rank and ``rank`` can't reach each other."""
        return (min(rank, self.rank), max(rank, self.rank)) in self.cut

    def describe(self, rank: int) -> str:
        """A rank with its member, for errors and logs: ``rank 2 (worker 2 at 10.0.0.7:52416)``, on
        a cluster ``rank 2 (worker 2 at attic:52416)``, the same on all ranks."""
        return f"rank {rank} ({self.members[rank]})"
