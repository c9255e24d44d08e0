"""Changing the cluster's secret under running processes: who accepts whom at each stage."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.cluster.trust import keyring
from potluck.cluster.trust.credentials import load_credentials
from potluck.cluster.trust.keyring import Keyring, read_secrets
from potluck.cluster.trust.store import TrustStore
from potluck.errors import IdentityError, Refused, WrongSecret
from potluck.settings import Settings
from potluck.transport.credentials import Credentials, namespace_of
from potluck.transport.handshake import connect
from potluck.transport.listener import Admission, Listener
from potluck.wire.greeting import Hello, Welcome

OLD, NEW = b"o" * 32, b"n" * 32


def node(home: Path, psk: bytes = OLD) -> Credentials:
    keyring.replace_secret(home, psk)
    return load_credentials(Settings(home=home))


def accepts(server: Credentials, client: Credentials) -> bool:
    """Whether a link from ``client`` to ``server`` comes about, over loopback."""
    listener = Listener("127.0.0.1", 0, server)
    listener.serve(lambda hello, node: Admission(Welcome(), lambda link: link.close()))
    try:
        link, _ = connect(
            "127.0.0.1",
            listener.port,
            Hello("worker", client.namespace),
            client,
            deadline=time.monotonic() + 30,
        )
    except (WrongSecret, Refused):
        return False
    finally:
        listener.close()
    link.close()
    return True


def test_at_no_moment_of_a_change_do_two_prepared_nodes_refuse_each_other(tmp_path: Path) -> None:
    homes = tmp_path / "ada", tmp_path / "bob"
    ada, bob = map(node, homes)

    def both_ways() -> bool:
        return accepts(ada, bob) and accepts(bob, ada)

    assert both_ways()
    keyring.store_next(homes[0], NEW)
    assert both_ways()
    keyring.store_next(homes[1], NEW)
    assert both_ways()
    assert keyring.use_next(homes[0])
    assert ada.namespace == namespace_of(NEW)
    assert bob.namespace == namespace_of(OLD)
    assert both_ways()
    assert keyring.use_next(homes[1])
    assert both_ways()
    for home in homes:
        keyring.drop_previous(home)
    assert both_ways()
    assert not keyring.use_next(homes[0])


def test_a_node_that_was_not_told_is_out_once_the_grace_is_over(tmp_path: Path) -> None:
    left = node(tmp_path / "left")
    stays = node(tmp_path / "stays")
    keyring.store_next(tmp_path / "stays", NEW)
    keyring.use_next(tmp_path / "stays")
    assert not accepts(left, stays)
    keyring.drop_previous(tmp_path / "stays")
    assert not accepts(stays, left)


def test_the_grace_ends_by_itself_in_a_running_process(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    keyring.replace_secret(tmp_path, OLD)
    keyring.store_next(tmp_path, NEW)
    keyring.use_next(tmp_path)
    long = Keyring(tmp_path, key, grace_s=600)
    short = Keyring(tmp_path, key, grace_s=0.2)
    assert long.current().namespaces == {namespace_of(OLD), namespace_of(NEW)}
    deadline = time.monotonic() + 30
    while short.current().namespaces != {namespace_of(NEW)}:
        assert time.monotonic() < deadline
    assert long.current().namespaces == {namespace_of(OLD), namespace_of(NEW)}


def test_a_previous_secret_from_long_ago_is_not_accepted(tmp_path: Path) -> None:
    keyring.replace_secret(tmp_path, OLD)
    keyring.store_next(tmp_path, NEW)
    keyring.use_next(tmp_path)
    past = time.time() - 3600
    os.utime(tmp_path / keyring.PREVIOUS_FILE, (past, past))
    assert read_secrets(tmp_path).previous is None


def test_a_change_that_was_interrupted_is_finished_by_the_next_call(tmp_path: Path) -> None:
    keyring.replace_secret(tmp_path, OLD)
    keyring.store_next(tmp_path, NEW)
    keyring.use_next(tmp_path)
    keyring.store_next(tmp_path, NEW)  # as if it had crashed before it removed the file
    assert keyring.use_next(tmp_path)
    assert read_secrets(tmp_path) == keyring.Secrets(NEW, None, OLD)


def test_another_clusters_secret_replaces_everything_and_keeps_a_copy(tmp_path: Path) -> None:
    keyring.replace_secret(tmp_path, OLD)
    keyring.store_next(tmp_path, b"x" * 32)
    kept = keyring.replace_secret(tmp_path, NEW)
    assert read_secrets(tmp_path) == keyring.Secrets(NEW)
    assert kept is not None
    assert kept.read_text().strip() == OLD.hex()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert keyring.replace_secret(tmp_path, NEW) is None


def test_a_damaged_file_leaves_a_running_process_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = node(tmp_path)
    (tmp_path / "cluster_secret").write_text("half a sec")
    assert credentials.namespace == namespace_of(OLD)
    assert "was not taken over" in caplog.text
    with pytest.raises(IdentityError, match="damaged"):
        load_credentials(Settings(home=tmp_path))


def test_no_secret_is_printed(tmp_path: Path) -> None:
    keyring.replace_secret(tmp_path, OLD)
    assert OLD.hex() not in repr(read_secrets(tmp_path)) + repr(node(tmp_path))


def test_a_banned_node_is_refused_in_both_directions_with_no_byte_of_payload(
    tmp_path: Path,
) -> None:
    ada, eve = node(tmp_path / "ada"), node(tmp_path / "eve")
    assert accepts(ada, eve)
    TrustStore(tmp_path / "ada").ban(eve.node_id, "sold")
    admitted = threading.Event()

    def admit(hello: Hello, peer: str) -> Admission:
        admitted.set()
        return Admission(Welcome(), lambda link: link.close())

    listener = Listener("127.0.0.1", 0, ada)
    listener.serve(admit)
    hello = Hello("worker", eve.namespace)
    try:
        with pytest.raises(Refused, match="banned from this cluster") as caught:
            connect("127.0.0.1", listener.port, hello, eve, deadline=time.monotonic() + 30)
    finally:
        listener.close()
    assert caught.value.code == "banned"
    assert not admitted.is_set()
    with pytest.raises(Refused, match="is not called"):
        _call_without_answer(ada, eve)


def _call_without_answer(client: Credentials, server: Credentials) -> None:
    """``client`` calls a server that reports every byte it is sent after TLS."""
    said: list[bytes] = []
    door = socket.create_server(("127.0.0.1", 0))
    context = server.server_context

    def answer() -> None:
        sock, _ = door.accept()
        with context.wrap_socket(sock, server_side=True) as tls:
            said.append(tls.recv(1000))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        connect(
            *door.getsockname(),
            Hello("worker", client.namespace),
            client,
            deadline=time.monotonic() + 30,
        )
    finally:
        thread.join(30)
        door.close()
        assert said == [b""]
