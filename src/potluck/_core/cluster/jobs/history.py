"""The history of jobs on one node: what ran, for whom, where, how it ended, and where results lie.

Each job has its ``entry`` in its folder (``cluster/code_store/job_folders.py``). The nodes that run
a job, its starter and its leader write it as the job goes on. Before the leader lets go of a job,
two machines have its end on disk, if there are two (``keeping.py``). So who asks later asks all
nodes, and takes the entry that is furthest (``merged``).

Bounded: ``KEPT_JOBS``, ``KEPT_DAYS``, and ``KEPT_LOG_BYTES`` of their logs (``log.py``), which are
in the same folders. The oldest of the starter with the most jobs goes first, so that a member with
many jobs displaces its own. Results stay for their own time. An end is written once: no leader
writes over it.
A private agent has no history.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from potluck._core.background import Tasks, why
from potluck._core.cluster.code_store.job_folders import jobs_in, key_of, newest, remove_empty
from potluck._core.cluster.home.keyfile import replace_private
from potluck._core.cluster.jobs.summary import Summary, encode_summary
from potluck._core.waiting import Complaint
from potluck._core.wire import jobs
from potluck._core.wire.peers import Written
from potluck.errors import ConfigurationError, PotluckError

KEPT_JOBS = 256
KEPT_DAYS = 90.0
KEPT_LOG_BYTES = 2 << 30
_DAY_S = 86400.0
_ENTRY = "entry"
_WHAT = "the history of jobs"
_PHASES = get_args(jobs.Phase)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One job. ``machine`` is the name of its starter; ``machines`` are nodes that run it, with
    their names. ``ended`` is Unix time; ``has_files``: what it left was not removed since."""

    spec: jobs.JobSpec
    machine: str
    phase: jobs.Phase = "placed"
    machines: tuple[tuple[str, str], ...] = ()
    ended: float = 0.0
    summary: Summary | None = None
    has_files: bool = True

    @property
    def key(self) -> str:
        """The name of its folder."""
        return key_of(self.spec.job, self.spec.starter)

    def info(self, *, is_whole: bool = False) -> jobs.JobInfo:
        """What others are told; with the summary if it ``is_whole``."""
        spec, summary = self.spec, self.summary
        info = jobs.JobInfo(
            job=spec.job,
            starter=spec.starter,
            machine=self.machine[:256],
            script=(spec.module or spec.script)[-256:],
            started=spec.started,
            phase=self.phase,
            machines=tuple(name[:256] for _, name in self.machines[:16]),
            package=spec.package or b"",
            plan=spec.plan or b"",
            commit=spec.commit,
            ended=self.ended,
        )
        if summary is None:
            return info
        return msgspec.structs.replace(
            info,
            seconds=min(max(summary.seconds, 0.0), 1e12),
            exit_code=_clipped(summary.exit_code),
            exits=tuple(
                (each.worker[:256], None if each.exit is None else _clipped(each.exit))
                for each in summary.workers[:64]
            ),
            problem=summary.problems[0][:512] if summary.problems else "",
            summary=encode_summary(summary) if is_whole else b"",
        )


def _clipped(code: int) -> int:
    return max(-(1 << 31), min(code, 1 << 32))


