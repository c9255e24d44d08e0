"""``Broker``: makes the sockets of workers that run in a sandbox, which has no network.

A worker may have sockets that are connected to the workers of its own group, or to the agent, and
ports on which it listens. The broker knocks where it calls, and callers of the ports knock at the
broker (``transport/knock.py``). So nobody without the cluster's secret exchanges a byte with a
script in the sandbox, whatever port a worker says is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from potluck._core.background import OnBroken, Tasks, start_task, stop
from potluck._core.system import need_posix
from potluck._core.transport import aio, listener
from potluck._core.transport.broker import short_path
from potluck._core.transport.credentials import Era
from potluck._core.transport.handshake import hear_knock, knock
from potluck._core.wire import broker as wire
from potluck.errors import ConfigurationError, ProtocolError, WrongSecret

MAX_REQUESTS = 128
"""Requests of a job's workers at one time, its ports among them; more wait."""
MAX_PORTS = 32
"""Ports of a job's workers at one time. A worker needs one or two."""
FIRST_PORT = 1024
_REQUEST_S = 5.0
"""How long a worker may take to say what it asks for."""
_DIAL_S = 10.0
_BACKLOG = 64
_PAUSE_S = 0.1

_log = logging.getLogger(__name__)

MayDial = Callable[[str, int], bool]
"""``may_dial(host, port)``: whether the workers of a job may connect there."""


@dataclass(eq=False, repr=False)
class Broker:
    """The broker of one job's workers, at the Unix socket ``path``, from construction to ``close``.
    Runs in the event loop. OSError if the socket can't be made.

    ``eras`` and ``bind`` are the agent's: whose knocks are right, and where workers listen.
    """

    path: Path
    may_dial: MayDial
    _: KW_ONLY
    eras: Callable[[], Sequence[Era]]
    bind: str
    on_broken: OnBroken

    def __post_init__(self) -> None:
        self._complain = listener.RateLimitedLog(_log)
        self._serving = Tasks()
        self._free = asyncio.Semaphore(MAX_REQUESTS)
        self._num_ports = 0
        self._strangers: listener.Unauthenticated = {}
        """Callers at all ports that have not knocked yet: together as many as at one."""
        self._sock = _listening_at(self.path)
        self._accepting = start_task(self._accept, name="socket broker", on_broken=self.on_broken)

    async def close(self) -> None:
        """Stop listening for the workers, and for their callers. Sockets that workers have stay
        theirs."""
        await stop(self._accepting, *self._serving)
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                asking, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # no descriptors, most likely
                self._free.release()
                self._complain.warning(f"can't take requests of workers in a sandbox: {error}")
                await asyncio.sleep(_PAUSE_S)
                continue
            serving = self._serving.start(self._serve(asking))
            serving.add_done_callback(lambda _: self._free.release())

    async def _serve(self, asking: socket.socket) -> None:
        """One request, and for a port all of its callers."""
        loop = asyncio.get_running_loop()
        with asking, contextlib.suppress(OSError):
            async with asyncio.timeout(_REQUEST_S):
                packet = await loop.sock_recv(asking, wire.MAX_PACKET)
            try:
                request = wire.decode_request(packet)
            except ProtocolError as error:
                _send(asking, wire.Denied(errno.EPROTO, str(error)[:1000]))
                return
            if isinstance(request, wire.Dial):
                await self._dial(asking, request)
            else:
                await self._listen(asking, request)

    async def _dial(self, asking: socket.socket, request: wire.Dial) -> None:
        where = f"{request.host}:{request.port}"
        if not self.may_dial(request.host, request.port):
            reason = f"{where} belongs to no worker of this group, and a sandbox reaches no other"
            _send(asking, wire.Denied(errno.EACCES, reason))
            return
        try:
            async with asyncio.timeout(_DIAL_S):
                sock = await aio.dial(request.host, request.port)
                try:
                    await listener.finish(knock(sock, self.eras()), sock)
                except BaseException:
                    sock.close()
                    raise
        except (WrongSecret, ProtocolError) as error:
            _send(asking, wire.Unheard(str(error)[:1000]))
        except OSError as error:  # which a TimeoutError is, too
            _send(asking, _denied(error, errno.ETIMEDOUT))
        else:
            with sock:
                _send(asking, wire.Granted(), sock)

    async def _listen(self, asking: socket.socket, request: wire.Listen) -> None:
        if self._num_ports >= MAX_PORTS:
            reason = f"the workers of a job get at most {MAX_PORTS} ports of a machine"
            _send(asking, wire.Denied(errno.EMFILE, reason))
            return
        if 0 < request.port < FIRST_PORT:
            reason = f"a sandbox gets no port below {FIRST_PORT}: those are the system's"
            _send(asking, wire.Denied(errno.EACCES, reason))
            return
        try:
            port = listener.listening_socket(self.bind, request.port)
        except ConfigurationError as error:
            cause = error.__cause__
            number = _number(cause, errno.EINVAL) if isinstance(cause, OSError) else errno.EINVAL
            _send(asking, wire.Denied(number, str(error)[:1000]))
            return
        except OSError as error:
            _send(asking, _denied(error, errno.EINVAL))
            return

        async def knocked(caller: listener.Caller) -> None:
            await listener.finish(hear_knock(caller.sock, self.eras()), caller.sock)
            caller.authenticated()
            _send(asking, wire.Granted(port.port), caller.sock)

        acceptor = listener.Acceptor(
            port, knocked, listener.LIMITS, awaits="a knock", crowd=self._strangers
        )
        self._num_ports += 1
        accepting = start_task(acceptor.run, name="a sandbox's port", on_broken=self.on_broken)
        try:
            _send(asking, wire.Granted(port.port))
            await listener.ready(asking)  # no more data: this is its end
        finally:
            self._num_ports -= 1
            await stop(accepting)
            port.close()


def _listening_at(path: Path) -> socket.socket:
    need_posix("a socket broker")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short_path(path) as short:
            sock.bind(short)
        os.chmod(path, 0o600)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _denied(error: OSError, number: int) -> wire.Denied:
    """The answer for ``error``, with ``number`` if it has none of the system's."""
    number = _number(error, number)
    return wire.Denied(number, str(error)[:1000] or os.strerror(number))


def _number(error: OSError, otherwise: int) -> int:
    """``error``'s number of the system; the numbers of ``socket.gaierror`` are negative."""
    return error.errno if error.errno is not None and error.errno > 0 else otherwise


def _send(asking: socket.socket, answer: wire.Answer, sock: socket.socket | None = None) -> None:
    """OSError if the worker has gone, or does not take what it is sent."""
    need_posix("a socket broker")
    fds = [] if sock is None else [sock.fileno()]
    socket.send_fds(asking, [wire.encode(answer)], fds)
