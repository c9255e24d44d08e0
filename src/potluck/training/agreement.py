"""Agreement between two steps: the members of a group get equal states and save checkpoints.

After a change of the group every member sends how many steps it has committed, and
``context/commit.py`` decides which steps count. Members that are behind receive the state of the
most senior rank that is up to date. If no member has a state, the rank with the newest checkpoint
loads it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck._core.context.commit import Resolution, Standing, reconcile
from potluck._core.context.structure import compare, hash_of
from potluck.checkpoint.state import State
from potluck.checkpoint.store import CheckpointStore
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
from potluck.training.noise import NoiseEstimate
from potluck.training.own_samples import told_of_change, warn_of_equal_samples
from potluck.training.policy import Policy
from potluck.training.progress import Progress
from potluck.training.replica import Replica
from potluck.training.sampler import Holding
from potluck.training.transfer import Expected, broadcast_state, gather_states

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

LOST = (PeerLost, OperationTimeout, Evicted)
"""The errors after which the survivors form the next group and go on."""

_MAX_OPEN = 2
"""Rounds that are not committed: the exchange of one, and the steps of the next."""


@contextlib.contextmanager
def telling_others(ctx: DistributedContext) -> Iterator[None]:
    """An error in this block that other ranks do not meet by themselves ends the group."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, GroupError | Diverged):
            ctx.abort(error)
        raise


