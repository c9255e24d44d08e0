"""Changing the cluster's secret under running processes: who hears whom at each stage."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path

import pytest

from potluck._core.cluster.trust import secret
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.credentials import load_credentials
from potluck._core.cluster.trust.secret import EARLIER_FILE, read_eras
from potluck._core.settings import Settings
from potluck._core.transport.credentials import Credentials, era_of, namespace_of
from potluck._core.transport.handshake import connect
from potluck._core.transport.knock import MAX_ERAS
from potluck._core.transport.listener import Admission, Listener
from potluck._core.wire.greeting import Hello, Welcome
from potluck.errors import IdentityError, Refused, WrongSecret
from support.clusters import ban, found_cluster

OLD, NEW = b"o" * 32, b"n" * 32


def load(home: Path) -> Credentials:
    return load_credentials(Settings(home=home))


def accepts(server: Credentials, client: Credentials) -> bool:
    """Whether a link from ``client`` to ``server`` comes about, over loopback."""
    listener = Listener("127.0.0.1", 0, server)
    listener.serve(lambda hello, node: Admission(Welcome(), lambda link: link.close()))
    try:
        link, _ = connect(
            "127.0.0.1",
            listener.port,
            Hello("worker"),
            client,
            deadline=time.monotonic() + 30,
            max_retries=0,
        )
    except (WrongSecret, Refused):
        return False
    finally:
        listener.close()
    link.close()
    return True


def test_at_no_moment_of_a_change_do_two_members_refuse_each_other(tmp_path: Path) -> None:
    """Whichever of them has the new secret first."""
    homes = tmp_path / "ada", tmp_path / "bob"
    found_cluster(*homes, psk=OLD)
    ada, bob = map(load, homes)

    def both_ways() -> bool:
        return accepts(ada, bob) and accepts(bob, ada)

    assert both_ways()
    secret.change_secret(homes[0], NEW)
    assert ada.namespace == namespace_of(NEW)
    assert bob.namespace == namespace_of(OLD)
    assert both_ways()
    secret.change_secret(homes[1], NEW)
    assert both_ways()


def test_a_member_that_was_away_is_heard_for_seven_changes_and_then_no_more(
    tmp_path: Path,
) -> None:
    found_cluster(tmp_path / "away", tmp_path / "here", psk=OLD)
    away, here = load(tmp_path / "away"), load(tmp_path / "here")
    for number in range(1, MAX_ERAS):
        secret.change_secret(tmp_path / "here", bytes([number]) * 32)
    assert accepts(here, away)
    assert accepts(away, here)
    secret.change_secret(tmp_path / "here", NEW)
    assert not accepts(here, away)
    assert not accepts(away, here)


def test_after_a_change_the_old_secret_makes_nobody_a_member(tmp_path: Path) -> None:
    """It is good for a knock; then the key counts."""
    found_cluster(tmp_path / "ada", psk=OLD)
    found_cluster(tmp_path / "thief", psk=OLD)  # a new key under the secret that leaked
    ada, thief = load(tmp_path / "ada"), load(tmp_path / "thief")
    assert not accepts(ada, thief), "before the change"
    secret.change_secret(tmp_path / "ada", NEW)
    assert not accepts(ada, thief)
    assert not accepts(thief, ada)


def test_no_secret_of_an_earlier_time_is_left_on_the_disk(tmp_path: Path) -> None:
    secret.replace_secret(tmp_path, OLD)
    secret.change_secret(tmp_path, NEW)
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert OLD not in left
    assert OLD.hex().encode() not in left
    assert [era.namespace for era in read_eras(tmp_path)] == [namespace_of(NEW), namespace_of(OLD)]
    secret.replace_secret(tmp_path, bytes(32))
    assert read_eras(tmp_path) == (era_of(bytes(32)),)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_a_change_to_the_same_secret_is_none(tmp_path: Path) -> None:
    secret.replace_secret(tmp_path, OLD)
    secret.change_secret(tmp_path, OLD)
    assert read_eras(tmp_path) == (era_of(OLD),)


@pytest.mark.parametrize("name", ["cluster_secret", EARLIER_FILE])
def test_a_damaged_file_leaves_a_running_process_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    found_cluster(tmp_path, psk=OLD)
    credentials = load(tmp_path)
    (tmp_path / name).write_text("half a sec")
    (tmp_path / name).chmod(0o600)
    with caplog.at_level(logging.WARNING):
        assert credentials.namespace == namespace_of(OLD)
    assert "was not taken over" in caplog.text
    with pytest.raises(IdentityError, match="damaged"):
        load(tmp_path)


def test_no_secret_is_printed(tmp_path: Path) -> None:
    found_cluster(tmp_path, psk=OLD)
    era = era_of(OLD)
    shown = repr(read_eras(tmp_path)) + repr(load(tmp_path))
    assert OLD.hex() not in shown
    assert repr(era.knock_key) not in shown
    assert repr(era.advert_key) not in shown


def test_a_banned_node_is_refused_in_both_directions_with_no_byte_of_payload(
    tmp_path: Path,
) -> None:
    _, eves = found_cluster(tmp_path / "ada", tmp_path / "eve")
    ada, eve = load(tmp_path / "ada"), load(tmp_path / "eve")
    assert accepts(ada, eve)
    ban(tmp_path / "ada", eves, "sold")
    admitted = threading.Event()

    def admit(hello: Hello, peer: str) -> Admission:
        admitted.set()
        return Admission(Welcome(), lambda link: link.close())

    listener = Listener("127.0.0.1", 0, ada)
    listener.serve(admit)
    hello = Hello("worker")
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
    """``client`` calls a server whose key it does not want to talk to."""
    listener = Listener("127.0.0.1", 0, server)
    heard: list[Hello] = []

    def admit(hello: Hello, peer: str) -> Admission:
        heard.append(hello)
        return Admission(Welcome(), lambda link: link.close())

    listener.serve(admit)
    hello = Hello("worker")
    try:
        connect("127.0.0.1", listener.port, hello, client, deadline=time.monotonic() + 30)
    finally:
        listener.close()
        assert heard == []


def test_a_list_that_cannot_be_read_lets_nobody_in(tmp_path: Path) -> None:
    found_cluster(tmp_path / "ada", tmp_path / "bob")
    ada, bob = load(tmp_path / "ada"), load(tmp_path / "bob")
    file = AdmissionFile(tmp_path / "ada")
    whole = file.path.read_bytes()
    for content in (b"", b"\xc1", whole[:-3], whole.replace(b"member", b"admin!", 1)):
        file.path.write_bytes(content)
        assert not accepts(ada, bob)
        assert "damaged" in str(ada.objects_to(bob.node_id))
    file.path.write_bytes(whole)
    file.path.chmod(0o644)
    assert not accepts(ada, bob)
    file.path.chmod(0o600)
    assert accepts(ada, bob)


def test_a_stranger_who_only_connects_hears_nothing(tmp_path: Path) -> None:
    found_cluster(tmp_path)
    listener = Listener("127.0.0.1", 0, load(tmp_path))
    try:
        with socket.create_connection(("127.0.0.1", listener.port), timeout=30) as sock:
            sock.sendall(bytes(80))
            assert sock.recv(1) == b""
    finally:
        listener.close()
