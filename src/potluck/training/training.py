"""The state of an elastic training on one rank, which its steps and its rounds share.

Between two steps the members of a group get equal states and save checkpoints: after a change of
the group every member sends how many steps it has committed, and ``context/commit.py`` decides
which steps count. Members that are behind receive the state of the most senior rank that is up to
date. If no member has a state, the rank with the newest checkpoint loads it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck._core.context.commit import Resolution, Standing, reconcile
from potluck._core.context.structure import compare, hash_of
from potluck.checkpoint.state import State
from potluck.checkpoint.store import CheckpointStore
from potluck.data.stream import Stream
from potluck.errors import (
    CheckpointError,
    Diverged,
    Evicted,
    GroupError,
    OperationTimeout,
    PeerLost,
)
from potluck.training import saving
from potluck.training.alignment import Alignment
from potluck.training.copies import Found, Lineage, holders, newest
from potluck.training.memory import Cap, in_words, is_out_of_memory
from potluck.training.noise import NoiseEstimate
from potluck.training.pace import Pace
from potluck.training.policy import Policy
from potluck.training.progress import Progress
from potluck.training.replica import Replica
from potluck.training.sampler import (
    Holding,
    StreamSchedule,
    describe_change,
    hashed,
    warn_of_equal_samples,
)
from potluck.training.transfer import Expected, broadcast_state, gather_numbers, gather_states

if TYPE_CHECKING:
    from potluck._core.context import Commit, DistributedContext

_log = logging.getLogger(__name__)

LOST = (PeerLost, OperationTimeout, Evicted)
"""The errors after which the survivors form the next group and go on."""

_MAX_OPEN = 2
"""Rounds that are not committed: the exchange of one, and the steps of the next."""

_MAX_READ_S = 600.0
"""Seconds that ranks wait for a rank that reads from a stream."""


@contextlib.contextmanager
def abort_on_error(ctx: DistributedContext) -> Iterator[None]:
    """An error in this block ends the group, unless other ranks get the same error themselves."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, GroupError | Diverged):
            ctx.abort(error)
        raise


