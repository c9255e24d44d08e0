"""The queue of a cluster's jobs: which waiting job starts next, on which machines, and why the
others wait. PURE.

A job asks for a part of each machine that it runs on (``Part``), or for whole machines. The order:
priority, which admins set over all jobs, others over their own; then who used less of the cluster
lately (fair share: core seconds that decay with a half-life of a day, as in Slurm's multifactor
priority); then who came first. The first job that does not fit *reserves* the machines that it will
get first. A later job may pass it only on what the reserved job leaves, or if it ends before (EASY
backfill: Lifka 1995, "The ANL/IBM SP scheduling system"). A job that stood first for an hour is
passed by nobody.

Times are seconds of one clock of the deciding node, which only differences are taken of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

HALF_LIFE_S = 86_400.0
PATIENCE_S = 3600.0
WHOLE = 0
"""Of the cores of a part: the whole machine, whatever it has."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a job takes of a machine. ``cores`` WHOLE: all of it, alone. ``memory_bytes`` 0: in
    proportion to the cores."""

    cores: int = WHOLE
    gpus: int = 0
    memory_bytes: int = 0

    def of(self, machine: Machine) -> Part:
        """The part in figures, of ``machine``."""
        if self.cores == WHOLE:
            return Part(machine.cores, machine.gpus, machine.memory_bytes)
        memory = self.memory_bytes or machine.memory_bytes * self.cores // max(1, machine.cores)
        return Part(self.cores, self.gpus, memory)

    def fits(self, other: Part) -> bool:
        """Whether ``other``, in figures, has room for this part, in figures."""
        return (
            self.cores <= other.cores
            and self.gpus <= other.gpus
            and self.memory_bytes <= other.memory_bytes
        )

    def plus(self, other: Part) -> Part:
        return Part(
            self.cores + other.cores,
            self.gpus + other.gpus,
            self.memory_bytes + other.memory_bytes,
        )

    def less(self, other: Part) -> Part:
        return Part(
            self.cores - other.cores,
            self.gpus - other.gpus,
            self.memory_bytes - other.memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """What the owner of ``node`` gives to jobs."""

    node: str
    cores: int
    gpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits: it takes ``part`` of ``min_nodes`` to ``max_nodes`` (0: any number) of the
    nodes ``may`` (those whose owners let it run there, in the order in which it takes them), and
    ends ``seconds`` after its start at the latest (inf: not known). It came at ``since``, and
    stands first in the queue since ``first_since`` (None: it does not). Its ``priority`` counts
    among the jobs of its person; if it ``may_pass``, or gives way (below 0), among all."""

    job: str
    person: str
    may: tuple[str, ...]
    since: float
    part: Part = Part()
    min_nodes: int = 1
    max_nodes: int = 0
    priority: int = 0
    seconds: float = math.inf
    first_since: float | None = None
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A job that runs on ``nodes`` since ``since``."""

    job: str
    person: str
    nodes: tuple[str, ...]
    since: float
    part: Part = Part()
    seconds: float = math.inf

    def ends(self, now: float) -> float:
        """When it ends at the latest. A job over its time is ended soon."""
        return max(now, self.since + self.seconds)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``nodes``: the job starts there, now. Empty: it waits for ``short`` more machines than are
    free; ``blockers`` are the jobs on them, and ``starts`` is when it starts at the latest (inf:
    that is not known). ``misses``: the cluster never has enough machines for it as it is now."""

    job: str
    nodes: tuple[str, ...] = ()
    short: int = 0
    blockers: tuple[str, ...] = ()
    starts: float = math.inf
    misses: bool = False


def usage(ended: Iterable[tuple[str, float, float]], now: float) -> dict[str, float]:
    """By person: the core seconds of jobs that have ended, halved for each ``HALF_LIFE_S`` since
    then. ``ended`` has the person, the core seconds, and the time of the end of each."""
    found: dict[str, float] = {}
    for person, core_seconds, end in ended:
        age = max(0.0, now - end)
        found[person] = found.get(person, 0.0) + core_seconds * 0.5 ** (age / HALF_LIFE_S)
    return found


