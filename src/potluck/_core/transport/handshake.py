"""How a connection becomes a link: TCP, knock, mutual TLS 1.3, ``Hello``, ``Welcome``.

The steps are generators that yield what they wait for (``READ`` or ``WRITE``), so that the blocking
``connect`` and the listener's loop share them. The server's half is ``hear_knock``,
``receive_hello`` and, once admitted, ``Listener._conclude``. The client sends nothing but ``Hello``
before it has read ``Welcome``: a TLS 1.3 client finishes its handshake before the server has looked
at its certificate, so a refusal arrives on the first read.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from potluck._core import forks
from potluck._core.system import wait_ready
from potluck._core.transport import broker
from potluck._core.transport.credentials import Credentials, Era, Identity, identity_of_certificate
from potluck._core.transport.failures import hung_up_at_knock, translated
from potluck._core.transport.knock import ANSWER_BYTES, CALL_BYTES, PROOF_BYTES, Heard, Knock
from potluck._core.transport.link_memory import NUM_SLOTS, SLOT_BYTES, offer_link_memory
from potluck._core.transport.native_tls import TlsSocket
from potluck._core.transport.tcp import TcpLink, secured, tune
from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.greeting import (
    GREETING,
    WORKER,
    Greeting,
    Hello,
    Refusal,
    Welcome,
    common_version,
    sent_greeting,
)
from potluck._core.wire.versions import NEWEST, OLDEST
from potluck.errors import (
    LinkError,
    PotluckError,
    ProtocolError,
    Refused,
    SecurityError,
    WrongSecret,
)

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

T = TypeVar("T")
Steps = Generator[int, None, T]

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_CONNECT_TIMEOUT_S = 5.0
_CANCEL_S = 0.1
_MAX_SILENCES = 5
_HALF_A_KNOCK = "it hung up before its knock was whole"


def connect(
    host: str,
    port: int,
    hello: Hello,
    credentials: Credentials,
    *,
    deadline: float,
    max_retries: int | None = 3,
    connection_timeout_s: float = _CONNECT_TIMEOUT_S,
    memory: tuple[int, int] | None = (NUM_SLOTS, SLOT_BYTES),
    cancelled: Callable[[], bool] | None = None,
) -> tuple[TcpLink, Welcome]:
    """Connect to a listener, prove this node's identity, and return the link and its welcome.

    Blocks until ``deadline`` (``time.monotonic()``) at the latest. A connection that is refused,
    unreachable, cut or silent for ``connection_timeout_s`` is tried again after a growing pause (50
    ms to 1 s), ``max_retries`` times (None: until the deadline). So is a server that hangs up at
    the knock, at most five times. A data link offers link memory of
    ``memory`` = (num_slots, slot_bytes) per direction; None offers none. ``cancelled`` is asked
    every 0.1 s; once it says True, the call ends with LinkError.

    Raises WrongSecret (the server hung up at the knock; no Hello was sent), Refused (the peer said
    no: ``code`` and text are its; or it is banned here), ProtocolError (not a potluck peer),
    LinkError (no connection in time).
    """
    peer = f"{host}:{port}"
    patience = _Patience(deadline, connection_timeout_s, cancelled)
    backoff_s = _FIRST_BACKOFF_S
    attempts = silences = 0
    while True:
        attempts += 1
        try:
            return _connect_once(host, port, hello, credentials, memory, patience)
        except WrongSecret:
            # A process that ends, and a crowded port, hang up at the knock as well.
            silences += 1
            is_last = silences > _MAX_SILENCES or (
                max_retries is not None and attempts > max_retries
            )
            if is_last or not patience.sleep(backoff_s):
                raise
        except Refused:
            raise
        except LinkError as error:
            is_last = max_retries is not None and attempts > max_retries
            if is_last or not patience.sleep(backoff_s):
                times = "once" if attempts == 1 else f"{attempts} times"
                raise LinkError(f"no link to {peer} (tried {times}): {error}") from error
        backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)


@dataclass(frozen=True, slots=True)
class _Patience:
    """How long a caller of ``connect`` will wait."""

    deadline: float
    attempt_s: float
    cancelled: Callable[[], bool] | None

    def attempt(self) -> float:
        """Until when one attempt may take that begins now."""
        return min(self.deadline, time.monotonic() + self.attempt_s)

    def sleep(self, seconds: float) -> bool:
        """Pause before the next attempt; False if there is to be none."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if until >= self.deadline or (self.cancelled is not None and self.cancelled()):
                return False
            time.sleep(min(left, _CANCEL_S))  # in pieces, so that ``cancelled`` is seen soon
        return True


