"""Jobs that wait: told to all nodes before their starter hears so, gone on with by the next
leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck._core.cluster.jobs import queued
from potluck._core.cluster.jobs.history import JobHistory
from potluck._core.cluster.jobs.queue import Running
from potluck._core.cluster.jobs.queued import QueuedJobs, as_running
from potluck._core.wire import jobs
from potluck._core.wire.nodes import View
from potluck.errors import ConfigurationError, LinkError
from support.job_parts import EVE, LEADER, ME, Machine, spec, view

OTHERS = ("ann", "bob", "cem", "dan")


class Node(Machine):
    """A node with a history of its own."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.history = JobHistory(home)
        self.banned: set[str] = set()

    def objects_to(self, node: str) -> str | None:
        return "it is banned" if node in self.banned else None


def named(job: str, **options: Any) -> jobs.JobSpec:
    return msgspec.structs.replace(spec(bytes(32), LEADER), job=job, only=(ME,), **options)


class Code:
    """Has the code of all jobs."""

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.is_whole = True
        self.failures: list[Exception] = []
        self.is_fetching, self.is_fetched = asyncio.Event(), asyncio.Event()

    def has(self, package: bytes) -> bool:
        return self.is_whole

    async def fetch(self, package: bytes, starter: str) -> None:
        if self.failures:
            raise self.failures.pop()
        self.is_fetching.set()
        await self.is_fetched.wait()

    def hold(self, package: bytes) -> None:
        self.held.append(package)

    def release(self, package: bytes) -> None:
        self.held.remove(package)


class Cluster:
    """Node ``name`` and its queue in a view that ``ME`` leads; ``LEADER`` starts the jobs."""

    def __init__(self, root: Path, name: str) -> None:
        self.node = Node(root)
        self.running: list[Running] = []
        self.started: list[tuple[str, tuple[str, ...]]] = []
        self.told: list[jobs.JobWaits] = []
        self.num_changes = 0
        self.code = Code()
        self.queue = QueuedJobs(
            replace(self.node.parts(), me=name),
            self.code,  # type: ignore[arg-type]
            running=lambda: self.running,
            start=self.start,
            send_all=self.told.append,
            on_changed=self.changed,
        )
        self.install(view(ME, LEADER, EVE))

    def install(self, new: View) -> tuple[str, ...]:
        self.node.view = new
        return self.queue.installed(new)

    def start(self, one: jobs.JobSpec, nodes: Sequence[str]) -> None:
        self.started.append((one.job, tuple(nodes)))
        self.running.append(as_running(one, tuple(nodes), 0.0))

    def changed(self) -> None:
        self.num_changes += 1

    def sent(self, kind: type) -> list[Any]:
        return [message for _, message in self.node.sent if isinstance(message, kind)]


def play(
    tmp_path: Path, story: Callable[[Cluster], Coroutine[Any, Any, None]], name: str = ME
) -> None:
    async def run() -> None:
        cluster = Cluster(tmp_path, name)
        try:
            await story(cluster)
        finally:
            await cluster.queue.close()
            await cluster.node.history.close()

    asyncio.run(run())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0)


