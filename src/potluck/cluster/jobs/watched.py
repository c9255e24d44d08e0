"""A job that a command of this machine started, as this machine's dispatcher remembers it."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.cluster.links.local import Client
from potluck.wire import jobs


@dataclass(slots=True, eq=False)
class WatchedJob:
    """A job and ``client``, the command that waits for it. ``is_taken``: the leader has said that
    it has the job. ``number`` and ``times``: the last signal for the job, and how many came."""

    spec: jobs.JobSpec
    client: Client
    is_taken: bool = False
    number: int = 0
    times: int = 0
