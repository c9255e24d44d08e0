"""Measuring one path to a node: its latency, and its bandwidth in each direction.

A measurement has a connection of its own, greeted and encrypted like any other, so that heartbeats
never wait behind its bytes. Bandwidth is timed with trains of bytes. Trains grow until one takes
long enough to be timed. One more train of that size follows, because a traffic shaper lets a first
burst pass (its token bucket is full), and the slower of the two counts. A train ends after
``TRAIN_S`` on any link and has at most 2 MiB, so a fast link carries about 5 MiB in each direction.
Python's TLS bounds the figure to some Gbit/s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials
from potluck._core.wire import facts
from potluck._core.wire.facts import MAX_LOAD, MAX_TRAIN, Echo, Load, SendTrain, TrainArrived
from potluck._core.wire.greeting import Hello
from potluck.errors import LinkError, ProtocolError

KIND = "measure"
"""The ``kind`` in the greeting of a measuring connection."""
TRAIN_S = 0.25
MEASURE_S = 5.0

_CONNECT_S = 1.5
_NUM_ECHOES = 5
_FIRST_TRAIN = 64 << 10
_ENOUGH_S = 0.008
_BUFFER = 64 << 10


class Stopped(Exception):
    """The measurement was given up because a job needs the links."""


@dataclass(frozen=True, slots=True)
class PathReading:
    """One path as measured from here. ``local`` is this machine's address on it. Bandwidths are
    bytes per second, 0 where only the latency was measured."""

    host: str
    local: str
    latency_s: float
    outward: float = 0.0
    inward: float = 0.0

    @property
    def cost_s(self) -> float:
        """Seconds that 2 MiB take in the slower direction, by which paths are compared."""
        slower = min(self.outward, self.inward)
        return self.latency_s + (MAX_TRAIN / slower if slower else float("inf"))


class Connection(Protocol):
    """What a measurement needs of a greeted connection."""

    def send(self, message: facts.Measuring) -> object:
        """Send ``message``, or keep it to be sent."""

    async def drain(self) -> None:
        """Return when the connection takes more bytes."""

    async def receive(self) -> facts.Measuring:
        """The next message. LinkError when the connection has ended, ProtocolError for bytes that
        are no message."""
        ...


class StreamConnection(aio.MessageLink[facts.Measuring, facts.Measuring]):
    """A connection over asyncio's streams, with at most 64 KiB that wait to be sent: bytes in a
    long queue would be timed too early."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer, received=facts.MEASURING, sent=facts.MEASURING)
        writer.transport.set_write_buffer_limits(high=_BUFFER)
        sock: socket.socket | None = writer.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _BUFFER)

    async def drain(self) -> None:
        """Return when the connection takes more bytes."""
        await self.writer.drain()


async def measure(
    host: str,
    port: int,
    node: str,
    credentials: Credentials,
    *,
    bind: str = "",
    may_go_on: Callable[[], bool],
    wants_bandwidth: Callable[[str], bool] = lambda local: True,
) -> PathReading:
    """Measure the path to ``node`` by this address, from the interface or address ``bind`` (empty:
    any).

    The bandwidth is measured only if ``wants_bandwidth(local)``, with the local address of the
    path. LinkError or another PotluckError if no node or another node answers there, or ``node`` is
    busy; TimeoutError after ``MEASURE_S``; Stopped if a job began.
    """
    hello = Hello(KIND)
    try:
        reader, writer, _ = await aio.connect(
            host,
            port,
            hello,
            credentials,
            timeout_s=_CONNECT_S,
            bind=bind,
            wanted=lambda who: who == node,
        )
    except aio.Unwanted as error:
        raise LinkError(f"{host}:{port} is another node") from error
    try:
        async with asyncio.timeout(MEASURE_S):
            trains = _Trains(StreamConnection(reader, writer), may_go_on)
            local = writer.get_extra_info("sockname")[0].removeprefix("::ffff:")
            latency_s = await _latency(trains.connection)
            if not wants_bandwidth(local):
                return PathReading(host, local, latency_s)
            outward = await _bandwidth(trains.push)
            inward = await _bandwidth(trains.pull)
            return PathReading(host, local, latency_s, outward, inward)
    finally:
        await aio.end(writer)


