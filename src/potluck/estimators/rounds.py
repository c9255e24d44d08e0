"""Rounds: a fit as a chain of small functions, each of which is committed on all ranks or on none.

The state of a fit is a dict of plain values and arrays, equal on all ranks. Its entry ``stage``
names the function that makes the next state from this one, with collective calls and this rank's
shard. The chain ends at the stage DONE, or at REFUSED for input that does not fit.

The elastic loop runs the chain. When a worker is lost, the survivors form the next group and repeat
the present round with their shards; the lost worker's shard is missing from then on. A worker that
is started again receives the states of all fits so far from a peer. For a fit that has ended it
returns the result at once; in the present one it takes part with its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from sklearn.utils.validation import validate_data

from potluck._core.context import DistributedContext
from potluck._core.context.start import present
from potluck.checkpoint.state import fingerprint
from potluck.errors import CheckpointError
from potluck.estimators.shards import Array, Shard, check, compare
from potluck.training.elastic import ElasticLoop
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule

State = dict[str, Any]
Stage = Callable[[State], State]

INPUT, DONE, REFUSED = "input", "done", "refused"
REFUSAL = "refusal"
_MOST_ROUNDS = 10**9  # the stages end the loop

_ERRORS = {"TypeError": TypeError, "ValueError": ValueError}


@dataclass
class _Fit(StateReplica):
    """The replica of a loop: a fit's number in the script, its state, and earlier fits' states."""

    number: int = 0
    now: State = field(default_factory=dict)
    heavy: tuple[str, ...] = ()
    """Entries that are the same bytes on all ranks by construction, and are not hashed."""

    def fingerprint(self) -> str:
        # Ranks may word the same refusal differently: a difference there must not replace it.
        left_out = (*self.heavy, REFUSAL)
        return fingerprint({name: self.now[name] for name in self.now if name not in left_out})


@dataclass
class _History:
    """The fits of one context, which a worker that is started again needs to catch up.

    ``finished`` are their last states. ``next`` is the number of the script's next fit; it is less
    than the number of finished ones in a worker that was started again. ``joined`` is the loop in
    which such a worker joined the others, at a later fit than that of its script.
    """

    finished: list[State] = field(default_factory=list)
    next: int = 0
    joined: tuple[_Fit, ElasticLoop, Iterator[Any]] | None = None


_histories: WeakKeyDictionary[DistributedContext, _History] = WeakKeyDictionary()


def run_rounds(
    ctx: DistributedContext,
    what: str,
    first: State,
    stages: Mapping[str, Stage],
    *,
    heavy: tuple[str, ...] = (),
) -> State:
    """Run the rounds of one fit; returns its last state. A collective call.

    ``what`` names the estimator. Rank 0's ``first`` state counts, so that its random seed does. A
    stage must not change the state that it is given. ValueError or TypeError on all ranks for
    refused input; the group lives on. Cost per round, beside the stage's own calls: a vote, one
    all_gather of 48 bytes per rank.

    A worker that is started again gets the results of the fits that it has missed from a peer, and
    returns them at once. An elastic context keeps the last state of each fit for that.
    """
    history = _histories.setdefault(ctx, _History())
    number = history.next
    while len(history.finished) <= number:
        fit, job, steps = history.joined or _loop(ctx, history, what, first, heavy)
        history.joined = None
        for _ in steps:
            if fit.number != number:
                steps = chain([None], steps)  # this step is still to be computed
                break
            with job.step():
                after = stages[fit.now["stage"]](fit.now)
                if after["stage"] in (DONE, REFUSED):
                    job.stop()
                job.commit(loss=after.get("loss"))
                fit.now = after
        if fit.number > number:
            history.joined = fit, job, steps
        elif fit.number == number:
            history.finished.append(fit.now)
        elif not job.done:
            raise CheckpointError(f"the other workers repeat the fit before this one, {what}")
        # Else the others have only now ended the fit before this one.
    last = history.finished[number]
    if last["fit"] != what:
        raise CheckpointError(f"the other workers have fitted {last['fit']}, this worker {what}")
    if ctx.elastic:
        history.next += 1
    else:
        history.finished.clear()
    if last["stage"] == REFUSED:
        kind, text = last[REFUSAL]
        raise _ERRORS[kind](text)
    assert last["stage"] == DONE, f"{what} ended at stage {last['stage']!r}"
    return last


def _loop(
    ctx: DistributedContext, history: _History, what: str, first: State, heavy: tuple[str, ...]
) -> tuple[_Fit, ElasticLoop, Iterator[Any]]:
    """A new loop for the script's next fit."""

    def capture() -> State:
        return {"number": fit.number, "now": fit.now, "finished": history.finished}

    def restore(state: Any) -> None:
        if not isinstance(state, dict) or not {"number", "now", "finished"} <= state.keys():
            raise CheckpointError("the other workers are not fitting an estimator, this worker is")
        fit.number, fit.now = int(state["number"]), state["now"]
        if fit.number == history.next and fit.now["fit"] != what:
            raise CheckpointError(
                f"the other workers are fitting {fit.now['fit']}, this worker begins with {what}: "
                "all workers must fit the same estimators in the same order"
            )
        if fit.number > history.next:
            history.finished[:] = state["finished"]

    now = {"fit": what, "stage": INPUT, **first}
    fit = _Fit(capture, restore, number=history.next, now=now, heavy=heavy)
    schedule = Schedule(1, 1, epochs=_MOST_ROUNDS, shuffle=False, is_open=True)
    job = ElasticLoop(ctx, schedule, fit)
    return fit, job, iter(job)


