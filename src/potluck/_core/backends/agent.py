"""``AgentBackend``: the groups of a worker, as the agent that started the worker gives them.

A thread (``agent_link.py``) exchanges messages with the agent, also while the script computes or
blocks: it answers probes and receives news of lost workers. ``form`` requests a group and opens its
communicator. When the agent ends a group, its communicator is aborted, and blocked calls raise.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Any

from potluck._core.backends import cut_links
from potluck._core.backends.agent_link import AgentLink, agent_address, check_free, leave
from potluck._core.backends.exit_report import ExitReport, is_group_error, may_follow_from_a_loss
from potluck._core.backends.service_transport import TcpServiceTransport
from potluck._core.backends.tcp import TcpBase
from potluck._core.collectives.spanning_tree import cut_of
from potluck._core.engine import patience
from potluck._core.engine.communicator import Communicator
from potluck._core.forks import at_exit, not_at_exit
from potluck._core.settings import Settings, load_settings
from potluck._core.types import Group, Member
from potluck._core.wire import worker_link
from potluck.errors import (
    AgentLost,
    Evicted,
    GroupError,
    OperationTimeout,
    PeerLost,
    PotluckError,
    ProtocolError,
    RemoteError,
)

FIRST_GROUP_S = 600.0
"""Seconds until the first group: other workers may be importing modules or be started again."""


class AgentBackend:
    """The backend of a worker that ``potluck run`` started.

    Reads POTLUCK_AGENT (host:port), POTLUCK_JOB and POTLUCK_WORKER. ConfigurationError if they are
    missing, or if this worker has a group or has left an elastic group. LinkError or Refused if the
    agent can't be reached or refuses the worker.
    """

    def __init__(self, *, settings: Settings | None = None, elastic: bool = True) -> None:
        """``elastic``: after the end of a group the script goes on in the next one; otherwise the
        agent starts all workers again."""
        agent_address()
        self.elastic = elastic
        self.job = os.environ.get("POTLUCK_JOB", "")
        self.worker = os.environ.get("POTLUCK_WORKER", "")
        check_free()
        self._local_rank = int(os.environ.get("LOCAL_RANK") or 0)
        self._changed = threading.Condition()
        self._newest: worker_link.NewGroup | None = None
        self._is_held = False
        self._overs: deque[worker_link.GroupOver] = deque(maxlen=64)
        self._stopped: PotluckError | None = None
        self._communicator: Communicator | None = None
        self._asking_after: int | None = None
        self._chaos_steps: frozenset[int] = frozenset()
        self._chaos_done = -1
        self._step = -1
        self._is_closed = False
        self._has_reformed = False
        self._base = _listening(settings or load_settings(), self._local_rank)
        self.switchboard = self._base.switchboard
        self.service_transport = TcpServiceTransport(self.switchboard)
        try:
            self._talk = AgentLink(
                self._base.credentials,
                take=self.take,
                ongoing=self._ongoing,
                on_lost=self._lost_agent,
            )
        except BaseException:
            self._base.close()
            raise
        self._exit_report = ExitReport(
            self._talk,
            describe=self._describe,
            follows=is_group_error if self.elastic else may_follow_from_a_loss,
            gives_up=self._gives_up,
            on_failure=self._tell_ranks,
        )
        self._base.when_broken(self._unreachable)
        at_exit(self._end)

    # -- called by the context

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        """The communicator of the newest group after ``after_epoch``; see ``Backend.form``.

        The first group may take up to ``FIRST_GROUP_S``. AgentLost if the agent is lost,
        RemoteError if it has stopped the job, OperationTimeout without a group in time.
        """
        if after_epoch == 0:
            timeout_s = max(timeout_s, FIRST_GROUP_S)
        self._has_reformed |= after_epoch > 0
        with self._changed:
            self._communicator = None
            self._asking_after = after_epoch
            self._talk.say(self._request(after_epoch, cause))
            self._await_group(after_epoch, timeout_s)
            self._asking_after = None
            if self._stopped is not None:
                raise self._stopped from cause
            told = self._usable(after_epoch)
            if told is None:
                raise OperationTimeout(
                    f"the agent announced no group after epoch {after_epoch} within "
                    f"{timeout_s:g} s; `potluck status` shows what it waits for",
                    epoch=after_epoch,
                ) from cause
            names = [member.worker for member in told.members]
            cut = cut_of(map(names.index, pair) for pair in told.cut)
            rank = names.index(self.worker)
            group = Group(told.epoch, rank, told.members, self.job, told.paths, cut)
            communicator = self._base.open(group)
            self._communicator = communicator
            self._chaos_steps = frozenset(told.chaos_steps)
        self._talk.say(worker_link.Entered(self.worker, told.epoch))
        cut_links.watch(
            communicator,
            self._base.credentials,
            lambda rank: self._talk.say(worker_link.Mended(self.worker, told.epoch, rank)),
        )
        return communicator

    def next_epoch(self) -> int:
        with self._changed:
            return 0 if self._newest is None else self._newest.epoch

    def next_members(self) -> tuple[Member, ...]:
        with self._changed:
            return () if self._newest is None else tuple(self._newest.members)

    def begin_step(self, step: int) -> None:
        """Keep the step for reports. If a fault is ordered for the step, wait until the agent has
        injected it."""
        self._step = step
        communicator = self._communicator
        if communicator is None or step not in self._chaos_steps:
            return
        with self._changed:
            self._chaos_done = -1
            self._talk.say(worker_link.ChaosDue(self.worker, communicator.group.epoch, step))
            self._changed.wait_for(lambda: self._chaos_done == step or self._stopped is not None)

    def report(self, facts: dict[str, Any]) -> None:
        """Report ``facts`` to the agent. ``step`` (number of committed steps),
        ``committed_samples``, ``total_samples``, ``worker_samples``, ``loss``, ``samples_per_s``
        and ``device`` are progress; a single ``event`` is a line of output; all others go into the
        summary."""
        communicator = self._communicator
        if "event" in facts and len(facts) == 1:
            self._talk.say(
                worker_link.WorkerNote(self.worker, worker_link.clip(str(facts["event"])))
            )
            return
        self._talk.progress.add(facts, communicator.group.epoch if communicator else 0)
        self._talk.progress_waits()

    def close(self) -> None:
        """Leave the group, and tell the agent that this worker has finished, unless an exception is
        being handled."""
        self._base.close()
        if sys.exc_info()[1] is None:
            self._end()

    # -- on the script's threads

    def _request(
        self, after_epoch: int, cause: GroupError | None
    ) -> worker_link.Ready | worker_link.Lost:
        if cause is None or isinstance(cause, Evicted) or after_epoch == 0:
            return worker_link.Ready(
                worker=self.worker,
                after_epoch=after_epoch,
                port=self._base.port,
                pid=os.getpid(),
                local_rank=self._local_rank,
                engine=self._base.engine,
                site=self._base.settings.site,
                cause=worker_link.clip(str(cause or "")),
                is_fixed=not self.elastic,
            )
        return worker_link.Lost(
            worker=self.worker,
            epoch=after_epoch,
            rank=cause.rank,
            certain=cause.certain,
            cause=worker_link.clip(str(cause)),
            step=self._step,
            unreachable=tuple(sorted(self._base.unreachable(after_epoch))),
        )

    def _await_group(self, after_epoch: int, timeout_s: float) -> None:
        """Wait for a usable group or the end of the job. The timeout does not run while the cluster
        is paused."""
        deadline = time.monotonic() + timeout_s
        while self._stopped is None and self._usable(after_epoch) is None:
            left = max(deadline, patience.held_until()) - time.monotonic()
            if left <= 0 and not self._is_held:
                return
            was_held = self._is_held
            self._changed.wait(None if was_held else left)
            if was_held:
                deadline = time.monotonic() + timeout_s

    def _usable(self, after_epoch: int) -> worker_link.NewGroup | None:
        told = self._newest
        if told is None or told.epoch <= after_epoch:
            return None
        names = tuple(member.worker for member in told.members)
        return None if any(over.ends(told.epoch, names) for over in self._overs) else told

    def _describe(self) -> str:
        communicator = self._communicator
        rank = "" if communicator is None else f"rank {communicator.group.rank}, "
        return f"{rank}worker {self.worker}"

    def _gives_up(self, error: BaseException) -> bool:
        """Whether ``error`` shows that the script is not elastic: it ends by a PeerLost and never
        requested a next group."""
        return self.elastic and isinstance(error, PeerLost) and not self._has_reformed

    def _tell_ranks(self, error: BaseException) -> None:
        """End the calls of other ranks that wait for this rank, after the script's code raised."""
        communicator = self._communicator
        if communicator is not None:
            group = communicator.group
            communicator.abort(
                RemoteError(
                    f"{group.describe(group.rank)} failed: {type(error).__name__}: {error}",
                    rank=group.rank,
                    epoch=group.epoch,
                )
            )

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._exit_report.end(is_finished=self._stopped is None)
        if self.elastic:
            leave()
        not_at_exit(self._end)

    # -- on the agent link's thread

    def take(self, message: worker_link.FromAgent) -> worker_link.FromWorker | None:
        """Handle a message of the agent; returns the answer, or None."""
        with self._changed:
            self._changed.notify_all()
            match message:
                case worker_link.NewGroup(job=job, epoch=epoch, members=members):
                    if job != self.job or self.worker not in {each.worker for each in members}:
                        raise ProtocolError(f"a group of epoch {epoch} that this worker is not in")
                    self._is_held = False
                    if self._newest is None or epoch > self._newest.epoch:
                        self._newest = message
                case worker_link.Hold(seconds=seconds) if seconds:
                    patience.hold(time.monotonic() + seconds)
                case worker_link.Hold():
                    self._is_held = True
                case worker_link.GroupOver():
                    return self._group_over(message)
                case worker_link.Probe(number):
                    blocked = self._asking_after is not None or bool(patience.place())
                    return worker_link.ProbeReply(self.worker, number, blocked)
                case worker_link.ChaosDone(step):
                    self._chaos_done = step
                case worker_link.Stop(reason):
                    self._stop(RemoteError(f"the job ends: {reason}"))
        return None

    def _group_over(self, over: worker_link.GroupOver) -> worker_link.FromWorker | None:
        self._overs.append(over)
        communicator = self._communicator
        if communicator is not None:
            group = communicator.group
            names = tuple(member.worker for member in group.members)
            if over.ends(group.epoch, names):
                communicator.abort(_error_of(over, group, self.worker))
        asking = self._asking_after
        if over.worker == self.worker and asking is not None and self._usable(asking) is None:
            return self._request(asking, None)
        return None

    def _ongoing(self) -> tuple[int, list[Hashable]]:
        communicator = self._communicator
        if communicator is None or communicator.error is not None:
            return 0, []
        epoch = communicator.group.epoch
        return epoch, [(epoch, name) for name in communicator.ongoing()]

    def _lost_agent(self, error: AgentLost) -> None:
        """The link to the agent ended without a close, or its thread in this process broke."""
        with self._changed:
            if self._stopped is None:
                self._stop(error)

    def _unreachable(self, error: GroupError) -> None:
        """This worker's listener broke, so no rank could link to it in any later group: the job
        fails, with the reason."""
        with self._changed:
            self._exit_report.has_failed = True
            self._talk.say(worker_link.Failed(self.worker, worker_link.clip(str(error))))
            self._stop(error)

    def _stop(self, error: PotluckError) -> None:
        self._stopped = error
        self._changed.notify_all()
        if self._communicator is not None:
            self._communicator.abort(error)


def _error_of(over: worker_link.GroupOver, group: Group, worker: str) -> GroupError:
    """The error of calls that are blocked in ``group`` when the agent ends it."""
    if over.worker == worker:
        return Evicted(
            f"the other members went on without {group.describe(group.rank)}: {over.cause}",
            rank=group.rank,
            epoch=group.epoch,
        )
    rank = next(
        (rank for rank, member in enumerate(group.members) if member.worker == over.worker), -1
    )
    lost = "the group" if rank < 0 else group.describe(rank)
    return PeerLost(
        f"lost {lost} in epoch {group.epoch}: {PeerLost.PHRASE}: {over.cause}",
        rank=rank,
        epoch=group.epoch,
        certain=over.certain,
    )


def _listening(settings: Settings, local_rank: int) -> TcpBase:
    """The listener of a worker: on the loopback, or in a cluster (POTLUCK_BIND) on all interfaces,
    on the port of the settings, for which firewalls may be open, if that port is free."""
    host = os.environ.get("POTLUCK_BIND", "127.0.0.1")
    is_told = host != "127.0.0.1" and settings.gradient_port
    port = settings.gradient_port + local_rank if is_told else 0
    return TcpBase.on_port_or_any(host, port, settings)