class JobHistory:
    """The history in ``home``; None, that of a private agent, keeps nothing. ``on_note`` gets a
    line each time that writing begins to fail: the job goes on, and this agent tells of it for as
    long as it lives."""

    def __init__(self, home: Path | None, on_note: Callable[[str], None] = lambda text: None):
        self.root = None if home is None else jobs_in(home)
        self._complain = Complaint(on_note)
        self._live: dict[str, Entry] = {}
        """Of the jobs that run, and those whose entries could not be written."""
        self._writing = Tasks()
        self._lock = asyncio.Lock()

    def reached(
        self,
        spec: jobs.JobSpec,
        machine: str,
        machines: Iterable[tuple[str, str]],
        phase: jobs.Phase,
    ) -> None:
        """The job of ``spec`` has come to ``phase``, with workers on ``machines``. Written soon."""
        if self.root is None:
            return
        old = self._live.get(key_of(spec.job, spec.starter))
        new = Entry(spec=spec, machine=machine, phase=phase, machines=tuple(machines))
        if old is not None and not _is_further(new.phase, old.phase):
            new = msgspec.structs.replace(new, phase=old.phase)
        if new != old and (old is None or old.phase != "ended"):
            self._live[new.key] = new
            self._writing.start(self._write_soon(new))

    def let_go(self, spec: jobs.JobSpec, *, is_over: bool = True) -> None:
        """This node has the job of ``spec`` no more. If it was not told of an end and nothing ran
        here, it forgets the job: maybe that never began. Not, if the job maybe is not over: then
        what is on disk tells of it."""
        live = self._live.get(key_of(spec.job, spec.starter))
        if live is not None and live.phase != "ended":
            del self._live[live.key]
            if is_over and live.phase in ("queued", "placed"):
                self._writing.start(self._forget(live))

    async def end(
        self,
        spec: jobs.JobSpec,
        machine: str,
        machines: Iterable[tuple[str, str]],
        summary: Summary,
        when: float,
    ) -> None:
        """The job of ``spec`` was over at ``when``; on disk when this returns. IdentityError if it
        can't be written."""
        if self.root is None:
            return
        known = await self.entry(spec.job, spec.starter)
        if known is None or known.phase != "ended":
            known = Entry(
                spec=spec,
                machine=machine,
                phase="ended",
                machines=tuple(machines),
                ended=when,
                summary=summary,
            )
        self._live[known.key] = known
        await self._write(known)
        self._live.pop(known.key, None)

    async def found(self, prefix: str = "") -> list[Entry]:
        """The jobs whose ids begin with ``prefix``, the newest first."""
        return await asyncio.to_thread(self._found, prefix)

    async def entry(self, job: str, starter: str) -> Entry | None:
        """What is known of one job."""
        key = key_of(job, starter)
        return self._live.get(key) or await asyncio.to_thread(self._read, key)

    async def answer(self, request: jobs.HistoryRequest) -> jobs.History:
        """The response to ``request`` of any member."""
        found = await self.found(request.job)
        if request.starter:
            one = [
                each.info(is_whole=True)
                for each in found
                if (each.spec.job, each.spec.starter) == (request.job, request.starter)
            ]
            return jobs.History(tuple(one))
        return jobs.History(tuple(each.info() for each in found[: jobs.MAX_LISTED]))

    def left_by(self, starter: str) -> list[tuple[str, tuple[Written, ...]]]:
        """Each job of ``starter`` that left files, the newest first, and on which machines."""
        return [
            (each.spec.job, each.summary.written)
            for each in self._found("")
            if each.spec.starter == starter and each.has_files
            if each.summary is not None and each.summary.written
        ]

    def files_removed(self, job: str, starter: str) -> None:
        """The files of ``job`` were deleted."""
        for each in self._found(job):
            if (each.spec.job, each.spec.starter) == (job, starter):
                self._put(msgspec.structs.replace(each, has_files=False))

    async def close(self) -> None:
        """All is on disk."""
        await self._writing.ended()

    # On disk.

    async def _write_soon(self, entry: Entry) -> None:
        with contextlib.suppress(PotluckError):
            await self._write(entry)

    async def _write(self, entry: Entry) -> None:
        try:
            async with self._lock:  # in order
                await asyncio.to_thread(self._put, entry)
                await asyncio.to_thread(self._prune, time.time())
        except (PotluckError, OSError) as error:
            self._complain(f"{_WHAT} can't be kept: {why(error)}")
            raise
        self._complain.over()

    async def _forget(self, entry: Entry) -> None:
        async with self._lock:
            known = await asyncio.to_thread(self._read, entry.key)
            if known is not None and known.phase in ("queued", "placed"):
                await asyncio.to_thread(self._remove, known)

    def _remove(self, entry: Entry) -> None:
        assert self.root is not None
        folder = self.root / entry.key
        for path in (folder / _ENTRY, *folder.glob("*.log")):
            path.unlink(missing_ok=True)
        remove_empty(folder)

    def _put(self, entry: Entry) -> None:
        assert self.root is not None
        old = self._read(entry.key)
        if old is not None and _is_further(old.phase, entry.phase):
            return  # of a job that is over, and was ordered again
        replace_private(self.root / entry.key / _ENTRY, _WHAT, msgspec.json.encode(entry))

    def _read(self, key: str) -> Entry | None:
        if self.root is None:
            return None
        try:
            return msgspec.json.decode((self.root / key / _ENTRY).read_bytes(), type=Entry)
        except (OSError, msgspec.MsgspecError):
            return None

    def _found(self, prefix: str) -> list[Entry]:
        entries = {each.key: each for each in self._on_disk()} | dict(self._live)
        found = [each for each in entries.values() if each.spec.job.startswith(prefix)]
        return sorted(found, key=lambda each: -each.spec.started)

    def _on_disk(self) -> Iterator[Entry]:
        folders = self.root.iterdir() if self.root is not None and self.root.is_dir() else ()
        for folder in folders:
            if (entry := self._read(folder.name)) is not None:
                yield entry

    def _prune(self, now: float) -> None:
        kept = [e for e in self._on_disk() if e.phase == "ended" or e.key not in self._live]
        assert self.root is not None
        written = {e.key: (self.root / e.key / _ENTRY).stat().st_mtime for e in kept}
        kept.sort(key=lambda each: (written[each.key], each.ended))
        for each in _to_forget(kept, written, now):
            self._remove(each)
        num_bytes = 0
        for folder in newest(self.root):
            logs = [(path, path.stat().st_size) for path in folder.glob("*.log")]
            num_bytes += sum(size for _, size in logs)
            if num_bytes > KEPT_LOG_BYTES and folder.name not in self._live:
                for path, _ in logs:
                    path.unlink(missing_ok=True)


