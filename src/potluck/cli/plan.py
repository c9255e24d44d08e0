"""``potluck plan``: which strategy is fast enough for a script on these machines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli import run
from potluck.cli.terminal import STDOUT, check_writable, write_json
from potluck.errors import ConfigurationError

if TYPE_CHECKING:
    from potluck.training.planner import Measured, Plan

SCHEMA_VERSION = 1


def plan(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", help="A Python script with an ElasticLoop."),
    ],
    arguments: run.ScriptArguments = None,
    workers: Annotated[
        int,
        typer.Option("--workers", "-n", help="Workers on each machine, as for potluck run."),
    ] = 1,
    nodes: Annotated[
        int, typer.Option(min=0, help="On how many machines of the cluster; 0: on all.")
    ] = 0,
    min_nodes: run.MinNodes = None,
    on: run.On = "",
    wait: run.Wait = 60.0,
    module: run.Module = False,
    root: run.Root = None,
    env: run.Env = None,
    include: run.Include = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the plan to this file, as JSON ('-' is stdout)."),
    ] = None,
) -> None:
    """Measure SCRIPT for a few steps on all machines, and say which strategy would be fastest.

    Nothing is trained: every worker takes 5 to 25 steps alone and ends inside its ElasticLoop;
    no callback is called, and no checkpoint is read or written. What SCRIPT does before its loop is
    done. Then come the links, in both directions, and what compressing costs on each machine, and
    each strategy is rehearsed: all workers send gradients of the model's sizes, or of a part of it
    where that takes long. This takes half a minute, on slow links or a busy machine up to four;
    lines on stderr say how far it is.

    The table has a row for each strategy, those that change the least first: the predicted time of
    a step (~ where only a part was rehearsed), how much of it is computation (the efficiency), the
    bytes that a worker sends, and what it changes in the mathematics of the training. The plan
    takes the first row whose efficiency is 95% or more, else the first that is about as fast as the
    fastest.

    The choice is kept beside SCRIPT, in a file such as train.plan.json. A script that asks for it,
    by ElasticLoop(..., strategy="auto"), trains so; no other script is changed. Plan again when the
    network, the machines or the model change.
    """
    from potluck._core.cluster.home.node_state import find_agent
    from potluck._core.cluster.jobs.environment import given_variables
    from potluck._core.cluster.run import checked, run_job
    from potluck._core.settings import load_settings
    from potluck._core.wire.local import RunRequest
    from potluck.cli.job_display import PlainView, print_summary
    from potluck.cli.launched import check_alone
    from potluck.training.planner import decode, make_plan
    from potluck.training.planner.measured import FACT, SUFFIX, VARIABLE

    check_alone(os.environ, "potluck plan")
    settings = load_settings()
    if json != STDOUT:
        check_writable("--json", json)
    request = checked(
        RunRequest(
            **run.script_of(script, module=module, root=root, arguments=arguments),
            per_node=workers,
            max_nodes=nodes,
            max_restarts=0,
            restarts_worlds=False,
            wait_s=wait,
            min_nodes=settings.min_peers + 1 if min_nodes is None else min_nodes,
            peer_timeout_s=max(settings.peer_timeout_s, 300.0),
            environment=given_variables([*(env or ()), f"{VARIABLE}=1"], os.environ),
            include=tuple(include or ()),
            on=run.machines_of(on),
        )
    )
    kept = Path(request.script).with_suffix(SUFFIX)
    check_writable("the plan", kept)
    agent = find_agent(settings.home)
    if agent is None:
        run.check_cluster(request, settings, min_nodes=min_nodes)
    summary = run_job(request, settings, PlainView(to_stderr=True), agent)
    if summary.exit_code:
        print_summary(summary)
        raise typer.Exit(summary.exit_code)
    text = summary.facts.get(FACT)
    if not isinstance(text, str):
        raise ConfigurationError(
            f"{script.name} ended without a step of an ElasticLoop, so nothing was measured: "
            "plans are for scripts that train with potluck.torch.ElasticLoop"
        )
    measured = decode(text)
    made = make_plan(measured)
    facts = {
        "version": SCHEMA_VERSION,
        "choice": made.choice.name,
        "bucket_size_mb": made.choice.bucket_size_mb,
        "every": made.choice.every,
        "code": made.choice.code,
        "reason": made.reason,
        "without_machines": made.without,
        "without_step_s": made.without_s,
        "proportional_step_s": made.proportional_s,
        "strategies": [
            {
                "name": each.candidate.name,
                "code": each.candidate.code,
                "changes": each.candidate.changes,
                "bucket_size_mb": each.candidate.bucket_size_mb,
                "every": each.candidate.every,
                "predicted_step_s": each.step_s,
                "basis": each.basis,
                "efficiency": each.efficiency,
                "bytes_per_step": each.bytes_per_step,
            }
            for each in made.predictions
        ],
        "measured": measured,
    }
    write_json(kept, facts)
    if json is not None:
        write_json(json, facts)
    if json == STDOUT:
        return
    for line in _lines(measured, made, kept):
        typer.echo(line)


def _lines(measured: Measured, made: Plan, kept: Path) -> Iterator[str]:
    from potluck.training.planner import Basis

    size = 4 * measured.num_elements / 1e6
    computes = _s(measured.step_compute_s)
    yield (
        f"\n{measured.world_size} workers, gradients of {size:.3g} MB; the computation of a step "
        f"takes {computes}"
    )
    if made.predictions:
        rate = min(measured.bytes_per_s) * 8 / 1e6
        yield f"slowest link: {rate:,.4g} Mbit/s, {_s(measured.latency_s)} one way"
        yield f"\n  {'predicted':>10}{'efficiency':>12}{'MB a step':>11}  strategy"
    for each in made.predictions:
        mark = "*" if each.candidate is made.choice else " "
        about = "" if each.basis is Basis.REHEARSED else "~"
        said = f"{about + _s(each.step_s):>10}{each.efficiency:>12.0%}"
        row = f"{said}{each.bytes_per_step / 1e6:>11.3g}"
        yield f"{mark} {row}  {each.candidate.code}"
        yield f"  {'':>33}  changes: {each.candidate.changes}"
    yield f"\nchoice: {made.choice.code}: {made.reason}"
    if made.without:
        names = " and ".join(_machine(measured, node) for node in made.without)
        they = "It takes" if len(made.without) == 1 else "They take"
        assert made.chosen is not None
        yield (
            f"Without {names} a step would take {_s(made.without_s)} instead of "
            f"{_s(made.chosen.step_s)}. {they} part unless you leave a machine out: name the "
            "others with --on, here and for potluck run."
        )
    if made.proportional_s:
        assert made.chosen is not None
        yield (
            f"The workers are unlike: with policy=Policy(shares=ProportionalShares()) a step would "
            f"take {_s(made.proportional_s)} instead of {_s(made.chosen.step_s)}."
        )
    yield f'\nkept in {kept}, for scripts with ElasticLoop(..., strategy="auto")'


def _machine(measured: Measured, node: str) -> str:
    """A machine and its workers, in words."""
    ranks = [str(rank) for rank, each in enumerate(measured.nodes) if each == node]
    return f"machine {node[:8]} (worker{'s' if len(ranks) > 1 else ''} {', '.join(ranks)})"


def _s(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
