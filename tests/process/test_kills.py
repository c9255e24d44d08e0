"""Workers killed and stopped by the operating system while they train: who notices, and how fast.

The figures are printed (``pytest -s``) and kept in docs/reliability.md. What is asserted about
time leaves room for a busy machine, except in the long tests; what is asserted about sums is exact.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.training.sampler import Schedule
from support.commands import run_command
from support.notes import Notebook

SCRIPT = Path(__file__).parent / "scripts" / "elastic_regression.py"
SCHEDULE = Schedule(num_samples=64, batch_size=8, epochs=1_000_000, seed=3)
NUM_WORKERS = 4
WIDTH = 500_000
"""Elements of the all-reduced gradient (4 MB): most of a step is spent in the all-reduce."""
SOON_S = 15.0
"""Half of the deadline of an operation: a loss that is noticed earlier was not waited for."""
PEER_TIMEOUT_S = 5.0
"""For the stopped worker: all others make each call well before this deadline."""


def what_was_committed(num_steps: int) -> int:
    """The sum of all samples of the first ``num_steps`` steps, each counted once."""
    total = committed = 0
    for _ in range(num_steps):
        batch = SCHEDULE.batch(committed)
        total += int(SCHEDULE.share(batch, 0, 1).indices.sum())
        committed += batch.size
    return total


class Training:
    """A running job and its notebook."""

    def __init__(self, folder: Path, *options: str, checkpoint: Path | None = None) -> None:
        self.notes = Notebook(folder / "notes")
        self.command = run_command(
            "--workers",
            str(NUM_WORKERS),
            *options,
            str(SCRIPT),
            str(self.notes.folder),
            str(WIDTH),
            *([str(checkpoint)] if checkpoint else []),
        )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            print("\n".join(self.command.lines[-40:]))
            for pid in self.notes.pids():
                print(*self.notes.of(pid)[-4:], sep="\n")
        self.command.__exit__(None, None, None)

    def wait_until_full(self, since: float = 0.0) -> None:
        """All workers commit together, twice."""

        def full() -> bool:
            commits = self.notes.all("commit", since)
            return sum(note.facts[1] == str(NUM_WORKERS) for note in commits) >= 2 * NUM_WORKERS

        self.notes.wait_for(f"{NUM_WORKERS} workers to commit together", full)

    @contextlib.contextmanager
    def slowly(self, how: str = "slow") -> Iterator[None]:
        """Let each step take longer (``how``: slow, slower): nothing is measured, and others need
        the processors."""
        slow = self.notes.folder / how
        slow.touch()
        try:
            yield
        finally:
            slow.unlink()

    def alive(self) -> list[int]:
        """The processes in the newest group, in rank order."""
        steps = self.notes.all("step", time.monotonic() - 10.0)
        epoch = max(int(note.facts[2]) for note in steps)
        ranks = {int(note.facts[1]): note.pid for note in steps if int(note.facts[2]) == epoch}
        return [ranks[rank] for rank in sorted(ranks)]

    def finish(self) -> None:
        (self.notes.folder / "stop").touch()
        assert self.command.finish() == 0, self.command.text

    def check_the_sums(self) -> int:
        """Every sample counted once, all workers equal; the number of steps."""
        ends = self.notes.all("end")
        assert len(ends) == NUM_WORKERS
        assert len({note.facts for note in ends}) == 1, ends
        num_steps, counted = int(ends[0].facts[0]), int(ends[0].facts[1])
        assert counted == what_was_committed(num_steps)
        return num_steps


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("num_kills", "detected_s", "recovered_s"),
    [(6, SOON_S, SOON_S), pytest.param(50, 2.0, 5.0, marks=pytest.mark.long)],
)
def test_kills_at_random_moments_cost_at_most_one_repeated_step_each(
    num_kills: int, detected_s: float, recovered_s: float, tmp_path: Path
) -> None:
    seed = 20260117
    chance = random.Random(seed)
    detections: list[float] = []
    recoveries: list[float] = []
    with Training(tmp_path, "--max-restarts", str(num_kills)) as training:
        notes = training.notes
        since = 0.0
        for kill in range(num_kills):
            with training.slowly():  # a worker starts meanwhile
                training.wait_until_full(since)
            training.wait_until_full(time.monotonic())
            pids = training.alive()
            victim = chance.choice(pids)
            survivors = set(pids) - {victim}
            # A moment within some step: most of its time is an all-reduce under way.
            moment = time.monotonic() + chance.uniform(0.0, 0.05)
            notes.wait_for("the moment", lambda at=moment: time.monotonic() >= at)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)

            def all_commit(killed: float = killed, survivors: set[int] = survivors) -> bool:
                lost = {n.pid: n.at for n in notes.all("lost", killed)}
                return survivors <= {
                    note.pid
                    for note in notes.all("commit", killed)
                    if note.at > lost.get(note.pid, float("inf"))
                }

            notes.wait_for(f"commits after kill {kill} (seed {seed})", all_commit)
            for pid in survivors:
                after = [note for note in notes.of(pid) if note.at >= killed]
                lost = next(note for note in after if note.kind == "lost")
                detections.append(lost.at - killed)
                next_commit = next(n for n in after if n.kind == "commit" and n.at > lost.at)
                recoveries.append(next_commit.at - killed)
            since = killed
        training.wait_until_full(since)
        training.finish()
        num_steps = training.check_the_sums()
    for pid in notes.pids():
        check_no_step_is_lost(notes, pid)
    print(
        f"\n{num_kills} kills in {num_steps} steps, seed {seed}: "
        f"detected after {describe(detections)}, committed again after {describe(recoveries)}"
    )
    assert max(detections) < detected_s
    assert max(recoveries) < recovered_s


def check_no_step_is_lost(notes: Notebook, pid: int) -> None:
    """What one process committed has no gaps; each loss made it begin at most one step again."""
    commits = [int(note.facts[0]) for note in notes.of(pid) if note.kind == "commit"]
    if commits:
        assert commits == list(range(commits[0], commits[0] + len(commits)))
    begun = [note.facts[0] for note in notes.of(pid) if note.kind == "step"]
    losses = sum(note.kind == "lost" for note in notes.of(pid))
    assert len(begun) - len(set(begun)) <= losses


def describe(seconds: list[float]) -> str:
    return (
        f"{statistics.median(seconds) * 1000:.0f} ms (median), {max(seconds) * 1000:.0f} ms (most)"
    )


@pytest.mark.timeout(200)
def test_a_stopped_worker_is_evicted_and_comes_back(tmp_path: Path) -> None:
    """SIGSTOP for 30 s: its group waits no longer than the deadline of an operation."""
    with Training(tmp_path, "--peer-timeout", str(PEER_TIMEOUT_S)) as training:
        notes = training.notes
        training.wait_until_full()
        victim = training.alive()[1]
        stopped = time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        try:

            def three_go_on() -> bool:
                commits = notes.all("commit", stopped)
                return len({note.pid for note in commits if note.facts[1] == "3"}) == 3

            notes.wait_for("the other three to go on", three_go_on)
            evicted = notes.all("lost", stopped)[0].at - stopped
            again = min(note.at for note in notes.all("commit", stopped) if note.facts[1] == "3")
            until = stopped + 30.0
            with training.slowly("slower"):  # nothing is expected
                notes.wait_for("30 s to pass", lambda: time.monotonic() >= until)
            before = training.alive()
        finally:
            os.kill(victim, signal.SIGCONT)
        resumed = time.monotonic()
        training.wait_until_full(resumed)
        back = min(
            note.at for note in notes.of(victim) if note.kind == "commit" and note.at > resumed
        )
        training.finish()
        training.check_the_sums()
    assert victim not in before
    print(
        f"\nstopped worker: noticed after {evicted:.2f} s, others commit after "
        f"{again - stopped:.2f} s, back {back - resumed:.2f} s after SIGCONT"
    )
    assert evicted < 2 * PEER_TIMEOUT_S


def test_when_all_are_killed_training_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    with Training(tmp_path, checkpoint=tmp_path / "checkpoints") as training:
        notes = training.notes
        notes.wait_for("25 steps", lambda: any(int(n.facts[0]) >= 25 for n in notes.all("commit")))
        pids = training.alive()
        # Stopped first: none trains on, maybe with a new process, when some are killed already.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
            killed = time.monotonic()
        before = max(
            int(note.facts[0]) for pid in pids for note in notes.of(pid) if note.kind == "commit"
        )
        training.wait_until_full(killed)
        again = next(note for note in notes.all("commit", killed) if note.pid not in pids)
        training.finish()
        training.check_the_sums()
    resumed = int(again.facts[0])
    print(
        f"\nall killed after step {before}: training again {again.at - killed:.2f} s later, "
        f"at {resumed}"
    )
    assert resumed <= before + 1
    assert before - resumed <= 10
    assert "resumed from the checkpoint" in training.command.text
