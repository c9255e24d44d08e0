"""The workers of one machine: a worker speaks for itself only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from potluck.cluster.jobs.local_workers import LocalWorkers
from potluck.wire import control, jobs
from potluck.wire.messages import Hello


class Machine:
    """Launcher and process of workers: starts nothing, writes down what it hears."""

    pid = 1

    def __init__(self) -> None:
        self.heard: list[jobs.Event] = []

    def launch(
        self, worker: str, variables: dict[str, str], on_exit: Callable[[int], None]
    ) -> Machine:
        return self

    def signal(self, number: int) -> None:
        pass

    async def release(self) -> None:
        pass

    def happened(self, event: jobs.Event) -> None:
        self.heard.append(event)


def test_a_worker_that_speaks_for_another_is_cut_off_before_that_counts() -> None:
    machine = Machine()

    async def story() -> None:
        workers = LocalWorkers("job", machine.launch, machine.happened)
        for worker in "01":
            workers.start(worker, 0, {})

        async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await workers.greeted(reader, writer, Hello("control", "", job="job", worker="0"))
            writer.close()

        async with await asyncio.start_server(called, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for said in (control.Installed("0", 4), control.Finished("1")):
                writer.write(control.TO_AGENT.encode(said))
            async with asyncio.timeout(20):
                await reader.read()
            writer.close()
        await workers.put_away()

    asyncio.run(story())
    _, _, said, complaint = machine.heard
    assert said == control.Installed("0", 4)
    assert complaint == control.Said("", "worker 0 was cut off: it spoke for worker '1'")
