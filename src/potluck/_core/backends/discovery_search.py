"""The search of ``AutoDiscoveryBackend``: a thread that finds processes on the network
(``Search``), and what it has found (``KnownPeers``)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from potluck._core.backends.discovery_rules import ExistingGroups
from potluck._core.background import start_thread, stop, why
from potluck._core.cluster.discovery.advert import INSTANCE_BYTES, Hint
from potluck._core.cluster.discovery.caller import HintCaller
from potluck._core.cluster.discovery.finder import Finder, Presence, running_finders
from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.link import send_all
from potluck._core.transport.listener import Admission
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import Member
from potluck._core.waiting import Reminder
from potluck._core.wire.gathering import INSTANCE, MAX_PARTICIPANTS, Participant
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import LinkError, OperationTimeout, PotluckError, Refused, WrongSecret

FORMED = "formed"
"""The code of a refusal by a member of a group that accepts no new members."""

_LOOK_S = 0.25


class KnownPeers:
    """The processes found so far, which have proved that they hold the cluster's secret.
    ``changed`` is notified of each change. Thread-safe."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self._peers: dict[str, Participant] = {}
        self._existing = ExistingGroups()
        self._broken: BaseException | None = None

    @property
    def peers(self) -> tuple[Participant, ...]:
        """The processes in the order of their ids."""
        with self.changed:
            return tuple(sorted(self._peers.values(), key=attrgetter("instance")))

    def get(self, instance: str) -> Participant:
        """The process with this id; KeyError if it is lost."""
        with self.changed:
            return self._peers[instance]

    def wait(self, n: int, timeout: float, complaint: Callable[[], str]) -> tuple[Participant, ...]:
        """Block until at least ``n`` processes are found; see
        ``AutoDiscoveryBackend.wait_for_peers``."""
        deadline = time.monotonic() + timeout

        def missing() -> str:
            peers = ", ".join(f"{m.host}:{m.port}" for m in (p.member for p in self.peers[:8]))
            found = f"{len(self._peers)} of {n} other processes found"
            return f"{found}{f' ({peers})' if peers else ''}{complaint()}"

        reminder = Reminder(lambda: f"waiting for peers: {missing()}", deadline)
        with self.changed:
            while len(self._peers) < n:
                if self._broken is not None:
                    raise LinkError(
                        f"the search for other processes broke ({why(self._broken)}) when "
                        f"{len(self._peers)} of {n} were found. Start this process again, or name "
                        "all addresses with backend='ring'; please report this with the traceback "
                        "above"
                    ) from self._broken
                self.check_existing()
                if reminder.is_overdue:
                    self._raise_if(self._existing.reasons())
                    raise OperationTimeout(
                        f"{missing()} in {timeout:g} s. Do they run, on the same network, on "
                        "machines of the same cluster (`potluck nodes`)? Where multicast is "
                        "blocked, write addresses down: POTLUCK_PEERS=host:port,...",
                        operation="wait_for_peers",
                    )
                reminder.tick()
                self.changed.wait(min(_LOOK_S, reminder.patience()))
            return self.peers

    def check_existing(self) -> None:
        """Refused, with the remedy, if a group that goes on has refused this process."""
        with self.changed:
            self._raise_if(self._existing.answer(time.monotonic()))

    @property
    def is_late(self) -> bool:
        """Whether a group without this process exists, which may be about to end."""
        with self.changed:
            return bool(self._existing)

    def lost(self, instance: str) -> None:
        """Remove the process ``instance``, which no longer answers."""
        with self.changed:
            self._peers.pop(instance, None)
            self.changed.notify_all()

    # -- called by the search, on its thread

    def found(self, peer: Participant) -> None:
        """Add ``peer``, which answered and proved that it holds the cluster's secret."""
        with self.changed:
            place = peer.member.host, peer.member.port
            self._existing.ended(place)
            for known in list(self._peers.values()):
                if (known.member.host, known.member.port) == place:
                    del self._peers[known.instance]  # another process has taken over its port
            if len(self._peers) < MAX_PARTICIPANTS - 1:
                self._peers[peer.instance] = peer
            self.changed.notify_all()

    def refused(self, host: str, port: int, error: Refused) -> None:
        """Note that the process at this address belongs to a group."""
        with self.changed:
            self._existing.refused((host, port), str(error), time.monotonic())
            self.changed.notify_all()

    def unreached(self, host: str, port: int) -> None:
        """Note that no process answered at this address."""
        with self.changed:
            self._existing.ended((host, port))

    def broke(self, error: BaseException) -> None:
        """Note that the search ended by ``error``."""
        with self.changed:
            self._broken = error
            self.changed.notify_all()

    @staticmethod
    def _raise_if(reason: str) -> None:
        if reason:
            raise Refused(reason, FORMED)


