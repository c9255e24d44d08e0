"""The elastic training loop, without torch: steps that count on all ranks or on none.

    for share in job:                  # what this rank computes on
        with job.step():
            gradient = all_reduce(...)
            job.commit(loss=loss)      # returns once every rank has voted ok
            weights -= rate * gradient

No gradient may be applied before ``commit`` returns. When a peer is lost before that, the block
ends early, the survivors form the next group, and the same samples are handed out again. When a
peer is lost *during* the vote, ``commit`` itself forms the next group and asks it for the outcome:
it returns if the step counts and ends the block if it does not (``context/commit.py`` decides).
Between steps (``agreement.py``) newcomers are let in: every member tells how many steps it has
committed, and members that are behind receive the state of the most senior rank that is up to date.
Then ranks may change the shares and the batch size together (``pace.py``), and write a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from potluck.checkpoint.store import CheckpointStore
from potluck.engine.work import again
from potluck.errors import (
    CheckpointError,
    Diverged,
    Evicted,
    GroupError,
    OperationTimeout,
    PeerLost,
)
from potluck.training.agreement import Agreement
from potluck.training.callbacks import Callbacks
from potluck.training.metrics import average
from potluck.training.pace import Pace
from potluck.training.policy import Policy
from potluck.training.progress import Progress
from potluck.training.record import Record
from potluck.training.replica import Replica
from potluck.training.sampler import Batch, Schedule, Share
from potluck.training.shares import EQUAL, apportion

if TYPE_CHECKING:
    from potluck.context import DistributedContext

__all__ = ["LOST", "ElasticLoop", "Policy"]

_log = logging.getLogger(__name__)

LOST = (PeerLost, OperationTimeout, Evicted)
"""The errors that a new group heals."""


class _Repeat(BaseException):
    """Leaves the block of a step that does not count; no ``except Exception`` stops it."""


class ElasticLoop(Record):
    """Iterate over the loop for this rank's [Share][potluck.training.Share] of each step.

        job = ElasticLoop(ctx, Schedule(60_000, 64, epochs=3), StateReplica(get_state, set_state))
        for share in job:
            with job.step():
                gradient = ctx.all_reduce(gradient_of(share))
                job.commit(loss=loss)  # returns once every rank has voted ok
                weights -= rate * gradient

    Nothing of ``replica``'s state may change before ``commit`` returns. When a peer is lost before
    that, the block ends early, the survivors form the next group, and the same samples come again.
    A joining worker receives the state of a peer between two steps.

    ``schedule`` says which samples a step has. ``checkpoint`` also keeps the state on disk, and a
    training of which no worker is left goes on from there. ``callbacks`` are objects with methods
    such as ``on_epoch_end(epoch, loss)``, or functions ``f(epoch, loss)``.

    ``losses`` are the global losses of the steps committed while this worker was there (NaN where
    none was told, or where it was lost with a rank). ``recoveries`` are the seconds from each
    lost peer to the next commit, ``num_reruns`` the steps that this worker ran again.

    Iterating raises [Diverged][potluck.errors.Diverged] when replicas differ,
    [RemoteError][potluck.errors.RemoteError] when another rank's code failed, and the GroupError
    that ended the group where no next group can be formed.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        schedule: Schedule,
        replica: Replica,
        *,
        checkpoint: CheckpointStore | None = None,
        policy: Policy | None = None,
        callbacks: Sequence[object] = (),
    ) -> None:
        self.ctx = ctx
        self._replica = replica
        self._policy = policy or Policy()
        self._callbacks = Callbacks(callbacks)
        super().__init__(Progress(schedule, self._policy.batching))
        self._agreement = Agreement(ctx, self._progress, replica, checkpoint)
        self._pace = Pace(self._policy)
        self._attempts = 0
        self._begun = False
        self._told_of = 0  # the group that callbacks know of
        # What ended a group since the last step began: until the next one others may stand
        # elsewhere in their scripts.
        self._interrupted: GroupError | None = None
        # The step under way.
        self._share: Share | None = None
        self._batch: Batch | None = None
        self._open = False
        self._counted = False
        self._told: dict[str, Any] = {}
        self._began = 0.0
        self._waited_s = 0.0
        self._is_typical = False

    # ------------------------------------------------------------ what a script calls

    @property
    def shares(self) -> tuple[int, ...]:
        """How many samples of a full batch each rank gets, in rank order."""
        costs = self._pace.costs or (EQUAL,) * self.ctx.world_size
        return apportion(self.batch_size, costs)

    @property
    def done(self) -> bool:
        """Whether every sample of every epoch is committed."""
        return self._agreement.has_state and self._progress.done

    def __iter__(self) -> Iterator[Share]:
        while True:
            self._settle(at_step=True)
            if not self._begun:
                self._begun = True
                self._tell("on_train_begin", self)
            if self.done:
                break
            batch = self._progress.batch()
            share = self.schedule.share(batch, self.ctx.rank, self.ctx.world_size, self._pace.costs)
            self._replica.weigh(share.weight)
            self._batch, self._share, self._counted = batch, share, False
            self._began, self._waited_s = time.monotonic(), self.ctx.waited_s
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
        self._open = True
        try:
            self._replica.remember()
            self.ctx.begin_step(self.step_number)
            yield
            if not self._counted:
                ElasticLoop.commit(self)
            self._measure()
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
        if self._counted:
            self._tell_of_step()

    def log(self, **facts: Any) -> None:
        """Report facts. ``loss`` in a step, before its commit, becomes the loss of all ranks."""
        if self._open and not self._counted:
            self._told.update(facts)
        else:
            self.ctx.report(**{name: _plain(value) for name, value in facts.items()})

    def average(self, **metrics: Any) -> dict[str, float]:
        """The means of ``metrics`` over all ranks: in a step by samples, else by equal parts.

        Every rank must call it with the same names; in a step before its commit. A peer lost
        between steps is PeerLost, also after the next group has formed and until the next step: not
        all ranks are at this call then.
        """
        if self._share is None and self._interrupted is not None:
            raise again(self._interrupted)
        weight = 1.0 if self._share is None else self._share.weight
        return average(self.ctx, metrics, weight=weight)

    def save(self) -> None:
        """Write a checkpoint now. Every rank must call it, after a step or before the first.

        CheckpointError on all ranks if one could not write (of an asynchronous store: if its last
        save could not); ValueError without a place for it.
        """
        if self._share is not None:  # the group may change here, and with it this rank's share
            raise RuntimeError(
                "a checkpoint is written between steps: after job.step(), not before or inside it"
            )
        if not self._agreement.has_place:
            raise ValueError("there is no place for checkpoints: pass checkpoint=DIRECTORY")
        # Not at once: a rank that has not heard how its step ended, or has lost its group, must do
        # what the others do, in the same order. All save where their group is settled.
        self._agreement.save_due = True
        failed = self._settle()
        if failed is not None:
            raise failed

    def commit(self, *, loss: float | None = None, ok: bool = True, skipped: bool = False) -> None:
        """Return once this step counts on every rank; else leave the block of the step.

        Call it when all that the step will apply is computed, and before any of it is applied.
        ``skipped`` (the same on all ranks) says that nothing will be. Raises Diverged when
        replicas differ. Cost: one vote of a few bytes per rank.
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
            self._agreement.newcomers = outcome.reform
            self._agreement.history = self.ctx.epoch
        self._count(told_loss, skipped)

    def saw_noise(self, signal: float, noise: float) -> None:
        """Unbiased |G|^2 and tr(Sigma) of the gradient of a committed step (noise.py)."""
        self._pace.saw(signal, noise)

    # ------------------------------------------------------------ one step's outcome

    def _state_hash(self) -> int:
        if not self._agreement.hash_due and self.step_number % self._policy.hash_every:
            return 0
        return 1 + int(self._replica.fingerprint()[:15], 16)

    def _ask_the_next_group(self, error: GroupError, pending: int) -> float:
        """The outcome of the vote of epoch ``pending`` was lost; returns if the step counts.

        Then the result is its loss, NaN if no rank knows it.
        """
        while True:
            self._lost(error)
            try:
                resolution, loss = self._agreement.agree(pending)
            except LOST as another:
                error = another
                continue
            self._pace.new_group()
            if self.ctx.rank in resolution.apply:
                self._agreement.history = resolution.history
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

    def _count(self, loss: float, skipped: bool) -> None:
        assert self._share is not None
        assert self._batch is not None
        self._counted = True
        self._agreement.hash_due = False
        self._progress.count(self._batch, loss, skipped=skipped)
        self._agreement.last_loss = loss
        self.losses.append(loss)
        self._attempts = 0
        now = time.monotonic()
        if self._agreement.lost_at is not None:
            self.recoveries.append(now - self._agreement.lost_at)
            self._agreement.lost_at = None
            self._is_typical = False
        else:
            self._is_typical = len(self.losses) > 1  # the first step also warms up
        rate = self._share.num_samples / max(now - self._began, 1e-9)
        known = self.samples_per_s
        self.samples_per_s = 0.9 * known + 0.1 * rate if known else rate
        if not math.isnan(loss):
            self._told["loss"] = loss
        self.ctx.report(
            step=self.step_number,
            committed_samples=self.committed,
            total_samples=self.schedule.total,
            samples_per_s=self.samples_per_s,
            device=self._replica.device,
            **{name: _plain(value) for name, value in self._told.items()},
        )

    def _measure(self) -> None:
        """The block of a committed step has ended: all of its time was work, but for the waits.

        What a rank waits for a transfer is not its own cost: that ends for all ranks together.
        """
        if self._is_typical and self._share is not None:
            waited_s = self.ctx.waited_s - self._waited_s
            self._pace.timed(self._share.num_samples, time.monotonic() - self._began - waited_s)

    def _tell_of_step(self) -> None:
        assert self._batch is not None
        self._tell("on_step_end", self.step_number, self.last_loss)
        if self._batch.start + self._batch.size == self.schedule.num_samples:
            self._tell("on_epoch_end", self._batch.epoch, self._progress.epoch_loss)

    def _tell(self, event: str, *arguments: Any) -> None:
        try:
            self._callbacks.call(event, *arguments)
        except LOST as error:
            if self._interrupted is None:
                self._lost(error)
        except GroupError:
            raise
        except Exception as error:
            self.ctx.abort(error)
            raise

    def _rerun(self) -> None:
        self._replica.undo()
        self.num_reruns += 1

    def _lost(self, error: GroupError) -> None:
        """Note that the group is over; raise ``error`` if there is no use in another."""
        now = time.monotonic()
        if self._agreement.lost_at is None:
            self._agreement.lost_at = now
        self._attempts += 1
        self._agreement.cause = self._interrupted = error
        if not self.ctx.elastic:
            raise error
        waited = now - self._agreement.lost_at
        if self._attempts > self._policy.max_attempts or waited > self._policy.recovery_s:
            error.add_note(f"gave up after {self._attempts} groups and {waited:.0f} s")
            raise error
        _log.info("step %d: %s", self.step_number, error)

    # ------------------------------------------------------------ between steps

    def _settle(self, *, at_step: bool = False) -> CheckpointError | None:
        """Return in a group whose members all stand where this rank stands, and have saved.

        ``at_step``: this is the point between two steps. Then waiting newcomers are let in, and at
        the end of the training no rank returns before all are there. The result is the error of a
        checkpoint that was due and could not be written.
        """
        agreement = self._agreement
        while True:
            try:
                if agreement.is_lost or (at_step and agreement.newcomers):
                    agreement.agree(0)
                    self._pace.new_group()
                agreement.bring_up_to_date()
                self._pace.exchange(self.ctx, self._progress)
                every = self._policy.save_every
                failed = agreement.save(due=self.done or self.step_number % every == 0)
                if self.done and at_step:
                    agreement.compare_at_the_end()
                break
            except LOST as error:
                self._lost(error)
            except Exception as error:
                if not isinstance(error, GroupError | Diverged):
                    self.ctx.abort(error)
                raise
        if at_step:
            self._interrupted = None
            known, self._told_of = self._told_of, self.ctx.epoch
            if self._begun and self.ctx.epoch != known:
                self._tell("on_group_change", self.ctx.world_size)
        return failed

    def _finish(self) -> None:
        self._agreement.finish_saving()
        self.ctx.report(
            committed_steps=self.step_number,
            steps_run_again=self.num_reruns,
            recoveries=list(self.recoveries),
            parameter_hash=self._replica.fingerprint(),
        )
        self._tell("on_train_end", self)


def _plain(value: Any) -> Any:
    """A fact as a plain value: numbers out of arrays and tensors."""
    return value.item() if hasattr(value, "item") else value
