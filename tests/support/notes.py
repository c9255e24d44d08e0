"""What worker processes note down, one file each, with a clock that all of a host share.

A line is ``<time.monotonic()> <kind> <facts...>``. Tests that kill processes read them: a killed
process can't report, but what it wrote stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Note:
    at: float
    pid: int
    kind: str
    facts: tuple[str, ...]


class Notebook:
    """All notes in one folder. Files are read once: a look costs what is new in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._read: dict[int, int] = {}
        self._notes: dict[int, list[Note]] = {}

    def of(self, pid: int) -> list[Note]:
        """The notes of one process; a line that is only half written yet is left out."""
        notes = self._notes.setdefault(pid, [])
        path = self.folder / str(pid)
        done = self._read.get(pid, 0)
        if path.stat().st_size > done:
            with path.open("rb") as file:
                file.seek(done)
                fresh = file.read()
            whole = fresh[: fresh.rfind(b"\n") + 1]
            self._read[pid] = done + len(whole)
            for line in whole.decode().splitlines():
                at, kind, *facts = line.split(" ")
                notes.append(Note(float(at), pid, kind, tuple(facts)))
        return notes

    def pids(self) -> list[int]:
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]

    def all(self, kind: str, since: float = 0.0) -> list[Note]:
        """Notes of one kind from all processes, in the order of time."""
        found = []
        for pid in self.pids():
            for note in reversed(self.of(pid)):
                if note.at < since:
                    break
                if note.kind == kind:
                    found.append(note)
        return sorted(found, key=lambda note: note.at)

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = 150.0) -> None:
        """Return once ``condition()`` holds; AssertionError naming ``what`` if it does not."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                raise AssertionError(f"waited {timeout_s} s for {what}")
            time.sleep(0.005)
