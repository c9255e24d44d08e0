"""How a job ended: what the workers reported, what was survived, and whether all is well. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from potluck._core.cluster.jobs.groups.roster import State, name_exit
from potluck._core.cluster.jobs.journal import Journal
from potluck._core.wire.jobs import MAX_SUMMARY
from potluck._core.wire.results import Written
from potluck._core.wire.worker_link import Fact, Samples

HASH = "parameter_hash"
_COMMITTED = "committed_steps"
_AGAIN = "steps_run_again"
_LAST = 500
_TOLD_ELSEWHERE = {HASH, _COMMITTED, _AGAIN, "recoveries"}

Missing = Callable[[str, str], str]
"""``missing(worker, module)``: why an import failed there, in a sentence."""


class WorkerSummary(msgspec.Struct, frozen=True):
    """``exit`` is None for a worker that never ran to an end; ``finished``: it said it was done."""

    worker: str
    finished: bool
    exit: int | None
    restarts: int
    parameter_hash: str | None
    facts: dict[str, Fact]


class RecoverySummary(msgspec.Struct, frozen=True):
    """Seconds from the moment the loss was detected; None if it never came to it."""

    workers: tuple[str, ...]
    cause: str
    reformed_s: float | None
    recovered_s: float | None
    step: int | None
    run_again: bool


class Summary(msgspec.Struct, frozen=True):
    """What ``potluck run --json`` writes. ``version`` rises when a field changes its meaning.

    ``hashes_equal`` is None when no worker reported a parameter hash. ``problems`` are sentences;
    ``exit_code`` is 0 exactly if there are none. ``samples`` is None where the script told of none.
    ``world_restarts``: how often all workers of a script that is not elastic were started again.
    ``written``: the files that workers left on each machine (``potluck fetch``).
    """

    job: str
    script: str
    exit_code: int
    seconds: float
    committed_steps: int
    steps_run_again: int
    facts: dict[str, Fact]
    hashes_equal: bool | None
    workers: tuple[WorkerSummary, ...]
    recoveries: tuple[RecoverySummary, ...]
    problems: tuple[str, ...]
    events: tuple[str, ...]
    version: int = 1
    samples: Samples | None = None
    world_restarts: int = 0
    written: tuple[Written, ...] = ()


def summarize(
    *,
    job: str,
    script: str,
    state: State,
    journal: Journal,
    unfired: Sequence[str],
    missing: Missing,
    called: Callable[[str], str],
    written: Sequence[Written],
    now: float,
) -> Summary:
    """The summary of a job that is over. ``unfired`` are ordered faults that never happened."""
    workers = tuple(
        WorkerSummary(
            worker=worker.name,
            finished=worker.finished,
            exit=journal.facts_of(worker.name).exit_code,
            restarts=worker.attempt,
            parameter_hash=_text(journal.facts_of(worker.name).facts.get(HASH)),
            facts=dict(journal.facts_of(worker.name).facts),
        )
        for worker in state.workers
    )
    hashes = {w.parameter_hash for w in workers if w.finished and w.parameter_hash is not None}
    problems = list(_failures(state, journal, missing, called))
    if len(hashes) > 1:
        problems.append("the workers ended with different parameters")
    problems += [f"the fault {fault!r} never happened" for fault in unfired]
    return Summary(
        job=job,
        script=script,
        exit_code=state.exit_code or (1 if problems else 0),
        seconds=now - journal.began,
        committed_steps=max([journal.step, 0, *_numbers(workers, _COMMITTED)]),
        steps_run_again=max([0, journal.num_run_again, *_numbers(workers, _AGAIN)]),
        facts=_common_facts(workers),
        hashes_equal=len(hashes) == 1 if hashes else None,
        workers=workers,
        recoveries=tuple(
            RecoverySummary(r.workers, r.cause, r.reformed_s, r.recovered_s, r.step, r.run_again)
            for r in journal.recoveries
        ),
        problems=tuple(problems),
        events=tuple(f"{note.at:.1f} s: {note.text}" for note in journal.notes),
        samples=journal.sample_progress.samples(now),
        world_restarts=state.world.number,
        written=tuple(written),
    )


def encode_summary(summary: Summary) -> bytes:
    """As JSON, short enough for a message."""
    while len(data := msgspec.json.encode(summary)) > MAX_SUMMARY and summary.events:
        kept = summary.events[len(summary.events) // 2 + 1 :]
        summary = msgspec.structs.replace(summary, events=kept)
    return data


def explain(lines: Sequence[str], missing: Callable[[str], str]) -> str | None:
    """What the end of a traceback means, in one sentence with what to do; None if unknown.
    ``missing(module)`` is the sentence about an import that failed."""
    for line in reversed(lines):
        module = re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", line)
        if module is not None:
            return missing(module[1].split(".")[0])
        if re.match(r"EOFError: EOF when reading a line|(bdb\.)?BdbQuit\b", line):
            return (
                "input() and breakpoint() need a terminal, and only a single worker has one: on a "
                "machine where no `potluck up` runs, potluck run --workers 1 SCRIPT on a terminal; "
                "anywhere, python SCRIPT"
            )
        told = re.match(r"potluck\.errors\.\w+: (.+)", line)
        if told is not None:
            return told[1]
    return None


def _failures(
    state: State, journal: Journal, missing: Missing, called: Callable[[str], str]
) -> Sequence[str]:
    if state.interrupted:
        return [state.stopping]
    failure = state.failure
    if failure is None:
        return []
    last_words = journal.facts_of(failure.worker).last_words
    said = explain(last_words, lambda module: missing(failure.worker, module))
    text, where = failure.text, called(failure.worker)
    if where:
        name = f"worker {failure.worker}"
        text = re.sub(rf"^{re.escape(name)}(?= )", lambda found: f"{name} on {where}", text)
    last = next((line.strip() for line in reversed(last_words) if line.strip()), "")
    if said is None and last and re.search(r"exited with code \d+$", text):
        said = f"it said last: {last[:_LAST]}"  # of sys.exit("why"), for example
    if failure.code is not None and "exited" not in text and "killed" not in text:
        code = failure.code if failure.code <= 128 else 128 - failure.code
        text += f" ({name_exit(code)})"
    return [text if said is None or said in text else f"{text}: {said}"]


def _common_facts(workers: Sequence[WorkerSummary]) -> dict[str, Fact]:
    """One value of each fact: the one of the first worker that has finished and reported it."""
    facts: dict[str, Fact] = {}
    for worker in sorted(workers, key=lambda each: not each.finished):
        for name, value in worker.facts.items():
            if name not in _TOLD_ELSEWHERE:
                facts.setdefault(name, value)
    return facts


def _numbers(workers: Sequence[WorkerSummary], name: str) -> list[int]:
    values = (worker.facts.get(name) for worker in workers)
    return [int(value) for value in values if isinstance(value, int | float)]


def _text(value: Fact | None) -> str | None:
    return None if value is None else str(value)
