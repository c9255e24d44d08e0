"""The logs of jobs on one node: what workers wrote, and notes, beside the history of each job.

A *source* is a worker, or a node that led the job (its notes). The node of a source gives each of
its lines a time that only rises (``at``) and a number; so a copy on another node knows what it has,
and a reader sees what is not kept any more. A source has files of ``SEGMENT_BYTES``, of which the
newest ``SEGMENTS`` are kept, fewer where a job has many workers.

Readers have a cursor, ``at`` of the last line of each source, and read as fast as they like: no
writer waits for them. The newest ``TAIL_BYTES`` of a job are read from memory. A line that the next
one replaces (a progress bar) is in memory only, until that comes.

``write`` returns at once: a thread writes the lines, in their order. A disk that is full costs
lines, not the job. Control characters are escaped before a line is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from potluck._core.background import Tasks, why
from potluck._core.cluster.home.keyfile import make_private
from potluck._core.printable import coloured
from potluck._core.waiting import Complaint
from potluck._core.wire.jobs import MAX_TEXT, End, LogLine
from potluck.errors import IdentityError

SEGMENT_BYTES = 1 << 20
SEGMENTS = 32
JOB_SEGMENTS = 512
"""Of all sources of a job; each has one at least."""
TAIL_BYTES = 256 << 10
PART_BYTES = 128 << 10
"""What a reader gets at once, about."""
MAX_UNWRITTEN = 4 << 20
MAX_SOURCES = 1024
"""Of a job: who its workers are is the leader's word."""
RESENT_BYTES = 2 << 20
"""Of the newest lines, when the link that they went over has ended."""
_MAX_FILES = 4096
_PAUSE_S = 0.02
_LOOK_S = 5.0
_CLOSE_S = 5.0
_EACH = 64
"""Bytes that a line takes beside its texts, about."""
_NOTHING = 0, -1

_encoder = msgspec.json.Encoder()
_lines = msgspec.json.Decoder(LogLine)

After = Mapping[str, int]
"""By source: the time of the last line that a reader has."""


