"""The state of a job for people: its status while it runs, its summary at the end. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import msgspec

from potluck._core.cluster.jobs.groups.roster import EXPECTED, Phase, State, WorkerState, name_exit
from potluck._core.cluster.jobs.journal import Journal
from potluck._core.wire import jobs, worker_link
from potluck._core.wire.format import decoded
from potluck._core.wire.jobs import MAX_SUMMARY
from potluck._core.wire.peers import Written
from potluck._core.wire.worker_link import Fact, Samples

HASH = "parameter_hash"
_COMMITTED = "committed_steps"
_AGAIN = "steps_run_again"
_LAST = 500
_IN_OTHER_FIELDS = {HASH, _COMMITTED, _AGAIN, "recoveries"}

Missing = Callable[[str, str], str]
"""``missing(worker, module)``: why an import failed there, in a sentence."""


class WorkerSummary(msgspec.Struct, frozen=True):
    """``exit`` is None for a worker that never ran to an end; ``finished``: it reported that it was
    done."""

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
    ``exit_code`` is 0 exactly if there are none. ``samples`` is None where the script reported
    none. ``world_restarts``: how often all workers of a script that is not elastic were started
    again. ``written``: the files that workers left on each machine (``potluck fetch``)."""

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


_summaries = msgspec.json.Decoder(Summary)


def encode_summary(summary: Summary) -> bytes:
    """As JSON, short enough for a message. JSON has no NaN and no infinity: such facts become
    text."""
    workers = tuple(
        msgspec.structs.replace(each, facts=_finite(each.facts)) for each in summary.workers
    )
    summary = msgspec.structs.replace(summary, facts=_finite(summary.facts), workers=workers)
    while len(data := msgspec.json.encode(summary)) > MAX_SUMMARY and summary.events:
        kept = summary.events[len(summary.events) // 2 + 1 :]
        summary = msgspec.structs.replace(summary, events=kept)
    return data


def decode_summary(data: bytes) -> Summary:
    """The summary that another machine sent; ProtocolError if it is none."""
    return decoded(_summaries, data, "the summary of a job")


def _finite(facts: dict[str, Fact]) -> dict[str, Fact]:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in facts.items()
    }


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
                "anywhere, python SCRIPT. In a cluster breakpoint() waits for potluck attach JOB "
                "--rank N, where `q` ends the script"
            )
        error = re.match(r"potluck\.errors\.\w+: (.+)", line)
        if error is not None:
            return error[1]
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
    cause = explain(last_words, lambda module: missing(failure.worker, module))
    text, where = failure.text, called(failure.worker)
    if where:
        name = f"worker {failure.worker}"
        text = re.sub(rf"^{re.escape(name)}(?= )", lambda found: f"{name} on {where}", text)
    last = next((line.strip() for line in reversed(last_words) if line.strip()), "")
    if cause is None and last and re.search(r"exited with code \d+$", text):
        cause = f"it said last: {last[:_LAST]}"  # of sys.exit("why"), for example
    if failure.code is not None and "exited" not in text and "killed" not in text:
        code = failure.code if failure.code <= 128 else 128 - failure.code
        text += f" ({name_exit(code)})"
    return [text if cause is None or cause in text else f"{text}: {cause}"]


def _common_facts(workers: Sequence[WorkerSummary]) -> dict[str, Fact]:
    """One value of each fact: of the first worker that has finished and reported it."""
    facts: dict[str, Fact] = {}
    for worker in sorted(workers, key=lambda each: not each.finished):
        for name, value in worker.facts.items():
            if name not in _IN_OTHER_FIELDS:
                facts.setdefault(name, value)
    return facts


def _numbers(workers: Sequence[WorkerSummary], name: str) -> list[int]:
    values = (worker.facts.get(name) for worker in workers)
    return [int(value) for value in values if isinstance(value, int | float)]


def _text(value: Fact | None) -> str | None:
    return None if value is None else str(value)


_MAX_EVENTS = 60
_MAX_EVENT = 4096


def status_of(
    spec: jobs.JobSpec,
    state: State,
    journal: Journal,
    *,
    node: str,
    called: Callable[[str], str],
    now: float,
) -> worker_link.JobState:
    """The job as the leader on ``node`` sees it. ``called`` names the node of a worker."""
    newest = state.newest_group
    ranks = {} if newest is None else {name: rank for rank, name in enumerate(newest.members)}
    shown = []
    for worker in state.workers:
        facts = journal.facts_of(worker.name)
        shown.append(
            worker_link.WorkerStatus(
                worker=worker.name,
                rank=ranks.get(worker.name, -1) if worker.phase is Phase.MEMBER else -1,
                phase=worker.phase.value,
                pid=facts.pid if worker.alive else 0,
                restarts=worker.attempt,
                device=facts.device,
                step=facts.step,
                samples_per_s=facts.rate(now) if worker.alive else None,
                node=called(worker.name),
            )
        )
    return worker_link.JobState(
        job=spec.job,
        node=node,
        pid=0,
        script=worker_link.clip(spec.script),
        started=spec.started,
        epoch=state.epoch,
        step=journal.step,
        loss=journal.loss,
        workers=tuple(shown),
        events=tuple(note.text[-_MAX_EVENT:] for note in journal.notes[-_MAX_EVENTS:]),
        samples=journal.sample_progress.samples(now),
        world_restarts=state.world.number,
        record=journal.record(_MAX_EVENTS, now),
    )


def missing_workers(state: State, journal: Journal, called: Callable[[str], str]) -> str:
    """The workers that the first group waits for, in words; empty if the group has formed. While no
    worker is ready, those whose processes have not started: a script may never call potluck."""
    ready, expected = state.having(Phase.READY), state.having(*EXPECTED)
    starting = (w for w in state.having(Phase.STARTING) if not journal.facts_of(w.name).pid)
    missing = expected if ready else tuple(starting)
    if not missing or state.having(Phase.MEMBER) or state.stopping:
        return ""
    call = "init_process_group" if state.world.is_fixed else "potluck.init()"
    found = ", ".join(
        _whereabouts(each, journal.facts_of(each.name).pid, called(each.name), call)
        for each in missing
    )
    count = f"{len(ready)} of {len(ready) + len(expected)} workers"
    return f"ready: {count}; still waiting for {found}"


def _whereabouts(worker: WorkerState, pid: int, node: str, call: str) -> str:
    where = f" on {node}" if node else ""
    if worker.phase is Phase.WAITING:
        return f"worker {worker.name}{where} (it ended, and is started again)"
    if not pid:
        return f"worker {worker.name}{where} (its process has not started yet)"
    return f"worker {worker.name}{where} (its process {pid} runs and has not called {call} yet)"
