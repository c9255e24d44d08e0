"""Training in rounds: steps on each rank alone, then one exchange, which commits them all.

A round is dealt a part of the samples; each rank computes its share in steps that neither vote nor
reduce. At the end of the round the ranks report what they have computed, exchange what has changed
in their parameters, and vote. The round counts with the samples that the members of the committing
group have computed; the others are owed to later rounds of the epoch (``ledger.py``).

After a change of the group inside a round every member keeps its work. A member that has none,
because it has joined, contributes nothing and waits for the next round. What is decided about a
round (its samples, its fragment, when it is exchanged) follows from what is committed, so that all
members decide alike.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from potluck.checkpoint.state import State
from potluck.errors import Diverged, GroupError
from potluck.training.agreement import LOST, Agreement
from potluck.training.interrupt import Interrupt
from potluck.training.ledger import Deal, Span, cut
from potluck.training.nearly import nearly_equal
from potluck.training.pace import Pace
from potluck.training.progress import Progress
from potluck.training.round_report import Report, Work
from potluck.training.sampler import Share, Taken
from potluck.training.strategies.deadline import Arrivals
from potluck.training.transfer import broadcast_state

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

_PATIENCE = 10
"""A rank that has not arrived is waited for so many times the longest steps of a rank."""

_FIRST_PATIENCE_S = 3600.0
"""How long it is waited for in the first round, when nobody knows how fast the slowest rank is."""


class RoundStrategy(Protocol):
    """What a strategy exchanges at the end of a round, and how it changes the replica."""

    num_steps: int
    """The number of steps of a round."""
    delay: int
    """The number of steps of the next round during which the exchange goes on."""
    num_fragments: int
    """The number of rounds in which all parameters are exchanged once."""
    deadline: float | None
    needs_whole_weights: bool
    """Whether weights must add up to 1 even if a part of the round is missing, as error feedback
    needs it: a residual is paid with the weight that it was kept with."""

    def begin(self, number: int) -> None:
        """The steps of round ``number`` begin."""

    def close(self, number: int, *, whole: bool) -> None:
        """The steps of round ``number`` are over on this rank: keep what they have changed, in one
        fragment or in the ``whole`` replica."""

    def start(
        self, ctx: DistributedContext, number: int, weight: float, timeout_s: float
    ) -> Callable[[], None]:
        """Start the weighted sum over all ranks of what the round has changed; returns the function
        that waits for it. Called again for the same round in the next group after a loss."""

    def apply(self, number: int, fraction: float, *, delayed: bool) -> None:
        """Apply the sum to the replica. ``fraction``: the sum of all weights; 0 for no work, then
        nothing that was sent counts. ``delayed``: this rank has begun its next round."""

    def inner_hash(self) -> int:
        """``nearly.two_grids`` of the values by which a step depends on its number, such as a
        learning rate; nearly equal on ranks that have done equally many steps."""

    def synchronize(self) -> None:
        """Wait until the device of this rank has computed the steps so far."""

    def capture_inner(self) -> State:
        """These values, for a rank that has done another number of steps."""

    def restore_inner(self, state: State) -> None:
        """Set these values to those of another rank."""


class Loop(Protocol):
    """What rounds need of the loop whose part they are."""

    ctx: DistributedContext
    _progress: Progress
    _agreement: Agreement
    _pace: Pace
    _interrupt: Interrupt
    _interrupted: GroupError | None
    _attempts: int
    recoveries: list[float]

    def _lost(self, error: GroupError) -> None: ...

    def _state_hash(self, *, num_steps: int) -> int: ...

    def _count_round(
        self, loss: float, num_samples: int, seconds: float, ended: int | None
    ) -> None: ...


class Rounds:
    """The rounds of one loop: the part of ElasticLoop that is for strategies with rounds."""

    def __init__(self, job: Loop, strategy: RoundStrategy) -> None:
        self.strategy = strategy
        self._job = job
        self._works: list[Work] = []  # as the loop's progress has deals
        self._recent: deque[int] = deque(maxlen=strategy.num_fragments - 1)
        """How many samples this rank has computed in each of the last rounds, whose changes are in
        fragments that are not reduced yet."""
        self._arrivals = Arrivals()
        self._present: Work | None = None  # whose steps this rank computes
        self._epoch = 0  # of the group that these works were dealt in
        self._taken = -1  # this rank's in ``taken`` of the progress; -1 before it is known
        job._agreement.dealt_in = lambda: [work.dealt_in for work in self._works]

    # ------------------------------------------------------------ steps

    def run(self) -> Iterator[Share]:
        """One round: its steps, then its exchange, which may go on during the next round's."""
        flying = self._works[0] if self._works and self._works[0].is_closed else None
        if flying is not None and (flying.is_urgent or self._job._interrupt.is_agreed):
            self._finish(flying)
            return
        open_ = [work for work in self._works if not work.is_closed]
        work = open_[0] if open_ else self._deal()
        self.strategy.begin(work.number)
        self._present = work
        limit = None
        if self.strategy.deadline is not None:
            limit = self._arrivals.deadline_s(self.strategy.deadline)
        for start, stop in work.batches:
            if flying is not None and work.num_steps == self.strategy.delay:
                self._land(flying)
                flying = None
            if self._is_over(work):
                break
            began = time.monotonic()
            yield self._share(work.deal, (start, stop))
            if limit is not None or stop == work.batches[-1][1]:
                self.strategy.synchronize()
            work.seconds += time.monotonic() - began  # without waits for other ranks
            work.num_samples += stop - start
            work.num_steps += 1
            self._look()
            is_late = limit is not None and work.seconds > limit
            if self._is_over(work) or is_late or self._job._interrupt.is_due:
                break
        if flying is not None:
            self._land(flying)
        if work not in self._works:
            return  # this rank has received another state
        self._close(work)
        if self._is_synchronous(work):
            self._finish(work)
        else:
            self._take_off(work)

    @property
    def is_busy(self) -> bool:
        """Whether rounds were dealt that are not committed, or fragments must be reduced before a
        checkpoint or the end."""
        return bool(self._job._progress.deals) or self._is_flush_due

    def upcoming(self) -> Iterator[Share]:
        """The shares after the present step to the end of the epoch, if nothing changes."""
        work, progress = self._present, self._job._progress
        if work is None:
            return
        yield from (self._share(work.deal, batch) for batch in work.batches[work.num_steps + 1 :])
        if progress.owed or not work.batches:
            return
        schedule, rank = progress.schedule, self._job.ctx.rank
        size = self.strategy.num_steps * schedule.batch_size
        taken = list(progress.taken)
        at, mine = progress.frontier, work.batches[-1][1]
        while at < schedule.num_samples:
            deal = Deal(work.deal.epoch, ((at, min(at + size, schedule.num_samples)),))
            if taken:
                taken[rank] = mine, taken[rank][1]
            batches = self._cut(deal, taken)
            yield from (self._share(deal, batch) for batch in batches)
            at, mine = deal.spans[0][1], batches[-1][1] if batches else mine

    def _share(self, deal: Deal, batch: Span) -> Share:
        schedule = self._job._progress.schedule
        return Share(deal.epoch, schedule.pick_dealt(deal, batch), 1.0)

    def add_loss(self, loss: float, num_samples: int) -> None:
        """Note the loss of a step of this rank."""
        if self._present is not None and not math.isnan(loss):
            self._present.loss_sum += loss * num_samples
            self._present.loss_weight += num_samples

    def ask(self, *, saves: bool = False, stops: bool = False) -> None:
        """Ask for a checkpoint, or for the end of the training, at the end of the round."""
        if self._present is not None:
            self._present.saves |= saves
            self._present.stops |= stops

    @property
    def num_steps(self) -> int:
        """The number of steps that this rank has computed in its present round."""
        return self._present.num_steps if self._present is not None else 0

    # ------------------------------------------------------------ the group

    def catch_up(self) -> None:
        """After an agreement of the group: the rounds that others were dealt, and this rank was
        not, it takes part in without work; with the samples of its own, if it has some."""
        job, agreement = self._job, self._job._agreement
        progress, held = job._progress, job._progress.schedule.held
        has_begun, agreement.is_afresh = agreement.is_afresh, False
        if has_begun or agreement.is_restored:
            self._taken = -1
        if agreement.is_restored:
            agreement.is_restored = False
            self._recent.clear()
            self._works = [
                Work(progress.round + place, deal) for place, deal in enumerate(progress.deals)
            ]
        has_changed = job.ctx.epoch != self._epoch
        while progress.round + len(progress.deals) < agreement.num_dealt:
            self._works.append(self._dealt())
        for work in self._works[:-1]:
            self._close(work)
        if has_changed and held:
            self._tell_taken(held, resumes=has_begun)
        self._epoch = job.ctx.epoch
        for work in self._works if has_changed else ():
            work.is_urgent = True
            if held:  # what a rank has of a round does not depend on the group
                if not (work.batches or work.is_closed):
                    self._fill(work)
            elif work.batches and work.dealt_in != agreement.valid_deals.get(work.number):
                self._close(work)
                work.drop()  # this rank was cut off, and the others were dealt the round anew

    # ------------------------------------------------------------ inside

    def _tell_taken(self, held: Sequence[int], *, resumes: bool) -> None:
        """All members learn how many of its own samples each has in committed rounds of the epoch.
        A newcomer counts from the positions that are not dealt; one that ``resumes`` a training
        with as many samples as before goes on. Cost: an all_gather of 8 bytes."""
        ctx, progress = self._job.ctx, self._job._progress
        if self._taken < 0:
            before = progress.schedule.counts([(0, progress.frontier)], ctx.world_size)
            known = progress.taken[ctx.rank : ctx.rank + 1] if resumes else []
            is_same = [num for _, num in known] == [held[ctx.rank]]
            self._taken = known[0][0] if is_same else before[ctx.rank]
        rows = ctx.all_gather(np.array([self._taken], np.int64)).reshape(-1).tolist()
        progress.taken = list(zip(rows, held, strict=True))

    @property
    def _is_flush_due(self) -> bool:
        """Whether a round without samples is next, which reduces all fragments: before a checkpoint
        and at the end of the training."""
        job, progress = self._job, self._job._progress
        if self.strategy.num_fragments == 1 or progress.is_flushed or progress.deals:
            return False
        return progress.done or job._agreement.is_save_due

    def _is_over(self, work: Work) -> bool:
        return work.is_closed or work not in self._works

    def _is_synchronous(self, work: Work) -> bool:
        """Whether the exchange ends before the next round begins: if the round after it depends on
        its outcome, or others wait. All of it is known from earlier commits."""
        job, progress = self._job, self._job._progress
        return (
            not self.strategy.delay
            or work.is_urgent
            or not work.deal.size
            or progress.is_epoch_dealt
            or progress.is_stopped
            or job._interrupt.is_agreed
            or job._agreement.newcomers
            or job._agreement.will_save(self._num_steps_of(work.deal))
        )

    def _land(self, flying: Work) -> None:
        """Finish the exchange of the round before, unless a change of the group has done so."""
        if flying in self._works:
            self._finish(flying)

    def _take_off(self, work: Work) -> None:
        """Start the exchange of a round; it is finished during the steps of the next."""
        work.is_delayed = True
        try:
            self._start(work)
        except LOST as error:
            self._job._lost(error)  # the next call between steps forms the next group

    def _dealt(self) -> Work:
        """The next round, of which this rank has no steps yet."""
        progress = self._job._progress
        number = progress.round + len(progress.deals)
        if self._is_flush_due:
            return Work(number, progress.deal_nothing(), num_recent=sum(self._recent))
        size = self.strategy.num_steps * progress.schedule.batch_size
        return Work(number, progress.deal(size))

    def _deal(self) -> Work:
        work = self._dealt()
        self._works.append(work)
        if work.deal.size:
            self._fill(work)
        return work

    def _fill(self, work: Work) -> None:
        """Cut what this rank has of a round, the last one that it was dealt, into steps."""
        rank = self._job.ctx.rank
        taken = list(self._job._progress.taken)
        if taken:  # and in rounds that are not committed yet
            at, num = taken[rank]
            taken[rank] = at + sum(each.num_samples for each in self._works), num
        work.batches = self._cut(work.deal, taken)
        work.dealt_in = self._job.ctx.epoch

    def _cut(self, deal: Deal, taken: Sequence[Taken]) -> list[Span]:
        """The steps of this rank in a round."""
        job, schedule = self._job, self._job._progress.schedule
        world = job.ctx.world_size
        start, stop = schedule.dealt(deal, taken, world, job._pace.costs)[job.ctx.rank]
        num_steps, usual = self._num_steps_of(deal), schedule.usual(deal.size, world)
        if abs(stop - start - usual) >= 1:
            num_steps = max(1, round(num_steps * (stop - start) / usual))
        return list(cut(start, stop, num_steps))

    def _look(self) -> None:
        """Between two steps: form the next group at once if the present one is over, or a worker
        waits to join, so that nobody waits for the end of this rank's round."""
        job = self._job
        error = getattr(job.ctx.communicator, "error", None)
        if isinstance(error, LOST):
            job._lost(error)
        elif error is None and job.ctx.has_next_group:
            job._agreement.newcomers = True
        else:
            return
        try:
            self._regroup(0)
            job._attempts = 0  # the steps between two losses are progress
        except LOST as another:
            job._lost(another)

    def _close(self, work: Work) -> None:
        if not work.is_closed:
            work.is_closed = True
            work.ends = self._job._interrupt.is_asked
            work.inner_hash = self.strategy.inner_hash()
            self.strategy.close(work.number, whole=not work.deal.size)

    def _finish(self, work: Work) -> None:
        """Exchange, vote and apply; over as many groups as it takes. Returns without having done so
        if this rank has received the state of another one."""
        job = self._job
        agreement = job._agreement
        pending = 0
        while work in self._works:
            try:
                if agreement.is_lost:
                    self._regroup(pending)
                    pending = 0
                    continue
                self._exchange(work)
                pending = job.ctx.epoch
                outcome = job.ctx.commit(
                    work.number,
                    state_hash=job._state_hash(num_steps=self._num_steps_of(work.deal)),
                    loss=work.loss,
                    weight=float(work.num_samples),
                    timeout=self._patience_s(work),
                )
                if not outcome:
                    raise RuntimeError(f"round {work.number} does not count: {outcome.reason}")
                agreement.newcomers = outcome.reform
                agreement.history = job.ctx.epoch
                agreement.hash_due = False
                self._count(work, outcome.loss)
            except LOST as error:
                job._lost(error)

    def _regroup(self, pending: int) -> None:
        """Form the next group, apply the round that it knows to count, and take up newcomers."""
        job = self._job
        agreement = job._agreement
        resolution, loss = agreement.agree(pending)
        job._pace.new_group()
        if job.ctx.rank in resolution.apply:
            agreement.history = resolution.history
            self._count(self._works[0], loss)
        agreement.bring_up_to_date()
        self.catch_up()
        job._interrupted = None  # from here on all members make the same calls, newcomers too
        job.recoveries += agreement.end_recovery()  # the round goes on

    def _exchange(self, work: Work) -> None:
        """The reports and the sum of all ranks. Collective, and can be called again."""
        if work.epoch != self._job.ctx.epoch:
            self._start(work)
        assert work.wait is not None
        work.reports = work.wait()
        self._compare(work)

    def _start(self, work: Work) -> None:
        ctx = self._job.ctx
        patience = self._patience_s(work)
        gathered = ctx.all_gather(work.report().row(), timeout=patience, async_op=True)

        def reports() -> list[Report]:
            return [Report.of(row) for row in gathered.wait().reshape(ctx.world_size, -1)]

        progress = self._job._progress
        parts = progress.schedule.dealt(work.deal, progress.taken, ctx.world_size)
        work.num_dealt = sum(stop - start for start, stop in parts)
        mine, present = work.num_samples, work.num_dealt
        work.is_weighed = self._must_weigh(work)
        if not work.deal.size:
            mine, present = work.num_recent, sum(report.num_recent for report in reports())
        elif work.is_weighed:
            present = sum(report.num_samples for report in reports())
        wait = self.strategy.start(ctx, work.number, mine / max(present, 1), patience)

        def both() -> list[Report]:
            found = reports()
            wait()
            return found

        work.epoch, work.wait = ctx.epoch, both

    def _patience_s(self, work: Work) -> float:
        """How long the slowest rank is waited for: it may still be at its steps."""
        longest = self._job._agreement.longest_s
        if not longest:
            return _FIRST_PATIENCE_S
        return self._job.ctx.timeout_s + _PATIENCE * max(longest, work.seconds)

    def _must_weigh(self, work: Work) -> bool:
        """Whether the exchange starts when all reports are there, which a part of the round may be
        missing in. Equal on all members, for it follows from the group's history."""
        may_lack = work.is_urgent or self.strategy.deadline is not None
        return self.strategy.needs_whole_weights and may_lack and work.deal.size > 0

    def _compare(self, work: Work) -> None:
        """Diverged if ranks that took equally many steps have unlike learning rates. Ranks that
        took other numbers of steps get those of the rank with the most samples."""
        ctx = self._job.ctx
        reports = work.reports
        hashes: dict[int, tuple[int, int]] = {}
        for rank, report in enumerate(reports):
            if not report.num_steps:
                continue
            first, expected = hashes.setdefault(report.num_steps, (rank, report.inner_hash))
            if not nearly_equal(report.inner_hash, expected):
                ctx.settle()
                raise Diverged(
                    f"after round {work.number} rank {rank} has other hyperparameters than rank "
                    f"{first}: a learning rate must follow from job.step_number, or from a "
                    "scheduler in also="
                )
        work.inner = None
        if len({report.num_steps for report in reports}) > 1:
            lead = max(range(len(reports)), key=lambda rank: reports[rank].num_samples)
            mine = self.strategy.capture_inner() if ctx.rank == lead else None
            work.inner = broadcast_state(ctx, mine, lead, wanted=True)

    def _num_steps_of(self, deal: Deal) -> int:
        return math.ceil(deal.size / self._job._progress.schedule.batch_size)

    def _count(self, work: Work, loss: float) -> None:
        """The round counts: apply it, and note what was computed of it."""
        job = self._job
        progress = job._progress
        done = [report.span for report in work.reports]
        before = progress.committed
        num_samples = sum(report.num_samples for report in work.reports)
        progress.settle(done, self._num_steps_of(work.deal), loss)
        size = work.deal.size
        is_whole = not size or (work.is_weighed and num_samples > 0)
        fraction = 1.0 if is_whole else num_samples / max(work.num_dealt, 1)
        self.strategy.apply(work.number, fraction, delayed=work.is_delayed)
        progress.is_flushed = not size or self.strategy.num_fragments == 1
        if work.inner is not None:
            self.strategy.restore_inner(work.inner)
        self._works.remove(work)
        if size:
            self._recent.append(work.num_samples)
        else:
            self._recent.clear()
        self._arrivals.add(report.seconds for report in work.reports)
        job._agreement.longest_s = self._arrivals.longest_s
        asked = any(report.saves for report in work.reports)
        ends = any(report.ends for report in work.reports)
        job._interrupt.is_agreed |= ends
        job._agreement.save_due |= asked or ends or (not size and job._agreement.has_store)
        progress.is_stopped |= any(report.stops for report in work.reports)
        if num_samples and work.epoch == job.ctx.epoch:
            times = [(report.num_samples, report.seconds) for report in work.reports]
            job._pace.add_round(job.ctx, progress.step, times)
        boundary = progress.committed % progress.schedule.num_samples == 0
        ended = progress.committed > before and boundary
        self._taken = 0 if ended else self._taken + work.num_samples
        if size:  # a round without samples is not one of the script's
            epoch = work.deal.epoch if ended else None
            job._count_round(loss, work.num_samples, work.seconds, epoch)
