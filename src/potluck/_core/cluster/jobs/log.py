"""Logs of jobs whose starter has gone: ``<home>/logs/<job>.log``, bounded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from potluck._core.background import why
from potluck._core.cluster.home.keyfile import make_private
from potluck._core.printable import coloured
from potluck._core.waiting import Complaint
from potluck.errors import IdentityError

MAX_BYTES = 4 << 20
MAX_UNWRITTEN = 4 << 20
KEPT_LOGS = 8
_CLOSE_S = 5.0


class JobLog:
    """The logs below ``home``. A full log takes no more lines; the oldest logs are removed.

    ``write`` returns at once: a thread writes the lines, in their order. A disk that is full, or a
    folder that others may change, costs lines, not the job; ``on_note`` gets one line each time
    that writing begins to fail."""

    def __init__(self, home: Path, on_note: Callable[[str], None]) -> None:
        self._folder = home / "logs"
        self._complain = Complaint(
            lambda text: on_note(f"lines of job logs in {self._folder} are lost: {text}")
        )
        self._lines: list[tuple[str, str]] = []
        self._num_bytes = 0
        self._writing: asyncio.Task[None] | None = None

    def path(self, job: str) -> Path:
        """The log of ``job``."""
        return self._folder / f"{job}.log"

    def write(self, job: str, line: str) -> None:
        """Add one line; what follows a line end in it is indented. If the disk is 4 MiB behind, the
        line is left out."""
        if self._num_bytes > MAX_UNWRITTEN:
            self._complain("the disk is too slow: lines are left out")
            return
        self._num_bytes += len(line)
        self._lines.append((job, "\n    ".join(map(coloured, line.split("\n"))) + "\n"))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_out())

    async def written(self) -> None:
        """Return when all lines so far are in their files."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Write what is left; gives up on a disk that does not answer for 5 s."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.written()
        except TimeoutError:
            self._complain("the disk does not answer")

    async def _write_out(self) -> None:
        try:
            while self._lines:
                lines, self._lines = self._lines, []
                try:
                    await asyncio.to_thread(self._append, lines)
                except (OSError, IdentityError) as error:
                    self._complain(why(error))
                else:
                    self._complain.over()
                self._num_bytes = sum(len(text) for _, text in self._lines)
        finally:
            self._writing = None

    def _append(self, lines: Iterable[tuple[str, str]]) -> None:
        of_jobs: dict[str, list[str]] = {}
        for job, text in lines:
            of_jobs.setdefault(job, []).append(text)
        for job, texts in of_jobs.items():
            self._append_to(self.path(job), texts)

    def _append_to(self, path: Path, texts: list[str]) -> None:
        if not path.exists():
            self._begin()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(os.open(path, flags, 0o600), "ab") as file:
            size = os.fstat(file.fileno()).st_size
            for text in texts:
                if size > MAX_BYTES:
                    return
                size += file.write(text.encode(errors="replace"))

    def _begin(self) -> None:
        make_private(self._folder)
        known = sorted(self._folder.glob("*.log"), key=lambda each: each.stat().st_mtime)
        for path in known[: max(0, len(known) - KEPT_LOGS + 1)]:
            path.unlink(missing_ok=True)
