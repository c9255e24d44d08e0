"""Rounds: a fit as a chain of small functions, each of which is committed on all ranks or on none.

The state of a fit is a dict of plain values and arrays, equal on all ranks. Its entry ``stage``
names the function that makes the next state from this one, with collective calls and this rank's
shard. The chain ends at the stage DONE, or at REFUSED for input that does not fit.

The elastic loop runs the chain. When a worker is lost, the survivors form the next group and repeat
the present round with their shards; the lost worker's shard is missing from then on. A worker that
is started again receives the state from a peer and takes part with its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.checkpoint.state import fingerprint
from potluck.context import DistributedContext, init
from potluck.context.start import latest
from potluck.errors import CheckpointError
from potluck.estimators.shards import Array
from potluck.training.elastic import ElasticLoop
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule

State = dict[str, Any]
Stage = Callable[[State], State]

INPUT, DONE, REFUSED = "input", "done", "refused"
_ERRORS = {"TypeError": TypeError, "ValueError": ValueError}


@dataclass
class _Replica(StateReplica):
    """``heavy`` entries are the same bytes on all ranks by construction, and are not hashed."""

    heavy: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        state = self.get_state()
        return fingerprint({name: state[name] for name in state if name not in self.heavy})


def run_rounds(
    ctx: DistributedContext,
    what: str,
    first: State,
    stages: Mapping[str, Stage],
    *,
    max_rounds: int,
    heavy: tuple[str, ...] = (),
) -> State:
    """Run the rounds of one fit; returns its last state. A collective call.

    ``what`` names the estimator. Rank 0's ``first`` state counts, so that its random seed does. A
    stage must not change the state that it is given. ValueError or TypeError on all ranks for
    refused input; the group lives on. Cost per round, beside the stage's own calls: a vote, one
    all_gather of 48 bytes per rank.
    """
    now: State = {"fit": what, "stage": INPUT, **first}

    def restore(state: Any) -> None:
        nonlocal now
        if not isinstance(state, dict) or state.get("fit") != what:
            other = state.get("fit") if isinstance(state, dict) else "another state"
            raise CheckpointError(
                f"the other workers are fitting {other}, this worker begins with {what}: a worker "
                "that was started again can only join the fit that its script comes to first"
            )
        now = state

    job = ElasticLoop(
        ctx,
        Schedule(num_samples=1, batch_size=1, epochs=max_rounds, shuffle=False),
        _Replica(lambda: now, restore, heavy=heavy),
    )
    for _ in job:
        with job.step():
            after = stages[now["stage"]](now)
            if after["stage"] in (DONE, REFUSED):
                job.stop()
            job.commit(loss=after.get("loss"))
            now = after
    if now["stage"] == REFUSED:
        kind, text = now["refusal"]
        raise _ERRORS[kind](text)
    assert now["stage"] == DONE, f"{what} ended after {max_rounds} rounds at stage {now['stage']!r}"
    return now


def refused(state: State, error: Exception) -> State:
    """The end of a fit whose input does not fit: every rank raises ``error``."""
    kind = "TypeError" if isinstance(error, TypeError) else "ValueError"
    return {**state, "stage": REFUSED, "refusal": [kind, str(error)]}


@contextmanager
def context_of(ctx: DistributedContext | None) -> Iterator[DistributedContext]:
    """The context that an estimator works in: ``ctx``, else the one that ``potluck.init()`` made
    last, else a new one of ``potluck.init()``. A new world of one ends with the block."""
    made = ctx if ctx is not None else latest()
    if made is not None:
        yield made
        return
    made = init()
    if made.world_size > 1 or made.elastic:
        _kept.append(made)  # the group of this process, also for its next fit
        yield made
    else:
        with made:
            yield made


_kept: list[DistributedContext] = []


def from_first(
    ctx: DistributedContext, compute: Callable[[], Array], shape: tuple[int, ...]
) -> Array:
    """The float64 array of ``shape`` that rank 0 computes, on every rank.

    For linear algebra: the last bits of BLAS and LAPACK differ between kinds of processors, and the
    ranks' states must not. Cost: one broadcast.
    """
    found = np.zeros(shape)
    if ctx.is_master:
        found[...] = compute()
    ctx.broadcast(found)
    return found
