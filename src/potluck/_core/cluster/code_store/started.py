"""What the jobs that this node started left on which machine, so that machines which are away can
be named. ``started/JOB`` below the store; of the newest jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from potluck._core.cluster.code_store.job_folders import newest
from potluck._core.cluster.home.keyfile import replace_private
from potluck._core.wire.results import Written

_KEPT = 256


class StartedJobs:
    """The records of the node of the potluck ``home``."""

    def __init__(self, home: Path) -> None:
        self._root = home / "code_store" / "started"

    def remember(self, job: str, written: Sequence[Written]) -> None:
        """``job`` has ended, and left files. IdentityError if that can't be
        kept."""
        data = msgspec.json.encode(written)
        replace_private(self._root / job, "what a job left on which machine", data)
        for path in newest(self._root)[_KEPT:]:
            path.unlink(missing_ok=True)

    def all(self) -> list[tuple[str, tuple[Written, ...]]]:
        """Each job, the newest first, and what it left."""
        found = []
        for path in newest(self._root):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                data = path.read_bytes()
                found.append((path.name, msgspec.json.decode(data, type=tuple[Written, ...])))
        return found

    def forget(self, job: str) -> None:
        """The files of ``job`` were deleted."""
        (self._root / job).unlink(missing_ok=True)
