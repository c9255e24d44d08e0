"""An agent whose content store obeys lines of its stdin; each is answered by a line of JSON.

add FOLDER      -> {"added": name of the package}
fetch NAME      -> {"missing": bytes} at its begin, then {"fetched": seconds, "from": {node: bytes}}
sent            -> {"sent": bytes of files that other nodes got}
lie             -> {}: from now on one bit of each part that it sends is wrong
stall           -> {}: from now on it answers no request for a part
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from potluck._core.cluster.content.store import Terms
from potluck._core.cluster.discovery.configured import all_finders
from potluck._core.cluster.node_agent import NodeAgent
from potluck._core.settings import load_settings
from potluck._core.wire import bulk
from potluck.errors import PotluckError


class Storing:
    def __init__(self) -> None:
        settings = load_settings()
        self.agent = NodeAgent(settings, on_note=self.note, finders=all_finders(settings))
        self.sent = 0
        self.lies = self.stalls = False
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, text: str) -> None:
        print(f"agent: {text}", flush=True)

    def say(self, **values: Any) -> None:
        print(json.dumps(values), flush=True)

    async def run(self) -> None:
        running = asyncio.create_task(self.agent.run())
        await self.agent.ready.wait()
        self.agent.content.open("data", Terms(lambda node, package: True))
        links = self.agent._bulk
        answer = links.answer

        async def counted(node: str, request: bulk.Request) -> bulk.Response:
            response = await answer(node, request)
            if isinstance(request, bulk.PartRequest) and isinstance(response, bulk.Part):
                if self.stalls:
                    await asyncio.Event().wait()
                self.sent += len(response.data)
                if self.lies:
                    data = bytes([response.data[0] ^ 1]) + response.data[1:]
                    response = msgspec.structs.replace(response, data=data)
            return response

        links.answer = counted
        self.say(ready=self.agent.me)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().split():
            task = asyncio.create_task(self.obey(*line))
            self._tasks.add(task)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def obey(self, what: str, argument: str = "") -> None:
        content = self.agent.content
        match what:
            case "add":
                folder = Path(argument)
                paths = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
                package = await asyncio.to_thread(content.add, "data", folder, paths)
                self.say(added=package.name.hex())
            case "fetch":
                came: dict[str, int] = {}

                def on_progress(num_bytes: int, node: str) -> None:
                    came[node[:8]] = came.get(node[:8], 0) + num_bytes
                    self.say(so_far=sum(came.values()))

                began = time.monotonic()
                try:
                    await content.fetch(
                        "data",
                        bytes.fromhex(argument),
                        on_progress=on_progress,
                        on_begin=lambda download, missing: self.say(missing=missing),
                    )
                except PotluckError as error:
                    self.say(failed=str(error))
                else:
                    self.say(fetched=time.monotonic() - began, **{"from": came})
            case "sent":
                self.say(sent=self.sent)
            case "lie":
                self.lies = True
                self.say()
            case "stall":
                self.stalls = True
                self.say()


asyncio.run(Storing().run())