def _connect_once(
    host: str,
    port: int,
    hello: Hello,
    credentials: Credentials,
    memory: tuple[int, int] | None,
    patience: _Patience,
) -> tuple[TcpLink, Welcome]:
    peer = f"{host}:{port}"
    limit, cancelled = patience.attempt(), patience.cancelled
    sock = _open(host, port, limit, cancelled)
    offered = None
    welcome = None
    try:
        if not broker.is_needed():  # which has knocked
            drive(knock(sock, credentials.eras), sock, limit, "knocking", peer, cancelled)
        sock = tls = secured(sock, credentials, server_side=False)
        drive(tls_handshake(tls), tls, limit, "setting up TLS", peer, cancelled)
        server = identity_of_certificate(tls.getpeercert(binary_form=True))
        node, peer = server.node, f"{peer} (node {server.node[:12]})"
        check_identity(server, peer, credentials)
        if hello.kind == "data" and memory is not None:
            offered = offer_link_memory(*memory)
        said = msgspec.structs.replace(hello, memory=None if offered is None else offered.offer)
        drive(write_all(tls, sent_greeting(said)), tls, limit, "sending HELLO", peer, cancelled)
        # The server may hold a newcomer back until it is ready itself: the whole deadline counts.
        answer = drive(
            read_greeting(tls), tls, patience.deadline, "waiting for WELCOME", peer, cancelled
        )
        welcome = welcomed(answer, peer)
    except OSError as error:  # from secured: the peer is gone already
        sock.close()
        raise translated(error, peer, "setting up TLS") from error
    except BaseException:
        sock.close()
        raise
    finally:
        shared = None
        if offered is not None:
            shared = offered.settle(welcome is not None and welcome.memory)
    return TcpLink(tls, peer=peer, peer_node=node, memory=shared), welcome


def welcomed(answer: Greeting, peer: str) -> Welcome:
    """The server's answer if it is a welcome; else Refused, or ProtocolError."""
    if isinstance(answer, Refusal):
        raise Refused(f"{peer} refused this connection: {answer.reason}", answer.code)
    if not isinstance(answer, Welcome):
        raise ProtocolError(f"{peer} answered HELLO with another HELLO")
    if not common_version(answer):
        raise Refused(_version_text(peer, "this machine", answer), "version")
    return answer


def _open(
    host: str, port: int, limit: float, cancelled: Callable[[], bool] | None
) -> socket.socket:
    """A non-blocking connected socket to the first address of ``host`` that answers."""
    peer = f"{host}:{port}"
    if broker.is_needed():
        with broker.dialling(host, port) as (asking, steps):
            return drive(steps, asking, limit, "connecting", peer, cancelled)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LinkError(f"the name {host!r} can't be resolved: {error}") from error
    failure: PotluckError | None = None
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        now = time.monotonic()
        share = now + max(0.0, limit - now) / (len(addresses) - index)
        with forks.opening() as mine:
            sock = mine(socket.socket(family, kind, protocol))
        try:
            sock.setblocking(False)
            tune(sock)
            drive(_tcp_connect(sock, address), sock, share, "connecting", peer, cancelled)
            return sock
        except LinkError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure or LinkError(f"the name {host!r} has no address")


def _tcp_connect(sock: socket.socket, address: tuple[object, ...]) -> Steps[None]:
    code = sock.connect_ex(address)
    if code in (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EINTR):
        yield WRITE
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def knock(sock: socket.socket, eras: Sequence[Era]) -> Steps[None]:
    """The client's knock; WrongSecret if the server hangs up at it, ProtocolError if it answers
    with anything but a knock."""
    mine = Knock(eras)
    yield from _write_raw(sock, mine.call)
    answer = yield from _read_raw(sock, ANSWER_BYTES)
    if not answer:
        raise WrongSecret(hung_up_at_knock())
    yield from _write_raw(sock, mine.proof(answer))


def hear_knock(sock: socket.socket, eras: Sequence[Era]) -> Steps[None]:
    """The server's half of the knock. Reads not a byte further: TLS begins right after it.
    WrongSecret, with nothing sent, if the client does not hold the secret."""
    call = yield from _read_raw(sock, CALL_BYTES)
    if len(call) < CALL_BYTES:
        raise LinkError(_HALF_A_KNOCK)
    heard = Heard(call, eras)
    yield from _write_raw(sock, heard.answer)
    proof = yield from _read_raw(sock, PROOF_BYTES)
    if len(proof) < PROOF_BYTES:
        raise LinkError(_HALF_A_KNOCK)
    heard.check(proof)


def _read_raw(sock: socket.socket, count: int) -> Steps[bytes]:
    """``count`` bytes from under TLS; fewer at the end of the connection."""
    data = bytearray()
    while len(data) < count:
        try:
            some = socket.socket.recv(sock, count - len(data))
        except BlockingIOError:
            yield READ
            continue
        if not some:
            break
        data += some
    return bytes(data)


