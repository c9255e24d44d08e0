"""The journal of a job: notes, recoveries, each worker's last facts, progress in samples. Pure.

The job's controller writes it; the live table, the status and the summary read it. Times are in the
clock of ``now``, in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from potluck._core.wire.facts import MAX_FIGURE
from potluck._core.wire.worker_link import (
    Fact,
    JobRecord,
    JobState,
    RecoveryRecord,
    Samples,
    WorkerProgress,
)

WINDOW_S = 20.0
"""The rate is a mean over this time, waits and recoveries included."""
MIN_SPAN_S = 1.0
"""A shorter time gives no rate."""
_SPACING_S = 0.25


@dataclass(slots=True)
class SampleProgress:
    """The newest count of samples, and earlier counts as points (time, count) for the rate."""

    committed: int = 0
    total: int = 0
    _points: deque[tuple[float, int]] = field(default_factory=deque)

    def update(self, committed: int, total: int, now: float) -> None:
        """``committed`` samples of ``total`` count now. A lower count than before comes of another
        training, or of one that went on from an older checkpoint."""
        if total <= 0:
            return
        points = self._points
        if committed < self.committed or total != self.total:
            points.clear()
        self.committed, self.total = committed, total
        if len(points) > 1 and now - points[-2][0] < _SPACING_S:
            points.pop()
        points.append((now, committed))
        while len(points) > 2 and points[1][0] <= now - WINDOW_S:
            points.popleft()

    def samples(self, now: float) -> Samples | None:
        """For people and programs; None while nothing is known."""
        return Samples(self.committed, self.total, self._per_s(now)) if self.total else None

    def _per_s(self, now: float) -> float | None:
        """The mean rate. It falls while the next count comes later than usual."""
        if len(self._points) < 2:
            return None
        (first, start), (last, end) = self._points[0], self._points[-1]
        usual = (last - first) / (len(self._points) - 1)
        seconds = max(last, now - usual) - first
        return (end - start) / seconds if seconds >= MIN_SPAN_S else None


MAX_NOTES = 1000
MAX_FACTS = 256
MAX_RECORDED = 64
"""Of the recoveries, in the record for the next leader."""
_MAX_CAUSE = 4096
_MAX_RECORDED_CAUSE = 512
_LAST_WORDS = 30


@dataclass(frozen=True, slots=True)
class JournalNote:
    """One line for people. ``at`` is seconds since the job began."""

    at: float
    text: str


@dataclass(slots=True)
class Recovery:
    """From a loss to the next committed step.

    ``reformed_s`` until all remaining members were in the next group, ``recovered_s`` until a step
    was committed in it; both from the moment the loss was detected, None if it never came to it.
    ``step`` is that step, counted from 0; ``run_again`` if it had been begun before the loss.
    """

    workers: tuple[str, ...]
    cause: str
    detected: float
    epoch: int = 0
    reformed_s: float | None = None
    recovered_s: float | None = None
    step: int | None = None
    run_again: bool = False


@dataclass(slots=True)
class WorkerFacts:
    """What is known of one worker, restarts included. ``training`` numbers the loops that its
    script runs one after the other. ``samples`` counts what it computed itself. ``pid`` is its
    newest process, ``exit_code`` how the newest process that ended did, ``last_words`` are the
    newest lines of its stderr."""

    training: int = 0
    epoch: int = 0
    step: int = -1
    loss: float | None = None
    samples_per_s: float | None = None
    device: str = ""
    samples: SampleProgress = field(default_factory=SampleProgress)
    facts: dict[str, Fact] = field(default_factory=dict)
    pid: int = 0
    exit_code: int | None = None
    last_words: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_WORDS))

    def rate(self, now: float) -> float | None:
        """Its committed samples per second, measured as those of the whole job are, so that the
        workers' rates add up to it; else the rate that the script reports."""
        counted = self.samples.samples(now)
        return self.samples_per_s if counted is None else counted.per_s


