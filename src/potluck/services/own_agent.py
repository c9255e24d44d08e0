"""``OwnAgent``: requests to this machine's agent, from any thread of a program outside of jobs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from potluck._core.background import Tasks, start_thread, stop
from potluck._core.cluster.links.local import ask_agent, call_agent
from potluck._core.settings import Settings
from potluck._core.transport.aio import MessageLink
from potluck._core.wire import local
from potluck._core.wire.peers import Served
from potluck.errors import ConfigurationError, LinkError, PotluckError

REGISTER_S = 10.0

_AGAIN_S = 1.0
_SLACK_S = 5.0
_CLOSED = "the services of this program were closed"

_log = logging.getLogger(__name__)

T = TypeVar("T")
Link = MessageLink[local.Reply, local.Request]


class OwnAgent:
    """An event loop on a thread of its own, from construction to ``close``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._tasks = Tasks()
        self._is_closed = False
        self._thread = start_thread(
            self._run, name="potluck-own-agent", on_broken=lambda error: None
        )

    def find(self, name: str, timeout_s: float, *, node: str = "") -> local.ServicesReply:
        """Where the service ``name`` is. ConfigurationError if no agent runs here, LinkError if it
        does not answer in time."""
        request = local.ServicesRequest(name, node)
        reply = self._ask(ask_agent(self._settings, request, timeout_s=timeout_s), timeout_s)
        assert isinstance(reply, local.ServicesReply)
        if reply.refusal:
            raise LinkError(f"this machine's agent did not look for {name!r}: {reply.refusal}")
        return reply

    def register(self, services: Served) -> None:
        """Announce ``services`` to other machines until ``close``, also after the agent was started
        again. ConfigurationError if no agent runs here, or it refuses them; LinkError if it does
        not answer."""
        link = self._ask(self._registered(services), REGISTER_S)
        self._loop.call_soon_threadsafe(lambda: self._tasks.start(self._keep(services, link)))

    def close(self) -> None:
        """Withdraw the services. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(LinkError, RuntimeError):  # its thread broke
            self._ask(_end_all_tasks(), REGISTER_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(REGISTER_S)

    # -- inside

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _ask(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of ``coroutine``, which takes ``timeout_s`` at most."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise LinkError(_CLOSED) from error
        try:
            return future.result(timeout_s + _SLACK_S)
        except concurrent.futures.CancelledError as error:
            raise LinkError(_CLOSED) from error
        except TimeoutError as error:
            future.cancel()
            raise LinkError("the thread that asks this machine's agent hangs") from error
        except BaseException:
            future.cancel()  # Ctrl-C
            raise

    async def _registered(self, services: Served) -> Link:
        """A connection over which ``services`` are registered."""
        try:
            async with asyncio.timeout(REGISTER_S):
                link = await call_agent(self._settings)
                try:
                    link.send(local.ServeRequest(services))
                    reply = await link.receive()
                except BaseException:
                    await link.close()
                    raise
        except TimeoutError as error:
            why = f"no answer within {REGISTER_S:g} s"
            raise LinkError(f"this machine's agent did not register services: {why}") from error
        assert isinstance(reply, local.CommandResult)
        if not reply.ok:
            await link.close()
            raise ConfigurationError(f"this machine's agent took no services: {reply.text}")
        return link

    async def _keep(self, services: Served, link: Link) -> None:
        """Hold ``link``, and register again whenever it ends."""
        names = ", ".join(repr(each.name) for each in services)
        while True:
            try:
                await link.receive()  # nothing comes before the end
            except PotluckError as error:
                _log.warning("other machines do not find %s any more: %s", names, error)
            finally:
                await link.close()
            link = await self._register_again(services, names)
            _log.warning("other machines find %s again", names)

    async def _register_again(self, services: Served, names: str) -> Link:
        logged = ""
        while True:
            await asyncio.sleep(_AGAIN_S)
            try:
                return await self._registered(services)
            except PotluckError as error:
                if str(error) != logged:
                    logged = str(error)
                    _log.warning("other machines do not find %s: %s", names, logged)


async def _end_all_tasks() -> None:
    await stop(*(asyncio.all_tasks() - {asyncio.current_task()}))
