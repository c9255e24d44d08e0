"""Which callers a listener admits and refuses, and what that costs: real sockets, real TLS."""

from __future__ import annotations

import contextlib
import datetime
import logging
import queue
import random
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.transport.credentials import Credentials, era_of
from potluck._core.transport.handshake import connect, drive, read_greeting, tls_handshake
from potluck._core.transport.knock import ANSWER_BYTES, CALL_BYTES, PROOF_BYTES, Knock
from potluck._core.transport.listener import Admission, Limits, Listener
from potluck._core.transport.tcp import TcpLink
from potluck._core.wire.greeting import GREETING, Hello, Refusal, Welcome
from potluck.errors import (
    ConfigurationError,
    LinkError,
    PotluckError,
    ProtocolError,
    Refused,
    SecurityError,
    WrongSecret,
)
from support.knocking import begin_knock, client_hello, knocked, raw, untrusting
from support.links import Blocking, new_credentials, psk
from support.ports import reserved_ports
from support.proxy import RecordingProxy

MARKER = b"these are the parameters of my model"
# What `python -c 'import pickle, os; pickle.dumps(os.system)'` style attacks look like.
PICKLE = b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
JUNK = {
    "nothing": b"",
    "truncated TLS": b"\x16\x03\x01\x02",
    "a length of 4 GiB": struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
    "a TLS record longer than any": b"\x16\x03\x01\xff\xff" + b"x" * 70_000,
    "random": random.Random(1).randbytes(100_000),
    "pickle": PICKLE,
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(100_000),
}


class Host:
    """A listener that welcomes everybody and counts."""

    def __init__(self, **options: float) -> None:
        self.credentials = new_credentials()
        limits = Limits(**options)  # type: ignore[arg-type]
        self.listener = Listener("127.0.0.1", 0, self.credentials, limits=limits)
        self.links: queue.Queue[TcpLink] = queue.Queue()
        self.asked: list[Hello] = []
        self.answer: Welcome | Refusal = Welcome(rank=1)
        self.listener.serve(self.admit)

    @property
    def port(self) -> int:
        return self.listener.port

    def admit(self, hello: Hello, node: str) -> Admission:
        self.asked.append(hello)
        return Admission(self.answer, self.links.put)

    def close(self) -> None:
        self.listener.close()
        while not self.links.empty():
            self.links.get().close()


@pytest.fixture
def host() -> Iterator[Host]:
    with contextlib.closing(Host()) as host:
        yield host


def call(
    port: int,
    credentials: Credentials | None = None,
    *,
    timeout_s: float = 30.0,
    max_retries: int = 0,
    **hello: object,
) -> TcpLink:
    credentials = credentials or new_credentials()
    said = Hello(**{"kind": "data"} | hello)  # type: ignore[arg-type]
    link, _ = connect(
        "127.0.0.1",
        port,
        said,
        credentials,
        deadline=time.monotonic() + timeout_s,
        max_retries=max_retries,
    )
    return link


def assert_a_good_peer_gets_through(host: Host) -> None:
    with contextlib.closing(call(host.port)) as link:
        Blocking(link).send_all(b"ping")
        with contextlib.closing(host.links.get(timeout=30)) as other:
            assert Blocking(other).receive(4) == b"ping"


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the other side ends the connection, with whatever kind of end."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while some := sock.recv(65536):
            data += some
    return data


# -- the right secret


def test_peers_of_one_cluster_learn_each_others_identity(host: Host) -> None:
    mine = new_credentials()
    link = call(host.port, mine)
    with contextlib.closing(link), contextlib.closing(host.links.get(timeout=30)) as other:
        assert link.peer_node == host.credentials.node_id
        assert other.peer_node == mine.node_id
        assert f"127.0.0.1:{host.port}" in link.peer


def test_admit_sees_who_calls_and_its_word_reaches_the_caller(host: Host) -> None:
    host.answer = Refusal("epoch", "this group is in epoch 7, not 6")
    with pytest.raises(Refused, match="this group is in epoch 7, not 6") as caught:
        call(host.port, epoch=6, rank=2, to_rank=0, job="j")
    assert caught.value.code == "epoch"
    assert f"127.0.0.1:{host.port}" in str(caught.value)
    (hello,) = host.asked
    assert (hello.epoch, hello.rank, hello.to_rank, hello.job) == (6, 2, 0, "j")
    assert host.links.empty()