def _to_forget(
    oldest_first: Sequence[Entry], written: Mapping[str, float], now: float
) -> list[Entry]:
    """The entries that are kept no longer: the aged, then the oldest of who has most. By when they
    were ``written`` here, by key: other times are what members told."""
    left = list(oldest_first)
    old = [each for each in left if now - written[each.key] > KEPT_DAYS * _DAY_S]
    left = [each for each in left if each not in old]
    counts = Counter(each.spec.starter for each in left)
    while counts.total() > KEPT_JOBS:
        [(most, _)] = counts.most_common(1)
        first = next(each for each in left if each.spec.starter == most)
        left.remove(first)
        old.append(first)
        counts[most] -= 1
    return old


def _is_further(phase: jobs.Phase, other: jobs.Phase) -> bool:
    return _PHASES.index(phase) > _PHASES.index(other)


def merged(answers: Iterable[jobs.JobInfo]) -> list[jobs.JobInfo]:
    """One entry of each job, of all that nodes told: the one that is furthest, and has most to say.
    Newest first."""
    best: dict[tuple[str, str], jobs.JobInfo] = {}
    for each in answers:
        known = best.setdefault((each.job, each.starter), each)
        if _how_much(each) > _how_much(known):
            best[each.job, each.starter] = each
    return sorted(best.values(), key=lambda each: -each.started)


def _how_much(info: jobs.JobInfo) -> tuple[int, int, bool]:
    return _PHASES.index(info.phase), len(info.machines), bool(info.problem)


def one_job(text: str, found: Sequence[jobs.JobInfo]) -> jobs.JobInfo:
    """The job that ``text`` names: its id, or the beginning of one. ConfigurationError if there is
    none, or several."""
    whole = [each for each in found if each.job == text]
    begun = whole or [each for each in found if text and each.job.startswith(text)]
    if not begun:
        raise ConfigurationError(
            f"no machine that is there knows a job {text!r}; `potluck jobs` lists them"
        )
    if len(begun) > 1:
        names = ", ".join(f"{each.job} (of {each.machine})" for each in begun[:8])
        more = f" and {len(begun) - 8} more" if len(begun) > 8 else ""
        raise ConfigurationError(
            f"{text!r} is the beginning of {len(begun)} jobs: {names}{more}; write more of the one "
            "that you mean"
        )
    return begun[0]
