"""The cluster's part of ``potluck status`` as people see it."""

from __future__ import annotations

import msgspec
import pytest

from potluck._core.wire.facts import LinkFacts
from potluck._core.wire.local import NodeInfo, NodesReply
from potluck._core.wire.worker_link import JobState, WorkerStatus
from potluck.cli import nodes

FIRST, SECOND = "a" * 64, "b" * 64


def info(node: str, name: str, *, role: str = "member", memory: int = 8 << 30) -> NodeInfo:
    return NodeInfo(
        node, name, role, "up", "10.0.0.7", 0.3, "3.12.1", "2.13.0", "0.1.0", 8, memory,
        ("NVIDIA H100", "NVIDIA H100") if memory else (), 812.0 if memory else None,
    )  # fmt: skip


def reply(*infos: NodeInfo, links: tuple[LinkFacts, ...] = ()) -> NodesReply:
    return NodesReply(FIRST, 1, 52415, "9c41", 7, "", infos, (), ("bob joins",), links)


def test_nodes_and_links_are_shown_with_their_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    there = LinkFacts(FIRST, SECOND, 0.0003, 117e6, 0.00001, "eth0", "10.0.0.2")
    back = LinkFacts(SECOND, FIRST, 0.0003, 3e6, 0.00001, "wlan0", "10.0.0.7")
    cluster = reply(info(FIRST, "ada", role="leader"), info(SECOND, "bob"), links=(there, back))
    nodes.show_nodes(cluster)
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    wanted = ["ada", "leader", "up", "10.0.0.7", "8", "8 GiB", "2 x NVIDIA H100", "812"]
    assert wanted in rows
    assert ["ada → bob", "0.3 ms", "936 Mbit/s", "24 Mbit/s", "eth0 / wlan0"] in rows
    assert "epoch 7" in shown
    assert "bob joins" in shown


def test_what_is_not_known_yet_is_not_made_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    link = LinkFacts(FIRST, SECOND)
    nodes.show_nodes(reply(info(FIRST, "vm"), info(SECOND, "vm", memory=0), links=(link,)))
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    assert ["vm bbbbbbbb", "member", "up", "10.0.0.7", "-", "-", "-", "-"] in rows
    assert ["vm aaaaaaaa → vm bbbbbbbb", "-", "-", "-", "?"] in rows


def test_what_an_owner_does_not_give_to_all_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    changed = msgspec.structs.replace(info(FIRST, "ada"), runs_for="all but bob", paused=True)
    nodes.show_nodes(reply(changed, msgspec.structs.replace(info(SECOND, "bob"), runs_for="all")))
    shown = capsys.readouterr().out
    assert "  ada: paused by its owner; runs jobs of: all but bob\n" in shown
    assert "  bob:" not in shown


def test_the_sites_are_shown_where_a_machine_has_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    ada = msgspec.structs.replace(info(FIRST, "ada"), site="home/rack1")
    nodes.show_nodes(reply(info(SECOND, "bob"), ada))
    shown = " ".join(capsys.readouterr().out.split())
    assert "home/rack1: ada; no site is set (`potluck up --site`), so each counts as one" in shown
    assert "by itself: bob" in shown
    nodes.show_nodes(reply(info(FIRST, "ada"), info(SECOND, "bob")))
    assert "site" not in capsys.readouterr().out


def test_a_name_with_brackets_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    nodes.show_nodes(reply(info(FIRST, "lab [attic]"), info(SECOND, "[/x]")))
    worker = WorkerStatus("0", 0, "member", 1, 0, "cpu", 7, None, "[/x]")
    nodes.show_jobs([JobState("job", FIRST, 1, "[/y].py", 0.0, 7, 7, None, (worker,), ())])
    shown = capsys.readouterr().out
    assert "lab [attic]" in shown
    assert shown.count("[/x]") == 2


def test_figures_have_the_digits_that_mean_something() -> None:
    assert [nodes.rate_of(each) for each in (0, 100, 2e4, 1.25e6, 1.25e8, 3e8)] == [
        "-",
        "800 bit/s",
        "160 kbit/s",
        "10 Mbit/s",
        "1.0 Gbit/s",
        "2.4 Gbit/s",
    ]
    assert nodes.milliseconds(0.0) == "-"
    assert nodes.milliseconds(0.0503, 0.012) == "50 ± 12.0 ms"
    assert nodes.milliseconds(0.00031, 0.00002) == "0.3 ms"
    assert nodes.devices(()) == "cpu"


def test_the_engine_of_each_node_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    fast = msgspec.structs.replace(info(FIRST, "ada"), engine="native")
    nodes.show_nodes(reply(fast, msgspec.structs.replace(info(SECOND, "bob"), engine="native")))
    assert "  engine: native on ada, bob\n" in capsys.readouterr().out
    nodes.show_nodes(reply(fast, msgspec.structs.replace(info(SECOND, "bob"), engine="python")))
    shown = " ".join(capsys.readouterr().out.split())
    assert "engine: native on ada; python on bob; `potluck doctor` there says why" in shown
