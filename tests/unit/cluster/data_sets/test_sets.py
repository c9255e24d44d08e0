"""Who gets data sets, what is kept of them, and what is refused."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from potluck._core.cluster.data_sets import job_data
from potluck._core.cluster.data_sets.job_data import JobData
from potluck._core.cluster.data_sets.sets import DataSets, quota_of
from potluck._core.wire import jobs, peers
from potluck.errors import ConfigurationError, LinkError
from support.data_sets import ADA, BOB, EVE, Machines, in_a_loop


async def fetched(machines: Machines) -> tuple[jobs.JobSpec, JobData, JobData]:
    spec = await machines.spec()
    ada, bob = machines.job(ADA, spec), machines.job(BOB, spec)
    await ada.offer()
    await bob.bring(has_workers=True)
    return spec, ada, bob


@in_a_loop
async def test_data_lies_in_a_folder_that_goes_with_the_job(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    _, ada, bob = await fetched(machines)
    assert ada.is_here
    assert bob.is_here
    there = tmp_path / BOB / "data" / "jobs" / "key" / "sets" / "pets"
    assert (there / "large").read_bytes() == (machines.pets / "large").read_bytes()
    assert (there / "small").stat().st_mode & 0o777 == 0o400
    assert there.stat().st_mode & 0o777 == 0o500
    for data in (bob, ada):
        await data.close()
    assert not there.exists()
    assert [each.state for each in machines.sets[BOB].held(BOB)] == ["kept"]


@in_a_loop
async def test_what_a_script_changed_is_neither_used_nor_served_again(tmp_path: Path) -> None:
    """A script without a sandbox can write to the links that it sees, and so to the store."""
    machines = Machines(tmp_path)
    spec, ada, bob = await fetched(machines)
    there = tmp_path / BOB / "data" / "jobs" / "key" / "sets" / "pets" / "large"
    there.chmod(0o600)
    with there.open("r+b") as file:
        file.write(b"not as it was")
    machines.nodes.answers.pop(ADA)
    machines.sets[BOB].allow("other", ADA, [EVE], [spec.data[0].package])
    eve = machines.sets[EVE].content
    for _ in range(2):  # what was told of it before is not told again
        with pytest.raises(LinkError, match="no node sends the"):
            await eve.fetch("data", spec.data[0].package, first=BOB)
    assert machines.nodes.notes == [], "bob passes for no liar"
    machines.nodes.answers[ADA] = machines.sets[ADA].content.answer
    await bob.close()
    machines.nodes.asked.clear()
    bob = machines.job(BOB, spec)
    await bob.bring(has_workers=True)
    assert there.read_bytes() == (machines.pets / "large").read_bytes()
    assert sum(each.count for each in machines.nodes.parts(ADA)) == 5 << 20, "the small one is here"
    for data in (bob, ada):
        await data.close()


@pytest.mark.parametrize("kept", [1.0, 0.5])
@in_a_loop
async def test_who_names_a_data_set_of_another_gets_it_only_if_it_has_it(
    tmp_path: Path, kept: float
) -> None:
    """Bob keeps what came for a job of ada's. Eve knows its hash, and starts a job of her own."""
    machines = Machines(tmp_path)
    spec, ada, bob = await fetched(machines)
    await bob.close()
    if kept < 1.0:
        [small] = (each for each in (tmp_path / BOB).rglob("objects/*-5"))
        small.unlink()
    hers = msgspec.structs.replace(spec, job="hers", starter=EVE)
    bob = machines.job(BOB, hers)
    bob.members([BOB, EVE])
    with pytest.raises(LinkError, match=r"eve does not show that it has it, too|no node sends"):
        await bob.bring(has_workers=True)
    assert not (tmp_path / BOB / "data" / "jobs" / "key" / "sets").exists()
    with pytest.raises(LinkError, match="no node sends the package"):
        await machines.sets[EVE].content.fetch("data", spec.data[0].package, first=BOB)
    await bob.close()
    folder = tmp_path / "hers"
    shutil.copytree(machines.pets, folder)
    scanned = await machines.sets[EVE].scan("pets", folder, print)
    machines.sets[EVE].offer("pets", folder, scanned)
    machines.sets[EVE].allow("hers", EVE, [BOB], [scanned.package.name])
    machines.nodes.asked.clear()
    bob = machines.job(BOB, hers)
    await bob.bring(has_workers=True)
    assert bob.is_here
    assert sum(each.count for each in machines.nodes.parts(EVE)) < 64 << 10
    await bob.close()
    again = DataSets(tmp_path / BOB, BOB, machines.nodes.store(tmp_path / BOB, BOB), 1 << 30)
    assert all(again.brings(scanned.package.name, node) for node in (ADA, EVE))
    await ada.close()


