"""The agent of one ``potluck run``: a cluster of one node that nobody else can enter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from potluck._core.cluster.node_agent import NodeAgent
from potluck._core.settings import Settings
from potluck._core.transport import aio
from potluck._core.wire.greeting import Hello
from potluck.errors import Refused


@contextlib.asynccontextmanager
async def private_agent(home: Path) -> AsyncIterator[NodeAgent]:
    agent = NodeAgent(Settings(home=home), on_note=lambda text: None, is_private=True)
    running = asyncio.create_task(agent.run())
    ready = asyncio.create_task(agent.ready.wait())
    await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield agent
    finally:
        ready.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("kind", ["node", "measure"])
def test_other_agents_are_refused_also_with_the_secret(tmp_path: Path, kind: str) -> None:
    async def story() -> None:
        async with private_agent(tmp_path) as agent:
            hello = Hello(kind)
            with pytest.raises(Refused, match="takes only that job's workers"):
                await aio.connect("127.0.0.1", agent.port, hello, agent.credentials)

    asyncio.run(story())


def test_two_agents_of_one_home_run_side_by_side(tmp_path: Path) -> None:
    """Two runs at the same time, or a run while ``potluck up`` starts."""

    async def story() -> None:
        public = NodeAgent(Settings(home=tmp_path), on_note=lambda text: None, port=0)
        async with private_agent(tmp_path) as first, private_agent(tmp_path) as second:
            assert first.port != second.port
            running = asyncio.create_task(public.run())
            ready = asyncio.create_task(public.ready.wait())
            await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
            assert not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())
