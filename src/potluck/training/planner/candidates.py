"""The strategies that a planner knows, those that change the least first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.compressors import BF16, Int, PowerSGD, Strategy, TopK
from potluck.training.strategies import SGD, DataParallel, DiLoCo, LocalSGD


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, as it is written in a script, and what it changes."""

    name: str
    code: str
    strategy: DataParallel | LocalSGD | DiLoCo
    changes: str

    @property
    def compression(self) -> Strategy | None:
        """The method that encodes what is sent."""
        return None if isinstance(self.strategy, LocalSGD) else self.strategy.compression


CANDIDATES = (
    Candidate("plain", "DataParallel()", DataParallel(), "nothing"),
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


def named(name: str) -> Candidate:
    """The candidate of this name; ValueError if there is none."""
    for candidate in CANDIDATES:
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in CANDIDATES)
    raise ValueError(f"no strategy is called {name!r}; a plan knows {names}")
