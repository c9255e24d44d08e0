"""How a job is doing, for people. Pure."""

from __future__ import annotations

from collections.abc import Callable

from potluck._core.cluster.jobs.groups.roster import EXPECTED, Phase, State, WorkerState
from potluck._core.cluster.jobs.journal import Journal
from potluck._core.wire import jobs, worker_link

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
        wire=spec.wire,
        samples=journal.sample_progress.samples(now),
        world_restarts=state.world.number,
        record=journal.record(_MAX_EVENTS, now),
    )


def missing_workers(state: State, journal: Journal, called: Callable[[str], str]) -> str:
    """The workers that the first group waits for, in words; empty if the group has formed, or no
    worker is ready."""
    ready, missing = state.having(Phase.READY), state.having(*EXPECTED)
    if not ready or not missing or state.having(Phase.MEMBER) or state.stopping:
        return ""
    call = "init_process_group" if state.world.is_fixed else "potluck.init()"
    found = ", ".join(
        _whereabouts(each, journal.facts_of(each.name).pid, called(each.name), call)
        for each in missing
    )
    return f"ready: {len(ready)} of {len(ready) + len(missing)} workers; still waiting for {found}"


def _whereabouts(worker: WorkerState, pid: int, node: str, call: str) -> str:
    where = f" on {node}" if node else ""
    if worker.phase is Phase.WAITING:
        return f"worker {worker.name}{where} (it ended, and is started again)"
    process = f"its process {pid} runs and" if pid else "it"
    return f"worker {worker.name}{where} ({process} has not called {call} yet)"
