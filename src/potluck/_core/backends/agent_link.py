"""``AgentLink``: the thread of a worker that exchanges messages with its agent, by one asyncio loop
over one link.

The thread answers the agent while the script computes or blocks. It sends the facts that the script
reports at intervals, only the newest of each name, and the last facts before the worker ends.

Reports of long operations (``LongWaits``): a worker tells its agent after 2 s, then every 2 s. The
agents of the group's members then check whether their workers run. The report alone blames no
worker, since another rank may compute for minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from potluck._core.background import Tasks, start_task, start_thread, stop, why
from potluck._core.engine import patience
from potluck._core.forks import Owner
from potluck._core.printable import plain
from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials
from potluck._core.wire import worker_link
from potluck._core.wire.greeting import WORKER, Hello, common_version
from potluck.errors import AgentLost, ConfigurationError, LinkError, PotluckError

LONG_S = 2.0
LOOK_EVERY_S = 0.2


class LongWaits:
    """The ages of this worker's unfinished operations. Pure: the time is an argument."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}
        self._said_at = float("-inf")

    def is_long(self, ongoing: Iterable[Hashable], now: float) -> bool:
        """Whether to send a report now. ``ongoing`` has a name for each unfinished operation.

        An operation's age counts from the first call that names it.
        """
        self._since = {name: self._since.get(name, now) for name in ongoing}
        oldest = min(self._since.values(), default=now)
        if now - oldest < LONG_S or now - self._said_at < LONG_S:
            return False
        self._said_at = now
        return True


_log = logging.getLogger(__name__)

_Link = aio.MessageLink[worker_link.FromAgent, worker_link.FromWorker]

_REPORT_EVERY_S = 0.1
_GOODBYE_S = 2.0
_ORPHAN_S = 5.0

_COUNTS = ("committed_samples", "total_samples", "worker_samples")
_PROGRESS = {"step", "loss", "samples_per_s", "device", *_COUNTS}
"""Reported names with fields of their own in a message; all others are facts."""

_links: weakref.WeakSet[AgentLink] = weakref.WeakSet()

_left: set[tuple[str, ...]] = set()
"""The workers, as of ``_me``, that have left an elastic group: the agent does not readmit them."""


def _me() -> tuple[str, ...]:
    names = ("POTLUCK_AGENT", "POTLUCK_JOB", "POTLUCK_WORKER")
    return tuple(os.environ.get(name, "") for name in names)


def is_linked() -> bool:
    """Whether this process has a link to its agent. A process may have one link. ForkedProcess in a
    process that was forked from one with a link: the agent knows only that one as this worker."""
    for link in _links:
        link.owner.check()
    return bool(_links)


def leave() -> None:
    """Note that this worker has left its elastic group."""
    _left.add(_me())


def has_left() -> bool:
    """Whether this worker has left its elastic group."""
    return _me() in _left


def check_free() -> None:
    """ConfigurationError if this worker has a group, or has left its elastic group; ForkedProcess
    if it is the process from which this one was forked."""
    is_linked()
    if has_left():
        raise ConfigurationError(
            "this worker has left its group, and under `potluck run` it can't join another: call "
            "potluck.init() once, and close its context when the script is done"
        )
    if any(link.me == _me() for link in _links):
        raise ConfigurationError(
            "this worker has a group already, and under `potluck run` it has one at a time: use "
            "the context that potluck.init() returned first; after init_process_group use "
            "torch.distributed"
        )


def agent_address() -> tuple[str, int]:
    """Host and port of the agent, from POTLUCK_AGENT; ConfigurationError if that is not set."""
    text = os.environ.get("POTLUCK_AGENT", "")
    if not text:
        raise ConfigurationError(
            "POTLUCK_AGENT is not set, so `potluck run` did not start this process; start the "
            "script with `potluck run SCRIPT`, or let potluck.init() choose (backend='auto')"
        )
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigurationError(
            f"POTLUCK_AGENT={text!r} is not host:port; `potluck run SCRIPT` sets it for its workers"
        )
    return host, int(port)