class Fit:
    """One fit of ``model``: its stages, and this rank's shard.

    A subclass makes the shard from the arguments of ``fit``, says what follows from the facts of
    all shards, and has the other stages.
    """

    min_samples = 1

    def __init__(
        self, model: Any, ctx: DistributedContext, X: Any, y: Any = None, weights: Any = None
    ) -> None:
        self.model, self.ctx, self.name = model, ctx, type(model).__name__
        self._shard, self._facts = check(ctx, model, lambda: self.make_shard(X, y, weights))

    def check_parameters(self) -> None:
        """Raise for parameters of the model that it can't be fitted with."""
        self.model._validate_params()

    def checked(self, X: Any, y: Any = "no_validation", **options: Any) -> Any:
        """The samples, with ``y`` if it is given, after scikit-learn's checks of the model's
        parameters and of both; ``options`` are those of ``validate_data``."""
        self.check_parameters()
        options = {"dtype": [np.float64, np.float32], "ensure_min_samples": 0, **options}
        return validate_data(self.model, X, y, **options)

    def make_shard(self, X: Any, y: Any, weights: Any) -> Shard:
        """This rank's shard, checked. ValueError or TypeError for what does not fit."""
        raise NotImplementedError

    def agree(self, state: State, rows: list[dict[str, Any]]) -> State:
        """The entries that follow from the facts of all shards, with the next ``stage``. The same
        on all ranks, as is its ValueError for shards that do not fit together."""
        raise NotImplementedError

    def stages(self) -> dict[str, Stage]:
        """The stages after the first one."""
        return {}

    @property
    def shard(self) -> Shard:
        """This rank's shard. After a failed check there is none: the first stage is the last."""
        assert self._shard is not None
        return self._shard

    def run(self, first: State | None = None, *, heavy: tuple[str, ...] = ()) -> State:
        """The last state; see ``run_rounds``."""
        stages = {INPUT: self._compare, **self.stages()}
        return run_rounds(self.ctx, self.name, first or {}, stages, heavy=heavy)

    def _compare(self, state: State) -> State:
        """The shards fit together."""
        rows, problem = compare(self.ctx, self._facts, min_samples=self.min_samples, name=self.name)
        if problem is None:
            try:
                return {**state, **self.agree(state, rows)}
            except ValueError as error:
                problem = error
        return refused(state, problem)


def refused(state: State, error: Exception) -> State:
    """The end of a fit whose input does not fit: every rank raises ``error``."""
    kind = "TypeError" if isinstance(error, TypeError) else "ValueError"
    return {**state, "stage": REFUSED, REFUSAL: [kind, str(error)]}


@contextmanager
def context_of(ctx: DistributedContext | None) -> Iterator[DistributedContext]:
    """The context of an estimator: ``ctx``, else the last context of ``potluck.init()``, else a new
    one. A new world of one ends with the block."""
    if not isinstance(ctx, DistributedContext | None):
        raise TypeError(f"ctx is {ctx!r}; it must be a context, such as that of potluck.init()")
    if ctx is not None:
        yield ctx
        return
    with present() as made:
        yield made


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