class Agreement:
    """This rank's view of the group between two steps, and the work that is due there.

    ``history`` is the epoch of the last committed vote. ``cause`` is the error that ended the
    group, None while it is intact. ``newcomers``: workers wait to join. ``hash_due``: parameters
    must be compared at the next vote. ``save_due``: the script, on any rank, called for a
    checkpoint that is not written yet. ``lost_at`` is the time of the loss, until training goes on.
    ``num_dealt``: the number of rounds that some member was dealt. ``dealt_in()``: the epochs in
    which the open rounds were dealt on this rank, oldest first, 0 for a round without work;
    ``valid_deals``: by number of the round, the one that counts. ``is_restored``: this rank has
    received the state of another one. ``is_afresh``: no member had a state, so all begin, or resume
    from a checkpoint. ``steps_run_again``: after a loss; not in rounds.
    ``longest_s``: the longest time that a rank took for the steps of one of the last rounds, 0 if
    no member knows it.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        progress: Progress,
        replica: Replica,
        store: CheckpointStore | None,
        policy: Policy,
    ) -> None:
        self.has_state = False
        self.history = 0
        self.cause: BaseException | None = None
        self.newcomers = False
        self.hash_due = True
        self.save_due = False
        self.lost_at: float | None = None
        self.last_loss = math.nan
        self.num_dealt = 0
        self.dealt_in: Callable[[], list[int]] = list
        self.valid_deals: dict[int, int] = {}
        self.is_restored = self.is_afresh = False
        self.steps_run_again = True
        self.longest_s = 0.0
        self.alignment = Alignment(ctx, progress, replica, policy)
        self._ctx = ctx
        self._progress = progress
        self._replica = replica
        self._store = store
        self._policy = policy
        self._resolution: Resolution | None = None
        self._agreed = False
        self._tried_at = self._saved_at = -1
        self._own: list[State] = []  # each rank's own state, from a loaded checkpoint

    @property
    def has_store(self) -> bool:
        """Whether checkpoints can be written."""
        return self._store is not None

    @property
    def is_lost(self) -> bool:
        """Whether the members must agree before any other collective call."""
        return not self._agreed or self.cause is not None

    def agree(self, pending: int) -> tuple[Resolution, float]:
        """Form the next group if the present one ended or newcomers wait; decide which steps count.

        ``pending`` is the epoch of the vote whose outcome this rank does not know, 0 for none. Also
        returns the loss of the last step that counts, NaN if no member knows it. Cost: one
        all_gather of 160 bytes per rank.
        """
        began = time.monotonic()
        reformed = self.cause is not None or self.newcomers
        if reformed:
            self._agreed = False
            if self._store is not None and self.cause is not None:
                self._store.give_up()
            if not self.steps_run_again:
                self._ctx.begin_step(-1)
            self._ctx.reform(self.cause)
            self.cause, self.newcomers = None, False
        progress = self._progress
        noise, holding = progress.noise, progress.schedule.holding
        structure = self._replica.structure()
        mine = [
            *(progress.round if self.has_state else -1, self.history, pending, self.last_loss),
            *(progress.batch_size, noise.signal, noise.noise, noise.num, self.save_due),
            *(progress.round + len(progress.deals), self.longest_s),
            *self.alignment.row,
            hash_of(structure),
            *holding.row,
            *(*self.dealt_in(), 0, 0)[:_MAX_OPEN],
        ]
        rows = self._ctx.all_gather(np.array(mine, np.float64)).reshape(-1, len(mine))
        if (rows[:, 14] != rows[0, 14]).any():
            remedy = "give every rank the same model"
            compare(self._ctx, "the model", structure, remedy, operation="join")
        resolution = reconcile([Standing(*map(int, row[:3])) for row in rows])
        losses = [float(row[3]) for row in rows if int(row[0]) == resolution.committed]
        self._adopt(rows[max(resolution.source, 0)])
        self._hold([Holding.of(row[15:18]) for row in rows], resolution.source < 0)
        self._resolution, self._agreed, self.hash_due = resolution, True, True
        self.save_due = bool(rows[:, 8].any())
        ready = [row for rank, row in enumerate(rows) if rank not in resolution.receivers]
        self.num_dealt = max((int(row[9]) for row in ready), default=0)
        self.longest_s = float(rows[:, 10].max())
        self.valid_deals = {}
        for row in ready:  # the most senior member's deal of a round counts
            for number, epoch in enumerate(map(int, row[18:]), int(row[0])):
                if epoch:
                    self.valid_deals.setdefault(number, epoch)
        self.alignment.new_group(rows[:, 11:14], resolution.source, resolution.receivers)
        self._tried_at = self._saved_at = -1  # members may have seen different outcomes of a save
        if reformed and self.has_state:
            since = began if self.lost_at is None else self.lost_at
            seconds = time.monotonic() - since
            event = f"re-formed with {self._ctx.world_size} in {seconds:.1f} s"
            runs_again = self.steps_run_again and self._ctx.rank not in resolution.apply
            if runs_again and self.lost_at is not None:
                event += f", step {resolution.committed} run again"
            _log.info("%s: %s", event, resolution.reason)
        return resolution, next(iter(losses), math.nan)

    def end_recovery(self) -> list[float]:
        """Training goes on: the seconds since the loss, if there was one."""
        lost_at, self.lost_at = self.lost_at, None
        return [] if lost_at is None else [time.monotonic() - lost_at]

    def bring_up_to_date(self) -> None:
        """Send the state of a member that is up to date to the members that are not."""
        resolution = self._resolution
        if resolution is None:
            return
        ctx, source = self._ctx, resolution.source
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
                if self._progress.step:
                    _log.info("joined at step %d", self._progress.step)
        mine = self._own[ctx.rank :: ctx.world_size]
        if mine:
            self._replica.restore_own(mine)
        self._own = []
        self.is_afresh = afresh
        if afresh:
            self._tried_at = self._progress.step
        self.has_state, self._resolution = True, None
        self.history = max(self.history, resolution.history)

    @property
    def is_save_due(self) -> bool:
        """Whether a checkpoint is due or the script called for one, and there is a store."""
        progress = self._progress
        due = progress.done or progress.has_passed(self._policy.save_every) or self.save_due
        return due and self.has_store

    def will_save(self, num_steps: int) -> bool:
        """Whether ``is_save_due`` after a commit of ``num_steps`` steps."""
        passes = self._progress.will_pass(self._policy.save_every, num_steps)
        return self.has_store and (passes or self.save_due)

    def save(self) -> CheckpointError | None:
        """Write a checkpoint if it is due or the script called for it. A collective call.

        Returns the error of a rank that could not write, for training goes on without a checkpoint;
        None if nothing failed.
        """
        step = self._progress.step
        is_asked = self.save_due and step != self._saved_at
        is_due = self.is_save_due and step not in (0, self._tried_at)
        if self._store is None or not (is_asked or is_due):
            self.save_due = False
            return None
        failed: CheckpointError | None = None
        try:
            own = gather_states(self._ctx, self._replica.capture_own())
            state = self.capture() | {"own": own}
            elsewhere = saving.save(self._ctx, self._store, state, step)
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
        if self._store is None:
            return
        try:
            self._store.wait()
        except CheckpointError as error:
            self._report(error)

    def compare_at_the_end(self) -> None:
        """Wait for all ranks at the end of the training. Diverged if their parameters differ."""
        mine = np.frombuffer(bytes.fromhex(self._replica.fingerprint()), np.uint8)
        hashes = self._ctx.all_gather(mine.copy()).reshape(-1, len(mine))
        different = [str(rank) for rank, other in enumerate(hashes) if (other != hashes[0]).any()]
        if different:
            self._ctx.settle()
            raise Diverged(
                f"after step {self._progress.step} the parameters of rank {', '.join(different)} "
                "differ from those of rank 0"
            )

    def capture(self) -> dict[str, Any]:
        """The part of the training's state that is equal on all ranks."""
        return self._progress.capture() | {"replica": self._replica.capture()}

    # ------------------------------------------------------------ inside

    def _adopt(self, row: Any) -> None:
        """Take the batch size and noise of the rank whose state counts; other ranks may be
        ahead."""
        if self._progress.batching is not None:
            self._progress.batch_size = self._progress.batching.clamp(float(row[4]))
            self._progress.noise = NoiseEstimate(float(row[5]), float(row[6]), int(row[7]))

    def _hold(self, holdings: list[Holding], afresh: bool) -> None:
        """Take the schedule for a group whose ranks have said what samples they hold."""
        progress, ctx = self._progress, self._ctx
        before = progress.schedule.held
        progress.schedule = progress.schedule.for_group(holdings, afresh=afresh)
        if before and (change := told_of_change(before, progress.schedule.held)) and ctx.is_master:
            _log.warning("step %d: %s", progress.step, change)
            ctx.report(event=change)
        if not before and ctx.is_master:
            warn_of_equal_samples(holdings)

    def _start_afresh(self) -> int:
        """Choose the rank with the newest checkpoint, which loads it, as no rank has a state.
        Returns that rank."""
        found = self._store.load_latest() if self._store is not None else None
        mine = np.array([found.step if found else -1], np.int64)
        source = int(np.argmax(self._ctx.all_gather(mine).reshape(-1)))
        if found is not None and self._ctx.rank == source:
            self._restore(found.state)
            step = self._progress.step
            said = f"resumed from the checkpoint of step {step}"
            if self._progress.is_stopped:
                said += (
                    ", at which job.stop() has ended the training: no step follows. To train on, "
                    "begin another training, with its own directory, from that model"
                )
                _log.warning("%s", said)
            self._ctx.report(event=said)
        return source

    def _expected(self) -> Expected:
        return Expected(
            own={"replica": self._replica.capture()},
            fixed={"replica": self._replica.fixed()},
            max_bytes=self._policy.max_state_bytes,
        )

    def _restore(self, state: State) -> None:
        if not isinstance(state, dict) or not isinstance(state.get("own"), list):
            raise CheckpointError("not the state of an elastic loop")
        self._progress.restore(state)
        try:
            self._replica.restore(state["replica"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"not the state of this training: {error!r}") from error
        self._own = state["own"]

    def _report(self, error: CheckpointError) -> None:
        _log.error("%s", error)
        self._ctx.report(event=str(error))
