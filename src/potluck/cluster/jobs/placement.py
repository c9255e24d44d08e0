"""Which workers a job has on which nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from potluck.types import Member
from potluck.wire.jobs import JobSpec, WorkerPlace
from potluck.wire.nodes import JobGroup


def place(
    spec: JobSpec, nodes: Sequence[str], taken: Sequence[WorkerPlace]
) -> tuple[WorkerPlace, ...]:
    """The places to be added for ``nodes`` (in order of seniority) that have none yet.

    The starter comes first, then the most senior, up to ``spec.max_nodes`` in all. Workers are
    numbered on: a place once given stays its node's, also while that is away.
    """
    used = {each.node for each in taken}
    ordered = sorted(nodes, key=lambda node: node != spec.starter)
    new = [node for node in ordered if node not in used]
    if spec.max_nodes:
        new = new[: max(0, spec.max_nodes - len(used))]
    added = [(node, local_rank) for node in new for local_rank in range(spec.per_node)]
    return tuple(
        WorkerPlace(str(number), node, local_rank)
        for number, (node, local_rank) in enumerate(added, len(taken))
    )


def holders(
    group: JobGroup | None,
    members: Iterable[Member],
    *,
    joined: Iterable[str],
    settled: Iterable[str],
    ended: Iterable[str],
) -> tuple[tuple[str, ...], bool]:
    """Which of ``members``, announced to follow ``group``, hold the job's state; and whether the
    job may begin afresh: none of them does, and all that did are known to have ended.

    ``joined`` are new in it, ``settled`` were heard to hold the state, ``ended`` have ended.
    """
    if group is None:
        return (), False
    staying = {member.worker for member in members} - set(joined)
    known = set(settled) | {m.worker for m in group.members if m.worker not in group.entering}
    kept = tuple(m.worker for m in group.members if m.worker in staying & known)
    may_go_on = {m.worker for m in group.members} - set(ended)
    return kept, not kept and may_go_on <= staying & set(group.entering)
