"""No job that waits begins twice, nor is lost while its starter is there: in random histories of
views, deaths, cut links, machines that were away, forks, machines that boot alone, and merges."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.cluster.jobs.waiting import Table
from potluck._core.wire import jobs
from potluck._core.wire.nodes import View, ViewMember
from support.job_parts import spec, view

NODES = "abcd"


def waits(job: str, starter: str = "a") -> jobs.JobWaits:
    return jobs.JobWaits(msgspec.structs.replace(spec(bytes(32), starter), job=job))


def names(table: Table) -> list[str]:
    return [each.spec.job for each in table]


def test_a_table_is_good_for_one_member_of_one_history_of_views() -> None:
    table = Table("a")
    first = view("b", "a", "c")
    assert table.installed(first) == ()
    assert table.take(waits("own"))
    assert table.take(waits("other", "c"))
    assert not table.take(waits("own"))
    led = View(first.history, 4, first.members[1:])
    assert table.installed(led) == (waits("own").spec,), "its leader may not have it"
    assert names(table) == ["own", "other"]
    again = (*first.members[2:], ViewMember("a", 1, 6))
    assert table.installed(View(first.history, 6, again)) == (), "it was away"
    assert names(table) == []
    table.take(waits("own"))
    assert table.installed(View("fork", 1, again, fork_of=first.history)) == ()
    assert names(table) == []


def test_a_machine_that_was_alone_knows_that_its_jobs_did_not_begin() -> None:
    table = Table("a")
    table.installed(view("a"))
    table.take(waits("waits"))
    table.take(waits("ran"))
    table.begins("ran")
    others = view("b", "a")
    assert table.installed(View("theirs", 9, others.members)) == (waits("waits").spec,)
    assert names(table) == []
    assert table.has_begun("ran")
    assert not table.take(waits("ran"))


def test_what_was_cancelled_stays_so() -> None:
    table = Table("a")
    table.installed(view("b", "a"))
    table.take(waits("job"))
    cancelled = msgspec.structs.replace(waits("job"), is_cancelled=True)
    assert table.take(cancelled)
    assert not table.take(waits("job"))
    assert list(table) == [cancelled]


# ---------------------------------------------------------------- random histories


@dataclass
class Machine:
    """A run of the agent of ``node``. ``runs`` are the jobs of which it has orders; while it
    ``is_cut``, nothing that its leader sends gets there, nor back. ``submitted`` are the jobs for
    which its commands wait, of which the leader did not answer yet to those that it ``asks``."""

    node: str
    incarnation: int = 1
    view: View | None = None
    is_cut: bool = False
    runs: set[str] = field(default_factory=set)
    submitted: set[str] = field(default_factory=set)
    asks: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.table = Table(self.node)

    @property
    def place(self) -> tuple[str, ViewMember | None]:
        """Which member of which history it is."""
        assert self.view is not None
        return self.view.history, self.view.member(self.node)


class World:
    """Machines, and what happens to them. Views are decided as by a majority: one side goes on."""

    def __init__(self) -> None:
        self.machines = {node: Machine(node) for node in NODES}
        self.number = 0
        self.starts: Counter[str] = Counter()
        self.missed: dict[str, set[object]] = {}
        self.heard: dict[str, set[object]] = {}
        """By job that was started: the members that did not hear of that, and those that did."""
        self.held: dict[str, object] = {}
        """By job that is not to be lost: the place of its starter, since it came."""
        self.install(View("h0", 1, tuple(ViewMember(node, 1, 1) for node in NODES)))

    def leader_of(self, machine: Machine) -> Machine | None:
        return None if machine.view is None else self.machines[machine.view.leader]

    def install(self, new: View) -> None:
        members = [self.machines[node] for node in new.nodes]
        for machine in members:
            was_alone = machine.view is not None and machine.view.nodes == (machine.node,)
            before = None if machine.view is None else machine.place
            machine.view = new
            machine.asks |= {each.job for each in machine.table.installed(new)}
            for job, place in list(self.held.items()):
                if place == before and place != machine.place:
                    self.held[job] = machine.place
                    if not was_alone:
                        del self.held[job]
        members[0].is_cut = False
        self.tell(members[0])

    def tell(self, leader: Machine) -> None:
        """The leader tells its followers all that they have to know, and they ask."""
        assert leader.view is not None
        members = [self.machines[node] for node in leader.view.nodes]
        for machine in members:
            if machine.is_cut:
                continue
            for job in leader.runs:
                machine.table.begins(job)
            machine.runs = set(leader.runs)
            for each in leader.table:
                machine.table.take(each)
            listed = {*names(leader.table), *leader.runs}
            machine.table.drop(machine.table.unlisted(listed))
            machine.submitted &= listed | machine.asks
        asked = False
        for machine in members:
            for job in [] if machine.is_cut else sorted(machine.asks):
                machine.asks.remove(job)
                if job in leader.runs or job in leader.table:
                    continue
                if leader.table.has_begun(job):
                    machine.submitted.discard(job)
                    continue
                leader.table.take(waits(job, machine.node))
                asked = True
        if asked:
            self.tell(leader)

    # What may happen.

    def new_job(self, machine: Machine) -> None:
        leader = self.leader_of(machine)
        if leader is not None and not machine.is_cut:
            self.number += 1
            job = f"j{self.number}"
            machine.submitted.add(job)
            machine.asks.add(job)
            self.held[job] = machine.place
            self.tell(leader)

    def start(self, machine: Machine) -> None:
        leader = self.leader_of(machine)
        for each in [] if leader is None else list(leader.table)[:1]:
            assert leader is not None
            assert leader.view is not None
            job, starter = each.spec.job, self.machines[each.spec.starter]
            if self.starts[job]:
                unaware = self.missed[job]
                assert leader.place in unaware or starter.place in unaware
                assert leader.place not in self.heard[job]
            members = [self.machines[node] for node in leader.view.nodes]
            self.heard[job] = {other.place for other in members if not other.is_cut}
            self.missed[job] = {other.place for other in members if other.is_cut}
            self.starts[job] += 1
            self.held.pop(job, None)
            leader.table.begins(job)
            leader.runs.add(job)
            self.tell(leader)

    def end(self, machine: Machine) -> None:
        leader = self.leader_of(machine)
        if leader is not None and leader.runs:
            leader.runs.remove(min(leader.runs))
            self.tell(leader)

    def cut(self, machine: Machine) -> None:
        machine.is_cut = self.leader_of(machine) not in (None, machine)

    def mend(self, machine: Machine) -> None:
        machine.is_cut = False
        if (leader := self.leader_of(machine)) is not None:
            self.tell(leader)

    def is_evicted(self, machine: Machine) -> None:
        """The others go on without it; it does not know what they do."""
        view = machine.view
        if view is None or len(view.nodes) == 1:
            return
        left = tuple(each for each in view.members if each.node != machine.node)
        for job, place in list(self.held.items()):
            if place == machine.place:
                del self.held[job]
        machine.view, machine.is_cut = None, False
        self.install(View(view.history, view.epoch + 1, left, fork_of=view.fork_of))

    def goes_on_alone(self, machine: Machine) -> None:
        """As a fork, by its owner's will."""
        if machine.view is None:
            self.install(self.alone(machine, fork_of="h0"))

    def alone(self, machine: Machine, **facts: str) -> View:
        self.number += 1
        member = ViewMember(machine.node, machine.incarnation, 1)
        return View(f"h{self.number}", 1, (member,), **facts)

    def boots(self, machine: Machine) -> None:
        """Its agent is killed, and starts again, without the others."""
        self.is_evicted(machine)
        for job, place in list(self.held.items()):
            if machine.view is not None and place == machine.place:
                del self.held[job]
        fresh = self.machines[machine.node] = Machine(machine.node, machine.incarnation + 1)
        self.install(self.alone(fresh))

    def joins(self, machine: Machine) -> None:
        """It is in no view, or alone, and meets a cluster."""
        if machine.view is not None and len(machine.view.nodes) > 1:
            return
        for other in self.machines.values():
            view = other.view
            if view is not None and machine.node not in view.nodes:
                joined = ViewMember(machine.node, machine.incarnation, view.epoch + 1)
                members = (*view.members, joined)
                machine.runs.clear()
                self.install(View(view.history, view.epoch + 1, members, fork_of=view.fork_of))
                return


STEPS = ("new_job", "start", "end", "cut", "mend", "is_evicted", "goes_on_alone", "boots", "joins")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(NODES)), max_size=60))
def test_in_every_history_no_job_begins_twice_and_none_is_lost(
    steps: list[tuple[str, str]],
) -> None:
    """Unless the next leader, or the starter, was cut off from the leader when it began it. A job
    is not lost as long as its starter stays the member that it was, or had been alone."""
    world = World()
    for step, node in steps:
        getattr(world, step)(world.machines[node])
    for job, place in world.held.items():
        [starter] = [
            each
            for each in world.machines.values()
            if each.view is not None and each.place == place
        ]
        leader = world.leader_of(starter)
        assert leader is not None
        assert job in leader.table or (starter.is_cut and job in starter.asks)


def test_the_next_leader_begins_nothing_again_that_it_saw_begin() -> None:
    """Although the job's starter, which was cut off meanwhile, submits it again."""
    world = World()
    steps = "new_job c, cut c, start a, end a, is_evicted a, mend c, start b"
    for step, node in map(str.split, steps.split(", ")):
        getattr(world, step)(world.machines[node])
    assert world.starts == {"j1": 1}
    assert world.machines["c"].submitted == set(), "it is told so"
