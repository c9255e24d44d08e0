"""The list of known and banned nodes: what it refuses, how it is named, what damages it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from potluck.cluster.trust import store as trust
from potluck.cluster.trust.store import TrustStore
from potluck.errors import ConfigurationError, IdentityError

ADA = "a1" * 32
BOB = "b2" * 32
BEA = "b2" * 4 + "cc" * 28


def test_nobody_is_banned_until_somebody_is(tmp_path: Path) -> None:
    store = TrustStore(tmp_path)
    assert store.objects_to(ADA) is None
    assert store.nodes() == ()
    assert not store.path.exists()


def test_a_ban_is_private_and_seen_at_once_by_whoever_reads_the_same_home(tmp_path: Path) -> None:
    reader, writer = TrustStore(tmp_path), TrustStore(tmp_path)
    assert reader.objects_to(ADA) is None
    assert writer.ban(ADA, "sold") is True
    assert writer.ban(ADA) is False
    assert reader.objects_to(ADA) is not None
    assert reader.objects_to(BOB) is None
    assert reader.banned() == {ADA}
    assert os.stat(writer.path).st_mode & 0o777 == 0o600


def test_meeting_a_banned_node_does_not_let_it_in(tmp_path: Path) -> None:
    store = TrustStore(tmp_path)
    store.meet(ADA, "attic")
    store.ban(ADA, "lost")
    store.meet(ADA, "attic")
    assert "lost" in str(store.objects_to(ADA))
    [node] = store.nodes()
    assert (node.name, node.banned) == ("attic", True)


def test_a_known_node_can_be_named_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    store = TrustStore(tmp_path)
    for node in (ADA, BOB, BEA):
        store.meet(node)
    assert store.find("A1A1A1A1") == ADA
    assert store.find(BOB[:12]) == BOB
    assert store.find("ee" * 32) == "ee" * 32


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b2b2b2b2", "fits 2 nodes"),
        ("a1a1", "has 4 digits"),
        ("attic", "is no node id"),
        ("", "is no node id"),
        ("deadbeef", "no node known here"),
        ("a1" * 33, "has 66 digits"),
    ],
)
def test_a_name_that_is_not_clear_is_explained(tmp_path: Path, text: str, why: str) -> None:
    store = TrustStore(tmp_path)
    for node in (ADA, BOB, BEA):
        store.meet(node)
    with pytest.raises(ConfigurationError, match=why):
        store.find(text)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version":9,"nodes":[]}'])
def test_a_list_that_cannot_be_read_lets_nobody_in(tmp_path: Path, content: bytes) -> None:
    store = TrustStore(tmp_path)
    store.ban(ADA)
    store.path.write_bytes(content)
    assert store.objects_to(ADA) is not None
    assert store.objects_to(BOB) is not None
    with pytest.raises(IdentityError, match=r"trust\.json"):
        store.ban(BOB)
    assert store.path.read_bytes() == content


def test_a_list_that_others_may_change_is_refused(tmp_path: Path) -> None:
    store = TrustStore(tmp_path)
    store.ban(ADA)
    store.path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        store.nodes()


def test_only_whole_ids_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no node id"):
        TrustStore(tmp_path).ban("a1a1")


def test_the_list_is_bounded_and_a_ban_is_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "MAX_NODES", 3)
    store = TrustStore(tmp_path)
    store.ban(ADA)
    for number in range(5):
        store.meet(f"{number:064x}")
    assert ADA in store.banned()
    assert [each.node for each in store.nodes()] == [ADA, f"{3:064x}", f"{4:064x}"]


BAN_MANY = """
import sys
from pathlib import Path
from potluck.cluster.trust.store import TrustStore
store = TrustStore(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 10):
    store.ban(f"{number:064x}")
"""


def test_processes_and_threads_that_ban_at_the_same_time_lose_none(tmp_path: Path) -> None:
    run = [sys.executable, "-c", BAN_MANY, str(tmp_path)]
    processes = [subprocess.Popen([*run, str(start)]) for start in (0, 10)]
    threads = [
        threading.Thread(target=lambda n=n: TrustStore(tmp_path).ban(f"{n:064x}"))
        for n in (20, 21, 22)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [process.wait(60) for process in processes] == [0, 0]
    assert TrustStore(tmp_path).banned() == {f"{number:064x}" for number in range(23)}
