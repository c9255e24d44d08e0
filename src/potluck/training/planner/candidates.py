"""The strategies that a planner knows, in the order of how little they change. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from potluck.compressors import BF16, Compressor, PowerSGD, Quantize, TopK
from potluck.training.strategies import (
    DataParallel,
    DiLoCo,
    Gossip,
    LocalSGD,
    OuterSGD,
    Strategy,
)

BUCKET_SIZE_MB = 25.0
"""The default of a DistributedDataParallel."""
BUCKET_SIZES_MB = (BUCKET_SIZE_MB, 5.0, 100.0)
"""The bucket sizes that a plan compares."""
ROUNDS = {"local-sgd": (8, 16, 32), "diloco": (100, 200, 400), "sparse": (40, 80, 160)}
"""By name: the steps of a round that a plan compares, the default first. Shorter rounds than these
would change the mathematics little, and cost the network more."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, as it is written in a script, and what it changes."""

    name: str
    code: str
    strategy: Strategy
    changes: str

    @property
    def compression(self) -> Compressor | None:
        """The method that encodes what is sent."""
        return self.strategy.compression

    @property
    def bucket_size_mb(self) -> float:
        """The size of the buckets of gradients, in MiB."""
        return self.strategy.bucket_size_mb or BUCKET_SIZE_MB

    @property
    def every(self) -> int | None:
        """The number of steps in which all parameters are exchanged once; None if gradients are, in
        every step."""
        return self.strategy.every

    def in_buckets(self, size_mb: float) -> Candidate:
        """The same with buckets of another size; itself for that of a DistributedDataParallel."""
        strategy = self.strategy.in_buckets(size_mb)
        if size_mb == BUCKET_SIZE_MB or strategy is self.strategy:
            return self
        comma = "" if self.code.endswith("()") else ", "
        code = f"{self.code[:-1]}{comma}bucket_size_mb={size_mb:g})"
        return replace(self, code=code, strategy=strategy)

    def in_rounds_of(self, every: int | None) -> Candidate:
        """The same with longer or shorter rounds; itself for the usual ones, and for None.

        ValueError if that strategy has no such rounds."""
        if every in {None, self.every}:
            return self
        if not self.strategy.in_rounds:
            raise ValueError(f"{self.name} exchanges gradients in every step, and has no rounds")
        return _IN_ROUNDS[self.name](every)

    @property
    def forms(self) -> tuple[Candidate, ...]:
        """The same in the buckets or the rounds that a plan compares, the usual ones first."""
        if not self.strategy.in_rounds:
            return tuple(map(self.in_buckets, BUCKET_SIZES_MB))
        return tuple(map(self.in_rounds_of, ROUNDS.get(self.name, (self.every,))))


def _local_sgd(every: int) -> Candidate:
    return Candidate(
        "local-sgd",
        f"LocalSGD(every={every})",
        LocalSGD(every=every),
        f"parameters are averaged every {every} steps, not gradients in each",
    )


def _gossip(every: int) -> Candidate:
    return Candidate(
        "gossip",
        f'Gossip("exponential", every={every})',
        Gossip("exponential", every=every),
        f"each worker averages parameters of its own with its neighbours' every {every} steps",
    )


def _diloco(every: int) -> Candidate:
    return Candidate(
        "diloco",
        f"DiLoCo(every={every}, fragments=4, delay=5, compression=Quantize(4))",
        DiLoCo(every=every, fragments=4, delay=5, compression=Quantize(4)),
        f"an outer optimizer applies what changed in {every} steps, a quarter at a time and late",
    )


def _sparse(every: int) -> Candidate:
    return Candidate(
        "sparse",
        f"DiLoCo(every={every}, outer=OuterSGD(1.0), compression=TopK(0.02, bits=2))",
        DiLoCo(every=every, outer=OuterSGD(1.0), compression=TopK(0.02, bits=2)),
        f"the largest 2% of what changed in {every} steps are applied, the rest later",
    )


_IN_ROUNDS: dict[str, Callable[[int], Candidate]] = {
    "local-sgd": _local_sgd,
    "gossip": _gossip,
    "diloco": _diloco,
    "sparse": _sparse,
}

CANDIDATES = (
    Candidate("plain", "DataParallel()", DataParallel(), "nothing"),
    Candidate(
        "hierarchical",
        'DataParallel(algorithm="hierarchical")',
        DataParallel(algorithm="hierarchical"),
        "nothing: the workers of a machine add up first, then the machines",
    ),
    Candidate(
        "bf16",
        "DataParallel(compression=BF16())",
        DataParallel(BF16()),
        "gradients are rounded to 8 bits of precision",
    ),
    Candidate(
        "int8",
        "DataParallel(compression=Quantize(8))",
        DataParallel(Quantize(8)),
        "gradients are rounded to 8 bits; what is lost is sent later",
    ),
    Candidate(
        "int4",
        "DataParallel(compression=Quantize(4))",
        DataParallel(Quantize(4)),
        "gradients are rounded to 4 bits; what is lost is sent later",
    ),
    Candidate(
        "topk",
        "DataParallel(compression=TopK(0.01, bits=2))",
        DataParallel(TopK(0.01, bits=2)),
        "1% of each gradient is sent, the rest later",
    ),
    Candidate(
        "powersgd",
        "DataParallel(compression=PowerSGD(4))",
        DataParallel(PowerSGD(4)),
        "gradients are replaced by matrices of rank 4; what is lost is sent later",
    ),
    _local_sgd(8),
    _gossip(8),
    _diloco(100),
    _sparse(40),
)
METHODS: dict[str, Compressor] = {
    candidate.name: candidate.compression
    for candidate in CANDIDATES
    if candidate.compression is not None
}
"""What is measured for its speed, by the name of the candidate."""


def candidates_for(nodes: tuple[str, ...]) -> tuple[Candidate, ...]:
    """The candidates for ranks on these machines: ``hierarchical`` where several share one,
    ``gossip`` where there are more than two, whose mean is not that of ``local-sgd``."""
    left_out = set()
    if not 1 < len(set(nodes)) < len(nodes):
        left_out.add("hierarchical")
    if len(nodes) <= 2:
        left_out.add("gossip")
    return tuple(each for each in CANDIDATES if each.name not in left_out)


def named(name: str) -> Candidate:
    """The candidate of this name; ValueError if there is none."""
    for candidate in CANDIDATES:
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in CANDIDATES)
    raise ValueError(f"no strategy is called {name!r}; a plan knows {names}")
