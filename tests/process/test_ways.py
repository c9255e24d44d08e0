"""docs/dev/ways/run.md: a real ``potluck run`` enters the files that it names, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from potluck._core.cluster.discovery.configured import StaticPeers
from potluck._core.cluster.node_agent import NodeAgent
from potluck._core.cluster.sharing.offers import SharingStore
from potluck._core.cluster.sharing.rules import Kept
from potluck._core.settings import Settings
from support.clusters import found_cluster
from support.ways import Roles, Trace, compare, of_roles, told, watched

pytestmark = pytest.mark.real_exec

WAIT_S = 300.0

COMMAND = """
import sys
from potluck.cli.main import app
from support.ways import dumped

with dumped(sys.argv.pop(1)):
    app()
"""

SCRIPT = """
import os
import potluck
from support.ways import dumped

with dumped(f"{os.environ['TRACES']}/worker{os.environ['RANK']}"):
    ctx = potluck.init()
    print("in a group of", ctx.world_size)
    ctx.close()
"""


@contextlib.asynccontextmanager
async def agent(home: Path, *peers: NodeAgent):
    """A running agent in ``home`` that has the addresses of ``peers``."""
    finders = [StaticPeers([("127.0.0.1", each.port) for each in peers])]
    made = NodeAgent(
        Settings(home=home), on_note=lambda text: None, finders=finders, host="127.0.0.1", port=0
    )
    task = asyncio.create_task(made.run())
    ready = asyncio.create_task(made.ready.wait())
    try:
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), "the agent ended"
        yield made
    finally:
        for each in (ready, task):
            each.cancel()
        await asyncio.gather(ready, task, return_exceptions=True)


async def traced_run(trace: Trace, folder: Path) -> None:
    """``potluck run`` on two machines, called on the one that does not lead. Traces of the command
    and of the workers lie in ``folder`` then; ``trace`` has what the agents entered."""
    homes = [folder / "ada", folder / "bob"]
    found_cluster(*homes)
    for home in homes:
        SharingStore(home).write(Kept("all"))
    (folder / "job").mkdir()
    script = folder / "job" / "train.py"
    script.write_text(SCRIPT)
    async with agent(homes[0]) as ada, agent(homes[1], ada) as bob:
        changed = asyncio.Event()
        bob.plane.listeners.append(lambda action: changed.set())
        async with asyncio.timeout(WAIT_S):
            while bob.plane.view is None or len(bob.plane.view.nodes) < 2:
                changed.clear()
                await changed.wait()
        with trace.recording():
            command = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", COMMAND, str(folder / "command")),
                *("run", "--env", f"TRACES={folder}", str(script)),
                env=os.environ | {"POTLUCK_HOME": str(homes[1])},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                async with asyncio.timeout(WAIT_S):
                    text, _ = await command.communicate()
            finally:
                if command.returncode is None:
                    command.kill()
        assert command.returncode == 0, text.decode()
        assert text.decode().count("in a group of 2") == 2


def test_a_run_goes_the_way_of_its_page(tmp_path: Path) -> None:
    """In the command's process, in two agents (starter, leader, nodes), and in each worker."""
    with watched() as trace:
        asyncio.run(traced_run(trace, tmp_path))
    command, *workers = (
        set((tmp_path / name).read_text().split()) for name in ("command", "worker0", "worker1")
    )
    entered: dict[Roles, set[str]] = {
        ("command",): command,
        ("starter", "leader", "node", "agents"): trace.files,
        ("worker",): workers[0] | workers[1],
    }
    beside = {"command": (), "starter": ("view",), "worker": ("gradient", "service")}
    named = {roles: of_roles("run", roles) | told(*beside[roles[0]]) for roles in entered}
    compare("run", entered, named)
