"""Measuring a path, over the loopback: what comes out, who is refused, when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from potluck._core.cluster.topology.measure import (
    PathReading,
    Stopped,
    StreamConnection,
    measure,
    next_train,
    serve,
)
from potluck._core.transport import aio
from potluck._core.wire.facts import MAX_TRAIN, TrainArrived
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import LinkError, Refused
from support.links import new_credentials

WAIT_S = 30.0


@asynccontextmanager
async def answering(
    may_go_on: Callable[[], bool] = lambda: True, refusal: Refusal | None = None
) -> AsyncIterator[tuple[int, str]]:
    """A node that answers measurements: its port and its id."""
    credentials = new_credentials()

    async def greeted(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        await aio.write_greeting(writer, refusal or Welcome())
        if refusal is None:
            await serve(StreamConnection(reader, writer), may_go_on)

    server = aio.Server("127.0.0.1", 0, credentials, greeted)
    try:
        yield server.port, credentials.node_id
    finally:
        await server.close()


def test_a_path_is_measured_both_ways() -> None:
    async def story() -> PathReading:
        async with asyncio.timeout(WAIT_S), answering() as (port, node):
            return await measure("127.0.0.1", port, node, new_credentials(), may_go_on=lambda: True)

    reading = asyncio.run(story())
    assert reading.local == "127.0.0.1"
    assert 0 < reading.latency_s < 1
    assert reading.outward > 1e5
    assert reading.inward > 1e5
    assert reading.cost_s < 60


def test_only_the_latency_where_no_more_is_wanted() -> None:
    async def story() -> PathReading:
        async with asyncio.timeout(WAIT_S), answering() as (port, node):
            return await measure(
                "127.0.0.1",
                port,
                node,
                new_credentials(),
                may_go_on=lambda: True,
                wants_bandwidth=lambda local: local != "127.0.0.1",
            )

    reading = asyncio.run(story())
    assert (reading.outward, reading.inward) == (0.0, 0.0)
    assert reading.cost_s == float("inf"), "a path of unknown bandwidth is never the best"


def test_an_address_of_another_node_and_a_busy_one_give_no_figure() -> None:
    async def story() -> None:
        me = new_credentials()
        async with asyncio.timeout(WAIT_S), answering() as (port, _):
            with pytest.raises(LinkError, match="is another node"):
                await measure("127.0.0.1", port, "f" * 64, me, may_go_on=lambda: True)
        busy = Refusal("busy", "a job runs")
        async with asyncio.timeout(WAIT_S), answering(refusal=busy) as (port, node):
            with pytest.raises(Refused, match="a job runs"):
                await measure("127.0.0.1", port, node, me, may_go_on=lambda: True)

    asyncio.run(story())


def test_it_stops_in_the_middle_when_a_job_begins_at_either_end() -> None:
    async def story() -> None:
        me, asked = new_credentials(), 0

        def for_a_while() -> bool:
            nonlocal asked
            asked += 1
            return asked < 5

        async with asyncio.timeout(WAIT_S), answering() as (port, node):
            with pytest.raises(Stopped):
                await measure("127.0.0.1", port, node, me, may_go_on=for_a_while)
        asked = 0
        async with asyncio.timeout(WAIT_S), answering(for_a_while) as (port, node):
            with pytest.raises(LinkError, match="the other side ended the link"):
                await measure("127.0.0.1", port, node, me, may_go_on=lambda: True)

    asyncio.run(story())


def test_trains_grow_until_one_can_be_timed() -> None:
    assert next_train(1000, TrainArrived(1000, 500, 0.001)) == 4000
    assert next_train(1000, TrainArrived(1000, 500, 0.05)) == 0
    assert next_train(1000, TrainArrived(800, 400, 0.001)) == 0, (
        "it was cut short: the link is slow"
    )
    assert next_train(MAX_TRAIN, TrainArrived(MAX_TRAIN, MAX_TRAIN // 2, 0.001)) == 0
    assert next_train(MAX_TRAIN // 2, TrainArrived(MAX_TRAIN // 2, 1, 0.001)) == MAX_TRAIN