@dataclass(slots=True)
class _Job:
    """What is in memory of the log of one job. ``newest`` has the last line of each source by time
    and number, ``dropped`` the time of the last line of each that is not in ``tail``, ``open`` the
    lines that the next of their source and stream replace."""

    newest: dict[str, tuple[int, int]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    tail: deque[LogLine] = field(default_factory=deque)
    tail_bytes: int = 0
    open: dict[tuple[str, str], LogLine] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class JobLog:
    """The logs in ``root``, by the keys of jobs (``history.key_of``); None keeps no files.
    ``on_note`` gets one line each time that writing begins to fail."""

    def __init__(self, root: Path | None, on_note: Callable[[str], None]) -> None:
        self._root = root
        self._complain = Complaint(lambda text: on_note(f"lines of job logs are lost: {text}"))
        self._jobs: dict[str, _Job] = {}
        self._unwritten: list[tuple[str, LogLine]] = []
        self._num_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._files: dict[Path, tuple[int, int]] = {}
        """By source: the number and size of its newest segment. Of the thread that writes."""

    @property
    def is_behind(self) -> bool:
        """Whether the disk is slower than what is written: workers here wait for it meanwhile."""
        return self._num_bytes > MAX_UNWRITTEN // 2

    # Writing.

    def add(
        self, key: str, source: str, stream: str, label: str, text: str, end: End = "\n"
    ) -> None:
        """Write a line of a ``source`` on this node."""
        at, number = self._job(key).newest.get(source, _NOTHING)
        at = max(at + 1, time.time_ns() // 1000)
        self.write(key, LogLine(at, number + (end != "\r"), source, stream, label, text, end))

    def write(self, key: str, line: LogLine) -> None:
        """Write a line that has its time, unless it is there."""
        job, source = self._job(key), line.source
        if line.at <= job.newest.get(source, _NOTHING)[0]:
            return
        if source not in job.newest and len(job.newest) >= MAX_SOURCES:
            self._complain(f"job {key.rpartition('.')[0]} has more than {MAX_SOURCES} sources")
            return
        line = msgspec.structs.replace(line, text=coloured(line.text)[:MAX_TEXT])
        job.newest[source] = line.at, line.number
        if line.end == "\r":
            job.open[source, line.stream] = line
        else:
            job.open.pop((source, line.stream), None)
            job.tail.append(line)
            job.tail_bytes += _size(line)
            while job.tail_bytes > TAIL_BYTES:
                old = job.tail.popleft()
                job.tail_bytes -= _size(old)
                job.dropped[old.source] = old.at
            self._to_disk(key, line)
        self.wake(key)

    def wake(self, key: str) -> None:
        """Whoever waits for a line of this job looks again."""
        if (job := self._jobs.get(key)) is not None:
            job.changed.set()
            job.changed = asyncio.Event()

    def forget(self, key: str) -> None:
        """The job is over: it is read from the disk from now on."""
        self.wake(key)
        self._jobs.pop(key, None)

    def _to_disk(self, key: str, line: LogLine) -> None:
        if self._root is None:
            return
        if self._num_bytes > MAX_UNWRITTEN:
            self._complain("the disk is too slow")
            return
        self._num_bytes += _size(line)
        self._unwritten.append((key, line))
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
            while self._unwritten:
                lines, self._unwritten = self._unwritten, []
                try:
                    await asyncio.to_thread(self._append, lines)
                except (OSError, IdentityError) as error:
                    self._complain(why(error))
                else:
                    self._complain.over()
                self._num_bytes = sum(_size(line) for _, line in self._unwritten)
        finally:
            self._writing = None

    def _append(self, lines: Iterable[tuple[str, LogLine]]) -> None:
        of_sources: dict[tuple[str, str], list[LogLine]] = {}
        for key, line in lines:
            of_sources.setdefault((key, line.source), []).append(line)
        if len(self._files) > _MAX_FILES:
            self._files.clear()  # they are looked for again
        for (key, source), each in of_sources.items():
            self._append_to(self._stem(key, source), each)

    def _append_to(self, stem: Path, lines: Iterable[LogLine]) -> None:
        make_private(stem.parent)
        if stem not in self._files:
            segments = _segments(stem)
            number = int(segments[-1].suffixes[-2][1:]) if segments else 0
            self._files[stem] = number, segments[-1].stat().st_size if segments else 0
        number, size = self._files[stem]
        for chunk in _chunked(lines, size):
            if size + len(chunk) > SEGMENT_BYTES and size:
                number, size = number + 1, 0
                self._rotate(stem)
            path = stem.with_name(f"{stem.name}.{number:08d}.log")
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with open(os.open(path, flags, 0o600), "ab") as file:
                size += file.write(chunk)
            self._files[stem] = number, size

    def _rotate(self, stem: Path) -> None:
        sources = {path.name.split(".")[0] for path in stem.parent.glob("*.log")}
        kept = max(1, min(SEGMENTS, JOB_SEGMENTS // max(1, len(sources))))
        for path in _segments(stem)[: -kept + 1 or None]:
            path.unlink(missing_ok=True)

    # Reading.

    async def read(
        self,
        key: str,
        after: After,
        *,
        since: int = 0,
        sources: Collection[str] = (),
        num_last: int = 0,
    ) -> tuple[list[LogLine], bool]:
        """The next lines for a reader who has those up to ``after``, of the other sources those up
        to ``since``; only of these ``sources`` (empty: of all). About ``PART_BYTES``; and whether
        there are more now. ``num_last``: these many lines instead, of those in memory."""
        job = self._jobs.get(key)
        if num_last:
            return ([] if job is None else list(job.tail)[-num_last:]), False
        lines: list[LogLine] = []
        if job is None or any(
            at > after.get(source, since)
            for source, at in job.dropped.items()
            if not sources or source in sources
        ):
            await self.written()
            order = key, dict(after), since, frozenset(sources)
            lines, has_more = await asyncio.to_thread(self._read, *order)
            if job is None or has_more:
                return lines, has_more
        newest = {**after, **{line.source: line.at for line in lines}}
        for line in (*job.tail, *job.open.values()):
            if line.at > newest.get(line.source, since) and (not sources or line.source in sources):
                lines.append(line)
        return lines, False

    async def changed(self, key: str, timeout_s: float) -> None:
        """Return when the job, which is to be forgotten some time, has a new line, or ``timeout_s``
        have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._job(key).changed.wait()

    def newest(self, key: str) -> tuple[tuple[str, int], ...]:
        """Each source, and the time of its last line."""
        job = self._jobs.get(key)
        return () if job is None else tuple((each, at) for each, (at, _) in job.newest.items())

    def held(self, key: str) -> dict[str, tuple[int, str]]:
        """By source: how many lines are in files, and the label of the newest."""
        found: dict[str, tuple[int, str]] = {}
        for stem in self._stems(key):
            segments = _segments(stem)
            first, last = next(_in(segments[0]), None), _last_of(segments)
            if first is not None and last is not None:
                found[last.source] = max(1, last.number - first.number + 1), last.label
        return found

    def _read(
        self, key: str, after: After, since: int, sources: Collection[str]
    ) -> tuple[list[LogLine], bool]:
        stems = self._stems(key)
        if sources:
            stems &= {self._stem(key, source) for source in sources}
        lines: list[LogLine] = []
        end: int | None = None
        """Where the first source that has more is cut: nothing that is later may come before."""
        for stem in stems:
            size = 0
            for line in _of_source(stem, after, since):
                size += _size(line)
                lines.append(line)
                if size > PART_BYTES:
                    end = line.at if end is None else min(end, line.at)
                    break
        lines.sort(key=lambda each: each.at)
        size = 0
        for index, line in enumerate(lines):
            size += _size(line)
            if line.at == end or size > PART_BYTES:
                return lines[: index + 1], True
        return lines, False

    def _job(self, key: str) -> _Job:
        """What is in memory of a job; of one that an earlier run of the agent knew, what is on
        disk of each source, too."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job()
            for stem in self._stems(key):
                if (last := _last_of(_segments(stem))) is not None:
                    job.newest[last.source] = last.at, last.number
                    job.dropped[last.source] = last.at
        return job

    def _stems(self, key: str) -> set[Path]:
        """What the names of the files of each source begin with."""
        paths = () if self._root is None else (self._root / key).glob("*.*.log")
        return {path.with_name(path.name.split(".")[0]) for path in paths}

    def _stem(self, key: str, source: str) -> Path:
        """That of one source. The names of workers come from the leader, and may be anything."""
        assert self._root is not None
        is_number = source.isascii() and source.isdigit() and len(source) < 10
        name = source if is_number else hashlib.sha256(source.encode()).hexdigest()[:20]
        return self._root / key / name


class LogPump:
    """Sends the lines of a job to another node, in their order, as soon as ``send(line)`` takes
    them: it returns False while there is no link, or the link is full. Only lines of which
    ``is_wanted(source)``."""

    def __init__(
        self,
        log: JobLog,
        key: str,
        send: Callable[[LogLine], bool],
        is_wanted: Callable[[str], bool] = lambda source: True,
    ) -> None:
        self._log = log
        self._key = key
        self._send = send
        self._is_wanted = is_wanted
        self._after: dict[str, int] = {}
        self._sent: deque[tuple[str, int, int]] = deque()
        """Source, the time that its line before had, size."""
        self._sent_bytes = 0
        self._num_again = 0
        self._tasks = Tasks()
        self._is_idle = asyncio.Event()
        self._tasks.start(self._run())

    async def _run(self) -> None:
        while True:
            lines, _ = await self._log.read(self._key, self._after)
            num_again = self._num_again
            for line in lines:
                while self._is_wanted(line.source) and not self._send(line):
                    await asyncio.sleep(_PAUSE_S)
                    if num_again != self._num_again:
                        break
                if num_again != self._num_again:
                    break  # earlier lines come first
                self._has_sent(line)
            if not lines:
                self._is_idle.set()
                await self._log.changed(self._key, _LOOK_S)
            self._is_idle.clear()

    def _has_sent(self, line: LogLine) -> None:
        self._sent.append((line.source, self._after.get(line.source, 0), _size(line)))
        self._sent_bytes += _size(line)
        self._after[line.source] = line.at
        while self._sent_bytes > RESENT_BYTES:
            self._sent_bytes -= self._sent.popleft()[2]

    def again(self) -> None:
        """What was sent last may be lost: send it once more. The receiver knows what it has."""
        while self._sent:
            source, before, _ = self._sent.pop()
            self._after[source] = min(before, self._after[source])
        self._sent_bytes = 0
        self._num_again += 1
        self._log.wake(self._key)

    async def sent(self, timeout_s: float) -> None:
        """Return when all lines so far were sent, or ``timeout_s`` have passed."""
        self._is_idle.clear()
        self._log.wake(self._key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()

    def close(self) -> None:
        """Send nothing more."""
        self._tasks.cancel()
        self._is_idle.set()


def _size(line: LogLine) -> int:
    return len(line.text) + 2 * (len(line.label) + len(line.source)) + _EACH


def _segments(stem: Path) -> list[Path]:
    """The files of one source, the oldest first."""
    return sorted(stem.parent.glob(f"{stem.name}.*.log"))


def _chunked(lines: Iterable[LogLine], size: int) -> Iterator[bytes]:
    """``lines`` as they are stored, cut where a segment, which has ``size`` bytes so far, is
    full."""
    chunk = bytearray()
    for line in lines:
        data = _encoder.encode(line) + b"\n"
        if chunk and size + len(chunk) + len(data) > SEGMENT_BYTES:
            yield bytes(chunk)
            chunk, size = bytearray(), 0
        chunk += data
    if chunk:
        yield bytes(chunk)


def _in(segment: Path, offset: int = 0) -> Iterator[LogLine]:
    """The lines of a file, from ``offset`` on. What is no line (a disk that was full cut it) is
    left out."""
    try:
        with segment.open("rb") as file:
            file.seek(offset)
            for data in file:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    yield _lines.decode(data)
    except FileNotFoundError:  # it was just rotated away
        return


def _of_source(stem: Path, after: After, since: int) -> Iterator[LogLine]:
    """The lines of one source that a reader does not have."""
    segments = _segments(stem)
    firsts = [next(_in(segment), None) for segment in segments]
    for index, segment in enumerate(segments):
        following = firsts[index + 1] if index + 1 < len(segments) else None
        if following is not None and following.at <= after.get(following.source, since):
            continue
        for line in _in(segment):
            if line.at > after.get(line.source, since):
                yield line


def _last_of(segments: Iterable[Path]) -> LogLine | None:
    for segment in reversed(list(segments)):
        with contextlib.suppress(FileNotFoundError):
            start = max(0, segment.stat().st_size - 256 * 1024)
            if found := deque(_in(segment, start), maxlen=1):
                return found[0]
    return None
