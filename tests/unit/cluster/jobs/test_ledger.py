"""A signed job is good for one run, also where the leader orders it again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck._core.cluster.jobs import ledger as asking
from potluck._core.cluster.jobs import ledger as ledgers
from potluck._core.cluster.jobs.ledger import JobLedger, Vouching
from potluck._core.cluster.links.peers import Requests
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.wire import jobs
from potluck.errors import ConfigurationError, LinkError

ME, ADA = "me", "ada"
HERE, ELSEWHERE = b"1" * 16, b"2" * 16


def job(number: int = 0, starter: str = ADA, name: str = "job", **more: Any) -> jobs.JobSpec:
    return jobs.JobSpec(
        job=name,
        script="train.py",
        package=bytes(32),
        starter=starter,
        versions=own_versions(),
        number=number,
        **{"cluster": HERE, **more},
    )


class Node:
    """A node with its ledger, linked to the ``others``; their messages arrive at once."""

    def __init__(self, me: str, home: Path | None, others: dict[str, Node]) -> None:
        self.me = me
        self.others = others
        self.is_mute = False
        self.requests = Requests()
        self.notes: list[str] = []
        links: Any = self
        self.ledger = JobLedger(me, home)
        self.vouching = Vouching(me, links, self.ledger, lambda: HERE, self.notes.append)
        others[me] = self

    def on_request(self, requests: object, answer: Any) -> None:
        self.answer = answer

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self.others)

    async def ask(
        self, node: str, request: jobs.JobRunsRequest, kind: Any, *, timeout_s: float
    ) -> Any:
        def send(number: int) -> bool:
            other = self.others.get(node)
            if other is not None and not other.is_mute:
                answer = other.answer(self.me, request)
                loop = asyncio.get_running_loop()
                loop.call_soon(self.requests.answered, node, number, answer)
            return other is not None

        return await self.requests.ask(node, kind, send, timeout_s=timeout_s)


def test_a_job_runs_once_and_the_next_run_of_the_agent_knows_it(tmp_path: Path) -> None:
    async def story() -> None:
        ada, me = Node(ADA, tmp_path / "a", nodes := {}), Node(ME, tmp_path / "m", nodes)
        spec = await ada.vouching.start_own(job())
        await me.vouching.confirm(spec)
        await me.vouching.confirm(spec)  # a new leader orders it again while it runs
        me = Node(ME, tmp_path / "m", nodes)
        await me.vouching.confirm(spec)  # or this agent began anew meanwhile
        me.vouching.over(spec)
        with pytest.raises(ConfigurationError, match="a job runs once"):
            await me.vouching.confirm(spec)
        await me.vouching.close()
        me = Node(ME, tmp_path / "m", nodes)
        with pytest.raises(ConfigurationError, match="a job runs once"):
            await me.vouching.confirm(spec)
        assert (tmp_path / "m" / ledgers.FILE).stat().st_mode & 0o777 == 0o600

    asyncio.run(story())


def test_a_machine_that_came_later_asks_the_starter_and_not_the_leader(tmp_path: Path) -> None:
    """It knows nothing of the jobs before. Without a link to the starter a job goes on."""

    async def story() -> None:
        nodes: dict[str, Node] = {}
        ada = Node(ADA, tmp_path, nodes)
        old = await ada.vouching.start_own(job())
        new = await ada.vouching.start_own(job())
        assert new.number > old.number
        ada.vouching.over(old)
        for restarts in range(2):
            late = Node(f"late-{restarts}", None, nodes)
            await late.vouching.confirm(new)
            with pytest.raises(ConfigurationError, match="says that it does not run any more"):
                await late.vouching.confirm(old)
            await ada.vouching.close()
            ada = Node(ADA, tmp_path, nodes)
        del nodes[ADA]
        await Node("alone", None, nodes).vouching.confirm(new)

    asyncio.run(story())


def test_a_job_of_this_machine_is_not_run_again_in_its_name(tmp_path: Path) -> None:
    """It would run outside of the sandbox."""

    async def story() -> None:
        me = Node(ME, tmp_path, {})
        spec = await me.vouching.start_own(job(starter=ME))
        await me.vouching.confirm(spec)
        me.vouching.over(spec)
        for other in (spec, job(spec.number + 1, ME), job(1, ME)):
            with pytest.raises(ConfigurationError, match="a job runs once"):
                await me.vouching.confirm(other)

    asyncio.run(story())


def test_a_job_of_another_cluster_is_refused_though_its_starter_is_in_both(tmp_path: Path) -> None:
    async def story() -> None:
        nodes: dict[str, Node] = {}
        ada, me = Node(ADA, None, nodes), Node(ME, None, nodes)
        spec = await ada.vouching.start_own(job())
        for cluster in (ELSEWHERE, b""):
            with pytest.raises(ConfigurationError, match="in another cluster"):
                await me.vouching.confirm(msgspec.structs.replace(spec, cluster=cluster))
        await me.vouching.confirm(spec)

    asyncio.run(story())


def test_the_numbers_of_a_starter_grow_whatever_its_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = []
    for now in (2e9, 1e9, 1e30, 5.0):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        ledger = JobLedger(ME, tmp_path)
        numbers += [ledger.begin_own(job(starter=ME)).number for _ in range(3)]
        asyncio.run(ledger.save())
    assert numbers == sorted(set(numbers))
    assert numbers[-1] < jobs.MAX_JOB_NUMBER


def test_what_ran_before_and_no_leader_lists_is_over(tmp_path: Path) -> None:
    """The agent was away when its jobs ended. A job that its starter has not handed in yet is in no
    list."""

    async def story() -> None:
        ada, me = Node(ADA, None, nodes := {}), Node(ME, tmp_path, nodes)
        gone, still = [await ada.vouching.start_own(job(name=each)) for each in ("gone", "still")]
        for spec in (gone, still):
            await me.vouching.confirm(spec)
        me = Node(ME, tmp_path, nodes)
        own = await me.vouching.start_own(job(starter=ME, name="own"))
        me.vouching.listed({"still", "own"})
        await me.vouching.confirm(still)
        await me.vouching.confirm(own)
        with pytest.raises(ConfigurationError, match="a job runs once"):
            await me.vouching.confirm(gone)

    asyncio.run(story())


def test_a_list_of_jobs_does_not_end_a_job_that_is_being_written_down(tmp_path: Path) -> None:
    """A job that ends sends all nodes a list, just as a command starts the next one."""

    async def story() -> None:
        me = Node(ME, tmp_path, {})
        starting = asyncio.create_task(me.vouching.start_own(job(starter=ME)))
        await asyncio.sleep(0)
        assert not starting.done()
        me.vouching.listed(())
        spec = await starting
        await me.vouching.confirm(spec)
        me.vouching.listed(())
        with pytest.raises(ConfigurationError, match="a job runs once"):
            await me.vouching.confirm(spec)

    asyncio.run(story())


def test_a_job_of_which_nothing_ran_may_be_ordered_by_the_next_leader(tmp_path: Path) -> None:
    async def story() -> None:
        ada, me = Node(ADA, None, nodes := {}), Node(ME, None, nodes)
        spec = await ada.vouching.start_own(job())
        await me.vouching.confirm(spec)
        me.vouching.over(spec, has_run=False)
        await me.vouching.confirm(spec)
        me.vouching.over(spec, has_run=False)
        ada.vouching.over(spec)
        with pytest.raises(ConfigurationError, match="does not run any more"):
            await me.vouching.confirm(spec)

    asyncio.run(story())


def test_a_starter_that_says_nothing_is_waited_for_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "_ANSWER_S", 0.2)
    monkeypatch.setattr(asking, "_ASK_AGAIN_S", 0.05)

    async def story() -> None:
        ada, me = Node(ADA, None, nodes := {}), Node(ME, None, nodes)
        spec = await ada.vouching.start_own(job())
        ada.is_mute = True
        with pytest.raises(LinkError, match="does not answer whether it runs"):
            await me.vouching.confirm(spec)
        waiting = asyncio.create_task(me.vouching.confirm(spec))
        await asyncio.sleep(0)
        del nodes[ADA]  # the link ends while it is asked
        await waiting

    asyncio.run(story())


def test_what_is_remembered_is_bounded_and_older_jobs_count_as_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledgers, "MAX_OVER", 3)
    ledger = JobLedger(ME, None)
    long = job(2)
    ledger.begin(long)
    for number in range(3, 20):
        ledger.begin(job(number))
        ledger.over(job(number))
    assert len(ledger._starters[ADA].over) == 3
    assert all(ledger.is_over(job(number)) for number in (1, *range(3, 20)))
    assert not ledger.is_over(long), "it still runs"
    assert not ledger.is_over(job(20))
    monkeypatch.setattr(ledgers, "MAX_STARTERS", 4)
    for number in range(20):
        ledger.begin(job(1, f"node-{number}"))
    assert len(ledger._starters) == 4


def test_an_agent_does_not_start_with_a_damaged_ledger(tmp_path: Path) -> None:
    path = tmp_path / ledgers.FILE
    path.write_text("[]")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"jobs\.json is damaged: .* Remove it"):
        JobLedger(ME, tmp_path)
