"""The last words of ``potluck run``: how the job ended, for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import typer

from potluck.cli.job_display import duration

if TYPE_CHECKING:
    from potluck.cluster.jobs.summary import RecoverySummary, Summary
    from potluck.wire.control import Fact


def print_summary(summary: Summary) -> None:
    """Write the summary to stdout, and what went wrong to stderr."""
    lines = list(_lines(summary))
    if lines:
        typer.echo("")
        for line in lines:
            typer.echo(line)
    for problem in summary.problems:
        first, *rest = problem.strip().splitlines() or ["failed"]
        typer.echo(f"potluck: {first}", err=True)
        for line in rest:
            typer.echo(f"    {line}", err=True)


def _lines(summary: Summary) -> list[str]:
    rows: list[tuple[str, str]] = []
    for name, value in summary.facts.items():
        rows.append((name.replace("_", " "), _shown(value)))
    if summary.committed_steps:
        if summary.samples is not None:
            committed, total = summary.samples.committed, summary.samples.total
            rows.append(("committed samples", f"{committed:,} of {total:,}"))
        rows.append(("committed steps", str(summary.committed_steps)))
        rows.append(("steps run again", str(summary.steps_run_again)))
        rows.append(("seconds", duration(summary.seconds)))
    for recovery in summary.recoveries:
        rows.append(("recovery", _recovery(recovery)))
    for worker in summary.workers:
        if worker.parameter_hash is not None:
            rows.append((f"parameters of worker {worker.worker}", worker.parameter_hash[:16]))
    if summary.hashes_equal is not None:
        rows.append(("parameters", "equal on all" if summary.hashes_equal else "DIFFERENT"))
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _recovery(recovery: RecoverySummary) -> str:
    parts = [recovery.cause]
    if recovery.reformed_s is not None:
        parts.append(f"re-formed in {recovery.reformed_s:.2f} s")
    if recovery.run_again:
        parts.append(f"step {recovery.step} run again")
    if recovery.recovered_s is not None:
        parts.append(f"next step committed after {recovery.recovered_s:.2f} s")
    else:
        parts.append("no step committed after it")
    return ", ".join(parts)


def _shown(value: Fact) -> str:
    if isinstance(value, float) and not math.isnan(value):
        return f"{value:.4f}"
    return str(value)
