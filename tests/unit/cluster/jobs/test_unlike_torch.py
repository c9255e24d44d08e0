"""Machines of unlike releases of torch: they take part, and a warning names them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from potluck._core.cluster.jobs.placement import Placement, place
from potluck._core.wire.format import Versions
from potluck._core.wire.jobs import JobSpec


def versions(torch: str) -> Versions:
    return Versions(python="3.11.7", potluck="0.1", torch=torch, numpy="2", machine="x86_64")


def taken(of_job: str, **nodes: str) -> tuple[list[str], list[str]]:
    """The nodes that take part in a job of ``a``, and the notes; ``nodes`` have these releases."""
    spec = JobSpec(
        script="s.py", job="j", package=bytes(32), starter="a", versions=versions(of_job)
    )
    known: dict[str, Any] = {
        node: SimpleNamespace(versions=versions(release)) for node, release in nodes.items()
    }
    names: Any = SimpleNamespace(called=lambda node: f"machine {node}")
    placement = Placement(spec, place(spec, (), ()), names, known.get, lambda node: "")
    notes: list[str] = []
    placement.take_in(nodes, notes.append)
    return list(placement.nodes), notes


def test_another_release_of_torch_takes_part_and_is_named() -> None:
    nodes, notes = taken("2.9.0", a="2.9.0", b="2.8.0", c="2.9.0")
    assert nodes == ["a", "b", "c"]
    [note] = notes
    assert note.startswith("machine b has torch 2.8.0, the starter 2.9.0: they train together")


def test_a_machine_without_torch_takes_no_part_in_a_job_that_needs_it() -> None:
    nodes, notes = taken("2.9.0", a="2.9.0", b="")
    assert nodes == ["a"]
    [note] = notes
    assert "machine b has no torch, this node 2.9.0" in note


def test_a_job_without_torch_does_not_ask_for_it() -> None:
    assert taken("", a="", b="2.8.0") == (["a", "b"], [])