@dataclass(eq=False, repr=False)
class Training:
    """The committed state, the agreement of the group, and what is due between two steps.

    ``history`` is the epoch of the last committed vote. ``cause`` is the error that ended the
    group, None while it is intact. ``interrupted`` is the error that ended a group since the last
    step began: until the next step other ranks may be at another place of their scripts.
    ``newcomers``: workers wait to join. ``hash_due``: parameters must be compared at the next vote.
    ``save_due``: the script, on any rank, called for a checkpoint that is not written yet.
    ``lost_at`` is the time of the loss, until training goes on. ``num_failed``: the number of
    groups and votes that have failed since the last commit. ``recoveries`` are the seconds from
    each loss until training went on.

    Of a training on a ``stream`` the schedule is a StreamSchedule. Of a training in rounds
    (``in_rounds``), in which no step is run again: ``num_dealt`` is the number of rounds that some
    member was dealt. ``dealt_in()``: the epochs in which the open rounds were dealt on this rank,
    oldest first, 0 for a round without work; ``valid_deals``: by number of the round, the epoch
    whose deal counts. ``is_restored``: this rank has received the state of another rank.
    ``is_afresh``: no member had a state, so all begin, or resume from a checkpoint.
    ``longest_s``: the longest time that a rank took for the steps of one of the last rounds, 0 if
    no member knows it.
    """

    ctx: DistributedContext
    progress: Progress
    replica: Replica
    store: CheckpointStore | None
    policy: Policy
    _: KW_ONLY
    in_rounds: bool = False
    stream: Stream | None = None

    def __post_init__(self) -> None:
        if self.stream is not None:
            self.stream.tell = self._tell
        self._told: set[str] = set()
        self.pace = Pace(self.policy)
        self.cap = Cap()
        self.interrupt = Interrupt()
        self.alignment = Alignment(self.ctx, self.progress, self.replica, self.policy)
        self.has_state = False
        self.history = 0
        self.cause: GroupError | None = None
        self.interrupted: GroupError | None = None
        self.newcomers = False
        self.hash_due = True
        self.save_due = False
        self.lost_at: float | None = None
        self.num_failed = 0
        self.recoveries: list[float] = []
        self.last_loss = math.nan
        self.num_dealt = 0
        self.dealt_in: Callable[[], list[int]] = list
        self.valid_deals: dict[int, int] = {}
        self.is_restored = self.is_afresh = False
        self.longest_s = 0.0
        self._resolution: Resolution | None = None
        self._agreed = False
        self._tried_at = self._saved_at = -1
        self._copies = saving.Copies()
        self._own: list[State] = []  # each rank's own state, from a loaded checkpoint

    @property
    def has_store(self) -> bool:
        """Whether checkpoints can be written."""
        return self.store is not None

    @property
    def is_lost(self) -> bool:
        """Whether the members must agree before any other collective call."""
        return not self._agreed or self.cause is not None

    # ------------------------------------------------------------ votes and losses

    def state_hash(self, *, num_steps: int = 1) -> int:
        """This rank's hash for the vote on the next ``num_steps`` steps; 0 if none is compared."""
        due = self.progress.passes(self.policy.hash_every, num_steps)
        is_aligned = not self.in_rounds and self.alignment.is_unlike
        if is_aligned or not (self.hash_due or due):
            return 0
        return 1 + int(self.replica.fingerprint()[:15], 16)

    def voted(self, outcome: Commit) -> None:
        """All members of the present group have committed a step or a round."""
        self.newcomers = outcome.reform
        self.save_due |= outcome.ends
        self.interrupt.is_agreed |= outcome.ends
        self.history = self.ctx.epoch
        # hash_due stays where the next group resolves a vote: its members may have applied
        # different steps.
        self.hash_due = False

    def refused(self, reason: str) -> None:
        """Members voted against the step. RuntimeError after too many such votes."""
        step = self.progress.step
        _log.warning("step %d does not count: %s", step, reason)
        self.num_failed += 1
        if self.num_failed > self.policy.max_attempts:
            raise RuntimeError(f"step {step} was refused {self.num_failed} times: {reason}")

    def lost(self, error: GroupError) -> None:
        """Note that the group is lost; raise ``error`` if no next group is to be formed."""
        now, step = time.monotonic(), self.progress.step
        if self.lost_at is None:
            self.lost_at = now
        self.num_failed += 1
        self.cause = self.interrupted = error
        if not self.ctx.elastic:
            raise error
        waited = now - self.lost_at
        if self.num_failed > self.policy.max_attempts or waited > self.policy.recovery_s:
            error.add_note(
                f"step {step} was not committed in {self.num_failed} groups and "
                f"{waited:.0f} s (Policy's max_attempts and recovery_s)"
            )
            raise error
        _log.info("step %d: %s", step, error)

    def shortage(self, error: Exception, at_once: int, predicted: int) -> str:
        """If the present step ran out of memory with ``at_once`` samples at once, and may run again
        with fewer, as many as are ``predicted`` to fit: what follows, in words; else empty."""
        if not is_out_of_memory(error):
            return ""
        me, step = self.ctx.group.describe(self.ctx.rank), self.progress.step
        with_so_many = f"out of memory with {in_words(at_once)} at once"
        if not (self.ctx.elastic or self.ctx.world_size == 1):
            why = "this world can't form another group: start the script with `potluck run`"
        elif not self.cap.ran_out(at_once, predicted):
            why = "fewer can't be computed: give it more memory, or train a smaller model"
        else:
            most = in_words(self.cap.most)
            return f"{me} is {with_so_many}: it computes at most {most}, and runs step {step} again"
        error.add_note(f"step {step}: {me} is {with_so_many}; {why}")
        return ""

    def ran_out(self, text: str) -> None:
        """This rank is out of memory, and its cap is lowered: end the group, for the others wait
        in the step. The next one has the same members. Alone, a rank only divides anew."""
        gc.collect()
        self._tell(text)
        if self.ctx.world_size == 1:
            self.pace.new_group((self.cap.most,))
            return
        error = PeerLost(text, epoch=self.ctx.epoch, certain=True)
        self.ctx.communicator.abort(error)
        self.lost(error)

    def end_recovery(self) -> None:
        """Training goes on: record the seconds since the loss, if there was one."""
        if self.lost_at is not None:
            self.recoveries.append(time.monotonic() - self.lost_at)
            self.lost_at = None

    # ------------------------------------------------------------ between two steps

    def agree(self, pending: int) -> tuple[bool, float]:
        """Form the next group if the present one ended or newcomers wait; decide which steps count.

        ``pending`` is the epoch of the vote whose outcome this rank does not know, 0 for none.
        Returns whether that vote's step or round counts, and its loss, NaN if no member knows it.
        Cost: one all_gather of 168 bytes per rank.
        """
        began = time.monotonic()
        reformed = self.cause is not None or self.newcomers
        if reformed:
            self._agreed = False
            if self.store is not None and self.cause is not None:
                self.store.give_up()
            if self.in_rounds:
                self.ctx.begin_step(-1)
            self.ctx.reform(self.cause)
            self.cause, self.newcomers = None, False
        progress = self.progress
        noise, holding = progress.noise, progress.schedule.holding
        structure = self.replica.structure()
        mine = {
            "standing": (progress.round if self.has_state else -1, self.history, pending),
            "loss": self.last_loss,
            "batch_size": progress.batch_size,
            "noise": (noise.signal, noise.noise, noise.num),
            "save_due": self.save_due or self._is_short(),
            "cap": self.cap.most,
            "num_dealt": progress.round + len(progress.deals),
            "longest_s": self.longest_s,
            "alignment": self.alignment.row,
            "structure": hash_of(structure),
            "holding": holding.row,
            "dealt_in": (*self.dealt_in(), 0, 0)[:_MAX_OPEN],
        }
        rows = gather_numbers(self.ctx, mine)
        if (rows["structure"] != rows["structure"][0]).any():
            remedy = "give every rank the same model"
            compare(self.ctx, "the model", structure, remedy, operation="join")
        standings = [Standing(*map(int, each)) for each in rows["standing"]]
        resolution = reconcile(standings)
        losses = rows["loss"][rows["standing"][:, 0] == resolution.committed].tolist()
        self._adopt(rows[max(resolution.source, 0)])
        self._hold([Holding.of(each) for each in rows["holding"]], resolution.source < 0)
        self._resolution, self._agreed, self.hash_due = resolution, True, True
        self.save_due = bool(rows["save_due"].any())
        ready = [rank for rank in range(len(rows)) if rank not in resolution.receivers]
        self.num_dealt = int(rows["num_dealt"][ready].max(initial=0))
        self.longest_s = float(rows["longest_s"].max())
        self.valid_deals = {}
        for rank in ready:  # the most senior member's deal of a round counts
            epochs = map(int, rows["dealt_in"][rank])
            for number, epoch in enumerate(epochs, standings[rank].committed):
                if epoch:
                    self.valid_deals.setdefault(number, epoch)
        self.alignment.new_group(rows["alignment"], resolution.source, resolution.receivers)
        self._tried_at = self._saved_at = -1  # members may have seen different outcomes of a save
        if reformed and self.has_state:
            since = began if self.lost_at is None else self.lost_at
            seconds = time.monotonic() - since
            event = f"re-formed with {self.ctx.world_size} in {seconds:.1f} s"
            runs_again = not self.in_rounds and self.ctx.rank not in resolution.apply
            if runs_again and self.lost_at is not None:
                event += f", step {resolution.committed} run again"
            _log.info("%s: %s", event, resolution.reason)
        self.pace.new_group([int(cap) for cap in rows["cap"]])
        counts = self.ctx.rank in resolution.apply
        if counts:
            self.history = resolution.history
        return counts, next(iter(losses), math.nan)

    def bring_up_to_date(self) -> None:
        """Send the state of a member that is up to date to the members that are not."""
        resolution = self._resolution
        if resolution is None:
            return
        ctx, source = self.ctx, resolution.source
        afresh = source < 0
        if afresh:
            source = self._start_afresh()
        wanted = ctx.rank in resolution.receivers and ctx.rank != source
        if resolution.receivers and ctx.world_size > 1:
            state = self.capture() | {"own": self._own} if ctx.rank == source else None
            expected = self._expected() if wanted else None
            received = broadcast_state(ctx, state, source, wanted=wanted, expected=expected)
            if wanted:
                self._restore(received)
                self.is_restored = True
                self.alignment.received()
                if self.progress.step:
                    _log.info("joined at step %d", self.progress.step)
        mine = self._own[ctx.rank :: ctx.world_size]
        if mine:
            self.replica.restore_own(mine)
        self._own = []
        self.is_afresh = afresh
        if afresh:
            self._tried_at = self.progress.step
        self.has_state, self._resolution = True, None
        self.history = max(self.history, resolution.history)

    def look_ahead(self) -> None:
        """Of a stream: agree on how many items the next steps have, and whether they end the epoch.

        A collective call between two steps, not at the end. All ranks hold the items before a step
        is dealt, so they hear of an end together. Cost: one all_gather of 24 bytes per rank.
        DataError for a stream that can't be read, or has no items.
        """
        progress, schedule = self.progress, self.progress.schedule
        if self.stream is None or progress.done:
            return
        assert isinstance(schedule, StreamSchedule)
        epoch, start = schedule.find(progress.committed)
        num, has_ended = self.stream.expect(epoch, start, progress.batch_size)
        mine = {"num": num, "ended": has_ended, "first": hashed(self.stream.take([start]))}
        rows = gather_numbers(self.ctx, mine, timeout=max(self.ctx.timeout_s, _MAX_READ_S))
        num, shortest = int(rows["num"].min()), int(rows["num"].argmin())
        has_ended = bool(rows["ended"][rows["num"] == num].any())
        others = np.flatnonzero(rows["first"] != rows["first"][0]).tolist()
        why = f"has another item {start}, so some are never trained on unless only noise differs"
        if has_ended and (rows["ended"] * rows["num"] != num).any():
            others, why = [shortest], f"ends after {start + num} items, so the epoch ends for all"
        if others:
            self._tell(
                f"the stream of {self.ctx.group.describe(others[0])} {why}: give all ranks the "
                "same stream in the same order, not split by rank"
            )
        progress.schedule = schedule.after(progress.committed, num, has_ended=has_ended)

    @property
    def is_save_due(self) -> bool:
        """Whether a checkpoint is due or the script called for one, and there is a store."""
        progress = self.progress
        due = progress.done or progress.has_passed(self.policy.save_every) or self.save_due
        return due and self.has_store

    def will_save(self, num_steps: int) -> bool:
        """Whether ``is_save_due`` after a commit of ``num_steps`` steps."""
        passes = self.progress.will_pass(self.policy.save_every, num_steps)
        return self.has_store and (passes or self.save_due)

    def save(self) -> CheckpointError | None:
        """Write a checkpoint if it is due or the script called for it. A collective call.

        Returns the error of a rank that could not write, for training goes on without a checkpoint;
        None if nothing failed.
        """
        step = self.progress.step
        is_asked = self.save_due and step != self._saved_at
        is_due = self.is_save_due and step not in (0, self._tried_at)
        if self.store is None or not (is_asked or is_due):
            self.save_due = False
            return None
        failed: CheckpointError | None = None
        try:
            own = gather_states(self.ctx, self.replica.capture_own())
            state = self.capture() | {"own": own}
            elsewhere = saving.save(self.ctx, self.store, state, step, self._copies)
            failed = CheckpointError(elsewhere) if elsewhere else None
        except CheckpointError as error:
            self._report(error)  # an error of another rank is reported by that rank
            failed = error
        # Not before: if the group is lost during the save, all ranks save again.
        self._tried_at, self.save_due = step, False
        self._saved_at = -1 if failed else step
        return failed

    def finish_saving(self) -> None:
        """Wait until an asynchronous save has ended; log its error."""
        if self.store is None:
            return
        try:
            self.store.wait()
        except CheckpointError as error:
            self._report(error)

    def compare_at_the_end(self) -> None:
        """Wait for all ranks at the end of the training. Diverged if their parameters differ."""
        mine = np.frombuffer(bytes.fromhex(self.replica.fingerprint()), np.uint8)
        hashes = self.ctx.all_gather(mine.copy()).reshape(-1, len(mine))
        different = [str(rank) for rank, other in enumerate(hashes) if (other != hashes[0]).any()]
        if different:
            self.ctx.settle()
            raise Diverged(
                f"after step {self.progress.step} the parameters of rank {', '.join(different)} "
                "differ from those of rank 0"
            )

    def capture(self) -> dict[str, Any]:
        """The part of the training's state that is equal on all ranks."""
        stream = None if self.stream is None else self.stream.capture()
        return self.progress.capture() | {"replica": self.replica.capture(), "stream": stream}

    # ------------------------------------------------------------ inside

    def _adopt(self, row: Any) -> None:
        """Take the batch size and noise of the rank whose state counts; other ranks may be
        ahead."""
        if self.progress.batching is not None:
            self.progress.batch_size = self.progress.batching.clamp(float(row["batch_size"]))
            found = row["noise"].tolist()
            self.progress.noise = NoiseEstimate(found[0], found[1], int(found[2]))

    def _hold(self, holdings: list[Holding], afresh: bool) -> None:
        """Set the schedule of a group whose ranks have these ``holdings``."""
        progress, ctx = self.progress, self.ctx
        before = progress.schedule.held
        progress.schedule = progress.schedule.for_group(holdings, afresh=afresh)
        if before and (change := describe_change(before, progress.schedule.held)) and ctx.is_master:
            _log.warning("step %d: %s", progress.step, change)
            ctx.report(event=change)
        if not before and ctx.is_master:
            warn_of_equal_samples(holdings)

    def _is_short(self) -> bool:
        """Whether a machine with the last checkpoint is lost, or the first other one has come."""
        nodes = [member.node for member in self.ctx.members]
        return self.store is not None and self._copies.is_short(self.store, nodes)

    def _start_afresh(self) -> int:
        """Choose the rank with the newest checkpoint of the newest training, which loads it, as no
        rank has a state. Returns that rank. Cost: one all_gather of 32 bytes per rank.
        CheckpointError if all checkpoints on all machines are damaged."""
        found, damaged = None, None
        try:
            found = self.store.load_latest() if self.store is not None else None
        except CheckpointError as error:
            damaged = error
        lineage = Lineage.of(found.facts) if found else Lineage.new()
        mine = [*lineage, found.number if found else 0, found.step if found else -1]
        patience_s = max(self.ctx.timeout_s, saving.MAX_WRITE_S)  # others may read a large one
        rows = self.ctx.all_gather(np.array(mine, np.int64), timeout=patience_s).tolist()
        every = [Found(Lineage(*row[:2]), *row[2:]) for row in rows]
        source = newest(every)
        best = every[source]
        if best.step < 0 and damaged is not None:
            raise damaged
        nodes = [member.node for member in self.ctx.members]
        self._copies.lineage, self._copies.last = best.lineage, max(each.number for each in every)
        self._copies.nodes = holders(every, nodes)
        if self.store is not None:
            self.store.safe = best.number
            self.save_due |= self._is_short()
        if damaged is not None:
            self._tell(f"{damaged}; that of {self.ctx.group.describe(source)} is used")
        elif found is not None and found.step >= 0 and lineage != best.lineage:
            self._tell(
                f"the checkpoints in {self.store and self.store.directory} are of a training that "
                f"began before: that of {self.ctx.group.describe(source)} goes on"
            )
        if found is not None and self.ctx.rank == source:
            self._restore(found.state)
            step = self.progress.step
            event = f"resumed from the checkpoint of step {step}"
            if self.progress.is_stopped:
                event += (
                    ", at which job.stop() has ended the training: no step follows. To train on, "
                    "begin another training, with its own directory, from that model"
                )
                _log.warning("%s", event)
            self.ctx.report(event=event)
        return source

    def _expected(self) -> Expected:
        return Expected(
            own={"replica": self.replica.capture()},
            fixed={"replica": self.replica.fixed()},
            max_bytes=self.policy.max_state_bytes,
        )

    def _restore(self, state: State) -> None:
        if not isinstance(state, dict) or not isinstance(state.get("own"), list):
            raise CheckpointError("not the state of an elastic loop")
        self.progress.restore(state)
        try:
            self.replica.restore(state["replica"])
            if self.stream is not None:
                self.stream.restore(state["stream"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"not the state of this training: {error!r}") from error
        self._own = state["own"]

    def _tell(self, text: str) -> None:
        """Log ``text``, and show it in the output of ``potluck run``; once."""
        if text not in self._told:
            self._told.add(text)
            _log.warning("step %d: %s", self.progress.step, text)
            self.ctx.report(event=text)

    def _report(self, error: CheckpointError) -> None:
        _log.error("%s", error)
        self.ctx.report(event=str(error))


class Interrupt:
    """Within its ``with`` block the first SIGINT sets ``is_asked``; a second one raises
    KeyboardInterrupt, as ever. Where the script has a handler of its own, or on another thread than
    the main one, the block changes nothing. ``is_agreed``: all ranks are to end after this step."""

    def __init__(self) -> None:
        self.is_asked = False
        self.is_agreed = False
        self._is_set = False

    @property
    def is_due(self) -> bool:
        """Whether this rank begins no further step of a round."""
        return self.is_asked or self.is_agreed

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._asked)
            self._is_set = True

    def __exit__(self, *_: object) -> None:
        if self._is_set and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_set = False

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            signal.default_int_handler(number, frame)
        self.is_asked = True
