"""Which workers go where; who holds a job's state when a group is announced."""

from __future__ import annotations

import pytest

from potluck._core.cluster.jobs.group_agreement import holders
from potluck._core.cluster.jobs.placement import place
from potluck._core.types import Member
from potluck._core.wire.format import Versions
from potluck._core.wire.jobs import JobSpec, WorkerPlace
from potluck._core.wire.nodes import JobGroup


def spec(per_node: int = 1, max_nodes: int = 0, starter: str = "b") -> JobSpec:
    versions = Versions("3.12", "1", "2.9", "2.0", "x86_64")
    return JobSpec(
        job="job",
        script="train.py",
        package=bytes(32),
        starter=starter,
        versions=versions,
        per_node=per_node,
        max_nodes=max_nodes,
    )


def test_the_starter_has_the_first_workers_then_the_most_senior() -> None:
    places = place(spec(per_node=2), ("a", "b", "c"), ())
    assert [(each.worker, each.node, each.local_rank) for each in places] == [
        *(("0", "b", 0), ("1", "b", 1), ("2", "a", 0), ("3", "a", 1)),
        *(("4", "c", 0), ("5", "c", 1)),
    ]


@pytest.mark.parametrize(
    ("max_nodes", "nodes", "taken", "added"),
    [
        (0, "abc", "", "bac"),
        (2, "abc", "", "ba"),
        (1, "abc", "", "b"),
        (0, "abcd", "bac", "d"),  # a newcomer
        (0, "ab", "bac", ""),  # c is away; its place stays its own
        (3, "abcd", "bac", ""),  # as many as were asked for
        (3, "abd", "ba", "d"),
        (2, "ac", "", "ac"),  # the starter is gone already
    ],
)
def test_newcomers_get_the_next_numbers(max_nodes: int, nodes: str, taken: str, added: str) -> None:
    before = tuple(WorkerPlace(str(number), node, 0) for number, node in enumerate(taken))
    after = place(spec(max_nodes=max_nodes), tuple(nodes), before)
    assert [each.node for each in after] == list(added)
    assert [each.worker for each in after] == [str(len(taken) + n) for n in range(len(added))]


def members(names: str) -> tuple[Member, ...]:
    return tuple(Member(name, f"node {name}") for name in names)


@pytest.mark.parametrize(
    ("before", "entering", "now", "joined", "heard", "ended", "kept", "fresh"),
    [
        ("", "", "ab", "ab", "", "", "", False),  # the first group
        ("abc", "", "ab", "", "", "", "ab", False),  # c is away
        ("abc", "", "abd", "d", "", "c", "ab", False),  # one comes in
        ("abc", "c", "bc", "", "c", "", "bc", False),  # c has the state by now
        ("abc", "bc", "bc", "", "", "", "", False),  # a, which had it, may go on elsewhere
        ("abc", "bc", "bc", "", "", "a", "", True),  # a has ended: what there is, is here
        ("abc", "bc", "b", "", "", "a", "", False),  # c may have got it from a
        ("a", "", "a", "a", "", "", "", False),  # a was started again, or so it seems
        ("a", "", "a", "a", "", "a", "", True),  # it was
        ("abc", "abc", "bc", "", "", "", "bc", False),  # of a first group none had entered
        ("abc", "abc", "bc", "", "b", "", "bc", False),  # some had
        ("abc", "abc", "bc", "c", "", "", "b", False),  # and c was started again
        ("abc", "abc", "bc", "bc", "", "", "", False),  # a may have got the votes of both
        ("abc", "abc", "bc", "bc", "", "abc", "", True),  # all were started again
    ],
)
def test_who_holds_the_state(
    before: str,
    entering: str,
    now: str,
    joined: str,
    heard: str,
    ended: str,
    kept: str,
    fresh: bool,
) -> None:
    group = JobGroup("job", 3, members(before), 3, tuple(entering)) if before else None
    found = holders(group, members(now), joined=joined, heard=heard, ended=ended)
    assert found == (tuple(kept), fresh)