def _write_raw(sock: socket.socket, data: bytes) -> Steps[None]:
    while data:
        try:
            data = data[socket.socket.send(sock, data) :]
        except BlockingIOError:
            yield WRITE


def receive_hello(tls: TlsSocket, credentials: Credentials) -> Steps[tuple[Hello, Identity]]:
    """The server's half after the knock: what the client said, and the identity it proved.

    Refused, after the client was told, if this side does not want to talk to that client: nothing
    that the client says is read.
    """
    yield from tls_handshake(tls)
    client = identity_of_certificate(tls.getpeercert(binary_form=True))
    refusal = credentials.refusal_of(client)
    if refusal is not None:
        yield from write_all(tls, sent_greeting(refusal))
        raise Refused(f"node {client.node[:12]} was refused: {refusal.reason}", refusal.code)
    hello = yield from read_greeting(tls)
    if not isinstance(hello, Hello):
        raise ProtocolError("the peer began with something else than HELLO")
    return hello, client


def check_identity(server: Identity, peer: str, credentials: Credentials) -> None:
    """Refused if this side does not want to talk to ``server``. Agents and commands call agents: a
    worker that answers could pass for the agent of its node."""
    if server.job and not credentials.job:
        raise Refused(f"{peer} is not called: a worker of job {server.job!r} answers there", "job")
    refusal = credentials.refusal_of(server)
    if refusal is not None:
        raise Refused(f"{peer} is not called: {refusal.reason}", refusal.code)


def objection(hello: Hello, client: Identity, credentials: Credentials) -> Refusal | None:
    """Why a server must refuse ``hello`` from ``client``, whatever takes this kind of connection,
    or None."""
    if not common_version(hello):
        caller = f"the machine that called (node {client.node[:12]})"
        return Refusal("version", _version_text(caller, "the machine that was called", hello))
    is_worker_elsewhere = client.job and not credentials.job  # it calls the node itself
    if is_worker_elsewhere and (hello.kind, hello.job) != (WORKER, client.job):
        return Refusal(
            "kind",
            f"the certificate of a worker of job {client.job!r} is good for that job only: a "
            "worker gives no orders to its node",
        )
    return None


def _version_text(they: str, we: str, theirs: Hello | Welcome) -> str:
    """Which of the two machines to upgrade, and how."""
    newest = max(theirs.version, theirs.newest)
    older, newer = (they, we) if newest < OLDEST else (we, they)
    return (
        f"{they} speaks versions {theirs.version} to {newest} of potluck's protocol, {we} {OLDEST} "
        f"to {NEWEST}: the potluck of {older} is too old for that of {newer}. Enter there: "
        "python -m pip install --upgrade potluck"
    )


def tls_handshake(tls: TlsSocket) -> Steps[None]:
    yield from _when_ready(tls.do_handshake)


def read_greeting(tls: TlsSocket) -> Steps[Greeting]:
    """One greeting; reads not a byte further, so that a link can begin right after it."""
    prefix = yield from _read_exactly(tls, PREFIX_BYTES)
    body = yield from _read_exactly(tls, GREETING.length(prefix))
    return GREETING.decode(body)


def _read_exactly(tls: TlsSocket, count: int) -> Steps[bytes]:
    data = bytearray()
    while len(data) < count:
        some = yield from _when_ready(partial(tls.recv, count - len(data)))
        if not some:
            raise ssl.SSLZeroReturnError
        data += some
    return bytes(data)


def write_all(tls: TlsSocket, data: bytes) -> Steps[None]:
    # All of it or SSLWantWriteError: OpenSSL does no partial writes here.
    yield from _when_ready(lambda: tls.send(data))


def _when_ready(call: Callable[[], T]) -> Steps[T]:
    """The result of ``call``, repeated until TLS need wait for the socket no more."""
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            yield READ
        except ssl.SSLWantWriteError:
            yield WRITE


def drive(
    steps: Steps[T],
    sock: socket.socket,
    deadline: float,
    doing: str,
    peer: str,
    cancelled: Callable[[], bool] | None = None,
) -> T:
    """Run ``steps`` to their end, blocking where they wait; errors are potluck's."""
    try:
        while True:
            event = next(steps)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError(f"{peer} did not answer in time while {doing}")
                wait_s = left if cancelled is None else min(left, _CANCEL_S)
                if wait_ready(sock.fileno(), write=event == WRITE, timeout_s=wait_s):
                    break
                if cancelled is not None and cancelled():
                    raise LinkError(f"gave up on {peer} while {doing}: no longer wanted")
    except StopIteration as stop:
        value: T = stop.value
        return value
    except OSError as error:
        raise translated(error, peer, doing) from error
    except WrongSecret as error:
        raise WrongSecret(f"{peer}, {doing}: {error}") from None
    except (ProtocolError, SecurityError) as error:
        raise type(error)(f"{peer}, {doing}: {error}") from error
