"""The elastic training loop, without torch: every step is committed on all ranks or on none.

    for share in job:                  # this rank's samples of the step
        with job.step():
            gradient = all_reduce(...)
            job.commit(loss=loss)      # returns once every rank has voted ok
            weights -= rate * gradient

No gradient may be applied before ``commit`` returns. When a peer is lost before that, the block
ends early, the survivors form the next group, and the same samples are computed again. When a peer
is lost *during* the vote, ``commit`` itself forms the next group and asks its members for the
outcome: it returns if the step counts and ends the block otherwise (``context/commit.py`` decides).
Between two steps newcomers join (``training.py``): every member sends how many steps it has
committed, and members that are behind receive the state of the most senior rank that is up to date.
Then ranks may change the shares and the batch size together (``pace.py``), and write a checkpoint.

With a ``strategy`` several steps are committed as one *round* (``rounds.py``), and a step by itself
is this rank's own affair.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck._core.context import check_whole
from potluck._core.engine.work import again
from potluck._core.forks import Uncopied
from potluck.checkpoint.store import CheckpointStore
from potluck.data.stream import Stream
from potluck.errors import CheckpointError, ConfigurationError, Diverged, GroupError
from potluck.training.callbacks import Callbacks
from potluck.training.means import average, means, part_of, plain
from potluck.training.memory import Parts, release
from potluck.training.policy import Policy
from potluck.training.progress import Progress
from potluck.training.replica import Replica
from potluck.training.rounds import Rounds, RoundStrategy
from potluck.training.sampler import Batch, Schedule, Share
from potluck.training.shares import num_parts
from potluck.training.training import LOST, Training, abort_on_error

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

__all__ = ["LOST", "ElasticLoop", "Policy"]

_log = logging.getLogger(__name__)


NOT_COMPUTED = "a step was not computed: do that inside `with job.step():`"


class _Repeat(BaseException):
    """Leaves the block of a step that does not count. A BaseException, so that an ``except
    Exception`` of the script does not catch it."""


class _NextPart(BaseException):
    """Leaves the block of a part of a step that is not its last."""


class ElasticLoop(Uncopied):
    """Iterate over the loop for this rank's [Share][potluck.training.Share] of each step.

        job = ElasticLoop(ctx, Schedule(60_000, 64, epochs=3), StateReplica(get_state, set_state))
        for share in job:
            with job.step():
                gradient = ctx.all_reduce(gradient_of(share))
                job.commit(loss=loss)  # returns once every rank has voted ok
                weights -= rate * gradient

    The state of ``replica`` must not change before ``commit`` returns. When a peer is lost before
    that, the block ends early, the survivors form the next group, and the same samples are computed
    again. A joining worker receives the state of a peer between two steps.

    ``schedule`` defines the samples of each step; an OwnSchedule those of ranks that have samples
    of their own, a StreamSchedule those of a ``stream``, whose items ``stream.take`` returns.
    ``checkpoint`` saves the state on disk, from which a training resumes that has lost all workers,
    or was interrupted: Ctrl-C ends it after the present step, with a checkpoint (a second Ctrl-C at
    once). ``callbacks`` are objects with methods such as ``on_epoch_end(epoch, loss)``, or
    functions ``f(epoch, loss)``. With a ``strategy`` ranks train alone for the steps of a round,
    and its exchange commits them; Ctrl-C then ends the round early.

    ``losses`` are the global losses of the steps committed while this worker was a member (NaN if
    none was given, or if it was lost with a rank). ``recoveries`` are the seconds from each lost
    peer to the next commit, ``num_reruns`` the number of steps that this worker ran again.

    Iterating raises [Diverged][potluck.errors.Diverged] if replicas differ,
    [RemoteError][potluck.errors.RemoteError] if another rank's script failed, and the GroupError
    that ended the group if no next group can be formed.
    """

    take_instead = "copy its model (of a DDP model.module) and optimizer, or call job.save()"

    def __init__(
        self,
        ctx: DistributedContext,
        schedule: Schedule,
        replica: Replica,
        *,
        checkpoint: CheckpointStore | None = None,
        policy: Policy | None = None,
        callbacks: Sequence[object] = (),
        strategy: RoundStrategy | None = None,
        stream: Stream | None = None,
    ) -> None:
        check_whole(ctx, "an elastic loop")
        self.ctx = ctx
        self._replica = replica
        self._callbacks = Callbacks(callbacks)
        policy = policy or Policy()
        progress = Progress(schedule, policy.batching)
        if strategy is not None and policy.batching is not None:
            raise ValueError(
                "batching follows gradients that are reduced in every step: leave it out with a "
                "strategy of rounds"
            )
        if schedule.holding.is_own and policy.shares is not None:
            raise ValueError(
                "shares that follow the speed of the ranks need the same samples on all ranks: "
                'leave shares= out with samples="own"'
            )
        in_rounds = strategy is not None
        if in_rounds and (stream is not None or schedule.max_steps):
            raise ValueError("streams and max_steps need steps of all ranks: leave strategy= out")
        training = Training(
            ctx, progress, replica, checkpoint, policy, in_rounds=in_rounds, stream=stream
        )
        self._training = training
        self._rounds = None
        if strategy is not None:
            self._rounds = Rounds(training, strategy, self._count_round)
        self.losses: list[float] = []
        """Global losses of the steps committed while this worker was a member; NaN: none known."""
        self.num_reruns = 0
        """The number of steps that this worker ran again."""
        self.samples_per_s = 0.0
        """Samples per second of this rank, with its waits: a moving average over steps."""
        self._num_computed = 0
        self._begun = False
        self._notified_epoch = 0  # the group that callbacks know
        # The present step.
        self._share: Share | None = None  # the part that is computed
        self._parts = Parts(Share(0, np.empty(0, np.int64), 0.0))
        self._batch: Batch | None = None
        self._open = False
        self._counted = False
        self._stops = False
        self._warned_of_late_loss = False
        self._facts: dict[str, Any] = {}
        self._began = 0.0
        self._waited_s = 0.0
        self._is_typical = False

    # ------------------------------------------------------------ what a script reads

    @property
    def recoveries(self) -> list[float]:
        """Seconds from each lost peer to the next commit."""
        return self._training.recoveries

    @property
    def schedule(self) -> Schedule:
        """The schedule of samples that the loop was made with."""
        return self._training.progress.schedule

    @property
    def step_number(self) -> int:
        """The number of steps committed since the training began."""
        return self._training.progress.step

    @property
    def committed(self) -> int:
        """The number of samples committed since the training began, over all epochs."""
        return self._training.progress.committed

    @property
    def epoch(self) -> int:
        """The epoch of the data set that the next step belongs to, from 0."""
        return self._training.progress.epoch

    @property
    def batch_size(self) -> int:
        """The samples of a step of all ranks together (the last step of an epoch may have
        fewer)."""
        return self._training.progress.batch_size

    @property
    def noise_scale(self) -> float:
        """The gradient's simple noise scale in samples; NaN while it is unknown."""
        return self._training.progress.noise.scale

    @property
    def num_skipped(self) -> int:
        """The number of committed steps without an update (after an overflow of the loss scale)."""
        return self._training.progress.num_skipped

    @property
    def last_loss(self) -> float:
        """The global loss of the last committed step; NaN if none is known."""
        return self.losses[-1] if self.losses else math.nan

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of samples of a full batch for each rank, in rank order."""
        batch = [(0, self.batch_size)]
        return self.schedule.counts(batch, self.ctx.world_size, self._training.pace.costs)

    @property
    def most_at_once(self) -> int:
        """The samples that this rank computes at once, at most; 0 while it has memory for all."""
        return self._training.cap.most

    @property
    def num_samples(self) -> int:
        """The samples with which this rank counts in the present step, or in the present part of a
        step that is computed in parts; 0 outside of one."""
        return 0 if self._share is None else self._share.num_samples

    @property
    def done(self) -> bool:
        """Whether every sample of every epoch is committed, or ``stop`` ended the training."""
        return self._training.has_state and self._training.progress.done

    # ------------------------------------------------------------ what a script calls

    def __iter__(self) -> Iterator[Share]:
        if self._training.has_store:
            with self._training.interrupt:
                yield from self._shares()
        else:
            yield from self._shares()

    def _shares(self) -> Iterator[Share]:
        while True:
            self._settle(at_step=True)
            is_busy = self._rounds is not None and self._rounds.is_busy
            if self._training.interrupt.is_agreed and not is_busy:
                self._training.finish_saving()
                if self.ctx.is_master:
                    text = f"interrupted; the checkpoint of step {self.step_number} is kept"
                    self.ctx.report(event=text)
                raise KeyboardInterrupt
            if not self._begun:
                self._begun = True
                self._notify("on_train_begin", self)
            if self.done and not is_busy:
                break
            if self._rounds is not None:
                yield from self._round(self._rounds)
                continue
            batch, costs = self._training.progress.batch(), self._training.pace.costs
            share = self.schedule.share(batch, self.ctx.rank, self.ctx.world_size, costs)
            self._batch, self._counted = batch, False
            self._parts = self._divided(share)
            self._began, self._waited_s = time.monotonic(), self.ctx.waited_s
            reruns = self.num_reruns
            for part in self._parts:
                self._share = part
                self._weigh(part)
                yield part
                if self._share is not None:
                    raise RuntimeError(NOT_COMPUTED)
                if self.num_reruns != reruns:
                    break
        self._finish()

    def _round(self, rounds: Rounds) -> Iterator[Share]:
        self._replica.weigh(1.0)
        with abort_on_error(self.ctx):
            for share in rounds.run():
                self._share, self._counted = share, False
                yield share
                if self._share is not None:
                    raise RuntimeError(NOT_COMPUTED)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context manager for one step. If the step must be repeated, its block ends early
        without an error.

        An exception of the script ends the training: the other ranks raise RemoteError.
        """
        if self._share is None:
            raise RuntimeError("call job.step() in the loop over the job, once per iteration")
        self._open = True
        if self._rounds is not None:
            self._stops = False
            yield from self._step_alone(self._rounds)
            return
        shortage = ""
        try:
            if self._parts.is_first:
                self._stops = False
                self._replica.remember(self.step_number)
                self.ctx.begin_step(self.step_number)
            yield
            if not self._counted:
                ElasticLoop.commit(self)
            self._measure()
        except _NextPart:
            pass
        except _Repeat:
            self._rerun()
        except LOST as error:
            self._training.lost(error)
            if not self._counted:
                self._release(error)
                self._rerun()
        except Exception as error:
            if not self._counted:
                at_once = self._parts.at_once
                shortage = self._training.shortage(error, at_once, self._most_that_fit())
            if shortage:
                self._release(error)
            else:
                if not isinstance(error, GroupError | Diverged):
                    self.ctx.abort(error)
                raise
        finally:
            self._open, self._share = False, None
            self._facts.clear()
        if shortage:  # not in the except clause: the error's traceback holds what did not fit
            self._rerun()
            self._training.ran_out(shortage)
        if self._counted:
            self._notify_step()

    def _step_alone(self, rounds: Rounds) -> Iterator[None]:
        """A step of a round."""
        try:
            with abort_on_error(self.ctx):
                self.ctx.begin_step(self.step_number + rounds.num_steps)
                yield
                if not self._counted:
                    ElasticLoop.commit(self)
        finally:
            self._open, self._share = False, None

    def log(self, **facts: Any) -> None:
        """Report facts to ``potluck run`` and ``potluck status``: names and numbers or strings.

        In a step they are reported with its commit; ``loss`` is averaged over all ranks.
        """
        if self._open and not self._counted:
            self._facts.update(facts)
        else:
            if self._open and "loss" in facts and not self._warned_of_late_loss:
                self._warned_of_late_loss = True
                _log.warning(
                    "job.log(loss=...) comes after the step's commit, which optimizer.step() "
                    "makes: this loss is not averaged over the ranks, and job.last_loss stays nan. "
                    "Call it before"
                )
            self.ctx.report(**{name: plain(value) for name, value in facts.items()})

    def average(self, **metrics: Any) -> dict[str, float]:
        """The means of ``metrics`` over all ranks: in a step weighted by samples, else unweighted.

        A collective call with the same names on every rank; in a step before its commit. After a
        loss between two steps it raises PeerLost until the next step, also when the next group has
        formed, because other ranks may not be at this call. In a step of a round, which does not
        communicate, they are this rank's own; so they are in all parts of a step but its last.
        """
        if self._share is not None and self._rounds is not None:
            return {name: float(plain(value)) for name, value in metrics.items()}
        if self._share is None and self._training.interrupted is not None:
            raise again(self._training.interrupted)
        if self._share is None:
            return average(self.ctx, metrics)
        parts = self._parts
        mine = {name: parts.mean(name, float(plain(each))) for name, each in metrics.items()}
        return average(self.ctx, mine, weight=parts.share.weight) if parts.is_last else mine

    def _means(
        self, num: int, measure: Callable[[range], Mapping[str, tuple[float, float]]]
    ) -> dict[str, float]:
        """``means`` of what ``measure`` returns for this rank's part of ``range(num)``: in a step,
        or after the last one. There it is computed again where a rank is lost."""
        if self._rounds is not None and not self.done:
            raise RuntimeError("between the exchanges of a round ranks have unlike parameters")
        parts = self._parts
        if self._share is not None and not parts.is_first:  # ranks have unlike numbers of parts
            return parts.evaluated_again()
        while True:
            mine = part_of(self.ctx, num, self._training.pace.costs)
            try:
                own = measure(mine or range(1))  # else this rank would not know the names
                found = means(self.ctx, own if mine else dict.fromkeys(own, (0.0, 0.0)))
            except LOST as error:
                if self._share is not None or not self.done:
                    raise
                self._training.lost(error)
                self._settle(at_step=True)  # a joining worker calls it, too: its loop is over
            else:
                parts.evaluated.append(found)
                return found

    def save(self) -> None:
        """Write a checkpoint now. A collective call, between two steps. With a strategy of rounds
        it is written at the end of the round, and an error is only logged.

        CheckpointError on all ranks if one rank could not write (in an asynchronous store: if the
        previous save failed); ValueError without ``checkpoint``.
        """
        if self._share is not None:  # saving may change the group, and thus this rank's share
            raise RuntimeError(
                "a checkpoint is written between steps: after job.step(), not before or inside it"
            )
        if not self._training.has_store:
            raise ValueError("there is no directory for checkpoints: pass checkpoint=DIRECTORY")
        if self._rounds is not None and self._training.progress.deals:
            self._rounds.ask(saves=True)
            return
        # Not at once: a rank that lost its group, or the outcome of its step, must make the same
        # calls as the others in the same order. All ranks save once their group is settled.
        self._training.save_due = True
        failed = self._settle()
        if failed is not None:
            raise failed

    def commit(self, *, loss: float | None = None, ok: bool = True, skipped: bool = False) -> None:
        """Vote to commit this step. Returns if the step counts on all ranks, else ends its block.

        Call it after the update of the step is computed and before any of it is applied. ``loss``
        is this rank's loss, ``ok=False`` votes against the step, ``skipped`` (equal on all ranks)
        says that no update will be applied. Diverged if replicas of like machines differ. Cost: one
        all_gather of 48 bytes per rank.
        """
        if not self._open or self._share is None:
            raise RuntimeError("commit belongs inside the block of a step")
        if self._counted:
            return
        own_loss = self._facts.pop("loss", None) if loss is None else loss
        if self._rounds is not None:
            if not ok:
                raise RuntimeError("the steps of a round are not voted on, so none can be refused")
            self._counted = True
            own_loss = math.nan if own_loss is None else float(own_loss)
            self._rounds.add_loss(own_loss, self._share.num_samples)
            return
        own_loss = self._parts.mean("", math.nan if own_loss is None else float(own_loss))
        ok = self._parts.ok = self._parts.ok and ok
        if not self._parts.is_last:
            raise _NextPart
        try:
            outcome = self.ctx.commit(
                self.step_number,
                ok=ok,
                state_hash=self._training.state_hash(),
                loss=own_loss,
                weight=self._parts.share.weight,
                ends=self._training.interrupt.is_asked,
            )
        except LOST as error:
            # Only a rank that voted for the step can learn that the step counts.
            global_loss = self._ask_the_next_group(error, self.ctx.epoch if ok else 0)
        else:
            if not outcome:
                self._training.refused(outcome.reason)
                raise _Repeat
            global_loss = outcome.loss
            self._training.voted(outcome)
        self._count(global_loss, skipped)

    def stop(self) -> None:
        """End the training with this step, once it is committed: for early stopping.

        Call it in the step's block before its commit, on every rank or on none: decide by values
        that are equal on all ranks, such as the result of an all_reduce.
        """
        if not self._open or self._counted:
            raise RuntimeError("stop belongs inside the block of a step, before its commit")
        self._stops = True
        if self._rounds is not None:
            self._rounds.ask(stops=True)

    def add_noise(self, signal: float, noise: float) -> None:
        """Record unbiased estimates of |G|^2 and tr(Sigma) for the gradient of a committed step, as
        ``noise.py`` defines them."""
        self._training.pace.add_noise(signal, noise)

    # ------------------------------------------------------------ one step's outcome

    def _ask_the_next_group(self, error: GroupError, pending: int) -> float:
        """Form the next group, which knows the outcome of the vote of epoch ``pending``.

        Returns the step's loss (NaN if no rank knows it) if the step counts, else ends its block.
        """
        while True:
            self._training.lost(error)
            try:
                counts, loss = self._training.agree(pending)
            except LOST as another:
                error = another
                continue
            if counts:
                return loss
            raise _Repeat from error

    def _count(self, loss: float, skipped: bool) -> None:
        assert self._share is not None
        assert self._batch is not None
        self._counted = True
        self._training.progress.count(self._batch, loss, skipped=skipped)
        self._training.progress.is_stopped = self._stops
        now = time.monotonic()
        # The first step also warms up.
        self._is_typical = self._training.lost_at is None and len(self.losses) > 0
        self._training.cap.fits(self._parts.at_once)
        self._note_commit(loss, self._parts.share.num_samples, now - self._began)

    def _count_round(
        self, loss: float, num_samples: int, seconds: float, ended: int | None
    ) -> None:
        """A round of this rank is committed, in which it computed ``num_samples`` in ``seconds``;
        ``ended``: the epoch that ended with it."""
        self._note_commit(loss, num_samples, seconds)
        self._facts.clear()
        self._notify("on_step_end", self.step_number, self.last_loss)
        if ended is not None:
            self._notify("on_epoch_end", ended, self._training.progress.epoch_loss)

    def _note_commit(self, loss: float, num_samples: int, seconds: float) -> None:
        self._training.last_loss = loss
        self.losses.append(loss)
        self._num_computed += num_samples
        self._training.num_failed = 0
        self._training.end_recovery()
        rate = num_samples / max(seconds, 1e-9)
        known = self.samples_per_s
        self.samples_per_s = 0.9 * known + 0.1 * rate if known else rate
        if not math.isnan(loss):
            self._facts["loss"] = loss
        self.ctx.report(
            step=self.step_number,
            committed_samples=self.committed,
            total_samples=self.schedule.aim,
            worker_samples=self._num_computed,
            samples_per_s=self.samples_per_s,
            device=self._replica.device,
            **{name: plain(value) for name, value in self._facts.items()},
        )

    def _measure(self) -> None:
        """Record the time that a committed step took this rank, at the end of its block.

        Time in which the rank waited for transfers is left out: transfers end at the same time for
        all ranks, so they say nothing of this rank's speed.
        """
        if self._is_typical and self._share is not None:
            step_s = time.monotonic() - self._began
            waited_s = self.ctx.waited_s - self._waited_s
            self._training.pace.add_time(self._parts.share.num_samples, step_s - waited_s)
            self._on_step_time(step_s, waited_s)

    def _on_step_time(self, step_s: float, waited_s: float) -> None:
        """A committed step took ``step_s``, of which this rank has waited ``waited_s``; not called
        for the first step, and the first after a loss."""

    def _upcoming(self) -> Iterator[Share]:
        """This rank's shares after the present step, if it counts and nothing changes; with a
        strategy of rounds to the end of the epoch."""
        if self._rounds is not None:
            yield from self._rounds.upcoming()
            return
        assert self._batch is not None
        yield from self._parts.parts[self._parts.number + 1 :]
        for share in self._next_shares(self.committed + self._batch.size):
            yield from self._divided(share).parts

    def _next_shares(self, committed: int) -> Iterator[Share]:
        group = self.ctx.rank, self.ctx.world_size, self._training.pace.costs
        size = self.batch_size
        while self.schedule.knows(committed, size):  # more of a stream is known later
            batch = self.schedule.batch(committed, size)
            yield self.schedule.share(batch, *group)
            committed += batch.size

    def _notify_step(self) -> None:
        assert self._batch is not None
        self._notify("on_step_end", self.step_number, self.last_loss)
        if not self.schedule.find(self.committed)[1]:
            self._notify("on_epoch_end", self._batch.epoch, self._training.progress.epoch_loss)

    def _notify(self, event: str, *arguments: Any) -> None:
        try:
            with abort_on_error(self.ctx):
                self._callbacks.call(event, *arguments)
        except LOST as error:
            if self._training.interrupted is None:
                self._training.lost(error)

    def _rerun(self) -> None:
        self._replica.undo()
        self.num_reruns += 1

    # ------------------------------------------------------------ memory

    def _divided(self, share: Share) -> Parts:
        """The parts in which this rank computes ``share``: one, as the sum of a script's own
        gradients is the script's. ConfigurationError on all ranks if the batch does not fit."""
        assert self._batch is not None
        costs = self._training.pace.costs
        if costs is not None and num_parts(self._batch.size, costs) > 1:
            caps = ", ".join(str(cost.most) for cost in costs)
            raise ConfigurationError(
                f"a batch of {self._batch.size} samples fits into the memory of no worker: the "
                f"ranks compute at most {caps} samples at once. Take a smaller batch_size, or more "
                "workers (potluck.torch.ElasticLoop computes such a batch in parts)"
            )
        return Parts(share)

    def _weigh(self, part: Share) -> None:
        """A part of the present step begins."""
        self._replica.weigh(part.weight)

    def _most_that_fit(self) -> int:
        """How many samples at once fit into the memory that is left; 0 if that is unknown."""
        return 0

    def _release(self, error: BaseException) -> None:
        """Release what the step that ended by ``error`` holds: else it takes memory beside what the
        step computes when it runs again."""
        release(error)

    # ------------------------------------------------------------ between steps

    def _settle(self, *, at_step: bool = False) -> CheckpointError | None:
        """Settle the group: all members are at the same step, with equal states, and have saved.

        ``at_step``: the call is between two steps. Then waiting newcomers join, and at the end of
        the training all ranks wait for each other. Returns the error of a checkpoint that was due
        and could not be written.
        """
        training = self._training
        while True:
            try:
                with abort_on_error(self.ctx):
                    if training.is_lost or (at_step and training.newcomers):
                        training.agree(0)
                    training.bring_up_to_date()
                    if self._rounds is not None:
                        self._rounds.catch_up()
                    failed = None
                    if self._rounds is None:
                        training.pace.exchange(self.ctx, training.progress)
                        training.alignment.align(now=self.done and at_step)
                    if not (self._rounds and self._rounds.is_busy):
                        failed = training.save()
                        if self.done and at_step:
                            training.compare_at_the_end()
                    if at_step:
                        training.look_ahead()
                break
            except LOST as error:
                training.lost(error)
        if at_step:
            training.interrupted = None
            known, self._notified_epoch = self._notified_epoch, self.ctx.epoch
            if self._begun and self.ctx.epoch != known:
                self._notify("on_group_change", self.ctx.world_size)
        return failed

    def _finish(self) -> None:
        self._training.finish_saving()
        if self._training.pace.costs is not None:
            self.ctx.report(shares=", ".join(map(str, self.shares)))
        self.ctx.report(
            committed_steps=self.step_number,
            steps_run_again=self.num_reruns,
            recoveries=list(self.recoveries),
            parameter_hash=self._replica.parameter_hash(),
        )
        self._notify("on_train_end", self)
