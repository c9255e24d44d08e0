"""The folders with which workers prove their node and job: what is in them, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from potluck._core.cluster.trust import secret
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.credentials import (
    KEY_FILE,
    load_admissions,
    load_credentials,
    load_or_create_identity,
)
from potluck._core.cluster.trust.secret import SECRET_FILE
from potluck._core.cluster.trust.worker_home import FOLDER, WorkerHomes
from potluck._core.settings import Settings
from potluck._core.transport.credentials import Credentials, namespace_of
from potluck.errors import ConfigurationError, IdentityError
from support.clusters import ban, found_cluster

OLD, NEW = b"o" * 32, b"n" * 32


def worker(home: Path) -> Credentials:
    return load_credentials(Settings(worker_home=str(home)))


def with_homes(
    settings: Settings,
    story: Callable[[WorkerHomes], Awaitable[None]],
    on_note: Callable[[str], None] = pytest.fail,
) -> None:
    """Run ``story`` with the folders of an agent with ``settings``."""

    async def run() -> None:
        homes = WorkerHomes(
            settings.home,
            load_or_create_identity(settings.home),
            load_credentials(settings),
            load_admissions(settings),
            on_note=on_note,
            on_broken=lambda error: pytest.fail(str(error)),
        )
        try:
            await story(homes)
        finally:
            await homes.close()

    asyncio.run(run())


async def has(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds, which the agent's own watch is to bring about; looked at
    every 20 ms."""
    never = asyncio.Event()
    async with asyncio.timeout(60):
        while not condition():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), 0.02)


def test_it_holds_neither_the_nodes_key_nor_the_secret(tmp_path: Path) -> None:
    found_cluster(tmp_path / "ada", psk=OLD)
    settings = Settings(home=tmp_path / "ada")
    node = load_credentials(settings)

    async def story(homes: WorkerHomes) -> None:
        home = homes.make("train-1")
        mine = worker(home)
        assert (mine.node_id, mine.job) == (node.node_id, "train-1")
        assert mine.namespace == node.namespace
        homes.make("train-2")
        files = [path for path in home.parent.rglob("*") if path.is_file()]
        assert {path.name for path in files} == {"worker_credentials", "admissions"}
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
        data = b"".join(path.read_bytes() for path in files)
        key = load_or_create_identity(settings.home).private_bytes_raw()
        assert not any(secret in data for secret in (key, OLD, OLD.hex().encode()))
        assert repr(mine) == repr(node)

    with_homes(settings, story)
    assert list((settings.home / FOLDER).iterdir()) == [], "nothing stays after the agent"


def test_bans_and_a_changed_secret_reach_running_workers(tmp_path: Path) -> None:
    found_cluster(tmp_path / "ada", tmp_path / "bob", psk=OLD)
    settings = Settings(home=tmp_path / "ada")
    bob = load_credentials(Settings(home=tmp_path / "bob"))

    async def story(homes: WorkerHomes) -> None:
        mine = worker(homes.make("train-1"))
        assert mine.objects_to(bob.node_id) is None
        ban(settings.home, bob.node_id, "sold", psk=NEW)
        await has(lambda: "banned" in str(mine.objects_to(bob.node_id)))
        await has(lambda: mine.namespace == namespace_of(NEW))
        assert [era.namespace for era in mine.eras] == [namespace_of(NEW), namespace_of(OLD)]

    with_homes(settings, story)


def test_workers_of_an_open_cluster_need_no_secret_either(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, psk=OLD.hex())

    async def story(homes: WorkerHomes) -> None:
        home = homes.make("train-1")
        assert [path.name for path in home.iterdir()] == ["worker_credentials"]
        assert worker(home).namespace == namespace_of(OLD)
        assert worker(home).objects_to("anybody") is None

    with_homes(settings, story)


def test_after_the_job_its_credentials_are_gone_and_no_new_node_is_made(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)

    async def story(homes: WorkerHomes) -> None:
        home = homes.make("train-1")
        mine = worker(home)
        again = homes.make("train-1")
        homes.remove(home)
        homes.remove(home)
        assert worker(again).job == "train-1", "ordered again while the first workers still end"
        with pytest.raises(IdentityError, match=r"its job is over.*POTLUCK_WORKER_HOME"):
            worker(home)
        assert not home.exists()
        assert mine.eras, "a process that is ending keeps what it has"

    with_homes(settings, story)


@pytest.mark.parametrize("damage", [b"", b"junk", b"\x81\xa3key\xc4\x01x"])
def test_damaged_credentials_of_a_worker_are_an_error(damage: bytes, tmp_path: Path) -> None:
    async def story(homes: WorkerHomes) -> None:
        home = homes.make("train-1")
        (home / "worker_credentials").write_bytes(damage)
        with pytest.raises(IdentityError, match="are damaged"):
            worker(home)

    with_homes(Settings(home=tmp_path), story)


def test_a_home_that_cant_be_written_is_an_error_of_the_job(tmp_path: Path) -> None:
    async def story(homes: WorkerHomes) -> None:
        (tmp_path / FOLDER).write_text("in the way")
        with pytest.raises(ConfigurationError, match="job train-1 can't be given credentials"):
            homes.make("train-1")

    with_homes(Settings(home=tmp_path), story)


def test_a_list_that_cant_be_read_is_noted_once_and_copied_later(tmp_path: Path) -> None:
    found_cluster(tmp_path, psk=OLD)
    path = AdmissionFile(tmp_path).path

    async def story(homes: WorkerHomes) -> None:
        home = homes.make("train-1")
        path.chmod(0o644)
        await has(lambda: len(notes) == 1)
        secret.change_secret(tmp_path, NEW)
        path.chmod(0o600)
        await has(lambda: worker(home).namespace == namespace_of(NEW))

    notes: list[str] = []
    with_homes(Settings(home=tmp_path), story, notes.append)
    assert "workers here do not hear of changes" in notes[0]


KILLED = """
import asyncio, pathlib, sys
from potluck._core.cluster.trust.credentials import load_admissions, load_credentials
from potluck._core.cluster.trust.credentials import load_or_create_identity
from potluck._core.cluster.trust.worker_home import WorkerHomes
from potluck._core.settings import Settings
async def main():
    s = Settings(home=pathlib.Path(sys.argv[1]))
    homes = WorkerHomes(s.home, load_or_create_identity(s.home), load_credentials(s),
                        load_admissions(s), on_note=print, on_broken=print)
    print(homes.make("train-1"), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_what_a_killed_agent_left_is_removed_and_what_a_running_one_needs_is_not(
    tmp_path: Path,
) -> None:
    agents = [
        subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        left, kept = [Path(os.fsdecode(agent.stdout.readline().strip())) for agent in agents]
        agents[0].send_signal(signal.SIGKILL)
        agents[0].wait()

        async def story(homes: WorkerHomes) -> None:
            homes.make("train-1")
            assert not left.exists()
            assert worker(kept).job == "train-1"

        with_homes(Settings(home=tmp_path), story)
        assert kept.exists()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
            agent.stdout.close()
    assert {KEY_FILE, SECRET_FILE} <= {path.name for path in tmp_path.iterdir()}


def test_agents_of_containers_with_one_home_have_one_process_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the first process of its container."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    settings = Settings(home=tmp_path / "home")

    async def story(first: WorkerHomes) -> None:
        one = await asyncio.to_thread(first.make, "train-1")
        await asyncio.to_thread(with_homes, settings, partial(beside, one))

    async def beside(one: Path, second: WorkerHomes) -> None:
        other = second.make("train-2")
        assert (worker(one).job, worker(other).job) == ("train-1", "train-2")

    with_homes(settings, story)
