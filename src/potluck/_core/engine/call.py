"""A call: what one rank asked for, in a form that ranks can compare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.engine.fingerprint import fingerprint_of, undescribed
from potluck._core.types import ReduceOp


@dataclass(frozen=True)
class Call:
    """One collective as this rank called it.

    Ranks that make different calls have different fingerprints, and every frame carries the
    fingerprint, so a disagreement is found before any payload is combined. ``ranks`` are the
    members of a sub-group, in its order; empty for the whole group. ``codec`` is the name of the
    encoding on the wire, empty for none.
    """

    operation: Operation
    algorithm: Algorithm
    dtype: str
    shape: tuple[int, ...]
    op: ReduceOp | None = None
    root: int = 0
    segment_bytes: int = 0
    ranks: tuple[int, ...] = ()
    codec: str = ""
    parent_call: str = ""
    """Empty for a call of the user's. A call that the engine makes by itself before one of those
    (to set up shared memory) has the text of the user's call here: errors name that one, and
    metrics do not count the engine's."""
    plans: str = ""
    """The hash of the plans of a registered algorithm."""

    def __str__(self) -> str:
        return self.text

    @cached_property
    def text(self) -> str:
        if self.parent_call:
            return self.parent_call
        if self.operation is Operation.BARRIER:
            return "barrier"
        parts = [self.dtype, f"shape {self.shape}"]
        if self.op is not None:
            parts.append(f"op {self.op}")
        if self.operation in _ROOTED:
            parts.append(f"root {self.root}")
        parts.append(self.algorithm.value)
        if self.codec:
            parts.append(f"codec {self.codec}")
        return f"{self.operation}({', '.join(parts)})"

    @cached_property
    def fingerprint(self) -> int:
        if self.parent_call:  # not the same on all ranks
            return undescribed(f"engine {self.operation} {self.shape} {self.ranks}")
        text = f"{self} {self.algorithm} {self.root} {self.segment_bytes} {self.ranks}{self.plans}"
        return fingerprint_of(
            self.operation,
            self.dtype,
            self.op,
            self.algorithm,
            self.codec,
            prod(self.shape),
            text,
        )


_ROOTED = frozenset({Operation.BROADCAST, Operation.REDUCE, Operation.SCATTER, Operation.GATHER})
