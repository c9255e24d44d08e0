"""``DistributedContext``: a worker's access to its group, which it re-forms after a loss.

A group never changes. After the loss or arrival of a member the context replaces its communicator
by the next group's. Until then every call raises the error that ended the old group.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck._core import hints
from potluck._core.backends.base import Backend, Communicator
from potluck._core.checks import Duration, check_within, checked_rank, checked_seconds
from potluck._core.context.collectives import Waits
from potluck._core.context.commit import Vote, tally
from potluck._core.context.messages import Messages
from potluck._core.context.uneven import UnevenCollectives
from potluck._core.forks import Owner, close_at_exit
from potluck._core.settings import load_settings
from potluck._core.waiting import to_stderr
from potluck._core.wire.frames import MAX_CONTROL
from potluck.errors import (
    ConfigurationError,
    Diverged,
    GroupClosed,
    GroupError,
    RemoteError,
)
from potluck.services import Remote, Services

_log = logging.getLogger(__name__)

PEER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Commit:
    """The outcome of a vote, equal on all ranks; truthy if the step is committed.

    ``loss`` is the weighted mean over the ranks that gave a loss. ``reform``: a newer group waits,
    and every rank must call ``reform`` before the next operation. ``ends``: the step is committed,
    and some rank asks all to end with it.
    """

    committed: bool
    loss: float
    reform: bool
    reason: str
    ends: bool = False

    def __bool__(self) -> bool:
        return self.committed


class DistributedContext(UnevenCollectives, Messages):
    """A worker's access to its group, with all operations on the group.

    Use it in a ``with`` block, or call ``close``.
    """

    @hints.arguments(hints.CONTEXT, hints.CONTEXT["world_size"])
    def __init__(self, backend: Backend, *, timeout_s: Duration = PEER_TIMEOUT_S) -> None:
        """Form the first group. Blocks until all its members have joined, at most ``timeout_s``
        seconds, which is also the default deadline of every operation.

        TypeError if ``backend`` is no backend. OperationTimeout, LinkError or SecurityError if the
        group can't be formed.
        """
        if not hasattr(backend, "form") or isinstance(backend, type):
            raise TypeError(
                f"DistributedContext takes a backend, such as RingBackend(peers, rank), not "
                f"{backend!r}; potluck.init() makes backend and context"
            )
        timeout_s = checked_seconds(timeout_s, "timeout_s")
        super().__init__(timeout_s)
        self._owner = Owner("this context")
        self._own_backend = backend
        self._is_closed = False
        self.communicator = backend.form(0, None, timeout_s)
        self._own_services = Services(
            backend.service_transport,
            lambda: self.communicator.group,
            backend.next_members,
            timeout_s=timeout_s,
            max_bytes=load_settings().max_call_bytes,
        )
        close_at_exit(self, before=_say_end)

    @property
    def _backend(self) -> Backend:
        """ForkedProcess in a forked child."""
        self._owner.check()
        return self._own_backend

    @property
    def _services(self) -> Services:
        """ForkedProcess in a forked child."""
        self._owner.check()
        return self._own_services

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    @property
    def elastic(self) -> bool:
        """Whether the group can be re-formed after the loss of a member."""
        return self._backend.elastic

    @property
    def reform_due(self) -> bool:
        """Whether this group is over or a newer one waits, so that ``reform`` comes next. For
        scripts that make no collective call, in which they would learn it."""
        return self.communicator.error is not None or self._backend.next_epoch() > self.epoch

    def new_group(self, ranks: Sequence[int]) -> SubGroup | None:
        """Make a sub-group of ``ranks``. Every rank of this group must call it, with equal ranks.

        Returns an object with the operations of a context for the ranks named, in that order, and
        None for the others; of no ranks None for all. ``potluck.torch.DDP`` trains on it; loops,
        trainers and services need the context itself, for a sub-group ends when the context
        re-forms. What it holds is released by its ``close``, or with the last reference to it.
        ValueError for ranks that are not distinct or not in the group.
        """
        communicator = self.communicator.subgroup(ranks)
        return None if communicator is None else SubGroup(communicator, self.timeout_s, self._waits)

    # -- services

    def serve(self, *things: Any) -> None:
        """Offer services to all workers of the job, until ``withdraw``, or this context is closed.

        ``things`` are functions, and instances of classes, made with
        [service][potluck.service]. Their methods run on threads of this process, also while the
        script computes, and outside of groups: a caller that dies is no loss to this worker.
        Services go on when the group is re-formed. TypeError for other things, ValueError for a
        name that is served here already, ConfigurationError on links of other libraries (Gloo,
        NCCL, MPI), GroupClosed after ``close``.
        """
        self._check_open()
        self._services.serve(*things)

    def withdraw(self, *names: str) -> None:
        """Take back services that this worker offers, by their names.

        Later calls of them raise UnknownService at their callers; a call that has come is answered
        still. Another service may be offered by the same name. ValueError, and nothing is taken
        back, for a name that this worker does not serve. Cost: no message.
        """
        self._services.withdraw(*names)

    def connect(
        self, name: str, *, rank: int | None = None, timeout: Duration | None = None
    ) -> Remote:
        """Find the service ``name``, and return a [Remote][potluck.Remote] with its methods.

        Asks rank ``rank``, or all ranks in order, for what they serve, again and again until one
        serves it; UnknownService, with the services of each, after ``timeout`` seconds. The Remote
        stays with that worker, also when the group is re-formed. GroupClosed after ``close``.
        """
        self._check_open()
        if rank is not None:
            check_within("rank", checked_rank("rank", rank, self.world_size), self.world_size)
        return self._services.connect(name, rank, self._patience(timeout))

    def _check_open(self) -> None:
        if self._is_closed:
            raise GroupClosed("this context was closed here", epoch=self.epoch)

    # -- elasticity

    def begin_step(self, step: int) -> None:
        """Note the start of training step ``step``, counted from 0. Errors and reports name it; a
        fault that ``potluck run --chaos`` orders for the step is injected here. With -1 no step is
        under way: a loss makes none run again."""
        self._backend.begin_step(step)

    def commit(
        self,
        step: int,
        *,
        ok: bool = True,
        state_hash: int = 0,
        loss: float = math.nan,
        weight: float = 1.0,
        ends: bool = False,
        timeout: Duration | None = None,
    ) -> Commit:
        """Vote on ``step``: committed on all ranks or on none. Every rank must call it.

        ``ok`` is this rank's vote. ``state_hash`` (0: none; else up to 63 bits) is compared between
        ranks: unequal ones raise Diverged on all. ``loss`` (NaN: none) and ``weight`` give the
        commit's mean loss. ``ends`` asks all ranks to end with this step. A GroupError means that
        the outcome is unknown: keep what you would apply, and ``reform``. Costs one all_gather of
        48 bytes per rank.
        """
        votes = ok | ends << 1
        ballot = np.array(
            [
                step,
                votes,
                state_hash & (2**63 - 1),
                max(self._backend.next_epoch(), self.epoch),
                0,
                0,
            ],
            dtype=np.int64,
        )
        ballot[4:].view(np.float64)[:] = (loss, weight)
        rows = self.all_gather(ballot, timeout=timeout)
        figures = rows[:, 4:].view(np.float64)
        outcome = tally(
            [
                Vote(
                    int(row[0]),
                    bool(row[1] & 1),
                    int(row[2]),
                    int(row[3]),
                    float(loss),
                    float(weight),
                    bool(row[1] >> 1),
                )
                for row, (loss, weight) in zip(rows, figures, strict=True)
            ]
        )
        if outcome.diverged:
            self.settle(timeout=timeout)
            raise Diverged(
                f"step {step} in epoch {self.epoch}: {outcome.reason} from the others'; resume "
                "from the last checkpoint"
            )
        return Commit(
            outcome.committed,
            outcome.loss,
            outcome.next_epoch > self.epoch,
            outcome.reason,
            outcome.ends,
        )

    def settle(self, *, timeout: Duration | None = None) -> None:
        """Wait until every rank has called ``settle``, or the group is over. Raises no GroupError.

        Call it before raising an error that every rank detects: a rank that raised earlier would
        end the group before other ranks have detected the error. Cost: a barrier.
        """
        with contextlib.suppress(GroupError):
            self.barrier(timeout=timeout)

    @property
    def has_next_group(self) -> bool:
        """Whether a newer group waits for this worker to ``reform``: a member was lost, or comes
        in. For workers that only serve and call; a loop learns it from ``commit``."""
        return self._backend.next_epoch() > self.epoch

    def reform(self, cause: BaseException | None = None) -> None:
        """Leave the current group and enter the next one.

        ``cause`` is the GroupError that ended it, or None if all ranks agreed to leave
        (``Commit.reform``). Rank, world size and epoch change; sub-groups of the old group end.
        ConfigurationError if the backend has no next group (``elastic`` is False),
        OperationTimeout if no group can be formed within the context's ``timeout_s``.
        """
        if not self.elastic:
            raise ConfigurationError(
                "this context can't re-form after a loss: start the script with `potluck run`, or "
                "let the processes find each other (backend='discovery')"
            ) from cause
        error = cause if isinstance(cause, GroupError) else None
        started = time.monotonic()
        self.communicator.close()
        self.communicator = self._backend.form(self.epoch, error, self.timeout_s)
        if error is not None:
            self.communicator.metrics.reformed(time.monotonic() - started)

    def abort(self, error: BaseException) -> None:
        """End the group because this rank's script failed with ``error``: every other rank raises
        RemoteError, which names this rank and ``error``. Nothing in a forked child."""
        reason = f"{type(error).__name__}: {error}"[: MAX_CONTROL // 4]
        self.communicator.abort(
            RemoteError(
                f"{self.group.describe(self.rank)} failed: {reason}",
                rank=self.rank,
                epoch=self.epoch,
            )
        )

    def report(
        self,
        name: str | None = None,
        value: Any = None,
        labels: Mapping[str, Any] | None = None,
        /,
        **facts: Any,
    ) -> None:
        """Report a metric, or facts about this job, from any rank. Never blocks. Nothing in a
        forked child.

        ``report("training_loss", 0.3, {"phase": "warm-up"})`` sets a gauge of this rank's
        ``metrics_text``, by name and labels; the newest value counts. TypeError or ValueError for a
        name, value or label that Prometheus does not know; of more than 1,000 series the oldest is
        dropped.

        Facts, by name, go to the agent and never raise:
        ``step`` (committed steps), ``loss``, ``samples_per_s``, ``device``, and
        ``committed_samples`` of ``total_samples`` (all ranks'), of which this worker computed
        ``worker_samples``, are shown while the job runs, ``event`` alone is a line of output; all
        other facts (numbers and short texts) appear in the summary.
        """
        if not self._owner.is_here:
            return
        if name is not None:
            unknown = facts.keys() - {"labels"}
            if unknown or (facts and labels is not None):
                raise TypeError(f"report({name!r}, value, labels) has no {sorted(facts)} beside it")
            self.communicator.metrics.report(name, value, labels or facts.get("labels"))
            return
        self._backend.report(facts)

    def stats(self) -> dict[str, Any]:
        """Counts, bytes and seconds so far, by operation, algorithm and link, ready for JSON."""
        return self.communicator.metrics.stats()

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.communicator.metrics.exposition()

    def close(self) -> None:
        """Leave the group; sent data arrives first. Idempotent; also called at interpreter exit.
        Nothing in a forked child."""
        if self._is_closed or not self._owner.is_here:
            return
        self._is_closed = True
        self._services.close()
        try:
            self.communicator.close()
        finally:
            self._backend.close()

    def __enter__(self) -> DistributedContext:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, GroupError):
            self.abort(error)
        self.close()


class SubGroup(UnevenCollectives, Messages):
    """The operations on a sub-group; see ``DistributedContext.new_group``."""

    elastic = False
    """A sub-group is not re-formed: it ends with the group that it was made of."""

    def __init__(self, communicator: Communicator, timeout_s: float, waits: Waits) -> None:
        super().__init__(timeout_s, waits)
        self.communicator = communicator

    def close(self) -> None:
        """Leave the sub-group. Calls under way end, later ones raise GroupClosed; the context goes
        on. Idempotent. Each rank may close it when it needs it no more: no message is sent."""
        self.communicator.close()


def check_whole(ctx: object, what: str) -> None:
    """TypeError if ``ctx`` is a sub-group, where ``what`` needs the context itself, or none."""
    if not hasattr(ctx, "all_reduce"):
        raise TypeError(f"{what} takes a context, ctx = potluck.init(), not {ctx!r:.80}")
    if isinstance(ctx, SubGroup):
        raise TypeError(
            f"{what} needs the context itself, not a sub-group of ctx.new_group: it votes on "
            "steps, reports, and re-forms the group after a loss, which ends sub-groups. "
            "potluck.torch.DDP and the sampler work on a sub-group"
        )


def _say_end() -> None:
    """Say what the error that ends the script calls for, if that is known."""
    told = hints.of_end(getattr(sys, "last_value", None))
    if told:
        to_stderr(told)