def test_serve_replaces_who_decides(host: Host) -> None:
    host.listener.serve(lambda hello, node: Admission(Refusal("rank", "not this time")))
    with pytest.raises(Refused, match="not this time"):
        call(host.port)
    host.listener.serve(host.admit)
    assert_a_good_peer_gets_through(host)


def test_an_admit_that_raises_is_a_refusal_and_a_log_entry(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(hello: Hello, node: str) -> Admission:
        raise RuntimeError("a bug")

    host.listener.serve(broken)
    with pytest.raises(Refused, match="see its log"):
        call(host.port)
    assert "a bug" in caplog.text


def test_what_the_client_sends_right_after_welcome_is_not_lost(host: Host) -> None:
    with contextlib.closing(call(host.port)) as link:
        Blocking(link).send_all(b"z" * 100_000)
        with contextlib.closing(host.links.get(timeout=30)) as other:
            assert Blocking(other).receive(100_000) == b"z" * 100_000


def test_a_caller_that_gave_up_while_it_waited_is_withdrawn_and_not_delivered(host: Host) -> None:
    asked, gone = threading.Event(), threading.Event()
    happened: queue.Queue[str] = queue.Queue()

    def slowly(hello: Hello, node: str) -> Admission:
        asked.set()
        gone.wait(30)
        return Admission(
            Welcome(), lambda link: happened.put("delivered"), lambda: happened.put("withdrawn")
        )

    host.listener.serve(slowly)
    credentials = new_credentials()
    with pytest.raises(LinkError, match="no longer wanted"):
        connect(
            "127.0.0.1",
            host.port,
            Hello("data"),
            credentials,
            deadline=time.monotonic() + 30,
            cancelled=asked.is_set,
        )
    gone.set()
    assert happened.get(timeout=30) == "withdrawn"


def test_a_delivered_link_outlives_its_listener() -> None:
    """Also while its admission thread is still about to end."""
    listener = Listener("127.0.0.1", 0, new_credentials())
    delivered: queue.Queue[TcpLink] = queue.Queue()
    closed = threading.Event()

    def deliver(link: TcpLink) -> None:
        delivered.put(link)
        closed.wait(30)

    listener.serve(lambda hello, node: Admission(Welcome(), deliver))
    link = call(listener.port)
    with contextlib.closing(link), contextlib.closing(delivered.get(timeout=30)) as other:
        closer = threading.Thread(target=listener.close)
        closer.start()
        Blocking(link).send_all(b"still here")
        assert Blocking(other).receive(10) == b"still here"
        closed.set()
        closer.join()
        Blocking(other).send_all(b"and here")
        assert Blocking(link).receive(8) == b"and here"


# -- strangers: not one byte


STRANGERS = {
    **{name: junk for name, junk in JUNK.items() if len(junk) >= CALL_BYTES},
    "a ClientHello without a knock": client_hello(),
    "a long HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: " + b"*/*, " * 20,
    "a knock under another secret": Knock(new_credentials("another").eras).call,
}


@pytest.mark.parametrize("junk", STRANGERS.values(), ids=STRANGERS)
def test_a_caller_without_a_right_knock_is_left_at_once_without_a_byte(junk: bytes) -> None:
    """The limits would let it wait for a minute."""
    with contextlib.closing(Host(timeout_s=60.0)) as host:
        with raw(host.port) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(junk)
            assert read_to_end(sock) == b""
        assert host.asked == []
        assert_a_good_peer_gets_through(host)


def test_half_a_knock_gets_no_byte_until_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    mine = Knock(new_credentials().eras)
    with contextlib.closing(Host(timeout_s=1.5)) as host, raw(host.port) as sock:
        sock.sendall(mine.call[:-1])
        assert read_to_end(sock) == b""
        wait_for(lambda: "no HELLO within 1.5 s" in caplog.text)


def test_a_recorded_knock_gets_32_random_bytes_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with contextlib.closing(Host(timeout_s=60.0)) as host:
        with RecordingProxy("127.0.0.1", host.port) as proxy:
            link = call(proxy.port)
            host.links.get(timeout=30).close()
            link.close()
        recorded = bytes(proxy.recordings[0].to_server)
        answers = [bytes(proxy.recordings[0].to_client[:ANSWER_BYTES])]
        for _ in range(3):
            with raw(host.port) as sock:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(recorded)
                answers.append(read_to_end(sock))
        assert [len(answer) for answer in answers] == [ANSWER_BYTES] * 4
        assert len(set(answers)) == 4
        assert len(host.asked) == 1
        wait_for(lambda: "played a recorded knock" in caplog.text)


@pytest.mark.parametrize("count", [0, PROOF_BYTES - 1, PROOF_BYTES])
def test_a_knock_without_its_proof_reaches_no_tls(
    count: int, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    sock, answer = begin_knock(host.port, Knock(new_credentials().eras))
    with sock:
        assert len(answer) == ANSWER_BYTES
        sock.sendall(bytes(count))
        if count < PROOF_BYTES:
            sock.shutdown(socket.SHUT_WR)
        assert read_to_end(sock) == b""
    cause = "recorded knock" if count == PROOF_BYTES else "hung up before its knock was whole"
    wait_for(lambda: cause in caplog.text)
    assert host.asked == []


def test_a_caller_with_another_secret_says_80_bytes_and_is_told_nothing(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with RecordingProxy("127.0.0.1", host.port) as proxy:
        with pytest.raises(WrongSecret, match=r"hung up without a word.*potluck pair"):
            call(proxy.port, new_credentials("another"), worker=MARKER.decode())
        wait_for(lambda: "does not hold this cluster's secret" in caplog.text)
    (recording,) = proxy.recordings
    assert (len(recording.to_server), len(recording.to_client)) == (CALL_BYTES, 0)
    assert host.asked == []
    assert_a_good_peer_gets_through(host)


def test_a_machine_that_was_away_while_the_secret_changed_is_heard(host: Host) -> None:
    old, new = era_of(psk()), era_of(psk("the next"))
    server = Credentials(Ed25519PrivateKey.generate(), lambda: (new, old))
    with contextlib.closing(Listener("127.0.0.1", 0, server)) as listener:
        listener.serve(host.admit)
        for eras in ((old,), (new,), (new, old)):
            caller = Credentials(Ed25519PrivateKey.generate(), lambda eras=eras: eras)
            call(listener.port, caller).close()
            host.links.get(timeout=30).close()


# -- holders of the secret: which key


@pytest.mark.parametrize("use_native", [False, True])
def test_a_key_that_is_not_admitted_is_told_so_and_not_listened_to(
    use_native: bool, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """A knock and a certificate are not enough; what the client says is never looked at."""
    unwanted = new_credentials(use_native=use_native)
    host.credentials.objects_to = {unwanted.node_id: "it was banned by bo"}.get
    with pytest.raises(Refused, match="it was banned by bo") as caught:
        call(host.port, unwanted)
    assert caught.value.code == "banned"
    with unwanted.client_context.wrap_socket(knocked(host.port)) as tls:
        tls.sendall(b"\xff" * 1000)  # a greeting of 4 GiB, if one looked
        deadline = time.monotonic() + 30
        answer = drive(read_greeting(tls), tls, deadline, "waiting", "the listener")
    assert answer == Refusal("banned", "it was banned by bo")
    wait_for(lambda: f"node {unwanted.node_id[:12]} was refused" in caplog.text)
    assert host.asked == []
    assert_a_good_peer_gets_through(host)


def test_a_server_whose_key_is_not_wanted_hears_no_hello(host: Host) -> None:
    mine = new_credentials()
    mine.objects_to = {host.credentials.node_id: "it was banned by bo"}.get
    with pytest.raises(Refused, match="is not called: it was banned by bo") as caught:
        call(host.port, mine)
    assert caught.value.code == "banned"
    assert host.asked == []


def test_a_client_without_a_certificate_is_refused(host: Host) -> None:
    tls = untrusting().wrap_socket(knocked(host.port))
    with tls, pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        tls.recv(1)
    assert host.asked == []


def test_a_client_whose_certificate_no_potluck_makes_hears_so_even_if_it_went_on_talking(
    host: Host, tmp_path: Path
) -> None:
    context = untrusting()
    path = tmp_path / "chain.pem"
    path.write_bytes(self_signed(Ed25519PrivateKey.generate()))
    context.load_cert_chain(path)
    with context.wrap_socket(knocked(host.port)) as tls:
        deadline = time.monotonic() + 30
        with pytest.raises(SecurityError, match="refused this node's certificate"):
            drive(talk_then_listen(tls), tls, deadline, "waiting for WELCOME", "the listener")
    assert host.asked == []


def self_signed(key: Ed25519PrivateKey) -> bytes:
    """A certificate that its own key has signed, and the key (PEM)."""
    name = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 1, 1))
        .sign(key, None)
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def talk_then_listen(tls: ssl.SSLSocket) -> Iterator[int]:
    with contextlib.suppress(ConnectionError):  # the other side listens for a second only
        tls.sendall(bytes(50_000))
    tls.setblocking(False)
    return read_greeting(tls)


def test_tls_1_2_is_refused(host: Host) -> None:
    context = untrusting(tls_1_2=True)
    with knocked(host.port) as sock, pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        context.wrap_socket(sock)
    assert host.asked == []


def test_the_bytes_of_a_good_peer_replayed_are_worth_nothing(host: Host) -> None:
    with RecordingProxy("127.0.0.1", host.port) as proxy:
        link = call(proxy.port)
        Blocking(link).send_all(MARKER)
        with contextlib.closing(host.links.get(timeout=30)) as other:
            assert Blocking(other).receive(len(MARKER)) == MARKER
        link.close()
    assert len(host.asked) == 1
    with raw(host.port) as sock:
        with contextlib.suppress(OSError):  # hung up on before all was sent
            sock.sendall(proxy.recordings[0].to_server)
            sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)
    assert_a_good_peer_gets_through(host)
    assert len(host.asked) == 2, "the replay must not have reached admit"


def test_nothing_readable_crosses_the_wire(host: Host) -> None:
    mine = new_credentials()
    with RecordingProxy("127.0.0.1", host.port) as proxy:
        link = call(proxy.port, mine, worker=MARKER.decode())
        with contextlib.closing(host.links.get(timeout=30)) as other:
            Blocking(link).send_all(MARKER * 1000)
            Blocking(other).send_all(MARKER)
            assert Blocking(other).receive(1000 * len(MARKER)) == MARKER * 1000
            assert Blocking(link).receive(len(MARKER)) == MARKER
        link.close()
    (recording,) = proxy.recordings
    wire = bytes(recording.to_server + recording.to_client)
    assert len(recording.to_server) > 1000 * len(MARKER)
    for secret in (MARKER, mine.namespace.encode(), mine.node_id[:16].encode()):
        assert secret not in wire


# -- junk


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_on_the_port_ends_its_connection_and_disturbs_nobody(junk: bytes, host: Host) -> None:
    with raw(host.port) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(junk)
            assert_a_good_peer_gets_through(host)  # while the junk is still connected
            with contextlib.suppress(OSError):  # what was no knock has been left by now
                sock.shutdown(socket.SHUT_WR)
        assert read_to_end(sock) == b""
    assert_a_good_peer_gets_through(host)
    assert len(host.asked) == 2


@pytest.mark.parametrize(
    "junk",
    {
        "a length of 4 GiB": struct.pack("<I", 0xFFFFFFFF) + b"x" * 1000,
        "a length of nothing": bytes(4),
        "pickle": struct.pack("<I", len(PICKLE)) + PICKLE,
        "random": struct.pack("<I", 1000) + random.Random(2).randbytes(1000),
        "a welcome": GREETING.encode(Welcome()),
        "cut short": struct.pack("<I", 1000) + b"x",
    }.items(),
    ids=lambda item: item[0],
)
def test_junk_under_tls_ends_its_connection_and_disturbs_nobody(
    junk: tuple[str, bytes], host: Host
) -> None:
    with new_credentials().client_context.wrap_socket(knocked(host.port)) as tls:
        tls.sendall(junk[1])
        socket.socket.shutdown(tls, socket.SHUT_WR)
        with contextlib.suppress(ssl.SSLError, ConnectionError):  # an end or an alert
            assert tls.recv(100) == b""
    assert host.asked == []
    assert_a_good_peer_gets_through(host)


def test_a_crowd_of_bad_callers_is_worth_one_log_line_a_second(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    begin = time.monotonic()
    for _ in range(100):
        with raw(host.port) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(STRANGERS["a long HTTP request"])
            assert read_to_end(sock) == b""
    seconds = time.monotonic() - begin
    lines = [
        record for record in caplog.records if record.name == "potluck._core.transport.listener"
    ]
    assert 1 <= len(lines) <= seconds + 1


# -- callers that do not speak


def test_five_hundred_idle_connections_do_not_keep_a_peer_out(host: Host) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(raw(host.port))
        assert_a_good_peer_gets_through(host)


def test_a_caller_that_drips_its_bytes_has_no_more_time_than_one_that_is_silent() -> None:
    """A ClientHello of 16 KiB after a right knock, a byte at a time: minutes, if one let it."""
    endless = b"\x16\x03\x01\x40\x00" + b"\x01\x00\x3f\xfc" + bytes(0x3FFC)
    with contextlib.closing(Host(timeout_s=1.5)) as host, knocked(host.port) as sock:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        sent = 0
        with contextlib.suppress(ConnectionError):
            for byte in endless:
                sock.sendall(bytes([byte]))
                sent += 1
                if poll.poll(20):  # the end of the connection, else the pause between two drips
                    break
        assert read_to_end(sock) == b""
        assert 1 < sent < len(endless)
        assert host.asked == []


def test_a_peer_that_waits_to_be_admitted_is_not_counted_among_unauthenticated_callers() -> None:
    with contextlib.closing(Host(max_connections=4, timeout_s=2.0)) as host:
        asked, decide = threading.Event(), threading.Event()

        def slowly(hello: Hello, node: str) -> Admission:
            asked.set()
            decide.wait(30)
            return host.admit(hello, node)

        host.listener.serve(slowly)
        links: list[TcpLink] = []
        caller = threading.Thread(target=lambda: links.append(call(host.port)))
        caller.start()
        assert asked.wait(30)
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(raw(host.port)) for _ in range(20)]
            for sock in idle:  # all dropped: by the crowd, or because their time was up
                assert read_to_end(sock) == b""
        decide.set()
        caller.join()
        links[0].close()


def test_a_peer_that_comes_before_serve_is_called_waits_for_it() -> None:
    credentials = new_credentials()
    links: queue.Queue[TcpLink] = queue.Queue()
    with contextlib.closing(Listener("127.0.0.1", 0, credentials)) as listener:
        called: list[TcpLink] = []
        caller = threading.Thread(target=lambda: called.append(call(listener.port)))
        caller.start()
        wait_for(lambda: any(t.name.startswith("potluck-admit") for t in threading.enumerate()))
        listener.serve(lambda hello, node: Admission(Welcome(), links.put))
        links.get(timeout=30).close()
        caller.join()
        called[0].close()


def test_closing_the_listener_ends_the_wait_of_peers_that_nobody_serves() -> None:
    listener = Listener("127.0.0.1", 0, new_credentials())
    caught: list[PotluckError] = []

    def try_to_call() -> None:
        try:
            call(listener.port)
        except PotluckError as error:
            caught.append(error)

    caller = threading.Thread(target=try_to_call)
    caller.start()
    wait_for(lambda: any(t.name.startswith("potluck-admit") for t in threading.enumerate()))
    listener.close()
    listener.close()
    caller.join()
    assert isinstance(caught[0], LinkError)


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that announces itself to nobody."""
    deadline = time.monotonic() + timeout_s
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        tick.wait(0.005)


# -- disagreement


def test_another_protocol_version_is_refused_and_both_are_named(host: Host) -> None:
    text = r"99 to 99 .* 1 to 2: .* the machine that was called is too old .* pip install --upgrade"
    with pytest.raises(Refused, match=text) as caught:
        call(host.port, version=99)
    assert caught.value.code == "version"
    assert host.asked == []


def test_a_server_of_another_protocol_version_is_not_accepted(host: Host) -> None:
    host.answer = Welcome(version=99)
    with pytest.raises(Refused, match=r"99 to 99 .* this machine is too old") as caught:
        call(host.port)
    assert caught.value.code == "version"


# -- the port


def test_a_port_in_use_is_named_together_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port {port}.*POTLUCK_GRADIENT_PORT"):
            Listener("127.0.0.1", port, new_credentials())


def test_a_listener_on_all_interfaces_takes_ipv4() -> None:
    with contextlib.closing(Listener("", 0, new_credentials())) as listener:
        listener.serve(lambda hello, node: Admission(Refusal("full", "no room today")))
        with pytest.raises(Refused, match="no room today"):
            call(listener.port)


# -- the client's side


def test_a_closed_port_is_tried_again_and_then_given_up() -> None:
    with (
        reserved_ports(1) as [port],
        pytest.raises(LinkError, match=rf"127.0.0.1:{port} \(tried 3 times\).*refused"),
    ):
        call(port, max_retries=2)


def test_a_listener_that_opens_late_is_found() -> None:
    with contextlib.ExitStack() as stack:
        [port] = stack.enter_context(reserved_ports(1))
        late: list[Listener] = []

        def open_it() -> bool:
            """Asked by connect after its first attempt has failed."""
            if not late:
                late.append(Listener("127.0.0.1", port, new_credentials()))
                stack.callback(late[0].close)
                late[0].serve(lambda hello, node: Admission(Refusal("full", "found you")))
            return False

        credentials = new_credentials()
        with pytest.raises(Refused, match="found you"):
            connect(
                "127.0.0.1",
                port,
                Hello("data"),
                credentials,
                deadline=time.monotonic() + 30,
                cancelled=open_it,
            )


def test_a_server_that_says_nothing_costs_the_connection_timeout_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        credentials = new_credentials()
        with pytest.raises(LinkError, match="did not answer in time while knocking"):
            connect(
                "127.0.0.1",
                silent.getsockname()[1],
                Hello("data"),
                credentials,
                deadline=time.monotonic() + 30,
                connection_timeout_s=1.5,
                max_retries=0,
            )


def test_a_call_that_is_no_longer_wanted_ends_before_its_deadline(host: Host) -> None:
    asked, gone = threading.Event(), threading.Event()

    def never(hello: Hello, node: str) -> Admission:
        asked.set()
        gone.wait(30)
        return Admission(Refusal("late", "too late"))

    host.listener.serve(never)
    credentials = new_credentials()
    with pytest.raises(LinkError, match="no longer wanted"):
        connect(
            "127.0.0.1",
            host.port,
            Hello("data"),
            credentials,
            deadline=time.monotonic() + 3600,
            cancelled=asked.is_set,
        )
    gone.set()


def test_a_web_server_is_not_taken_for_a_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            sock, _ = web.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match="another program"):
            call(web.getsockname()[1], max_retries=5)
        thread.join()


def test_a_server_that_hangs_up_at_the_knock_is_tried_again_but_not_for_ever() -> None:
    """A process that ends does so as well, and its successor may listen at the same port."""
    calls: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            for _ in range(6):
                sock, _ = other.accept()
                with sock:
                    calls.append(sock.recv(65536))
            other.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(WrongSecret, match="hung up without a word"):
            call(other.getsockname()[1], max_retries=1000)
        thread.join()
    assert [len(each) for each in calls] == [CALL_BYTES] * 6
    assert len(set(calls)) == 6


def test_a_name_that_does_not_exist_is_a_link_error_that_says_so() -> None:
    credentials = new_credentials()
    with pytest.raises(LinkError, match=r"nowhere\.invalid"):
        connect(
            "nowhere.invalid",
            1,
            Hello("data"),
            credentials,
            deadline=time.monotonic() + 30,
            max_retries=0,
        )


def test_a_bit_flipped_on_the_way_ends_the_link_and_delivers_nothing_wrong(host: Host) -> None:
    flip = threading.Event()

    def alter(to_server: bool, offset: int, data: bytes) -> bytes:
        if to_server and flip.is_set():
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    with RecordingProxy("127.0.0.1", host.port, alter=alter) as proxy:
        link = call(proxy.port)
        with contextlib.closing(host.links.get(timeout=30)) as other:
            flip.set()
            Blocking(link).send_all(b"12345678")
            with pytest.raises(LinkError, match="broke"):
                Blocking(other).receive(1)
        link.close()


def test_the_handshake_functions_serve_a_socket_that_blocks_in_neither_direction(
    host: Host,
) -> None:
    credentials = new_credentials()
    sock = knocked(host.port)
    sock.setblocking(False)
    with credentials.client_context.wrap_socket(sock, do_handshake_on_connect=False) as tls:
        drive(tls_handshake(tls), tls, time.monotonic() + 30, "setting up TLS", "the listener")
        assert tls.version() == "TLSv1.3"


def test_a_listener_that_breaks_says_where_and_why() -> None:
    told: queue.Queue[BaseException] = queue.Queue()
    listener = Listener("127.0.0.1", 0, new_credentials(), on_broken=told.put)

    def broken() -> None:
        raise MemoryError("no room")

    listener._acceptor._accept = broken  # type: ignore[method-assign]
    with raw(listener.port):
        error = told.get(timeout=30)
    where = f"port {listener.port} of 127.0.0.1"
    assert str(error) == (
        f"the thread that takes connections on {where} broke (MemoryError: no room)"
    )
    with pytest.raises(ConnectionRefusedError):
        raw(listener.port)
    listener.close()


def test_what_breaks_over_one_caller_ends_that_one_only(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread(*_: object, **__: object) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("potluck._core.transport.listener.start_thread", no_thread)
        with pytest.raises(LinkError):
            call(host.port)
    assert "can't start new thread" in caplog.text
    assert_a_good_peer_gets_through(host)