async def serve(connection: Connection, may_go_on: Callable[[], bool]) -> None:
    """Answer one measurement to its end; at most ``MEASURE_S``."""
    with contextlib.suppress(LinkError, Stopped, TimeoutError, OSError):
        async with asyncio.timeout(MEASURE_S):
            trains = _Trains(connection, may_go_on)
            while True:
                message = await connection.receive()
                if isinstance(message, Echo):
                    connection.send(message)
                elif isinstance(message, SendTrain):
                    await trains.load(message.nbytes)
                elif isinstance(message, Load):
                    connection.send(await trains.arrives(message))
                else:
                    raise ProtocolError(f"{type(message).__name__} answers nothing")


def next_train(nbytes: int, arrived: TrainArrived) -> int:
    """The bytes of the train after one of ``nbytes``; 0 if that one took long enough to time."""
    if arrived.seconds >= _ENOUGH_S or nbytes >= MAX_TRAIN or arrived.nbytes < nbytes:
        return 0
    return min(4 * nbytes, MAX_TRAIN)


async def _latency(connection: Connection) -> float:
    loop = asyncio.get_running_loop()
    least = float("inf")
    for number in range(_NUM_ECHOES):
        began = loop.time()
        connection.send(Echo(number))
        if await connection.receive() != Echo(number):
            raise ProtocolError("it sent something else back")
        least = min(least, (loop.time() - began) / 2)
    return least


async def _bandwidth(train: Callable[[int], Awaitable[TrainArrived]]) -> float:
    """Bytes per second of trains like this."""
    nbytes = _FIRST_TRAIN
    arrived = await train(nbytes)
    while longer := next_train(nbytes, arrived):
        nbytes = longer
        arrived = await train(nbytes)
    again = await train(nbytes)
    # A receiver that got no core for a while finds all bytes waiting, and times them as too fast.
    return min(each.half_bytes / max(each.seconds, 1e-6) for each in (arrived, again))


class _Trains:
    """Trains of bytes over a connection, in both directions."""

    def __init__(self, connection: Connection, may_go_on: Callable[[], bool]) -> None:
        self.connection = connection
        self._may_go_on = may_go_on

    async def push(self, nbytes: int) -> TrainArrived:
        """Send a train; returns what the other side timed."""
        await self.load(nbytes)
        answer = await self.connection.receive()
        if not isinstance(answer, TrainArrived):
            raise ProtocolError(f"a train was answered with {type(answer).__name__}")
        return answer

    async def pull(self, nbytes: int) -> TrainArrived:
        """Have the other side send a train; returns what was timed here."""
        self.connection.send(SendTrain(nbytes))
        first = await self.connection.receive()
        if not isinstance(first, Load):
            raise ProtocolError(f"a train was asked for and {type(first).__name__} came")
        return await self.arrives(first)

    async def load(self, nbytes: int) -> None:
        """Send ``nbytes``, or less if they take too long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + TRAIN_S
        piece = os.urandom(min(MAX_LOAD, nbytes // 8))
        for left in range(nbytes - len(piece), -1, -len(piece)):
            if not self._may_go_on():
                raise Stopped
            is_last = left < len(piece) or loop.time() > until
            self.connection.send(Load(piece, is_last))
            await self.connection.drain()
            if is_last:
                return

    async def arrives(self, first: Load) -> TrainArrived:
        """Receive a train, and time its second half: the first fills the buffers on the way."""
        loop = asyncio.get_running_loop()
        total = len(first.data)
        times = [(loop.time(), total)]
        message: facts.Measuring = first
        while isinstance(message, Load) and not message.last:
            message = await self.connection.receive()
            if not isinstance(message, Load):
                raise ProtocolError(f"{type(message).__name__} in the middle of a train")
            total += len(message.data)
            if total > 2 * MAX_TRAIN:
                raise ProtocolError("a train that does not end")
            times.append((loop.time(), total))
        middle, before = next(each for each in times if each[1] * 2 >= total)
        return TrainArrived(total, total - before, loop.time() - middle)
