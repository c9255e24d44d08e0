"""The workers of a job by node, the nodes that can take part, and the nodes that their owners took
out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from potluck._core.cluster.names import NodeNames
from potluck._core.wire.format import Versions
from potluck._core.wire.jobs import JobSpec, Places, WorkerPlace, WorldSpec
from potluck._core.wire.nodes import View
from potluck._core.wire.peers import Introduction
from potluck._core.wire.versions import JOBS_SINCE


def place(
    spec: JobSpec, nodes: Sequence[str], taken: Sequence[WorkerPlace]
) -> tuple[WorkerPlace, ...]:
    """The places to be added for ``nodes`` (in order of seniority) that have none yet.

    The starter comes first, then the most senior, up to ``spec.max_nodes`` in all, those in
    ``spec.only`` alone if it names any. Workers are numbered on: a place once given stays its
    node's, also while that is away.
    """
    used = {each.node for each in taken}
    new = [node for node in preferred(spec, nodes) if node not in used]
    if spec.max_nodes:
        new = new[: max(0, spec.max_nodes - len(used))]
    added = [
        (node, local_rank)
        for node in new
        for local_rank in range(spec.per_node + spec.extra_workers * (node == spec.starter))
    ]
    return tuple(
        WorkerPlace(str(number), node, local_rank)
        for number, (node, local_rank) in enumerate(added, len(taken))
    )


COPIES = 2
"""Machines that have the log of a job, and its end on disk before its leader lets go of it, if
there are so many."""


def keepers_of(spec: JobSpec, places: Places, view: View) -> tuple[str, ...]:
    """The nodes of ``view`` that keep what becomes of a job, the most senior first: those that run
    it, its starter, its leader; and the next in seniority, if these are one."""
    nodes = {spec.starter, view.leader, *(each.node for each in places)} & set(view.nodes)
    spare = [node for node in view.nodes if node not in nodes]
    nodes |= set(spare[: max(0, COPIES - len(nodes))])
    return tuple(node for node in view.nodes if node in nodes)


def rank_in_words(worker: str, group: Sequence[str], world: WorldSpec) -> str:
    """The rank of ``worker`` in the members of its newest ``group``, else in the ``world`` that it
    was started for; a worker that came later has its own number there."""
    members = group if worker in group else world.members
    return str(members.index(worker)) if worker in members else worker


def preferred(spec: JobSpec, nodes: Sequence[str]) -> list[str]:
    """Those of ``nodes`` (in order of seniority) that may run the job of ``spec``, by its own
    options, in the order in which it takes them: the starter first."""
    ordered = sorted(nodes, key=lambda node: node != spec.starter)
    return [node for node in ordered if node in spec.only or not spec.only]


@dataclass(eq=False, repr=False)
class Placement:
    """The ``places`` of the workers of the job of ``spec``. ``introduction(node)`` is that of a
    node with a link; ``unwilling(node)`` is why a node runs no jobs of this starter, and is empty
    if it does."""

    spec: JobSpec
    places: Places
    names: NodeNames
    introduction: Callable[[str], Introduction | None]
    unwilling: Callable[[str], str]

    def __post_init__(self) -> None:
        self._node_of = {each.worker: each.node for each in self.places}
        self._unfit: dict[str, str] = {}
        self._lacks: dict[str, str] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have places, in the order of their workers."""
        return tuple(dict.fromkeys(self._node_of.values()))

    def node_of(self, worker: str) -> str | None:
        """The node of ``worker``; None if it has no place."""
        return self._node_of.get(worker)

    def at(self, node: str) -> tuple[str, ...]:
        """The workers that have places at ``node``."""
        return tuple(each.worker for each in self.places if each.node == node)

    def pairs(self, nodes: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        """For each pair of nodes, all pairs of a worker on one and a worker on the other."""
        return frozenset(
            pair for node, other in nodes for pair in product(self.at(node), self.at(other))
        )

    def by_node(self, workers: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """``workers``, grouped by their nodes."""
        found: dict[str, tuple[str, ...]] = {}
        for worker in workers:
            node = self._node_of[worker]
            found[node] = (*found.get(node, ()), worker)
        return found

    def label(self, worker: str) -> str:
        """What people call the node of ``worker``; empty where there is only one."""
        node = self.node_of(worker)
        return "" if node is None or self.spec.is_local else self.names.label(node)

    def prefix(self, worker: str, node: str) -> str:
        """The prefix of a line of ``node`` for people, about ``worker`` or no worker."""
        if not self.spec.is_local:
            return f"{self.names.label(node)}: "
        return f"worker {worker}: " if worker else ""

    def objection(self, view: View) -> str:
        """Why the job can't be begun in ``view``; empty if it can."""
        if self.spec.starter not in view.nodes:
            return "the node it was started on is not in the cluster's view"
        num, least = len(self.nodes), self.spec.min_nodes
        if num and (num >= least or self.spec.is_local):
            return ""
        count = f"{num} of at least {least} machines" if num else "no machine"
        notes: list[str] = []
        self.note_unfit(view.nodes, notes.append, again=True)
        return f"{count} can run this job" + "".join(f". {text}" for text in notes)

    def lacks(self, node: str, what: str) -> None:
        """``node`` lacks ``what`` (empty: nothing any more): it gets no places."""
        self._lacks[node] = what

    def leave_out(self, node: str) -> None:
        """Take back the places of ``node``, on which nothing runs yet."""
        self.places = tuple(each for each in self.places if each.node != node)
        self._node_of = {each.worker: each.node for each in self.places}

    def take_in(self, nodes: Iterable[str], note: Callable[[str], None]) -> None:
        """Give places to those of ``nodes`` that have none and can take part; ``note`` gets why
        others can't."""
        fitting, taken = [], set(self.nodes)
        if self.spec.max_nodes and len(taken) >= self.spec.max_nodes:
            return
        for node in nodes:
            if node in taken or self._is_fit(node, note):
                fitting.append(node)
        added = place(self.spec, fitting, self.places)
        self.places += added
        self._node_of |= {each.worker: each.node for each in added}
        self.note_unlike({each.node for each in added}, note)

    def note_unlike(self, nodes: Iterable[str], note: Callable[[str], None]) -> None:
        """Note which of ``nodes`` have another release of torch than the starter."""
        mine = self.spec.versions.torch
        for node in sorted(nodes):
            introduction = self.introduction(node)
            theirs = "" if introduction is None else introduction.versions.torch
            if mine and theirs not in ("", mine):
                note(
                    f"{self.names.called(node)} has torch {theirs}, the starter {mine}: they train "
                    "together where states and dtypes agree, and may round differently"
                )

    def note_unfit(
        self, nodes: Iterable[str], note: Callable[[str], None], *, again: bool = False
    ) -> None:
        """Note which of ``nodes`` have no place and can\'t take part, and why; with ``again`` also
        the ones noted before."""
        for node in nodes:
            if node not in self.nodes:
                if again:
                    self._unfit.pop(node, None)
                self._is_fit(node, note)

    def _is_fit(self, node: str, note: Callable[[str], None]) -> bool:
        """Whether ``node`` can take part; ``note`` gets the reason if not, once."""
        text, unwilling = "; ".join(self._differences(node)), self.unwilling(node)
        lacks = self._lacks.get(node)
        if self.spec.only and node not in self.spec.only:
            text = ""  # nobody asked for it
        elif text:
            text = f"a node can't take part: {text}"
        elif lacks:
            text = f"a node can't take part: {self.names.called(node)} {lacks}"
        elif unwilling:
            text = f"{self.names.called(node)} takes no part: {unwilling}"
        if text and text != self._unfit.get(node):
            note(text)
        self._unfit[node] = text
        return not text

    def _differences(self, node: str) -> list[str]:
        called, introduction = self.names.called(node), self.introduction(node)
        if introduction is None:
            return [f"there is no link to {called}"]
        return differences(called, self.spec.versions, introduction.versions)


def differences(name: str, mine: Versions, theirs: Versions) -> list[str]:
    """The differences because of which workers on the node ``name`` and here can't be in one job,
    in words, with what to do; empty if they can.

    Python must have the same major and minor version, and torch be there, unless ``mine`` has
    none: a job that brings its environment asks for neither. The protocol of both potlucks must
    carry jobs between them.
    """
    texts = []
    pip = f"there: {theirs.executable or 'python'} -m pip install"
    again = "and start its potluck up again"
    if mine.python and _minor(mine.python) != _minor(theirs.python):
        texts.append(
            f"{name} has Python {theirs.python}, this node {mine.python} (there: uv venv --python "
            f"{_minor(mine.python)}, install potluck and the script's packages into it, {again})"
        )
    older = min(mine, theirs, key=lambda each: each.protocol)
    if older.protocol < JOBS_SINCE and mine.protocol != theirs.protocol:
        where = "there" if older is theirs else "on this node"
        texts.append(
            f"{name} has potluck {theirs.potluck}, this node {mine.potluck}, and the older can't "
            f"run jobs of the newer ({where}: {older.upgrade})"
        )
    if mine.torch and not theirs.torch:
        texts.append(
            f"{name} has no torch, this node {mine.torch} ({pip} torch=={mine.torch}, {again})"
        )
    if mine.byte_order != theirs.byte_order:
        texts.append(f"{name} is a {theirs.byte_order}-endian machine ({theirs.machine})")
    return texts


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])
