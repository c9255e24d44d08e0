"""Fixed worlds: a worker of ``potluck run`` joins the world that torch forms (``join_world``).

``init_process_group`` connects to a store at MASTER_ADDR and MASTER_PORT, and would wait there for
lost ranks. So each worker first tells its agent that its script forms a fixed world, and waits for
the group of all its ranks; the agent ends the world when a rank is lost
(``cluster.jobs.groups.worlds``). The link to the agent stays open until the script ends. If a
script destroys its process group and makes another, the ranks meet again for a new port: at the
last group's port a fast rank would find the last group's store, and wait in it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Hashable, Mapping

from potluck._core.backends.agent_link import AgentLink, has_left, is_linked
from potluck._core.backends.exit_report import ExitReport, may_follow_from_a_loss
from potluck._core.cluster.trust.credentials import load_credentials
from potluck._core.engine.resources import ongoing_here
from potluck._core.forks import at_exit, not_at_exit
from potluck._core.settings import load_settings
from potluck._core.wire import worker_link
from potluck.errors import AgentLost, OperationTimeout, PotluckError, RemoteError


def is_our_world(environment: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Whether this process's agent started it as ``rank`` of a world of ``world_size``, and no
    context of potluck uses the link to the agent."""
    if not environment.get("POTLUCK_AGENT"):
        return False
    if environment.get("POTLUCK_WORLD_RANK") != f"{rank}/{world_size}":
        return False
    return _own_link() is not None or not (is_linked() or has_left())


def join_world(timeout_s: float) -> tuple[str, int]:
    """Wait until all ranks of this worker's world are ready. Returns the address of the store that
    rank 0 will serve: its host, and a port that is free there.

    LinkError or Refused if the agent can't be reached, OperationTimeout if the ranks do not meet in
    time, RemoteError if the agent ends the job.
    """
    is_first = os.environ["RANK"] == "0"
    with socket.socket() as held:
        if is_first:
            held.bind(("", 0))  # holds the port until rank 0 makes its store
        link = _own_link() or _WorldLink()
        group = link.meet(held.getsockname()[1] if is_first else 0, timeout_s)
    return group.members[0].host, group.members[0].port


def hosts_of_world(rank: int, world_size: int) -> tuple[str, ...]:
    """The hosts of all ranks as this machine reaches them; empty unless the agent started this
    process as ``rank`` of that world and the ranks have met.

    Ranks can't publish such addresses themselves: a link-local IPv6 address is valid only together
    with an interface of the machine that connects.
    """
    link = _own_link()
    group = None if link is None else link.group
    if group is None or os.environ.get("POTLUCK_WORLD_RANK") != f"{rank}/{world_size}":
        return ()
    return tuple(member.host for member in group.members)


def leave_world() -> None:
    """End the link to the agent, if there is one, for a backend with a link of its own."""
    link = _own_link()
    if link is not None:
        link.end()


_links: list[_WorldLink] = []
"""The link of this process."""


def _own_link() -> _WorldLink | None:
    """ForkedProcess if it belongs to the process from which this one was forked."""
    is_linked()
    return next(iter(_links), None)


class _WorldLink:
    """The link to the agent, with the newest group that the agent sent."""

    def __init__(self) -> None:
        self._worker = os.environ.get("POTLUCK_WORKER", "")
        self._changed = threading.Condition()
        self._after = 0
        self._group: worker_link.NewGroup | None = None
        self._error: PotluckError | None = None
        self._talk = AgentLink(
            load_credentials(load_settings()),
            take=self._take,
            ongoing=self._ongoing,
            on_lost=self._lost_agent,
        )
        self._exit_report = ExitReport(
            self._talk,
            describe=lambda: f"rank {os.environ.get('RANK', '')}, worker {self._worker}",
            follows=may_follow_from_a_loss,
        )
        _links.append(self)
        at_exit(self.end)

    @property
    def group(self) -> worker_link.NewGroup | None:
        """The group of all ranks when they met last; None before."""
        return self._group

    def meet(self, port: int, timeout_s: float) -> worker_link.NewGroup:
        """Wait for the next group of all ranks. ``port`` is a free port of this rank for the
        store."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._group is not None:
                self._after, self._group = self._group.epoch, None
            local_rank = int(os.environ.get("LOCAL_RANK") or 0)
            ready = worker_link.Ready(
                self._worker, self._after, port, os.getpid(), local_rank=local_rank, is_fixed=True
            )
            self._talk.say(ready)
            while self._group is None and self._error is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise OperationTimeout(
                        f"not all ranks were ready within {timeout_s:g} s; `potluck status` shows "
                        "what the agent waits for",
                        operation="init_process_group",
                    )
                self._changed.wait(left)
            if self._group is None:
                assert self._error is not None
                raise self._error
        self._talk.say(worker_link.Entered(self._worker, self._group.epoch))
        return self._group

    def _ongoing(self) -> tuple[int, list[Hashable]]:
        """The unfinished operations on potluck's links; those of Gloo and NCCL are unknown."""
        return (0, []) if self._group is None else (self._group.epoch, ongoing_here())

    def _take(self, message: worker_link.FromAgent) -> worker_link.FromWorker | None:
        with self._changed:
            self._changed.notify_all()
            match message:
                case worker_link.NewGroup(epoch=epoch) if epoch > self._after:
                    self._group = message
                case worker_link.Stop(reason):
                    self._error = RemoteError(f"the job ends: {reason}")
                    os.kill(os.getpid(), signal.SIGTERM)  # as scripts without a link are stopped
                case worker_link.Probe(number):
                    return worker_link.ProbeReply(self._worker, number, self._group is None)
                case _:
                    pass  # messages about elastic groups
        return None

    def _lost_agent(self, error: AgentLost) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def end(self) -> None:
        """Tell the agent that this worker has finished, and end the link."""
        if self in _links:
            _links.remove(self)
            not_at_exit(self.end)
            self._exit_report.end(is_finished=self._error is None)
