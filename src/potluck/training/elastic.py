"""The elastic training loop, without torch: steps that count on all ranks or on none.

::

    for share in job:                  # what this rank computes on
        with job.step():
            gradient = all_reduce(...)
            job.commit(loss=loss)      # returns once every rank has voted ok
            weights -= rate * gradient

Nothing may be applied before ``commit`` returns. When a peer is lost before that, the block ends
early, the survivors form the next group, and the same samples are handed out again. When a peer is
lost *during* the vote, ``commit`` itself forms the next group and asks it for the outcome: it
returns if the step counts and ends the block if it does not (``cluster/commit.py`` decides).
Between steps newcomers are let in: every member says where it stands, and whoever is behind
receives the state of the most senior rank that is up to date.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.checkpoint.state import State
from potluck.checkpoint.store import CheckpointStore
from potluck.cluster.commit import Resolution, Standing, reconcile
from potluck.errors import (
    CheckpointError,
    ConfigurationError,
    Diverged,
    Evicted,
    GroupError,
    OperationTimeout,
    PeerLost,
)
from potluck.training.replica import Replica
from potluck.training.sampler import Schedule, Share
from potluck.training.transfer import broadcast_state

if TYPE_CHECKING:
    from potluck.context import DistributedContext

_log = logging.getLogger(__name__)

LOST = (PeerLost, OperationTimeout, Evicted)
"""The errors that a new group heals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How often the loop does what costs something, and how long it goes on trying.

    Every ``hash_every`` steps parameters are compared between ranks; every ``save_every`` steps
    (and at the end) the leader writes a checkpoint, if there is a place for it. After a loss a
    step must be committed within ``recovery_s`` seconds and ``max_attempts`` groups.
    """

    hash_every: int = 50
    save_every: int = 100
    recovery_s: float = 300.0
    max_attempts: int = 50


class _Repeat(BaseException):
    """Leaves the block of a step that does not count; no ``except Exception`` stops it."""


class ElasticLoop:
    """Iterate over it for this rank's Share of each step; see the module's own text.

    ``step_number`` and ``committed`` are the steps and samples committed since the training began.
    ``losses`` are the global losses of the steps committed while this worker was there (NaN where
    none was told, or where it went down with a rank). ``recoveries`` are the seconds from each
    lost peer to the next commit, ``num_reruns`` the steps that this worker ran again.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        schedule: Schedule,
        replica: Replica,
        *,
        checkpoint: CheckpointStore | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.ctx = ctx
        self.schedule = schedule
        self.step_number = 0
        self.committed = 0
        self.losses: list[float] = []
        self.recoveries: list[float] = []
        self.num_reruns = 0
        self._replica = replica
        self._store = checkpoint
        self._policy = policy or Policy()
        # Where this rank stands in the group's history (cluster/commit.py).
        self._has_state = False
        self._history = 0
        # What the group owes: a new group, an agreement, a state for those who are behind.
        self._cause: BaseException | None = None
        self._newcomers = False
        self._resolution: Resolution | None = None
        self._agreed = False
        self._hash_due = True
        self._lost_at: float | None = None
        self._attempts = 0
        # The step under way.
        self._share: Share | None = None
        self._open = False
        self._counted = False
        self._told: dict[str, Any] = {}
        self._began = 0.0
        self._rate = 0.0
        self._saved_at = -1

    # ------------------------------------------------------------ what a script calls

    @property
    def done(self) -> bool:
        """Whether every sample of every epoch is committed."""
        return self._has_state and self.committed >= self.schedule.total

    @property
    def in_step(self) -> bool:
        """Whether the block of a step is open."""
        return self._open

    @property
    def epoch(self) -> int:
        """The epoch of the data set that the next step belongs to."""
        return self.schedule.batch(self.committed).epoch

    @property
    def last_loss(self) -> float:
        """The global loss of the last committed step, NaN if none was told."""
        return self.losses[-1] if self.losses else math.nan

    def __iter__(self) -> Iterator[Share]:
        while True:
            self._settle()
            if self.done:
                break
            batch = self.schedule.batch(self.committed)
            share = self.schedule.share(batch, self.ctx.rank, self.ctx.world_size)
            self._replica.weigh(share.weight)
            self._share, self._counted = share, False
            yield share
            if self._share is not None:
                raise RuntimeError("the body of the loop must do its work inside job.step()")
        self._finish()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The block of one step. It ends early, without an error, if the step must be repeated.

        Any error of the script's own is told to all other ranks, which raise RemoteError.
        """
        if self._share is None:
            raise RuntimeError("job.step() is for the body of a loop over the job, once per turn")
        self._open, self._began = True, time.monotonic()
        try:
            self._replica.remember()
            self.ctx.begin_step(self.step_number)
            yield
            if not self._counted:
                self.commit()
        except _Repeat:
            self._rerun()
        except LOST as error:
            self._lost(error)
            if not self._counted:
                self._rerun()
        except Exception as error:
            if not isinstance(error, GroupError | Diverged):
                self.ctx.abort(error)
            raise
        finally:
            self._open, self._share = False, None
            self._told.clear()

    def log(self, **facts: Any) -> None:
        """Tell whoever watches. ``loss`` in a step, before its commit, becomes the global loss."""
        if self._open and not self._counted:
            self._told.update(facts)
        else:
            self.ctx.report(**{name: _plain(value) for name, value in facts.items()})

    def commit(self, *, loss: float | None = None, ok: bool = True) -> None:
        """Return once this step counts on every rank; else leave the block of the step.

        Call it when all that the step will apply is computed, and before any of it is applied.
        Raises Diverged when replicas differ. Cost: one vote of a few bytes per rank.
        """
        if not self._open or self._share is None:
            raise RuntimeError("commit belongs inside the block of a step")
        if self._counted:
            return
        told = self._told.pop("loss", None) if loss is None else loss
        try:
            outcome = self.ctx.commit(
                self.step_number,
                ok=ok,
                state_hash=self._state_hash(),
                loss=math.nan if told is None else float(told),
                weight=self._share.weight,
            )
        except LOST as error:
            # Only a rank that voted for the step may hold on to it.
            told_loss = self._ask_the_next_group(error, self.ctx.epoch if ok else 0)
        else:
            if not outcome:
                self._refused(outcome.reason)
            told_loss = outcome.loss
            self._newcomers = outcome.reform
            self._history = self.ctx.epoch
        self._count(told_loss)

    # ------------------------------------------------------------ one step's outcome

    def _state_hash(self) -> int:
        if not self._hash_due and self.step_number % self._policy.hash_every:
            return 0
        return 1 + int(self._replica.fingerprint()[:15], 16)

    def _ask_the_next_group(self, error: GroupError, pending: int) -> float:
        """The outcome of the vote of epoch ``pending`` was lost; returns if the step counts.

        Then the result is its loss, NaN if nobody knows it.
        """
        while True:
            self._lost(error)
            try:
                resolution, loss = self._agree(pending)
            except LOST as again:
                error = again
                continue
            if self.ctx.rank in resolution.apply:
                self._history = resolution.history
                return loss
            raise _Repeat from error

    def _refused(self, reason: str) -> None:
        _log.warning("step %d does not count: %s", self.step_number, reason)
        self._attempts += 1
        if self._attempts > self._policy.max_attempts:
            raise RuntimeError(
                f"step {self.step_number} was refused {self._attempts} times: {reason}"
            )
        raise _Repeat

    def _count(self, loss: float) -> None:
        assert self._share is not None
        self._counted = True
        self._hash_due = False
        self.step_number += 1
        self.committed += self.schedule.batch(self.committed).size
        self.losses.append(loss)
        self._attempts = 0
        now = time.monotonic()
        if self._lost_at is not None:
            self.recoveries.append(now - self._lost_at)
            self._lost_at = None
        rate = self._share.num_samples / max(now - self._began, 1e-9)
        self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        if not math.isnan(loss):
            self._told["loss"] = loss
        self.ctx.report(
            step=self.step_number,
            samples_per_s=self._rate,
            device=self._replica.device,
            **{name: _plain(value) for name, value in self._told.items()},
        )

    def _rerun(self) -> None:
        self._replica.undo()
        self.num_reruns += 1

    def _lost(self, error: GroupError) -> None:
        """Note that the group is over; raise ``error`` if there is no use in another."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        self._attempts += 1
        self._cause = error
        if not self.ctx.elastic:
            raise error
        waited = now - self._lost_at
        if self._attempts > self._policy.max_attempts or waited > self._policy.recovery_s:
            error.add_note(f"gave up after {self._attempts} groups and {waited:.0f} s")
            raise error
        _log.info("step %d: %s", self.step_number, error)

    # ------------------------------------------------------------ between steps

    def _settle(self) -> None:
        """Return in a group whose members all stand where this rank stands."""
        while True:
            try:
                if not self._agreed or self._cause is not None or self._newcomers:
                    self._agree(0)
                self._bring_up_to_date()
                self._save(always=self.done)
                if self.done:
                    self._compare_at_the_end()
                return
            except LOST as error:
                self._lost(error)
            except (CheckpointError, ConfigurationError) as error:
                self.ctx.abort(error)
                raise

    def _agree(self, pending: int) -> tuple[Resolution, float]:
        """Form the next group if one is due, and decide with its members what counts.

        ``pending`` is the epoch of the vote whose outcome this rank has lost, 0 for none. Also
        returns the loss of the last step that counts, NaN if nobody here knows it.
        """
        began = time.monotonic()
        reformed = self._cause is not None or self._newcomers
        if reformed:
            self._agreed = False
            self.ctx.reform(self._cause)
            self._cause, self._newcomers = None, False
        mine = [self.step_number if self._has_state else -1, self._history, pending, self.last_loss]
        rows = self.ctx.all_gather(np.array(mine, np.float64)).reshape(-1, len(mine))
        resolution = reconcile([Standing(*map(int, row[:3])) for row in rows])
        losses = [float(row[3]) for row in rows if int(row[0]) == resolution.committed]
        self._resolution, self._agreed, self._hash_due = resolution, True, True
        if reformed and self._has_state:
            since = began if self._lost_at is None else self._lost_at
            seconds = time.monotonic() - since
            event = f"re-formed with {self.ctx.world_size} in {seconds:.1f} s"
            if self.ctx.rank not in resolution.apply and self._lost_at is not None:
                event += f", step {resolution.committed} run again"
            _log.info("%s: %s", event, resolution.reason)
        return resolution, next(iter(losses), math.nan)

    def _bring_up_to_date(self) -> None:
        """Hand the state of whoever is up to date to whoever is not."""
        resolution = self._resolution
        if resolution is None:
            return
        source = resolution.source
        if source < 0:
            source = self._start_afresh()
        wanted = self.ctx.rank in resolution.receivers and self.ctx.rank != source
        if resolution.receivers and self.ctx.world_size > 1:
            state = self._capture() if self.ctx.rank == source else None
            received = broadcast_state(self.ctx, state, source, wanted=wanted)
            if wanted:
                self._restore(received)
                if self.step_number:
                    _log.info("joined at step %d", self.step_number)
        self._has_state, self._resolution = True, None
        self._history = max(self._history, resolution.history)

    def _start_afresh(self) -> int:
        """Nobody has a state: the rank with the newest checkpoint loads it. Returns that rank."""
        found = self._store.load_latest() if self._store is not None else None
        steps = self.ctx.all_gather(np.array([found.step if found else -1], np.int64)).reshape(-1)
        source = int(np.argmax(steps))
        if found is not None and self.ctx.rank == source:
            self._restore(found.state)
            self._saved_at = self.step_number
            self.ctx.report(event=f"resumed from the checkpoint of step {self.step_number}")
        return source

    def _capture(self) -> State:
        return {
            "step": self.step_number,
            "committed": self.committed,
            "num_samples": self.schedule.num_samples,
            "seed": self.schedule.seed,
            "replica": self._replica.capture(),
        }

    def _restore(self, state: State) -> None:
        try:
            step, committed = int(state["step"]), int(state["committed"])
            num_samples, seed = state["num_samples"], state["seed"]
            replica = state["replica"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not the state of an elastic loop: {error!r}") from error
        if (num_samples, seed) != (self.schedule.num_samples, self.schedule.seed):
            raise ConfigurationError(
                f"this state belongs to a training on {num_samples} samples with seed {seed}; "
                f"this one has {self.schedule.num_samples} and seed {self.schedule.seed}"
            )
        self._replica.restore(replica)
        self.step_number, self.committed = step, committed

    def _save(self, *, always: bool) -> None:
        """Write a checkpoint if this rank leads and one is due; training goes on if it can't be."""
        due = always or self.step_number % self._policy.save_every == 0
        new = self.step_number not in (0, self._saved_at)
        if self._store is None or not (due and new and self.ctx.is_master):
            return
        self._saved_at = self.step_number
        try:
            self._store.save(self._capture(), self.step_number)
        except CheckpointError as error:
            _log.error("%s", error)
            self.ctx.report(event=str(error))

    def _compare_at_the_end(self) -> None:
        """Nobody leaves before everybody is done, and with equal parameters."""
        mine = np.frombuffer(bytes.fromhex(self._replica.fingerprint()), np.uint8)
        hashes = self.ctx.all_gather(mine.copy()).reshape(-1, len(mine))
        different = [str(rank) for rank, other in enumerate(hashes) if (other != hashes[0]).any()]
        if different:
            raise Diverged(
                f"after step {self.step_number} the parameters of rank {', '.join(different)} "
                "differ from those of rank 0"
            )

    def _finish(self) -> None:
        self.ctx.report(
            committed_steps=self.step_number,
            steps_run_again=self.num_reruns,
            recoveries=list(self.recoveries),
            parameter_hash=self._replica.fingerprint(),
        )


def _plain(value: Any) -> Any:
    """A fact as a plain value: numbers out of arrays and tensors."""
    return value.item() if hasattr(value, "item") else value