def test_all_nodes_know_of_a_job_that_waits_before_its_starter_hears_so(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.queue.submitted(named("first"))
        assert cluster.started == [("first", (ME,))]
        cluster.queue.submitted(named("second"))
        assert cluster.sent(jobs.Submitted) == []
        await until(lambda: cluster.sent(jobs.Submitted) != [])
        assert cluster.told == [jobs.JobWaits(named("second"))]
        assert cluster.sent(jobs.Submitted) == [jobs.Submitted("second")]
        assert cluster.code.held == [bytes(32)]
        await cluster.node.history.close()
        [entry] = await JobHistory(tmp_path).found()
        assert (entry.spec.job, entry.phase) == ("second", "queued")
        [note] = cluster.sent(jobs.JobNote)
        assert note.text.startswith("second waits: it needs 1 machine, 0 are free; leader's first")
        assert cluster.queue.why("second") in note.text
        cluster.queue.linked(EVE)
        assert cluster.node.sent[-1] == (EVE, jobs.JobWaits(named("second")))
        cluster.running.clear()
        cluster.queue.look()
        assert [job for job, _ in cluster.started] == ["first", "second"]
        assert cluster.queue.names == ()

    play(tmp_path, story)


@pytest.mark.parametrize("name", [LEADER, EVE])
def test_a_node_has_what_its_leader_tells_and_the_next_leader_goes_on(
    tmp_path: Path, name: str
) -> None:
    async def story(cluster: Cluster) -> None:
        for job in ("one", "two", "ran", "ended", "forged"):
            cluster.node.forged.add("forged")
            cluster.queue.take(jobs.JobWaits(named(job)))
        assert cluster.queue.names == ("one", "two", "ran", "ended")
        cluster.queue.look()
        assert cluster.started == [], "it does not lead"
        cluster.queue.ordered("ran")
        cluster.queue.listed(["one", "two"])
        cluster.queue.take(jobs.JobWaits(named("ran")))
        assert cluster.queue.names == ("one", "two")
        await until(lambda: len(cluster.code.held) == (2 if name == LEADER else 0))
        both = view(LEADER, EVE)
        again = cluster.install(View(both.history, 4, cluster.node.view.members[1:]))  # type: ignore[union-attr]
        assert again == ((named("one"), named("two")) if name == LEADER else ())
        cluster.queue.look()
        if name == LEADER:
            assert [each.spec.job for each in cluster.told] == ["one", "two"]
            assert cluster.queue.names == ("one", "two"), "this machine alone may run them: it left"
        await until(lambda: len(cluster.code.held) == 2)

    play(tmp_path, story, name)


def test_a_cancelled_job_begins_under_no_leader(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.queue.submitted(named("first"))
        cluster.queue.submitted(named("second"))
        await until(lambda: cluster.sent(jobs.Submitted) != [])
        assert cluster.queue.cancel("second") == named("second")
        assert cluster.queue.cancel("second") is None
        assert cluster.told[-1] == jobs.JobWaits(named("second"), is_cancelled=True)
        cluster.running.clear()
        cluster.queue.look()
        assert cluster.queue.names == ("second",), "until its end is kept"
        assert cluster.code.held == []
        cluster.queue.forget("second")
        assert cluster.queue.names == ()
        assert [job for job, _ in cluster.started] == ["first"]

    play(tmp_path, story)


def test_nothing_is_held_for_a_job_that_is_cancelled_while_its_code_comes(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.code.is_whole = False
        cluster.queue.take(jobs.JobWaits(spec := named("job", plan=bytes(31) + b"p")))
        holding = asyncio.create_task(cluster.queue._hold(spec))
        await cluster.code.is_fetching.wait()
        assert cluster.code.held == [bytes(32)]
        cluster.queue.cancel("job")
        cluster.code.is_fetched.set()
        await holding
        assert cluster.code.held == []

    play(tmp_path, story, EVE)


def test_the_next_leader_asks_for_code_until_it_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The starter may have been lost while it sent that; the leader has it."""
    monkeypatch.setattr(queued, "_LOOK_S", 0.0)

    async def story(cluster: Cluster) -> None:
        cluster.code.is_whole = False
        cluster.code.failures = [LinkError("the starter is lost"), OSError("no room")]
        cluster.queue.take(jobs.JobWaits(named("job")))
        cluster.install(msgspec.structs.replace(cluster.node.view, epoch=4))
        await until(cluster.code.is_fetching.is_set)
        assert (cluster.code.failures, cluster.queue._bringing) == ([], {"job"})
        cluster.code.is_fetched.set()
        await until(lambda: not cluster.queue._bringing)
        assert cluster.code.held == [bytes(32)]

    play(tmp_path, story, LEADER)


def test_a_leader_can_not_have_more_wait_than_may(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        large = tuple("x" * 60_000 for _ in range(8))
        for job in ("a", "b", "c"):
            cluster.queue.take(jobs.JobWaits(named(job, arguments=large)))
        assert cluster.queue.names == ("a", "b")
        for number in range(200):
            cluster.queue.take(jobs.JobWaits(named(f"d{number}")))
        assert len(cluster.queue.names) == 64
        cluster.queue.take(jobs.JobWaits(named("a", arguments=large), is_cancelled=True))
        assert not cluster.queue.table.waits("a"), "the end of what waits takes no room"

    play(tmp_path, story, EVE)


def test_what_is_dropped_because_this_node_was_away_is_told_from_the_disk(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.queue.take(jobs.JobWaits(named("one")))
        assert cluster.node.history._live != {}
        cluster.install(view(LEADER, ME, EVE, epoch=4))
        assert (cluster.queue.names, cluster.node.history._live) == ((), {})
        await cluster.node.history.close()
        [entry] = await cluster.node.history.found()
        assert entry.phase == "queued", "as far as this node knows"

    play(tmp_path, story, LEADER)


def test_what_waits_is_bounded_in_bytes_and_so_is_one_machine(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.queue.submitted(named("first"))
        large = tuple("x" * 60_000 for _ in range(8))
        for job in ("a", "b"):
            cluster.queue.submitted(named(job, arguments=large))
        with pytest.raises(ConfigurationError, match=r"2 of this machine, .* at most 256 jobs"):
            cluster.queue.submitted(named("c", arguments=large))
        cluster.queue.submitted(named("d"))
        assert cluster.queue.names == ("a", "b", "d")

    play(tmp_path, story)


def test_jobs_of_a_banned_node_do_not_wait(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.queue.submitted(named("first"))
        cluster.queue.submitted(named("second"))
        await until(lambda: cluster.sent(jobs.JobNote) != [])
        cluster.queue.barred({LEADER})
        assert cluster.queue.names == ()
        assert cluster.code.held == []
        cluster.node.banned.add(LEADER)
        cluster.queue.stop()
        cluster.queue.take(jobs.JobWaits(named("third")))
        assert cluster.queue.names == ()
        cluster.running.clear()
        cluster.install(view(ME, LEADER, EVE))
        cluster.queue.look()
        assert [job for job, _ in cluster.started] == ["first"]

    play(tmp_path, story)


def test_a_job_that_is_to_start_now_does_not_wait(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.queue.submitted(named("first"))
        with pytest.raises(ConfigurationError, match="can't start now: it needs 1 machine, 0 are"):
            cluster.queue.submitted(named("second", starts_now=True))
        assert cluster.queue.names == ()

    play(tmp_path, story)


def test_a_job_that_no_machine_can_run_does_not_wait(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        what = r"1 machine with 9 cores, 1 GPU, 1 GiB of memory, and 0 of those that are there"
        with pytest.raises(ConfigurationError, match=what):
            cluster.queue.submitted(named("wide", cores=9, gpus=1, memory_bytes=1 << 30))
        assert cluster.queue.names == ()

    play(tmp_path, story)


def test_a_running_job_takes_no_machine_that_others_have_or_wait_for(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.running = [as_running(named("first"), (EVE,), 0.0)]
        assert cluster.queue.objection(EVE, named("other")) == "it runs first"
        assert cluster.queue.objection(EVE, named("first")) == ""
        assert cluster.queue.objection(LEADER, named("other")) == ""
        cluster.running = [as_running(named("first"), (ME,), 0.0)]
        cluster.queue.submitted(named("second"))
        assert cluster.queue.objection(ME, named("first")) == "second waits for it"
        assert cluster.queue.objection(LEADER, named("first")) == ""

    play(tmp_path, story)