MEET, JOIN = "meet", "join"
"""The kinds of a HELLO between processes: a request for the id, a request to join the group."""

T = TypeVar("T")

CALL_S = 3.0

Objection = Callable[[Hello], Refusal | None]


def welcome_caller(
    hello: Hello, node: str, instance: bytes, peers: KnownPeers, objection: Objection
) -> Admission:
    """Answer a process that has found this process with ``instance``, and add it to ``peers``."""
    if hello.worker == instance.hex():
        return Admission(Refusal("self", "that is this process itself"))
    refusal = objection(hello)
    if refusal is not None:
        return Admission(refusal)

    def deliver(link: TcpLink) -> None:
        with contextlib.closing(link):
            send_all(link, instance, time.monotonic() + CALL_S)
            if 0 < hello.port < 65536 and INSTANCE.match(hello.worker):
                member = Member("", node, link.peer_host, hello.port)
                peers.found(Participant(hello.worker, member))

    return Admission(Welcome(), deliver)


@dataclass(eq=False, repr=False)
class Search:
    """Announces this process and finds other processes, from construction to ``close``.

    ``peers`` receives the results, on the search's thread.
    """

    credentials: Credentials
    instance: bytes
    port: int
    finders: Sequence[Finder]
    peers: KnownPeers

    def __post_init__(self) -> None:
        self._presence = Presence(lambda: self.credentials.advert_keys, self.port, self.instance)
        self._is_resting = False
        self._calls = HintCaller(self._call)
        self._book = self._calls.book
        self._calling: asyncio.Task[None] | None = None
        self._failure = ""
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = start_thread(self._run, name="potluck-discovery", on_broken=self.peers.broke)

    def complaint(self) -> str:
        """The last failure with a process that was found, for an error text; empty without one."""
        return f" (the last that was found: {self._failure})" if self._failure else ""

    def lost(self, instance: str) -> None:
        """Search again for the process ``instance``, which does not answer any more."""
        self._post(self._look_again, instance)

    def look_at(self, host: str, port: int) -> None:
        """Connect to this address, where a process may listen."""
        self._post(self._heard, Hint(host, port, "peer"))

    def rest(self) -> None:
        """Stop connecting to other processes; this process is still announced."""
        self._is_resting = True
        self._post(self._stop_calling)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run ``coroutine`` in the search's loop and return its result. LinkError if the search has
        ended, or the result takes longer than ``timeout_s``."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise LinkError("the search for other processes has ended") from error
        try:
            return future.result(timeout_s)
        except (concurrent.futures.CancelledError, TimeoutError) as error:
            future.cancel()
            raise LinkError("the search for other processes has ended or hangs") from error

    def close(self) -> None:
        """End the announcement and the search. Idempotent."""
        self._post(self._over.set)
        self._thread.join()

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        """Call ``call`` on the search's thread; nothing if the search has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._search())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _search(self) -> None:
        caller = self._calling = asyncio.create_task(self._calls.run())
        over = asyncio.create_task(self._over.wait())
        try:
            async with running_finders(self.finders, self._presence, self._heard):
                await asyncio.wait([caller, over], return_when=asyncio.FIRST_COMPLETED)
                if caller.cancelled():
                    await over
                elif not over.done():
                    caller.result()
        finally:
            await stop(*({caller, *asyncio.all_tasks()} - {asyncio.current_task()}))

    def _heard(self, hint: Hint) -> None:
        if self._is_resting or hint.host.lower().startswith("fe80:"):
            return  # a link-local address is not valid on other machines, to which it would be sent
        self._calls.heard(hint)

    def _stop_calling(self) -> None:
        if self._calling is not None:
            self._calling.cancel()

    def _look_again(self, instance: str) -> None:
        self._book.unlinked(instance, self._loop.time())
        self._calls.wake()

    async def _call(self, hint: Hint) -> None:
        mine = self._presence
        hello = Hello(MEET, worker=mine.instance.hex(), port=mine.port)
        writer = None
        try:
            async with asyncio.timeout(CALL_S):
                reader, writer, _ = await aio.connect(
                    hint.host, hint.port, hello, self.credentials, timeout_s=CALL_S
                )
                instance = (await reader.readexactly(INSTANCE_BYTES)).hex()
                node = aio.peer_identity(writer).node
            self._book.reached(hint, instance, self._loop.time())
            self._book.linked(instance)
            self.peers.found(Participant(instance, Member("", node, hint.host, hint.port)))
        except (PotluckError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self._book.failed(hint, self._loop.time())
            if isinstance(error, Refused) and error.code == FORMED:
                self.peers.refused(hint.host, hint.port, error)
            else:
                self.peers.unreached(hint.host, hint.port)
            if isinstance(error, WrongSecret):
                self._failure = str(error)
        finally:
            if writer is not None:
                await aio.end(writer)
