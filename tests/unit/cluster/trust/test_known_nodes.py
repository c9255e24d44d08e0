"""The nodes that were met: how they are named, what damages the list, what bounds it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from potluck._core.cluster.names import find_node
from potluck._core.cluster.trust import known_nodes
from potluck._core.cluster.trust.known_nodes import KnownNodes
from potluck.errors import ConfigurationError, IdentityError

ADA = "a1" * 32
BOB = "b2" * 32
BEA = "b2" * 4 + "cc" * 28
NAMED = [(ADA, "attic"), (BOB, "cellar"), (BEA, "cellar")]


def test_a_meeting_is_private_and_kept(tmp_path: Path) -> None:
    known = KnownNodes(tmp_path)
    assert known.nodes() == ()
    assert not known.path.exists()
    known.meet(ADA, "attic", b"k" * 32)
    known.meet(ADA)
    [node] = KnownNodes(tmp_path).nodes()
    assert (node.node, node.name, node.key) == (ADA, "attic", (b"k" * 32).hex())
    assert 0 < node.first <= node.last
    assert known.name(ADA) == "attic"
    assert known.name(BOB) == ""
    assert os.stat(known.path).st_mode & 0o777 == 0o600


def test_a_machine_is_named_by_its_name_its_id_or_the_beginning_of_it() -> None:
    assert find_node("attic", NAMED) == ADA
    assert find_node("A1A1A1A1", NAMED) == ADA
    assert find_node(BOB[:12], NAMED) == BOB
    assert find_node("ee" * 32, NAMED) == "ee" * 32


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cellar", "2 machines are called 'cellar'"),
        ("b2b2b2b2", "fits 2 nodes"),
        ("a1a1", "is no machine that is known here"),
        ("loft", "is no machine that is known here"),
        ("", "is no machine that is known here"),
        ("deadbeef", "no node known here"),
        ("a1" * 33, "is no machine that is known here"),
    ],
)
def test_a_name_that_is_not_clear_is_explained(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        find_node(text, NAMED)


@pytest.mark.parametrize("name", [ADA, ADA[:8], ADA[:12]])
def test_a_machine_that_calls_itself_like_the_id_of_another_is_not_taken_for_it(name: str) -> None:
    """``potluck allow`` of what `potluck nodes` shows must not let that machine in."""
    nodes = [(ADA, "attic"), (BOB, name)]
    assert find_node(ADA, nodes) == ADA
    assert find_node(BOB[:8], nodes) == BOB
    if name != ADA:
        with pytest.raises(ConfigurationError, match=r"beginning of the id of another.*whole id"):
            find_node(name, nodes)
    assert find_node(ADA[:8], [(ADA, ADA[:8])]) == ADA


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version":9,"nodes":[]}'])
def test_a_damaged_list_is_named_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    known = KnownNodes(tmp_path)
    known.meet(ADA)
    known.path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"known_nodes\.json"):
        known.meet(BOB)
    assert known.path.read_bytes() == content


def test_a_list_that_others_may_change_is_refused(tmp_path: Path) -> None:
    known = KnownNodes(tmp_path)
    known.meet(ADA)
    known.path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        known.nodes()


def test_only_whole_ids_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no node id"):
        KnownNodes(tmp_path).meet("a1a1")


def test_the_list_is_bounded_whatever_the_nodes_call_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_nodes, "MAX_NODES", 3)
    known = KnownNodes(tmp_path)
    for number in range(5):
        known.meet(f"{number:064x}", "n" * 1000)
    assert [int(each.node, 16) for each in known.nodes()] == [2, 3, 4]
    assert {len(each.name) for each in known.nodes()} == {64}


def test_a_full_list_can_be_read_again(tmp_path: Path) -> None:
    """The longest entries there can be, and as many as there can be, are within what is read."""
    entry = known_nodes.KnownNode(
        node="f" * 64, name="\U0001f954" * 64, key="f" * 64, first=1e12, last=1e12
    )
    whole = known_nodes._File(known_nodes.FORMAT, (entry,) * known_nodes.MAX_NODES)
    text = known_nodes.msgspec.json.format(known_nodes.msgspec.json.encode(whole), indent=1)
    assert len(text) < 1 << 20


MEET_MANY = """
import sys
from pathlib import Path
from potluck._core.cluster.trust.known_nodes import KnownNodes
known = KnownNodes(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 10):
    known.meet(f"{number:064x}")
"""


def test_processes_and_threads_that_meet_at_the_same_time_lose_none(tmp_path: Path) -> None:
    run = [sys.executable, "-c", MEET_MANY, str(tmp_path)]
    processes = [subprocess.Popen([*run, str(start)]) for start in (0, 10)]
    threads = [
        threading.Thread(target=lambda n=n: KnownNodes(tmp_path).meet(f"{n:064x}"))
        for n in (20, 21, 22)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [process.wait(60) for process in processes] == [0, 0]
    assert {int(each.node, 16) for each in KnownNodes(tmp_path).nodes()} == set(range(23))