class UnsentFacts:
    """Facts that were not sent to the agent yet, the newest of each name. Thread-safe."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        self._facts: worker_link.Facts = {}
        self.epoch = 0

    def add(self, facts: dict[str, Any], epoch: int) -> None:
        with self._lock:
            if "step" in facts or "step" not in self._known:
                self.epoch = epoch  # in which the step was committed
            for name, value in facts.items():
                if name in _PROGRESS:
                    self._known[name] = value
                elif name not in ("event", "epoch") and len(self._facts) < worker_link.MAX_FACTS:
                    self._facts[str(name)[:256]] = _plain(value)

    def take(self) -> worker_link.WorkerProgress:
        with self._lock:
            facts, self._facts = self._facts, {}
            known = self._known
            return worker_link.WorkerProgress(
                worker=self._worker,
                epoch=self.epoch,
                step=int(known.get("step", -1)),
                loss=_number(known.get("loss")),
                samples_per_s=_number(known.get("samples_per_s")),
                device=str(known.get("device", ""))[:256],
                facts=facts,
                **{name: _count(known.get(name)) for name in _COUNTS},
            )


@dataclass(eq=False, repr=False)
class AgentLink:
    """The thread that exchanges messages with the agent. Only its loop uses the link.

    The constructor connects to the agent at POTLUCK_AGENT, as worker POTLUCK_WORKER of POTLUCK_JOB,
    and raises LinkError, Refused or a SecurityError if that fails.

    The functions are called on the link's thread: ``take(message)`` for each message of the
    agent, it may return an answer; ``ongoing()`` every ``LOOK_EVERY_S``, it returns the epoch
    of the present group and its unfinished operations; ``on_lost(error)`` if the link ends
    before ``end``.
    """

    credentials: Credentials
    _: KW_ONLY
    take: Callable[[worker_link.FromAgent], worker_link.FromWorker | None]
    ongoing: Callable[[], tuple[int, Iterable[Hashable]]]
    on_lost: Callable[[AgentLost], None]

    def __post_init__(self) -> None:
        self._host, self._port = agent_address()
        job, worker = (os.environ.get(f"POTLUCK_{name}", "") for name in ("JOB", "WORKER"))
        self._hello = Hello(WORKER, job=job, worker=worker)
        self.worker = worker
        self.progress = UnsentFacts(worker)
        self.owner = Owner("this worker's link to its agent")
        self.me = _me()
        _links.add(self)
        self._connected = threading.Event()
        self._failure: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._link: _Link | None = None
        self._ending = False
        self._finished = False
        self._is_over = False
        self._lock = threading.Lock()
        self._sent_at = 0.0
        self._sent_epoch = -1
        self._timer: asyncio.TimerHandle | None = None
        self._thread = start_thread(
            self._run,
            name="potluck-agent-link",
            on_broken=lambda error: self.on_lost(_agent_lost(_broke(error))),
        )
        self._connected.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    # -- on any thread

    def say(self, message: worker_link.FromWorker) -> None:
        self._call(lambda: self._send(message))

    def progress_waits(self) -> None:
        self._call(self._progress_waits)

    def finish(self) -> None:
        """Send the last facts, and that this worker has finished. The agent then ends the link."""
        self._call(self._send_progress)
        self.say(worker_link.Finished(self.worker))
        self._finished = True

    def flush(self, timeout_s: float) -> None:
        """Wait until all messages so far are written to the socket, at most ``timeout_s``."""
        done = threading.Event()

        async def flush() -> None:
            if self._link is not None:
                await self._link.flush(timeout_s)
            done.set()

        self._call(lambda: self._tasks.start(flush()))
        done.wait(timeout_s)

    def end(self) -> None:
        """Close the link and join its thread. Idempotent."""
        self._call(self._begin_end)
        self._thread.join()
        _links.discard(self)

    def _call(self, action: Callable[[], object]) -> None:
        with self._lock:
            if not self._is_over:
                self._loop.call_soon_threadsafe(action)

    # -- on the link's thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    runner.run(self._main())
                finally:
                    with self._lock:
                        self._is_over = True
        except BaseException as error:
            self._failure = LinkError(_broke(error))
            raise
        finally:
            self._connected.set()

    async def _main(self) -> None:
        self._tasks = Tasks()
        self._done = asyncio.Event()
        try:
            reader, writer, welcome = await aio.connect(
                self._host, self._port, self._hello, self.credentials
            )
        except (PotluckError, TimeoutError) as error:
            failure = LinkError(f"the agent at {self._host}:{self._port} can't be reached: {error}")
            self._failure = error if isinstance(error, PotluckError) else failure
            return
        self._link = link = aio.MessageLink(
            reader,
            writer,
            received=worker_link.FROM_AGENT,
            sent=worker_link.TO_AGENT,
            version=common_version(welcome),
        )
        listening = asyncio.create_task(self._listen(link))
        looking = start_task(
            lambda: self._look_around(link), name="potluck-look", on_broken=_untold_waits
        )
        self._connected.set()
        await self._done.wait()
        if self._finished:  # closing a socket with unread data could discard our last messages
            await asyncio.wait([listening], timeout=_GOODBYE_S)
        await stop(listening, looking)
        await self._tasks.ended()
        await link.flush(_GOODBYE_S)
        await link.close()

    async def _listen(self, link: _Link) -> None:
        try:
            while True:
                answer = self.take(await link.receive())
                if answer is not None:
                    link.send(answer)
        except PotluckError as error:
            if not self._ending:
                self._lost(str(error))
        except Exception as error:  # without this thread the worker could not follow the agent
            _log.exception("listening to the agent broke")
            link.send(worker_link.Failed(self.worker, worker_link.clip(_broke(error))))
            self._lost(_broke(error))

    async def _look_around(self, link: _Link) -> None:
        """Send a message to the agent when an operation takes long, and while the script sits at a
        breakpoint."""
        waits, due = LongWaits(), 0.0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            epoch, operations = self.ongoing()
            if waits.is_long(operations, time.monotonic()):
                link.send(worker_link.Waiting(self.worker, epoch))
            if time.monotonic() >= due and (where := patience.place()):
                due = time.monotonic() + LONG_S
                reason = f"is at a breakpoint ({plain(where)[:200]})"
                link.send(worker_link.Halted(self.worker, reason))

    def _lost(self, cause: str) -> None:
        self.on_lost(_agent_lost(cause))
        self._loop.call_later(_ORPHAN_S, _end_orphan)

    def _begin_end(self) -> None:
        self._ending = True
        if self._link is not None:
            self._done.set()

    def _send(self, message: worker_link.FromWorker) -> None:
        if self._link is not None:
            self._link.send(message)

    def _progress_waits(self) -> None:
        """Send the first facts of a new epoch at once, later ones every ``_REPORT_EVERY_S``."""
        waited = self._loop.time() - self._sent_at
        if self.progress.epoch != self._sent_epoch or waited >= _REPORT_EVERY_S:
            self._send_progress()
        elif self._timer is None:
            self._timer = self._loop.call_later(_REPORT_EVERY_S - waited, self._send_progress)

    def _send_progress(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        told = self.progress.take()
        self._sent_at, self._sent_epoch = self._loop.time(), told.epoch
        self._send(told)


def _end_orphan() -> None:
    """End this process, since its agent is lost and the script has not ended by itself."""
    os.kill(os.getpid(), signal.SIGTERM)


def _untold_waits(error: BaseException) -> None:
    """Ignore that the task which reports long waits broke: a stopped worker is then noticed at an
    operation's deadline instead."""


def _agent_lost(cause: str) -> AgentLost:
    return AgentLost(f"the agent that started this worker is lost: {cause}")


def _broke(error: BaseException) -> str:
    return (
        f"this worker's thread that talks to it broke ({why(error)}). The script is not to blame: "
        "start it again, and please report this with the traceback in that worker's output"
    )


def _plain(value: Any) -> worker_link.Fact:
    """``value`` as a fact: a number (also of an array), else text."""
    with contextlib.suppress(Exception):
        value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    return worker_link.clip(str(value))


def _count(value: Any) -> int:
    """``value`` as an integer for a message; 0, for unknown, if it is no number."""
    try:
        return min(max(int(value), 0), 2**63 - 1)
    except (TypeError, ValueError, OverflowError):
        return 0


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
