"""The history of jobs: what a node keeps, for how long, and what several nodes know together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck._core.cluster.code_store.job_folders import key_of
from potluck._core.cluster.jobs import history as module
from potluck._core.cluster.jobs.history import JobHistory, merged, one_job
from potluck._core.cluster.jobs.keeping import Keeping
from potluck._core.cluster.jobs.summary import Summary, encode_summary
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.wire import jobs, peers
from potluck._core.wire.peers import Written
from potluck.errors import ConfigurationError, IdentityError, LinkError, ProtocolError
from support.disk import changes_by_this_thread
from support.job_parts import EVE, LEADER, ME, Machine, install, play, submit, view

ADA, BOB = "a1" * 32, "b2" * 32
NOW = time.time()
WHERE = ("ada", [(ADA, "ada"), (BOB, "bob")])


def spec(job: str, starter: str = ADA, started: float = NOW) -> jobs.JobSpec:
    return jobs.JobSpec(
        job=job,
        script="train.py",
        package=b"\1" * 32,
        starter=starter,
        versions=own_versions(),
        started=started,
        commit="12ab-dirty",
    )


def summary(job: str, code: int = 0, *, num_files: int = 0) -> Summary:
    written = (Written(BOB, "bob", num_files, 10),) if num_files else ()
    problems = ("worker 1 exited with code 3",) if code else ()
    return Summary(
        job, "train.py", code, 2.5, 0, 0, {}, None, (), (), problems, (), written=written
    )


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await story()

    asyncio.run(bounded())


def test_an_entry_is_kept_as_it_goes_on_and_outlives_the_agent(tmp_path: Path) -> None:
    async def story() -> None:
        history = JobHistory(tmp_path, pytest.fail)
        with changes_by_this_thread(tmp_path) as changes:
            history.reached(spec("a-1"), *WHERE, "placed")
            [placed] = (await history.answer(jobs.HistoryRequest())).jobs
            history.reached(spec("a-1"), *WHERE, "running")
            history.reached(spec("a-1"), *WHERE, "placed")  # of an order that came late
            await history.close()
            [running] = (await JobHistory(tmp_path).answer(jobs.HistoryRequest("a"))).jobs
            await history.end(spec("a-1"), *WHERE, summary("a-1", 3), NOW + 5)
        assert changes == []
        assert (placed.phase, running.phase) == ("placed", "running")
        [ended] = (await JobHistory(tmp_path).answer(jobs.HistoryRequest())).jobs
        assert (ended.phase, ended.exit_code, ended.seconds) == ("ended", 3, 2.5)
        assert (ended.machine, ended.machines, ended.commit) == (
            "ada",
            ("ada", "bob"),
            "12ab-dirty",
        )
        assert ended.problem == "worker 1 exited with code 3"
        assert ended.summary == b"", "only who asks for the one job gets it"
        [whole] = (await history.answer(jobs.HistoryRequest("a-1", ADA))).jobs
        assert msgspec.json.decode(whole.summary, type=Summary) == summary("a-1", 3)
        assert (await history.answer(jobs.HistoryRequest("b"))).jobs == ()

    run(story)


def test_an_end_is_written_once_whatever_the_leader_says_later(tmp_path: Path) -> None:
    async def story() -> None:
        history = JobHistory(tmp_path)
        await history.end(spec("a-1"), *WHERE, summary("a-1", 0, num_files=3), NOW)
        await history.end(spec("a-1"), *WHERE, summary("a-1", 1), NOW)
        history.reached(spec("a-1"), *WHERE, "running")  # the job was ordered once more
        history.let_go(spec("a-1"))
        await history.close()
        [entry] = await history.found()
        assert entry.summary == summary("a-1", 0, num_files=3)
        assert history.left_by(ADA) == [("a-1", (Written(BOB, "bob", 3, 10),))]
        assert history.left_by(BOB) == []
        history.files_removed("a-1", ADA)
        assert history.left_by(ADA) == []

    run(story)


def test_a_job_that_never_began_is_forgotten_one_that_ran_is_not(tmp_path: Path) -> None:
    async def story() -> None:
        history = JobHistory(tmp_path)
        history.reached(spec("a-1"), *WHERE, "placed")
        history.reached(spec("b-1"), *WHERE, "running")
        history.let_go(spec("a-1"))
        history.let_go(spec("b-1"))
        await history.close()
        assert [each.spec.job for each in await history.found()] == ["b-1"]

    run(story)


def test_a_member_with_many_jobs_displaces_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_JOBS", 4)

    async def story() -> None:
        history = JobHistory(tmp_path)
        for number in range(2):
            await history.end(spec(f"b-{number}", BOB), *WHERE, summary("b"), NOW - 9)
        for number in range(6):
            await history.end(spec(f"a-{number}"), *WHERE, summary("a"), NOW + number)
        left = {each.spec.job for each in await history.found()}
        assert left == {"b-0", "b-1", "a-4", "a-5"}
        monkeypatch.setattr(module, "KEPT_DAYS", -1.0)
        await history.end(spec("a-6"), *WHERE, summary("a"), NOW)
        history._prune(1e12)
        assert await history.found() == []

    run(story)


def test_a_full_disk_is_said_once_and_this_agent_still_tells_of_the_end(tmp_path: Path) -> None:
    async def story() -> None:
        notes: list[str] = []
        history = JobHistory(tmp_path, notes.append)
        (tmp_path / "code_store").write_text("a file where the folder should be")
        history.reached(spec("a-1"), *WHERE, "running")
        with pytest.raises(IdentityError, match="the history of jobs"):
            await history.end(spec("a-1"), *WHERE, summary("a-1", 3), NOW)
        assert len(notes) == 1
        [told] = (await history.answer(jobs.HistoryRequest())).jobs
        assert (told.phase, told.exit_code) == ("ended", 3)

    run(story)


def test_two_starters_may_have_jobs_of_one_name(tmp_path: Path) -> None:
    async def story() -> None:
        history = JobHistory(tmp_path)
        await history.end(spec("a-1"), *WHERE, summary("a-1", 0), NOW)
        await history.end(spec("a-1", BOB), *WHERE, summary("a-1", 7), NOW)
        found = (await history.answer(jobs.HistoryRequest("a-1"))).jobs
        assert {each.starter: each.exit_code for each in found} == {ADA: 0, BOB: 7}

    run(story)


def test_a_lying_summary_can_be_told_on(tmp_path: Path) -> None:
    """A leader may say any number; what another node is told has to fit its message."""

    async def story() -> None:
        history = JobHistory(tmp_path)
        lies = msgspec.structs.replace(summary("a-1", 10**30), seconds=-5.0)
        await history.end(spec("a-1"), *WHERE, lies, NOW)
        answer = await history.answer(jobs.HistoryRequest())
        data = peers.MESSAGE.encode(peers.Response(1, answer))
        assert peers.MESSAGE.decode(data[4:]) == peers.Response(1, answer)

    run(story)


def info(job: str, phase: jobs.Phase, starter: str = ADA, **fields: Any) -> jobs.JobInfo:
    return jobs.JobInfo(
        job=job, starter=starter, machine="ada", script="s.py", started=1.0, phase=phase, **fields
    )


def test_of_what_nodes_tell_the_furthest_counts() -> None:
    ended = info("a-1", "ended", exit_code=0)
    others = [info("a-1", "running"), info("a-1", "placed"), info("a-1", "ended", BOB)]
    for answers in ([ended, *others], [*others, ended]):
        assert [each for each in merged(answers) if each.starter == ADA] == [ended]
        assert len(merged(answers)) == 2


def test_a_job_is_named_by_any_beginning_that_fits_one() -> None:
    found = [info("sweep-14e6", "ended"), info("sweep-14", "running"), info("train-9", "ended")]
    assert one_job("tr", found) is found[2]
    assert one_job("sweep-14", found) is found[1], "a whole id is never ambiguous"
    with pytest.raises(ConfigurationError, match=r"2 jobs: sweep-14e6 \(of ada\), sweep-14 \("):
        one_job("sw", found)
    for unknown in ("", "x", "sweep-14e6-"):
        with pytest.raises(ConfigurationError, match="no machine that is there knows"):
            one_job(unknown, found)


def test_an_end_is_kept_for_the_leader_of_a_job_that_its_starter_signed(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: Any, code_store: Any) -> None:
        install(machine, all_jobs, view(LEADER, ME, EVE))
        machine.history = JobHistory(tmp_path)
        keeping: Keeping = all_jobs._keeping
        keeping._agent = machine.parts()
        all_jobs.received(LEADER, jobs.Order(spec("a-1", EVE), ()))
        told = jobs.KeepEnd("a-1", encode_summary(summary("a-1")), NOW)
        with pytest.raises(LinkError, match="only the leader"):
            await keeping._asked(EVE, told)
        with pytest.raises(LinkError, match="members of its cluster's view only"):
            await keeping._asked("stranger", jobs.HistoryRequest())
        with pytest.raises(LinkError, match="no such job was started"):
            await keeping._asked(LEADER, jobs.KeepEnd("b-1", told.summary, NOW))
        machine.forged.add("a-1")
        with pytest.raises(LinkError, match="no such job was started"):
            await keeping._asked(LEADER, told)
        machine.forged.clear()
        with pytest.raises(ProtocolError, match="not the summary of a job"):
            await keeping._asked(LEADER, jobs.KeepEnd("a-1", b"{}", NOW))
        assert await machine.history.found() == []
        assert await keeping._asked(LEADER, told) == jobs.Kept()
        assert [each.phase for each in await machine.history.found()] == ["ended"]

    play(tmp_path, story)


def test_a_job_is_cancelled_for_its_starter_and_for_admins_alone(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: Any, code_store: Any) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code", (LEADER, EVE, "carl"))
        keeping: Keeping = all_jobs._keeping
        with pytest.raises(LinkError, match="on the machine that started it, or by an admin"):
            await keeping._asked("carl", jobs.CancelJob("job"))
        with pytest.raises(LinkError, match="members of its cluster's view only"):
            await keeping._asked("stranger", jobs.CancelJob("job"))
        with pytest.raises(LinkError, match="job other is not led here any more"):
            await keeping._asked(LEADER, jobs.CancelJob("other"))
        for node in (ME, LEADER, EVE, "carl"):
            all_jobs.received(node, jobs.NodeReport("job"))
        [controller] = all_jobs._controllers.values()
        assert controller.num_interrupts == 0
        assert await keeping._asked(LEADER, jobs.CancelJob("job")) == jobs.Kept()
        assert controller.num_interrupts == 1
        assert await keeping._asked(EVE, jobs.CancelJob("job", kills=True)) == jobs.Kept()
        assert controller.num_interrupts == 3
        assert "job job: cancelled by eve (eve)" in machine.notes

    play(tmp_path, story)


def test_a_log_is_read_by_who_started_or_ran_the_job_or_may_run_scripts_here(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: Any, code_store: Any) -> None:
        install(machine, all_jobs, view(ME, LEADER, EVE, "carl"))
        machine.history = JobHistory(tmp_path)
        keeping: Keeping = all_jobs._keeping
        keeping._agent = machine.parts()
        machine.refusals[ME] = "its owner does not let it run jobs of others"
        secret = msgspec.structs.replace(spec("b-1", EVE), keeps_files=True)
        for one in (spec("a-1", EVE), secret):
            await machine.history.end(one, "eve", [(LEADER, "leader")], summary(one.job), NOW)
        for job, readers in (("a-1", {ME, EVE, LEADER}), ("b-1", {ME, EVE})):
            for node in (ME, EVE, LEADER, "carl"):
                asked = keeping._asked(node, jobs.LogRequest(job, EVE))
                if node in readers:
                    assert (await asked).is_over
                else:
                    with pytest.raises(LinkError, match="started or ran it"):
                        await asked
        machine.refusals.clear()
        assert await keeping._asked("carl", jobs.LogRequest("a-1", EVE))
        with pytest.raises(LinkError, match="started or ran it"):
            await keeping._asked("carl", jobs.LogRequest("b-1", EVE))

    play(tmp_path, story)


def test_a_log_has_lines_of_workers_of_the_job_and_of_its_leaders_alone(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: Any, code_store: Any) -> None:
        install(machine, all_jobs, view(LEADER, ME, EVE))
        places = (jobs.WorkerPlace("0", EVE, 0),)
        all_jobs.received(LEADER, jobs.Order(spec("job", ME), places))
        for source in ("0", "@leader", "1", "x" * 40, ""):
            line = jobs.LabelledOutput("job", "", "stdout", "hello", source=source, at=1, number=1)
            all_jobs.received(LEADER, line)
        kept, _ = await machine.log.read(key_of("job", ME), {})
        assert [each.source for each in kept] == ["0", "@leader"]

    play(tmp_path, story)
