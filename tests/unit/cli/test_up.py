"""``potluck up``: the agent goes on whoever reads what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from potluck._core.cluster.node_agent import NodeAgent
from potluck._core.settings import Settings
from potluck.cli import up
from potluck.errors import ConfigurationError

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """The command has this process log to its stderr, which ends with the test."""
    log = logging.getLogger()
    before = log.handlers[:]
    yield
    log.handlers[:] = before


def test_an_agent_whose_output_nobody_can_read_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def broken(line: str) -> None:
        said.append(line)
        raise BrokenPipeError

    monkeypatch.setattr(typer, "echo", broken)

    async def story() -> None:
        settings = Settings(home=tmp_path, discovery_port=0, discovery="static")
        running = asyncio.create_task(up._run(settings))
        async with asyncio.timeout(WAIT_S):
            while not any("is up on port" in line for line in said):
                await asyncio.sleep(0)
            while not running.done() and not any("epoch 1" in line for line in said):
                await asyncio.sleep(0)
        assert not running.done(), "it ended with the first line that it could not write"
        running.cancel()
        await running

    asyncio.run(story())


def test_an_agent_that_breaks_says_so_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(agent: NodeAgent) -> None:
        raise MemoryError("no room")

    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    monkeypatch.setenv("POTLUCK_ALLOW_ROOT", "1")
    monkeypatch.setattr(NodeAgent, "run", broken)
    with pytest.raises(typer.Exit) as end:
        up.up()
    assert end.value.exit_code == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "this node's agent broke (MemoryError: no room) and has ended" in said
    assert "Start `potluck up` again" in said


def test_root_is_refused_unless_the_owner_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(up, "is_root", lambda: True)
    with pytest.raises(ConfigurationError, match=r"this is root.*sudo -u NAME.*POTLUCK_ALLOW_ROOT"):
        up.up()
    assert not (tmp_path / "home").exists(), "nothing was made as root"
    up.check_user(Settings(allow_root=True))
    monkeypatch.setattr(up, "is_root", lambda: False)
    up.check_user(Settings())
