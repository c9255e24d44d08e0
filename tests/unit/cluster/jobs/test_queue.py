"""Which job starts next: decided for cases by hand, and in random histories."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from potluck._core.cluster.jobs.queue import (
    HALF_LIFE_S,
    PATIENCE_S,
    Machine,
    Part,
    Running,
    Verdict,
    Waiting,
    decide,
    in_order,
    usage,
)

GB = 1 << 30
DESK = Machine("desk", 8, 1, 32 * GB)
LAPTOP = Machine("laptop", 4, 0, 16 * GB)
ATTIC = Machine("attic", 4, 0, 8 * GB)
THREE = {each.node: each for each in (DESK, LAPTOP, ATTIC)}
ALL = tuple(THREE)


def test_a_job_takes_whole_machines_unless_it_says_less() -> None:
    first, second = Waiting("a", "ada", ALL, 0.0), Waiting("b", "bob", ALL, 1.0)
    assert decide([first, second], [], THREE, 2.0) == [
        Verdict("a", ALL),
        Verdict("b", (), 1, ("a",), math.inf),
    ]


def test_small_jobs_share_a_machine_up_to_its_cores_gpus_and_memory() -> None:
    small = Part(cores=2)
    jobs = [Waiting(str(n), "ada", ("laptop",), n, small) for n in range(3)]
    assert [bool(each.nodes) for each in decide(jobs, [], THREE, 9.0)] == [True, True, False]
    gpu = [Waiting(str(n), "ada", ("desk",), n, Part(1, gpus=1)) for n in range(2)]
    assert [bool(each.nodes) for each in decide(gpu, [], THREE, 9.0)] == [True, False]
    large = [Waiting(str(n), "ada", ("desk",), n, Part(1, 0, 20 * GB)) for n in range(2)]
    assert [bool(each.nodes) for each in decide(large, [], THREE, 9.0)] == [True, False]


def test_a_job_for_which_machines_lack_says_how_many_and_holds_nobody_up() -> None:
    wide = Waiting("wide", "ada", ("desk", "laptop"), 0.0, min_nodes=3)
    gpus = Waiting("gpus", "ada", ALL, 1.0, Part(1, gpus=1), min_nodes=2)
    other = Waiting("other", "bob", ALL, 2.0)
    assert decide([wide, gpus, other], [], THREE, 3.0) == [
        Verdict("wide", short=1, misses=True),
        Verdict("gpus", short=1, misses=True),
        Verdict("other", ALL),
    ]


def test_a_job_waits_until_the_machines_are_free_at_the_latest() -> None:
    running = [
        Running("x", "eva", ("attic",), 0.0, seconds=600.0),
        Running("y", "eva", ("laptop",), 0.0, seconds=300.0),
    ]
    job = Waiting("big", "ada", ALL, 10.0, min_nodes=3)
    assert decide([job], running, THREE, 100.0) == [Verdict("big", (), 2, ("x", "y"), 600.0)]


def test_a_job_passes_the_first_one_only_if_that_is_not_delayed() -> None:
    running = [Running("x", "eva", ("attic",), 0.0, seconds=600.0)]
    big = Waiting("big", "ada", ALL, 1.0, min_nodes=3)
    short = Waiting("short", "bob", ALL, 2.0, min_nodes=1, seconds=400.0)
    long = replace(short, job="long", seconds=900.0)
    assert decide([big, short], running, THREE, 100.0)[1].nodes == ("desk", "laptop")
    assert decide([big, long], running, THREE, 100.0)[1].nodes == ()
    # A job whose end is not known may delay whoever waits for its machines.
    unknown = [replace(running[0], seconds=math.inf)]
    assert decide([big, short], unknown, THREE, 100.0)[1].nodes == ()


def test_a_job_may_use_machines_that_the_first_one_does_not_wait_for() -> None:
    running = [Running("x", "eva", ("attic",), 0.0)]
    big = Waiting("big", "ada", ("attic", "laptop"), 1.0, min_nodes=2)
    other = Waiting("other", "bob", ALL, 2.0)
    assert decide([big, other], running, THREE, 100.0)[1].nodes == ("desk",)


def test_nobody_passes_a_job_that_stood_first_for_an_hour() -> None:
    running = [Running("x", "eva", ("attic",), 0.0)]
    big = Waiting("big", "ada", ("attic",), 1.0, first_since=2.0)
    other = Waiting("other", "bob", ("desk",), 3.0)
    assert decide([big, other], running, THREE, PATIENCE_S)[1].nodes == ("desk",)
    assert decide([big, other], running, THREE, 2.0 + PATIENCE_S)[1].nodes == ()


def test_priority_then_fair_share_then_age() -> None:
    jobs = [
        Waiting("late", "bob", ALL, 3.0),
        Waiting("early", "bob", ALL, 1.0),
        Waiting("heavy", "ada", ALL, 0.0),
        Waiting("urgent", "ada", ALL, 4.0, priority=1, may_pass=True),
    ]
    used = {"ada": 100.0, "bob": 1.0}.__getitem__
    assert [each.job for each in in_order(jobs, used)] == ["urgent", "early", "late", "heavy"]


def test_priority_is_among_the_jobs_of_a_person_unless_an_admin_gave_it_or_it_gives_way() -> None:
    jobs = [
        Waiting("a1", "ada", ALL, 1.0),
        Waiting("b2", "bob", ALL, 2.0),
        Waiting("a3", "ada", ALL, 3.0, priority=100),
        Waiting("a4", "ada", ALL, 4.0, priority=-1),
        Waiting("b5", "bob", ALL, 5.0),
        Waiting("a6", "ada", ALL, 6.0, priority=50),
    ]
    order = [each.job for each in in_order(jobs, lambda who: 0.0)]
    assert order == ["a3", "b2", "a6", "b5", "a1", "a4"]


def test_use_of_long_ago_counts_less() -> None:
    ended = [("ada", 1000.0, 0.0), ("bob", 600.0, HALF_LIFE_S), ("bob", 10.0, 2 * HALF_LIFE_S)]
    assert usage(ended, HALF_LIFE_S) == {"ada": 500.0, "bob": 610.0}


# ---------------------------------------------------------------- random histories


@dataclass(frozen=True)
class Arrival:
    job: Waiting
    at: float
    takes: float


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    found = []
    for number in range(draw(st.integers(1, 14))):
        whole = draw(st.booleans())
        part = Part() if whole else Part(draw(st.integers(1, 8)), draw(st.integers(0, 1)))
        limit = draw(st.sampled_from([math.inf, 100.0, 1000.0]))
        job = Waiting(
            f"j{number}",
            draw(st.sampled_from(["ada", "bob", "eva"])),
            tuple(draw(st.permutations(ALL)))[: draw(st.integers(1, 3))],
            0.0,
            part,
            draw(st.integers(1, 3)),
            draw(st.sampled_from([0, 1, 3])),
            draw(st.sampled_from([0, 0, 0, 5])),
            limit,
        )
        if job.max_nodes and job.max_nodes < job.min_nodes:
            job = replace(job, max_nodes=job.min_nodes)
        at = float(draw(st.integers(0, 2000)))
        takes = draw(st.floats(1.0, min(limit, 3000.0)))
        found.append(Arrival(replace(job, since=at), at, takes))
    return found


@given(arrivals())
def test_in_every_history_nothing_is_given_twice_and_every_job_that_fits_starts(
    history: list[Arrival],
) -> None:
    """A simulated cluster to its end. Each promise of a time is kept, if nobody with a higher
    priority came since."""
    takes = {each.job.job: each.takes for each in history}
    times = [each.at for each in history]
    heapq.heapify(times)
    waiting: dict[str, Waiting] = {}
    running: dict[str, tuple[Running, float]] = {}
    coming = sorted(history, key=lambda each: each.at)
    started: set[str] = set()
    misses: set[str] = set()
    promised: dict[str, float] = {}
    first = ""
    while times:
        now = heapq.heappop(times)
        for job, (_, end) in list(running.items()):
            if end <= now:
                del running[job]
        while coming and coming[0].at <= now:
            arrival = coming.pop(0)
            waiting[arrival.job.job] = arrival.job
            promised.clear()  # it may go first
        order = in_order(waiting.values(), lambda who: 0.0)
        verdicts = decide(order, [run for run, _ in running.values()], THREE, now)
        for verdict in verdicts:
            job = waiting[verdict.job]
            if verdict.misses:
                misses.add(job.job)
            elif verdict.nodes:
                assert job.min_nodes <= len(verdict.nodes) <= (job.max_nodes or 3)
                assert set(verdict.nodes) <= set(job.may)
                assert now <= promised.get(job.job, math.inf)
                run = Running(job.job, job.person, verdict.nodes, now, job.part, job.seconds)
                running[job.job] = run, now + takes[job.job]
                heapq.heappush(times, now + takes[job.job])
                started.add(job.job)
                del waiting[job.job]
            else:
                assert verdict.short > 0
                assert verdict.blockers
        stands = [each for each in verdicts if not each.nodes and not each.misses]
        if stands and stands[0].job != first:
            first = stands[0].job
            promised = {first: stands[0].starts}
            waiting[first] = replace(waiting[first], first_since=now)
        for machine in THREE.values():
            parts = [
                run.part.of(machine) for run, _ in running.values() if machine.node in run.nodes
            ]
            assert sum(each.cores for each in parts) <= machine.cores
            assert sum(each.gpus for each in parts) <= machine.gpus
            assert sum(each.memory_bytes for each in parts) <= machine.memory_bytes
    assert started | misses == {each.job.job for each in history}
    assert not started & misses