class Journal:
    """What has happened in one job so far."""

    def __init__(self, workers: Sequence[str], now: float) -> None:
        self.began = now
        self.notes: list[JournalNote] = []
        self.recoveries: list[Recovery] = []
        self.workers = {name: WorkerFacts() for name in workers}
        self.epoch = 0
        self.step = -1
        self.loss: float | None = None
        self.sample_progress = SampleProgress()
        self._newest = (0, 0, -1)
        self._members: tuple[str, ...] = ()
        self._entered: set[str] = set()
        self._rejoining: dict[str, int] = {}
        self._interrupted = -1
        self._suspected: float | None = None

    def take_over(self, status: JobState, at: float) -> None:
        """Go on with the former leader's journal, from its ``status`` received ``at``."""
        record = status.record
        self.began = at - record.seconds
        self.notes = [
            JournalNote(when, text) for when, text in zip(record.times, status.events, strict=False)
        ]
        self.recoveries = [
            Recovery(
                each.workers,
                each.cause,
                self.began + each.detected,
                reformed_s=each.reformed_s,
                recovered_s=each.recovered_s,
                step=each.step,
                run_again=each.run_again,
            )
            for each in record.recoveries
        ]
        self.step, self.loss = status.step, status.loss
        if status.samples is not None:
            self.sample_progress.update(status.samples.committed, status.samples.total, at)

    def record(self, num_notes: int, now: float) -> JobRecord:
        """What ``take_over`` needs beside the last ``num_notes`` notes and the status."""
        return JobRecord(
            max(0.0, now - self.began),
            tuple(max(0.0, note.at) for note in self.notes[-num_notes:]),
            tuple(
                RecoveryRecord(
                    each.workers,
                    each.cause[:_MAX_RECORDED_CAUSE],
                    max(0.0, each.detected - self.began),
                    each.reformed_s,
                    each.recovered_s,
                    each.step,
                    each.run_again,
                )
                for each in self.recoveries[-MAX_RECORDED:]
            ),
        )

    @property
    def num_run_again(self) -> int:
        """How many steps were run again after a loss."""
        return sum(each.run_again for each in self.recoveries)

    def facts_of(self, worker: str) -> WorkerFacts:
        """The facts last reported by ``worker``; empty for a new one."""
        return self.workers.setdefault(worker, WorkerFacts())

    def started(self, worker: str) -> None:
        """A process of ``worker`` starts."""
        self.facts_of(worker).last_words.clear()

    def wrote(self, worker: str, line: str) -> None:
        """``worker`` wrote ``line`` to its stderr."""
        self.facts_of(worker).last_words.append(line)

    def note(self, text: str, now: float) -> None:
        self.notes.append(JournalNote(now - self.began, text))
        del self.notes[:-MAX_NOTES]

    @property
    def open_recovery(self) -> Recovery | None:
        """The last loss, while no step was committed since."""
        if self.recoveries and self.recoveries[-1].recovered_s is None:
            return self.recoveries[-1]
        return None

    def lost(self, worker: str, cause: str, now: float) -> None:
        """A member is out (or, if ``worker`` is empty, a group ended with nobody to blame).
        Several before the next committed step are one recovery. The group without ``worker`` may
        have been announced before."""
        recovery = self.open_recovery
        who = (worker,) if worker else ()
        if recovery is None:
            detected = now if self._suspected is None else self._suspected
            recovery = Recovery(who, cause, detected)
            if worker and self._members and worker not in self._members:
                recovery.epoch = self.epoch
                if self._entered >= set(self._members):
                    recovery.reformed_s = now - detected
            self.recoveries.append(recovery)
            del self.recoveries[:-MAX_NOTES]
        else:
            recovery.workers = (*recovery.workers, *who)[-MAX_NOTES:]
            recovery.cause = f"{recovery.cause}; {cause}"[:_MAX_CAUSE]
            recovery.reformed_s = None
        if worker:
            facts = self.facts_of(worker)
            facts.samples_per_s, facts.samples = None, SampleProgress()

    def reported(self, epoch: int, step: int, now: float) -> None:
        """A worker reported that its group failed in ``step``: the moment a loss is detected, if
        it was not known before."""
        self._interrupted = max(self._interrupted, step)
        if self._suspected is None and self.open_recovery is None and epoch == self.epoch:
            self._suspected = now

    def announced(self, epoch: int, members: tuple[str, ...], joined: tuple[str, ...]) -> None:
        """A new group. Workers that were in an earlier one come back."""
        if self.epoch:
            self._rejoining |= dict.fromkeys(joined, epoch)
        self._rejoining = {name: at for name, at in self._rejoining.items() if name in members}
        self.epoch, self._members, self._entered = epoch, members, set()
        recovery = self.open_recovery
        if (recovery is not None and not recovery.epoch) or (
            recovery is not None and recovery.reformed_s is None
        ):
            recovery.epoch = epoch

    def entered(self, worker: str, epoch: int, now: float) -> bool:
        """``worker`` is in the group of ``epoch``; whether with it all are, after a loss."""
        if epoch != self.epoch:
            return False
        self._entered.add(worker)
        recovery = self.open_recovery
        if recovery is None or recovery.epoch != epoch or recovery.reformed_s is not None:
            return False
        if self._entered >= set(self._members):
            recovery.reformed_s = now - recovery.detected
            return True
        return False

    def world_formed(self, now: float) -> str:
        """A fixed world runs again, with all its members: the end of the recovery, in words. Of the
        steps of such a script nothing is known."""
        recovery = self.recoveries[-1]
        assert recovery.reformed_s is not None
        recovery.recovered_s = recovery.reformed_s
        self._rejoining.clear()
        self._interrupted, self._suspected = -1, None
        count = f"{len(self._members)} worker{'s' if len(self._members) > 1 else ''}"
        text = f"{recovery.cause}, {count} started again in {recovery.reformed_s:.2f} s"
        self.note(text, now)
        return text

    def progress(self, report: WorkerProgress, now: float) -> list[JournalNote]:
        """A worker committed ``report.step``, or reported other facts; the notes that
        follow."""
        known = len(self.notes)
        self._take(report, now)
        return self.notes[known:]

    def _take(self, report: WorkerProgress, now: float) -> None:
        worker = report.worker
        facts = self.facts_of(worker)
        known = (facts.training, facts.epoch, facts.step)
        if report.epoch == facts.epoch and 0 <= report.step < facts.step:
            facts.training += 1
        newest = (facts.training, report.epoch, report.step)
        facts.epoch, facts.step = report.epoch, report.step
        facts.loss, facts.samples_per_s = report.loss, _figure(report.samples_per_s)
        if report.worker_samples:
            facts.samples.update(report.worker_samples, 1, now)  # of how many is not known
        facts.device = report.device or facts.device
        facts.facts = dict(list((facts.facts | report.facts).items())[:MAX_FACTS])
        if report.step < 0 or newest <= known:
            return
        if newest > self._newest:  # workers report one step at different times
            self._newest, self.step = newest, report.step
            self.loss = report.loss if report.loss is not None else self.loss
            self.sample_progress.update(report.committed_samples, report.total_samples, now)
        self._conclude_recovery(report, now)
        if self._rejoining.get(worker, report.epoch + 1) <= report.epoch:
            del self._rejoining[worker]
            self.note(f"worker {worker} rejoined at step {report.step - 1}", now)

    def _conclude_recovery(self, report: WorkerProgress, now: float) -> None:
        recovery = self.open_recovery
        if recovery is None or not recovery.epoch or report.epoch < recovery.epoch:
            return
        recovery.recovered_s = now - recovery.detected
        recovery.step = report.step - 1
        recovery.run_again = recovery.step == self._interrupted
        self._interrupted, self._suspected = -1, None
        parts = [recovery.cause]
        if recovery.reformed_s is not None:
            parts.append(f"re-formed in {recovery.reformed_s:.2f} s")
        if recovery.run_again:
            parts.append(f"step {recovery.step} run again")
        parts.append(f"training on after {recovery.recovered_s:.2f} s")
        self.note(", ".join(parts), now)


def lost_text(worker: str, why: str) -> str:
    """``worker 2 lost (killed by SIGKILL (9))``, from a reason that may begin with the worker."""
    return f"worker {worker} lost ({first_line(why).removeprefix(f'worker {worker} ')})"


def first_line(text: str) -> str:
    """The first line of ``text`` that is not empty."""
    return text.strip().splitlines()[0] if text.strip() else ""


def _figure(per_s: float | None) -> float | None:
    """``per_s`` if it is a figure that other nodes accept: a worker may report anything."""
    return per_s if per_s is not None and 0 <= per_s <= MAX_FIGURE else None