@in_a_loop
async def test_what_was_touched_and_not_changed_is_verified_once(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    spec, ada, bob = await fetched(machines)
    await bob.close()
    for each in (tmp_path / BOB).rglob("objects/*"):
        os.utime(each)
    machines.nodes.asked.clear()
    bob = machines.job(BOB, spec)
    await bob.bring(has_workers=True)
    assert not machines.nodes.parts(ADA)
    for data in (bob, ada):
        await data.close()


@in_a_loop
async def test_only_machines_of_the_job_get_its_data(tmp_path: Path) -> None:
    """Eve is a member of the cluster, and knows the hash."""
    machines = Machines(tmp_path)
    spec, ada, bob = await fetched(machines)
    with pytest.raises(LinkError, match="no node sends the package"):
        await machines.sets[EVE].content.fetch("data", spec.data[0].package)
    for data in (bob, ada):
        await data.close()
    with pytest.raises(LinkError, match="no node sends the package"):  # the job is over
        await machines.sets[EVE].content.fetch("data", spec.data[0].package, first=BOB)


@in_a_loop
async def test_a_machine_tells_others_only_of_what_they_brought(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    _, ada, bob = await fetched(machines)
    asked = peers.DataRequest()
    answers = {node: await machines.sets[BOB].answer(node, asked) for node in (ADA, BOB, EVE)}
    assert [each.state for each in answers[BOB].sets] == ["in use"]
    assert len(answers[ADA].sets) == 1
    assert answers[EVE].sets == ()
    with pytest.raises(LinkError, match="only its owner"):
        await machines.sets[BOB].answer(ADA, peers.DataRequest("rm", "pets"))
    with pytest.raises(ConfigurationError, match="needed by a job"):
        await machines.sets[BOB].answer(BOB, peers.DataRequest("rm", "pets"))
    for data in (bob, ada):
        await data.close()


@in_a_loop
async def test_what_is_pinned_stays_and_what_is_removed_is_gone(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    spec, ada, bob = await fetched(machines)
    for data in (bob, ada):
        await data.close()
    sets = machines.sets[BOB]
    await sets.answer(BOB, peers.DataRequest("pin", "pets"))
    sets.content.prune("data", 0)
    again = DataSets(tmp_path / BOB, BOB, machines.nodes.store(tmp_path / BOB, BOB), 1 << 30)
    again.content.prune("data", 0)
    assert [each.state for each in again.held(BOB)] == ["pinned"]
    with pytest.raises(ConfigurationError, match="pets is pinned"):
        await again.answer(BOB, peers.DataRequest("rm", "pets"))
    with pytest.raises(ConfigurationError, match="no data set is called 'cats' here"):
        await again.answer(BOB, peers.DataRequest("rm", "cats"))
    name = spec.data[0].package.hex()[:8]
    await again.answer(BOB, peers.DataRequest("unpin", name))
    assert (await again.answer(BOB, peers.DataRequest("rm", name))).sets == ()
    assert not again.shelf.packages()


@in_a_loop
async def test_what_came_from_a_banned_machine_is_deleted(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    _, ada, bob = await fetched(machines)
    for data in (bob, ada):
        await data.close()
    assert machines.sets[BOB].delete_from(EVE) == 0
    assert machines.sets[BOB].delete_from(ADA) == 1
    assert machines.sets[BOB].held(BOB) == []


@pytest.mark.parametrize(
    ("quota", "text"),
    [(0, "takes no data of jobs: its owner set POTLUCK_DATA=off"), (1 << 20, "at most 1.0 MiB")],
)
@in_a_loop
async def test_what_its_owner_does_not_allow_is_not_fetched(
    tmp_path: Path, quota: int, text: str
) -> None:
    machines = Machines(tmp_path, quota)
    spec = await machines.spec()
    ada, bob = machines.job(ADA, spec), machines.job(BOB, spec)
    await ada.offer()
    with pytest.raises(ConfigurationError, match=text):
        await bob.bring(has_workers=False)
    assert not machines.nodes.asked
    for data in (bob, ada):
        await data.close()


@in_a_loop
async def test_each_machine_refuses_data_of_a_federation(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    spec = await machines.spec(keeps_files=True)
    for me in (ADA, BOB):
        data = machines.job(me, spec)
        with pytest.raises(ConfigurationError, match="in a federation data stays"):
            await data.offer()
        await data.close()


@in_a_loop
async def test_a_folder_that_changed_before_the_job_began_is_not_offered(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    spec = await machines.spec()
    (machines.pets / "small").write_text("other")
    ada = machines.job(ADA, spec)
    with pytest.raises(ConfigurationError, match="pets was changed while the job runs or waits"):
        await ada.offer()
    await ada.close()


@in_a_loop
async def test_a_folder_that_changes_while_the_job_runs_is_served_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the data keeps it; nobody passes for a liar."""
    monkeypatch.setattr(job_data, "_LOOK_S", 0.01)
    machines = Machines(tmp_path)
    spec, ada, bob = await fetched(machines)
    machines.noted.clear()
    (machines.pets / "small").write_text("other")
    async with asyncio.timeout(60):
        await machines.noted.wait()
    assert machines.sets[ADA].held(ADA) == []
    [said] = [each for each in machines.notes if "was changed" in each]
    assert f"the data set pets was changed while the job runs or waits: {machines.pets}" in said
    assert machines.sets[BOB].content.has("data", spec.data[0].package)
    eve = machines.sets[EVE].content
    machines.nodes.answers.pop(BOB)
    machines.sets[ADA].allow("job", ADA, [EVE], [spec.data[0].package])
    with pytest.raises(LinkError, match="no node sends the package"):
        await eve.fetch("data", spec.data[0].package, first=ADA)
    assert machines.nodes.notes == []
    for data in (bob, ada):
        await data.close()


@in_a_loop
async def test_two_data_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    named = [("pets", str(machines.pets)), ("pets", str(tmp_path))]
    with pytest.raises(ConfigurationError, match="two data sets have one name"):
        await machines.sets[ADA].take_in(named, print, travels=True)


@in_a_loop
async def test_a_machine_that_could_not_have_it_says_so_without_workers(tmp_path: Path) -> None:
    """Else it would be given workers again and again."""
    machines = Machines(tmp_path)
    spec = await machines.spec()
    bob = machines.job(BOB, spec)
    for has_workers in (True, False):
        with pytest.raises(LinkError, match="can't have the data set pets: no node sends"):
            await bob.bring(has_workers=has_workers)
    await bob.close()


@in_a_loop
async def test_a_cancelled_fetch_ends_and_goes_on_later(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    spec = await machines.spec()
    ada, bob = machines.job(ADA, spec), machines.job(BOB, spec)
    await ada.offer()
    bringing = asyncio.create_task(bob.bring(has_workers=True))
    await asyncio.sleep(0)
    bringing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bringing
    await bob.close()
    bob = machines.job(BOB, spec)
    await bob.bring(has_workers=True)
    assert bob.is_here
    for data in (bob, ada):
        await data.close()


@in_a_loop
async def test_of_two_folders_with_one_content_the_other_one_is_served(tmp_path: Path) -> None:
    """What is changed in one must not be sent in place of what the other still has."""
    machines = Machines(tmp_path)
    again = tmp_path / "again"
    shutil.copytree(machines.pets, again)
    ada = machines.sets[ADA]
    named = [("pets", str(machines.pets)), ("again", str(again))]
    data = await ada.take_in(named, print, travels=True)
    for each in data:
        folder = Path(each.folder)
        ada.offer(each.name, folder, await ada.scan(each.name, folder, print))
    (again / "small").write_text("other")
    ada.withdraw(data[1])
    ada.allow("job", ADA, [BOB], [data[0].package])
    await machines.sets[BOB].content.fetch("data", data[0].package)
    assert [each.state for each in ada.held(ADA)] == [str(machines.pets)]
    assert machines.nodes.notes == [], "ada passes for no liar"
    ada.withdraw(data[0])
    assert ada.held(ADA) == []


def test_the_quota_is_a_size_or_off() -> None:
    assert quota_of("off") == 0
    assert quota_of("50G") == quota_of("50 GiB") == quota_of("50Gi") == 50 << 30
    assert quota_of("1.5m") == 3 << 19
    for text in ("", "much", "0", "-1G", "9" * 400, "999999999999T", "0.1"):
        with pytest.raises(ConfigurationError, match="write a size, such as 50G, or off"):
            quota_of(text)
