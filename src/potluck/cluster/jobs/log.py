"""Logs of jobs whose starter has gone: ``<home>/logs/<job>.log``, bounded."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from potluck.cluster.home.directory import make_private
from potluck.errors import IdentityError
from potluck.printable import coloured

MAX_BYTES = 4 << 20
KEPT_LOGS = 8


class JobLog:
    """The logs below ``home``. A full log takes no more lines; the oldest logs are removed."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "logs"

    def path(self, job: str) -> Path:
        """The log of ``job``."""
        return self._folder / f"{job}.log"

    def write(self, job: str, line: str) -> None:
        """Add one line; what follows a line end in it is indented. A disk that is full, or a
        folder that others may change, costs the line, not the job."""
        path = self.path(job)
        with contextlib.suppress(OSError, IdentityError):
            if not path.exists():
                self._begin()
            elif path.stat().st_size > MAX_BYTES:
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with open(os.open(path, flags, 0o600), "a", errors="replace") as file:
                file.write("\n    ".join(map(coloured, line.split("\n"))) + "\n")

    def _begin(self) -> None:
        make_private(self._folder)
        known = sorted(self._folder.glob("*.log"), key=lambda each: each.stat().st_mtime)
        for path in known[: max(0, len(known) - KEPT_LOGS + 1)]:
            path.unlink(missing_ok=True)
