"""What the parts of an agent that are about jobs need of the rest, and of the machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from potluck.cluster.jobs.job import Chaos, Launcher
from potluck.cluster.jobs.lead import Lead
from potluck.cluster.membership import events
from potluck.cluster.names import NodeNames
from potluck.types import MeasuredPath
from potluck.wire import jobs
from potluck.wire.names import Versions
from potluck.wire.nodes import View


class Runtime(Protocol):
    """What starts processes and judges how a job ended: from the floor above."""

    def launcher(
        self,
        spec: jobs.JobSpec,
        folder: Path,
        *,
        is_starter: bool,
        sink: Callable[[str, str, str], None],
        is_behind: Callable[[], bool],
    ) -> Launcher:
        """Starts the workers of ``spec``; ``sink(worker, stream, line)`` gets their output."""

    def free_port(self) -> int:
        """A port for scripts that use torch.distributed by themselves."""

    def chaos(self, text: str) -> Chaos:
        """The faults that ``text`` orders; ConfigurationError if it can't be read."""

    def summary(
        self, spec: jobs.JobSpec, lead: Lead, last_words: Mapping[str, Sequence[str]]
    ) -> tuple[int, bytes]:
        """The exit code of a job that is over, and its summary as JSON."""


class JobHost(Protocol):
    """The agent, as its jobs see it."""

    @property
    def me(self) -> str:
        """This node's id."""

    @property
    def port(self) -> int:
        """Where this agent listens."""

    @property
    def names(self) -> NodeNames:
        """What people call the nodes."""

    @property
    def bind(self) -> str:
        """Where workers listen; empty: on all interfaces."""

    @property
    def runtime(self) -> Runtime: ...

    @property
    def view(self) -> View | None:
        """The view in use."""

    @property
    def stands_still(self) -> str:
        """Why no group may commit here now; empty if it may."""

    @property
    def is_banned(self) -> bool:
        """Whether this node was banned from the cluster."""

    def send(self, node: str, message: jobs.JobMessage) -> bool:
        """Have ``message`` sent, to this node itself, too; False without a link."""

    def to_leader(self, message: jobs.ToLeader) -> bool:
        """Send to the leader of the view; False without one."""

    def unsent(self, node: str) -> int:
        """Bytes that wait to be sent to ``node``."""

    def handle(self, event: events.Event) -> None:
        """Tell the control plane."""

    def address(self, node: str) -> str:
        """The host at which ``node`` is reached from here."""

    def ring(self) -> tuple[str, ...]:
        """The nodes of the view in the order of the ring that avoids slow links."""

    def paths(self, nodes: Collection[str]) -> tuple[MeasuredPath, ...]:
        """What was measured of the links between ``nodes``."""

    def versions(self, node: str) -> Versions | None:
        """With what its workers would run; None without a link."""

    def is_dead(self, node: str) -> bool:
        """Whether its agent, and so its workers, are known to have ended."""

    def log(self, job: str, line: str) -> None:
        """Keep a line that nobody is there to read."""

    def note(self, text: str) -> None:
        """Tell a person."""