def in_order(waiting: Iterable[Waiting], used: Callable[[str], float]) -> list[Waiting]:
    """The queue, the next job first. ``used(person)``: core seconds lately. The priority of a job
    that may not pass others' moves it among the places that its person's jobs have."""

    def common(each: Waiting) -> int:
        return each.priority if each.may_pass else min(each.priority, 0)

    def place(each: Waiting) -> tuple[float, float, float, float, str]:
        # The first stays first: it was promised when it starts.
        stands = math.inf if each.first_since is None else each.first_since
        return -common(each), stands, used(each.person), each.since, each.job

    order = sorted(waiting, key=place)
    own: dict[tuple[str, int], list[Waiting]] = {}
    for each in sorted(order, key=lambda each: -each.priority):
        own.setdefault((each.person, common(each)), []).append(each)
    return [own[each.person, common(each)].pop(0) for each in order]


def decide(
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    machines: Mapping[str, Machine],
    now: float,
) -> list[Verdict]:
    """What becomes of each job that waits, in their order (``in_order``). Cost: jobs x machines x
    running jobs."""
    free = {node: left_on(machine, running) for node, machine in machines.items()}
    reserved: dict[str, tuple[float, Part]] = {}
    """By machine: from when on the first job that waits takes which part of it."""
    first: Waiting | None = None
    running, verdicts = list(running), list[Verdict]()
    for job in waiting:
        may = [machines[node] for node in job.may if node in machines]
        able = [each for each in may if job.part.of(each).fits(Part().of(each))]
        if len(able) < job.min_nodes:
            verdicts.append(Verdict(job.job, short=job.min_nodes - len(able), misses=True))
            continue
        is_held = first is not None and now - (first.first_since or now) >= PATIENCE_S
        open_to = [] if is_held else [m for m in able if _has_room(job, m, free, reserved, now)]
        if len(open_to) >= job.min_nodes:
            taken = open_to[: job.max_nodes or len(open_to)]
            for machine in taken:
                free[machine.node] = free[machine.node].less(job.part.of(machine))
            nodes = tuple(each.node for each in taken)
            running.append(Running(job.job, job.person, nodes, now, job.part, job.seconds))
            verdicts.append(Verdict(job.job, nodes))
            continue
        starts = _earliest(job, able, running, free, now)
        best = sorted(able, key=lambda machine: starts[machine.node])[: job.min_nodes]
        at = max(starts[machine.node] for machine in best)
        closed = {each.node for each in able if each not in open_to}
        blockers = [each.job for each in running if closed & set(each.nodes)]
        if first is None:
            first = job
            reserved = {machine.node: (at, job.part.of(machine)) for machine in best}
        else:
            blockers.append(first.job)
        short = job.min_nodes - len(open_to)
        verdicts.append(Verdict(job.job, (), short, tuple(dict.fromkeys(blockers)), at))
    return verdicts


def left_on(machine: Machine, running: Iterable[Running]) -> Part:
    """What ``running`` jobs leave of a machine, in figures."""
    left = Part().of(machine)
    for each in running:
        if machine.node in each.nodes:
            left = left.less(each.part.of(machine))
    return left


def _has_room(
    job: Waiting,
    machine: Machine,
    free: Mapping[str, Part],
    reserved: Mapping[str, tuple[float, Part]],
    now: float,
) -> bool:
    """Whether ``job`` can start on ``machine`` now without a delay for the reserving job."""
    part, left = job.part.of(machine), free[machine.node]
    if not part.fits(left):
        return False
    if machine.node not in reserved:
        return True
    at, wanted = reserved[machine.node]
    return now + job.seconds <= at < math.inf or part.fits(left.less(wanted))


def _earliest(
    job: Waiting,
    machines: Iterable[Machine],
    running: Sequence[Running],
    free: Mapping[str, Part],
    now: float,
) -> dict[str, float]:
    """By machine: when ``job`` fits there at the latest, as the jobs on it end."""
    found = {}
    for machine in machines:
        part, left, at = job.part.of(machine), free[machine.node], now
        here = (each for each in running if machine.node in each.nodes)
        for each in sorted(here, key=lambda each: each.ends(now)):
            if part.fits(left):
                break
            freed = each.part.of(machine)
            left, at = left.plus(freed), each.ends(now)
        found[machine.node] = at if part.fits(left) else math.inf
    return found
