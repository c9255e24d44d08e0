"""Jobs that wait: kept by a majority before their starter hears so, found by the next leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck._core.cluster.jobs.history import JobHistory
from potluck._core.cluster.jobs.keeping import Keeping
from potluck._core.cluster.jobs.queue import Running
from potluck._core.cluster.jobs.queued import QueuedJobs, as_running, never_begun
from potluck._core.cluster.jobs.summary import Summary
from potluck._core.wire import jobs
from potluck._core.wire.format import decoded
from potluck.errors import ConfigurationError, LinkError
from support.job_parts import EVE, LEADER, ME, Machine, spec, view

OTHERS = ("ann", "bob", "cem", "dan")


class Node(Machine):
    """A node with a history of its own, which answers the leader's questions; others that are not
    ``up`` are silent."""

    def __init__(self, home: Path, nodes: dict[str, Node], name: str) -> None:
        super().__init__()
        self.me = name
        self.history = JobHistory(home)
        self.nodes_by_name, self.is_up = nodes, True
        self.banned: set[str] = set()
        nodes[name] = self
        self.keeping: Keeping | None = None

    async def ask(
        self, node: str, request: Any, kind: Any, *, timeout_s: float | None = 10.0
    ) -> Any:
        other = self.nodes_by_name[node]
        if not other.is_up:
            raise LinkError(f"node {node} is away")
        assert other.keeping is not None
        return await other.keeping._asked(self.me, request)

    def objects_to(self, node: str) -> str | None:
        return "it is banned" if node in self.banned else None


def named(job: str, **options: Any) -> jobs.JobSpec:
    return msgspec.structs.replace(spec(bytes(32), LEADER), job=job, only=(ME,), **options)


class Code:
    """Has the code of all jobs."""

    def __init__(self) -> None:
        self.held: list[bytes] = []

    def has(self, package: bytes) -> bool:
        return True

    def hold(self, package: bytes) -> None:
        self.held.append(package)

    def release(self, package: bytes) -> None:
        self.held.remove(package)


class Cluster:
    """Nodes ``ME`` (the leader), ``LEADER`` (which starts the jobs) and ``EVE``."""

    def __init__(self, root: Path) -> None:
        self.nodes: dict[str, Node] = {}
        self.running: list[Running] = []
        self.started: list[tuple[str, tuple[str, ...]]] = []
        self.num_changes = 0
        self.view = view(ME, LEADER, EVE)
        for name in (ME, LEADER, EVE):
            node = Node(root / name, self.nodes, name)
            node.view = self.view
            parts = parts_named(node, name)
            node.keeping = Keeping(parts, {})
        me = self.nodes[ME]
        self.code = Code()
        self.queue = QueuedJobs(
            parts_named(me, ME),
            self.code,  # type: ignore[arg-type]
            running=lambda: self.running,
            is_known_here=lambda job: job in [each.job for each in self.running],
            start=self.start,
            on_changed=self.changed,
        )

    def start(self, one: jobs.JobSpec, nodes: Sequence[str]) -> None:
        self.started.append((one.job, tuple(nodes)))
        self.running.append(as_running(one, tuple(nodes), 0.0))

    def changed(self) -> None:
        self.num_changes += 1

    def sent(self, kind: type) -> list[Any]:
        return [message for _, message in self.nodes[ME].sent if isinstance(message, kind)]


def parts_named(node: Node, name: str) -> Any:
    """The parts of the agent of ``node``, under its own name."""
    return replace(node.parts(), me=name)


def play(tmp_path: Path, story: Callable[[Cluster], Coroutine[Any, Any, None]]) -> Cluster:
    async def run() -> Cluster:
        cluster = Cluster(tmp_path)
        try:
            await story(cluster)
        finally:
            await cluster.queue.close()
            for node in cluster.nodes.values():
                await node.history.close()
        return cluster

    return asyncio.run(run())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0)


async def lead(cluster: Cluster) -> None:
    cluster.queue.lead(cluster.view)
    await until(lambda: cluster.queue.is_known)


def test_a_job_that_waits_is_on_the_disks_of_a_majority_before_its_starter_hears_so(
    tmp_path: Path,
) -> None:
    async def story(cluster: Cluster) -> None:
        await lead(cluster)
        cluster.queue.submitted(named("first"))
        assert cluster.started == [("first", (ME,))]
        cluster.nodes[EVE].is_up = False
        cluster.queue.submitted(named("second"))
        assert cluster.sent(jobs.Submitted) == []
        await until(lambda: cluster.sent(jobs.Submitted) != [])
        for name in (ME, LEADER):
            [entry] = await JobHistory(tmp_path / name).found()
            assert (entry.spec.job, entry.phase) == ("second", "queued")
        assert cluster.sent(jobs.Submitted) == [jobs.Submitted("second")]
        assert cluster.code.held == [bytes(32)]
        [note] = cluster.sent(jobs.JobNote)
        assert note.text.startswith("second waits: it needs 1 machine, 0 are free; leader's first")
        assert cluster.queue.why("second") in note.text
        cluster.running.clear()
        cluster.queue.look()
        assert [job for job, _ in cluster.started] == ["first", "second"]
        assert cluster.queue.names == ()

    play(tmp_path, story)


def test_a_job_that_no_majority_keeps_does_not_wait(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        await lead(cluster)
        cluster.queue.submitted(named("first"))
        cluster.nodes[EVE].is_up = cluster.nodes[LEADER].is_up = False
        cluster.queue.submitted(named("second"))
        await until(lambda: cluster.sent(jobs.Submitted) != [])
        [answer] = cluster.sent(jobs.Submitted)
        assert "only 1 of 3 machines could keep it on disk" in answer.error
        assert cluster.queue.names == ()

    play(tmp_path, story)


def test_the_next_leader_finds_what_waits_and_nothing_that_has_run(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        eve, other = cluster.nodes[EVE].history, cluster.nodes[LEADER].history
        for job in ("waits", "ran", "runs", "ordered", "forged"):
            await eve.waits(named(job), LEADER)
        summary = decoded(
            msgspec.json.Decoder(Summary), never_begun(named("ran"), 2, "no"), "a summary"
        )
        await other.end(named("ran"), LEADER, (), summary, time.time())
        other.reached(named("runs"), LEADER, (), "running")
        other.reached(named("ordered"), LEADER, (), "placed")  # its leader was lost with the order
        cluster.nodes[ME].forged.add("forged")
        await lead(cluster)
        assert set(cluster.queue.names) | {job for job, _ in cluster.started} == {
            "waits",
            "ordered",
        }

    play(tmp_path, story)


def test_a_leader_knows_what_waits_only_when_a_majority_has_answered(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.nodes[EVE].history.waits(named("waits"), LEADER)
        cluster.nodes[EVE].is_up = cluster.nodes[LEADER].is_up = False
        cluster.queue.lead(cluster.view)
        await asyncio.sleep(0)
        assert not cluster.queue.is_known
        cluster.nodes[EVE].is_up = True
        await until(lambda: cluster.queue.is_known)
        assert [job for job, _ in cluster.started] == ["waits"]

    play(tmp_path, story)


def test_jobs_of_a_banned_node_do_not_wait(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        await lead(cluster)
        cluster.queue.submitted(named("first"))
        cluster.queue.submitted(named("second"))
        await until(lambda: cluster.sent(jobs.JobNote) != [])
        cluster.queue.barred({LEADER})
        assert cluster.queue.names == ()
        assert cluster.code.held == []
        cluster.queue.stop()
        cluster.nodes[ME].banned.add(LEADER)
        cluster.running.clear()
        await lead(cluster)
        assert cluster.queue.names == ()
        assert [job for job, _ in cluster.started] == ["first"]

    play(tmp_path, story)


def test_a_job_that_is_to_start_now_does_not_wait(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        await lead(cluster)
        cluster.queue.submitted(named("first"))
        with pytest.raises(ConfigurationError, match="can't start now: it needs 1 machine, 0 are"):
            cluster.queue.submitted(named("second", starts_now=True))
        assert cluster.queue.names == ()

    play(tmp_path, story)


def test_a_job_that_no_machine_can_run_does_not_wait(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        await lead(cluster)
        what = r"1 machine with 9 cores, 1 GPU, 1 GiB of memory, and 0 of those that are there"
        with pytest.raises(ConfigurationError, match=what):
            cluster.queue.submitted(named("wide", cores=9, gpus=1, memory_bytes=1 << 30))
        assert cluster.queue.names == ()

    play(tmp_path, story)


def test_a_running_job_takes_no_machine_that_others_have_or_wait_for(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        await lead(cluster)
        cluster.running = [as_running(named("first"), (EVE,), 0.0)]
        assert cluster.queue.objection(EVE, named("other")) == "it runs first"
        assert cluster.queue.objection(EVE, named("first")) == ""
        assert cluster.queue.objection(LEADER, named("other")) == ""
        cluster.running = [as_running(named("first"), (ME,), 0.0)]
        cluster.queue.submitted(named("second"))
        assert cluster.queue.objection(ME, named("first")) == "second waits for it"
        assert cluster.queue.objection(LEADER, named("first")) == ""

    play(tmp_path, story)
