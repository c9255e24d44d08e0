"""The strategies that a planner knows, those that change the least first. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from potluck.compressors import BF16, Int, PowerSGD, Strategy, TopK
from potluck.training.strategies import SGD, DataParallel, DiLoCo, Gossip, LocalSGD

BUCKET_SIZE_MB = 25.0
"""Of a DistributedDataParallel, unless it is told otherwise."""
BUCKET_SIZES_MB = (BUCKET_SIZE_MB, 5.0, 100.0)
"""Those that a plan compares."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, as it is written in a script, and what it changes."""

    name: str
    code: str
    strategy: DataParallel | LocalSGD | DiLoCo | Gossip
    changes: str

    @property
    def compression(self) -> Strategy | None:
        """The method that encodes what is sent."""
        if isinstance(self.strategy, LocalSGD | Gossip):
            return None
        return self.strategy.compression

    @property
    def bucket_size_mb(self) -> float:
        """The size of the buckets of gradients, in MiB."""
        strategy = self.strategy
        own = strategy.bucket_size_mb if isinstance(strategy, DataParallel) else None
        return own or BUCKET_SIZE_MB

    @property
    def fragments(self) -> int:
        """In how many rounds all parameters are exchanged once."""
        return self.strategy.fragments if isinstance(self.strategy, DiLoCo) else 1

    @property
    def round_steps(self) -> float:
        """The number of steps between two exchanges; 1 for data parallelism."""
        if isinstance(self.strategy, DataParallel):
            return 1
        return self.strategy.every / self.fragments

    def in_buckets(self, size_mb: float) -> Candidate:
        """The same with buckets of another size; itself for that of a DistributedDataParallel."""
        if size_mb == BUCKET_SIZE_MB or not isinstance(self.strategy, DataParallel):
            return self
        comma = "" if self.code.endswith("()") else ", "
        code = f"{self.code[:-1]}{comma}bucket_size_mb={size_mb:g})"
        return replace(self, code=code, strategy=replace(self.strategy, bucket_size_mb=size_mb))


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
        "DataParallel(compression=Int(8))",
        DataParallel(Int(8)),
        "gradients are rounded to 8 bits; what is lost is sent later",
    ),
    Candidate(
        "int4",
        "DataParallel(compression=Int(4))",
        DataParallel(Int(4)),
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
    Candidate(
        "local-sgd",
        "LocalSGD(every=8)",
        LocalSGD(every=8),
        "parameters are averaged every 8 steps, not gradients in each",
    ),
    Candidate(
        "gossip",
        'Gossip("exponential", every=8)',
        Gossip("exponential", every=8),
        "each worker averages parameters of its own with its neighbours' every 8 steps",
    ),
    Candidate(
        "diloco",
        "DiLoCo(every=100, fragments=4, delay=5, compression=Int(4))",
        DiLoCo(every=100, fragments=4, delay=5, compression=Int(4)),
        "an outer optimizer applies what changed in 100 steps, a quarter at a time and late",
    ),
    Candidate(
        "sparse",
        "DiLoCo(every=40, outer=SGD(1.0), compression=TopK(0.02, bits=2))",
        DiLoCo(every=40, outer=SGD(1.0), compression=TopK(0.02, bits=2)),
        "the largest 2% of what changed in 40 steps are applied, the rest later",
    ),
)
METHODS: dict[str, Strategy] = {
    candidate.name: candidate.compression
    for candidate in CANDIDATES
    if candidate.compression is not None
}
"""What is measured for its speed, by the name of the candidate."""


def candidates_for(nodes: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Those that make sense for ranks on these machines: ``hierarchical`` where several share one,
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
