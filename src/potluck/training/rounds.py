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
from potluck.errors import Diverged
from potluck.training.ledger import Deal, Span, cut
from potluck.training.round_part import Arrivals, Report, RoundPart
from potluck.training.rounding import nearly_equal
from potluck.training.sampler import Share, Taken
from potluck.training.training import LOST, Training
from potluck.training.transfer import broadcast_state

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

_PATIENCE = 10
"""How long a late rank is waited for, as a multiple of the longest time of a rank's steps."""

_FIRST_PATIENCE_S = 3600.0
"""How long a late rank is waited for in the first round, before the slowest rank's speed is
known."""


class RoundStrategy(Protocol):
    """The exchange at the end of a round, and its effect on the replica."""

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
        """``rounding.tolerant_hash`` of the values by which a step depends on its number, such as a
        learning rate; nearly equal on ranks that have done equally many steps."""

    def synchronize(self) -> None:
        """Wait until the device of this rank has computed the steps so far."""

    def capture_inner(self) -> State:
        """These values, for a rank that has done another number of steps."""

    def restore_inner(self, state: State) -> None:
        """Set these values to those of another rank."""


class Rounds:
    """The rounds of one loop: the part of ElasticLoop that is for strategies with rounds.

    ``on_commit(loss, num_samples, seconds, epoch)`` is called for each committed round: the samples
    and seconds of this rank, and the epoch that ended with the round, or None.
    """

    def __init__(
        self,
        training: Training,
        strategy: RoundStrategy,
        on_commit: Callable[[float, int, float, int | None], None],
    ) -> None:
        self.strategy = strategy
        self._training = training
        self._ctx = training.ctx
        self._progress = training.progress
        self._on_commit = on_commit
        self._open: list[RoundPart] = []  # as the progress has deals
        self._recent: deque[int] = deque(maxlen=strategy.num_fragments - 1)
        """How many samples this rank has computed in each of the last rounds, whose changes are in
        fragments that are not reduced yet."""
        self._arrivals = Arrivals()
        self._current: RoundPart | None = None  # whose steps this rank computes
        self._epoch = 0  # of the group that these rounds were dealt in
        self._taken = -1  # this rank's in ``taken`` of the progress; -1 before it is known
        training.dealt_in = lambda: [each.dealt_in for each in self._open]

    # ------------------------------------------------------------ steps

    def run(self) -> Iterator[Share]:
        """One round: its steps, then its exchange, which may go on during the next round's."""
        in_flight = self._open[0] if self._open and self._open[0].is_closed else None
        if in_flight is not None and (in_flight.is_urgent or self._training.interrupt.is_agreed):
            self._finish(in_flight)
            return
        open_ = [part for part in self._open if not part.is_closed]
        part = open_[0] if open_ else self._deal()
        self.strategy.begin(part.number)
        self._current = part
        limit = None
        if self.strategy.deadline is not None:
            limit = self._arrivals.deadline_s(self.strategy.deadline)
        for start, stop in part.batches:
            if in_flight is not None and part.num_steps == self.strategy.delay:
                self._finish_delayed(in_flight)
                in_flight = None
            if self._is_over(part):
                break
            began = time.monotonic()
            yield self._share(part.deal, (start, stop))
            if limit is not None or stop == part.batches[-1][1]:
                self.strategy.synchronize()
            part.seconds += time.monotonic() - began  # without waits for other ranks
            part.num_samples += stop - start
            part.num_steps += 1
            self._check_group()
            is_late = limit is not None and part.seconds > limit
            if self._is_over(part) or is_late or self._training.interrupt.is_due:
                break
        if in_flight is not None:
            self._finish_delayed(in_flight)
        if part not in self._open:
            return  # this rank has received another state
        self._close(part)
        if self._is_synchronous(part):
            self._finish(part)
        else:
            self._start_delayed(part)

    @property
    def is_busy(self) -> bool:
        """Whether rounds were dealt that are not committed, or fragments must be reduced before a
        checkpoint or the end."""
        return bool(self._progress.deals) or self._is_flush_due

    def upcoming(self) -> Iterator[Share]:
        """The shares after the present step to the end of the epoch, if nothing changes."""
        part, progress = self._current, self._progress
        if part is None:
            return
        yield from (self._share(part.deal, batch) for batch in part.batches[part.num_steps + 1 :])
        if progress.owed or not part.batches:
            return
        schedule, rank = progress.schedule, self._ctx.rank
        size = self.strategy.num_steps * schedule.batch_size
        taken = list(progress.taken)
        at, mine = progress.frontier, part.batches[-1][1]
        while at < schedule.num_samples:
            deal = Deal(part.deal.epoch, ((at, min(at + size, schedule.num_samples)),))
            if taken:
                taken[rank] = mine, taken[rank][1]
            batches = self._cut(deal, taken)
            yield from (self._share(deal, batch) for batch in batches)
            at, mine = deal.spans[0][1], batches[-1][1] if batches else mine

    def _share(self, deal: Deal, batch: Span) -> Share:
        schedule = self._progress.schedule
        return Share(deal.epoch, schedule.pick_dealt(deal, batch), 1.0)

    def add_loss(self, loss: float, num_samples: int) -> None:
        """Note the loss of a step of this rank."""
        if self._current is not None and not math.isnan(loss):
            self._current.loss_sum += loss * num_samples
            self._current.loss_weight += num_samples

    def ask(self, *, saves: bool = False, stops: bool = False) -> None:
        """Ask for a checkpoint, or for the end of the training, at the end of the round."""
        if self._current is not None:
            self._current.saves |= saves
            self._current.stops |= stops

    @property
    def num_steps(self) -> int:
        """The number of steps that this rank has computed in its present round."""
        return self._current.num_steps if self._current is not None else 0

    # ------------------------------------------------------------ the group

    def catch_up(self) -> None:
        """After an agreement of the group: add the rounds that other ranks were dealt and this rank
        was not. It takes part in them without work, or with samples of its own if it has some."""
        ctx, training, progress = self._ctx, self._training, self._progress
        held = progress.schedule.held
        has_begun, training.is_afresh = training.is_afresh, False
        if has_begun or training.is_restored:
            self._taken = -1
        if training.is_restored:
            training.is_restored = False
            self._recent.clear()
            self._open = [
                RoundPart(progress.round + place, deal=deal)
                for place, deal in enumerate(progress.deals)
            ]
        has_changed = ctx.epoch != self._epoch
        while progress.round + len(progress.deals) < training.num_dealt:
            self._open.append(self._dealt())
        for part in self._open[:-1]:
            self._close(part)
        if has_changed and held:
            self._gather_taken(held, resumes=has_begun)
        self._epoch = ctx.epoch
        for part in self._open if has_changed else ():
            part.is_urgent = True
            if held:  # what a rank has of a round does not depend on the group
                if not (part.batches or part.is_closed):
                    self._fill(part)
            elif part.batches and part.dealt_in != training.valid_deals.get(part.number):
                self._close(part)
                part.drop()  # while this rank was cut off, its samples were dealt to other ranks

    # ------------------------------------------------------------ inside

    def _gather_taken(self, held: Sequence[int], *, resumes: bool) -> None:
        """Gather, for each rank, how many of its own samples are in committed rounds of the epoch.
        A newcomer counts from the positions that are not dealt; a rank that ``resumes`` a training
        with as many samples as before goes on from its count. Cost: an all_gather of 8 bytes."""
        ctx, progress = self._ctx, self._progress
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
        progress = self._progress
        if self.strategy.num_fragments == 1 or progress.is_flushed or progress.deals:
            return False
        return progress.done or self._training.is_save_due

    def _is_over(self, part: RoundPart) -> bool:
        return part.is_closed or part not in self._open

    def _is_synchronous(self, part: RoundPart) -> bool:
        """Whether the exchange ends before the next round begins, since the next round depends on
        its outcome, or other ranks wait. Equal on all members: it follows from earlier commits."""
        training, progress = self._training, self._progress
        return (
            not self.strategy.delay
            or part.is_urgent
            or not part.deal.size
            or progress.is_epoch_dealt
            or progress.is_stopped
            or training.interrupt.is_agreed
            or training.newcomers
            or training.will_save(self._num_steps_of(part.deal))
        )

    def _finish_delayed(self, in_flight: RoundPart) -> None:
        """Finish the previous round's exchange, unless a change of the group has done so."""
        if in_flight in self._open:
            self._finish(in_flight)

    def _start_delayed(self, part: RoundPart) -> None:
        """Start the exchange of a round; it is finished during the steps of the next."""
        part.is_delayed = True
        try:
            self._start(part)
        except LOST as error:
            self._training.lost(error)  # the next call between steps forms the next group

    def _dealt(self) -> RoundPart:
        """The next round, of which this rank has no steps yet."""
        progress = self._progress
        number = progress.round + len(progress.deals)
        if self._is_flush_due:
            nothing = progress.deal_nothing()
            return RoundPart(number, deal=nothing, num_recent=sum(self._recent))
        size = self.strategy.num_steps * progress.schedule.batch_size
        return RoundPart(number, deal=progress.deal(size))

    def _deal(self) -> RoundPart:
        part = self._dealt()
        self._open.append(part)
        if part.deal.size:
            self._fill(part)
        return part

    def _fill(self, part: RoundPart) -> None:
        """Cut this rank's samples of a round, the last that was dealt, into steps."""
        rank = self._ctx.rank
        taken = list(self._progress.taken)
        if taken:  # and in rounds that are not committed yet
            at, num = taken[rank]
            taken[rank] = at + sum(each.num_samples for each in self._open), num
        part.fill(self._cut(part.deal, taken), self._ctx.epoch)

    def _cut(self, deal: Deal, taken: Sequence[Taken]) -> list[Span]:
        """The steps of this rank in a round."""
        schedule, world = self._progress.schedule, self._ctx.world_size
        start, stop = schedule.dealt(deal, taken, world, self._training.pace.costs)[self._ctx.rank]
        num_steps, usual = self._num_steps_of(deal), schedule.usual(deal.size, world)
        if abs(stop - start - usual) >= 1:
            num_steps = max(1, round(num_steps * (stop - start) / usual))
        return list(cut(start, stop, num_steps))

    def _check_group(self) -> None:
        """Between two steps: form the next group at once if the present one is over, or a worker
        waits to join, so that other ranks need not wait for the end of this rank's round."""
        ctx, training = self._ctx, self._training
        error = getattr(ctx.communicator, "error", None)
        if isinstance(error, LOST):
            training.lost(error)
        elif error is None and ctx.has_next_group:
            training.newcomers = True
        else:
            return
        try:
            self._regroup(0)
            training.num_failed = 0  # the steps between two losses are progress
        except LOST as another:
            training.lost(another)

    def _close(self, part: RoundPart) -> None:
        if not part.is_closed:
            part.is_closed = True
            part.ends = self._training.interrupt.is_asked
            part.inner_hash = self.strategy.inner_hash()
            self.strategy.close(part.number, whole=not part.deal.size)

    def _finish(self, part: RoundPart) -> None:
        """Exchange, vote and apply; in a new group after each loss. Returns without having applied
        the round if this rank has received the state of another rank."""
        ctx, training = self._ctx, self._training
        pending = 0
        while part in self._open:
            try:
                if training.is_lost:
                    self._regroup(pending)
                    pending = 0
                    continue
                self._exchange(part)
                pending = ctx.epoch
                outcome = ctx.commit(
                    part.number,
                    state_hash=training.state_hash(num_steps=self._num_steps_of(part.deal)),
                    loss=part.loss,
                    weight=float(part.num_samples),
                    timeout=self._patience_s(part),
                )
                if not outcome:
                    raise RuntimeError(f"round {part.number} does not count: {outcome.reason}")
                training.voted(outcome)
                self._count(part, outcome.loss)
            except LOST as error:
                training.lost(error)

    def _regroup(self, pending: int) -> None:
        """Form the next group, apply the round that its members know to count, and admit
        newcomers."""
        training = self._training
        counts, loss = training.agree(pending)
        if counts:
            self._count(self._open[0], loss)
        training.bring_up_to_date()
        self.catch_up()
        training.interrupted = None  # from here on all members make the same calls, also newcomers
        training.end_recovery()  # the round goes on

    def _exchange(self, part: RoundPart) -> None:
        """The reports and the sum of all ranks. Collective, and can be called again."""
        if part.epoch != self._ctx.epoch:
            self._start(part)
        assert part.wait is not None
        part.reports = part.wait()
        self._compare(part)

    def _start(self, part: RoundPart) -> None:
        ctx = self._ctx
        patience = self._patience_s(part)
        gathered = ctx.all_gather(part.row(), timeout=patience, async_op=True)

        def reports() -> list[Report]:
            return [Report.of(row) for row in gathered.wait().reshape(ctx.world_size, -1)]

        progress = self._progress
        spans = progress.schedule.dealt(part.deal, progress.taken, ctx.world_size)
        part.num_dealt = sum(stop - start for start, stop in spans)
        mine, present = part.num_samples, part.num_dealt
        part.is_weighed = self._must_weigh(part)
        if not part.deal.size:
            mine, present = part.num_recent, sum(report.num_recent for report in reports())
        elif part.is_weighed:
            present = sum(report.num_samples for report in reports())
        wait = self.strategy.start(ctx, part.number, mine / max(present, 1), patience)

        def both() -> list[Report]:
            found = reports()
            wait()
            return found

        part.epoch, part.wait = ctx.epoch, both

    def _patience_s(self, part: RoundPart) -> float:
        """How long the slowest rank is waited for: it may still be at its steps."""
        longest = self._training.longest_s
        if not longest:
            return _FIRST_PATIENCE_S
        return self._ctx.timeout_s + _PATIENCE * max(longest, part.seconds)

    def _must_weigh(self, part: RoundPart) -> bool:
        """Whether the exchange starts only once all reports have arrived, since a part of the round
        may be missing in them. Equal on all members, for it follows from the group's history."""
        may_lack = part.is_urgent or self.strategy.deadline is not None
        return self.strategy.needs_whole_weights and may_lack and part.deal.size > 0

    def _compare(self, part: RoundPart) -> None:
        """Diverged if ranks that took equally many steps have unlike learning rates. Ranks that
        took other numbers of steps get the rates of the rank with the most samples."""
        ctx = self._ctx
        reports = part.reports
        hashes: dict[int, tuple[int, int]] = {}
        for rank, report in enumerate(reports):
            if not report.num_steps:
                continue
            first, expected = hashes.setdefault(report.num_steps, (rank, report.inner_hash))
            if not nearly_equal(report.inner_hash, expected):
                ctx.settle()
                raise Diverged(
                    f"after round {part.number} rank {rank} has other hyperparameters than rank "
                    f"{first}: a learning rate must follow from job.step_number, or from a "
                    "scheduler in also="
                )
        part.inner = None
        if len({report.num_steps for report in reports}) > 1:
            lead = max(range(len(reports)), key=lambda rank: reports[rank].num_samples)
            mine = self.strategy.capture_inner() if ctx.rank == lead else None
            part.inner = broadcast_state(ctx, mine, lead, wanted=True)

    def _num_steps_of(self, deal: Deal) -> int:
        return math.ceil(deal.size / self._progress.schedule.batch_size)

    def _count(self, part: RoundPart, loss: float) -> None:
        """The round counts: apply it, and note what was computed of it."""
        training, progress = self._training, self._progress
        done = [report.span for report in part.reports]
        before = progress.committed
        num_samples = sum(report.num_samples for report in part.reports)
        progress.settle(done, self._num_steps_of(part.deal), loss)
        size = part.deal.size
        is_whole = not size or (part.is_weighed and num_samples > 0)
        fraction = 1.0 if is_whole else num_samples / max(part.num_dealt, 1)
        self.strategy.apply(part.number, fraction, delayed=part.is_delayed)
        progress.is_flushed = not size or self.strategy.num_fragments == 1
        if part.inner is not None:
            self.strategy.restore_inner(part.inner)
        self._open.remove(part)
        if size:
            self._recent.append(part.num_samples)
        else:
            self._recent.clear()
        self._arrivals.add(report.seconds for report in part.reports)
        training.longest_s = self._arrivals.longest_s
        asked = any(report.saves for report in part.reports)
        ends = any(report.ends for report in part.reports)
        training.interrupt.is_agreed |= ends
        training.save_due |= asked or ends or (not size and training.has_store)
        progress.is_stopped |= any(report.stops for report in part.reports)
        if num_samples and part.epoch == self._ctx.epoch:
            times = [(report.num_samples, report.seconds) for report in part.reports]
            training.pace.add_round(self._ctx, progress.step, times)
        boundary = progress.committed % progress.schedule.num_samples == 0
        ended = progress.committed > before and boundary
        self._taken = 0 if ended else self._taken + part.num_samples
        if size:  # a round without samples is not one of the script's
            epoch = part.deal.epoch if ended else None
            self._on_commit(loss, part.num_samples, part.seconds, epoch)
