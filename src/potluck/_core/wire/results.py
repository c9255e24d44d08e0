"""Messages about the files that a job's workers wrote, between agents and with commands.

A node's results of one job travel as a code package does (``PartWanted``, ``PackagePart`` in
``peers.py``). Its name is asked for here first.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck._core.wire.jobs import Job
from potluck._core.wire.names import Name, Text
from potluck._core.wire.nodes import Count
from potluck._core.wire.worker_link import Seconds

MAX_LISTED = 256

Want = Literal["list", "package", "remove"]


class ResultsWanted(msgspec.Struct, frozen=True, tag=True):
    """A request about the results of ``job`` (empty, for a list: of all jobs) at the receiver:
    which there are, as a package (of the files that match ``pattern``; empty: of all), or to delete
    them. Answered with ResultsTold of the same ``number``. Only a job's starter is told of it."""

    number: Count
    want: Want
    job: Annotated[str, msgspec.Meta(max_length=256)] = ""
    pattern: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class JobFiles(msgspec.Struct, frozen=True):
    """The results of a job at one node. ``began`` is Unix time; ``gone``: why they were deleted
    there (empty: they were not)."""

    job: Job
    starter: Name
    script: Name
    began: Seconds
    num_files: Count
    num_bytes: Count
    is_running: bool = False
    gone: Name = ""


class ResultsTold(msgspec.Struct, frozen=True, tag=True):
    """The answer: the jobs, the newest first, or the name of the ``package``, of which the files
    ``left`` are no part, because their names can't travel. ``error``: why there is none."""

    number: Count
    jobs: Annotated[tuple[JobFiles, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    package: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    left: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()
    error: Text = ""


ResultsMessage = ResultsWanted | ResultsTold


class Written(msgspec.Struct, frozen=True):
    """What a job's workers had written on ``node``, which people call ``machine``, when the job
    ended; None if the node was away then."""

    node: Name
    machine: Name
    num_files: Count | None
    num_bytes: Count | None
