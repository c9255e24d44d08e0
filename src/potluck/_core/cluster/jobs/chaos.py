"""Ordered faults: ``kill rank 2 at step 60; stop rank 1 at step 20 for 5 s``. Pure.

A fault is carried out by the agent, for real, when the worker that has this rank is about to begin
this step (steps count from 0). Each fault happens once, also if the step is run again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from potluck.errors import ConfigurationError

EXAMPLES = (
    "kill rank 2 at step 60",
    "stop rank 1 at step 20 for 5 s",
    "kill all at step 80",
)

_FAULT = re.compile(
    r"""(?P<kind>kill|stop) \s+
        (?: all | rank \s+ (?P<rank>\d{1,6}) ) \s+
        at \s+ step \s+ (?P<step>\d{1,12})
        (?: \s+ for \s+ (?P<seconds>\d{1,6}(?:\.\d{1,6})?) \s* (?:s|seconds?) )?""",
    re.VERBOSE | re.IGNORECASE,
)


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL"""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after ``seconds``"""


@dataclass(frozen=True, slots=True)
class Fault:
    """One order. ``rank`` None means all workers."""

    kind: FaultKind
    rank: int | None
    step: int
    seconds: float = 0.0

    def __str__(self) -> str:
        who = "all" if self.rank is None else f"rank {self.rank}"
        text = f"{self.kind} {who} at step {self.step}"
        return text if self.kind is FaultKind.KILL else f"{text} for {self.seconds:g} s"


@dataclass(slots=True)
class ChaosPlan:
    """The faults of one job, and which of them have not happened yet."""

    waiting: list[Fault]

    def steps_of(self, rank: int) -> tuple[int, ...]:
        """The steps before which ``rank`` must ask. For ``all``, rank 0 asks."""
        return tuple(sorted({fault.step for fault in self.waiting if rank == (fault.rank or 0)}))

    def due(self, rank: int, step: int) -> list[Fault]:
        """Take out the faults that ``rank`` has to meet before ``step``."""
        due = [fault for fault in self.waiting if fault.step == step and rank == (fault.rank or 0)]
        self.waiting = [fault for fault in self.waiting if fault not in due]
        return due


def parse_chaos(text: str) -> ChaosPlan:
    """The plan that ``text`` orders; ConfigurationError, with examples, if it can't be read."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _FAULT.fullmatch(part)
        if match is None:
            raise ConfigurationError(f"--chaos: {part!r} can't be understood; {_examples()}")
        kind = FaultKind(match["kind"].lower())
        if (kind is FaultKind.STOP) != (match["seconds"] is not None):
            needs = "needs 'for N s'" if kind is FaultKind.STOP else "takes no 'for'"
            raise ConfigurationError(f"--chaos: {part!r}: {kind} {needs}; {_examples()}")
        rank = None if match["rank"] is None else int(match["rank"])
        faults.append(Fault(kind, rank, int(match["step"]), float(match["seconds"] or 0)))
    return ChaosPlan(faults)


def check_ranks(plan: ChaosPlan, num_workers: int) -> None:
    """ConfigurationError if a fault is ordered for a rank that the job can't have."""
    for fault in plan.waiting:
        if fault.rank is not None and fault.rank >= num_workers:
            raise ConfigurationError(
                f"--chaos: {str(fault)!r}: the highest rank is {num_workers - 1}, "
                f"with --workers {num_workers}"
            )


def _examples() -> str:
    return "write for example " + ", ".join(repr(example) for example in EXAMPLES)
