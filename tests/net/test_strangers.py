"""Who is kept out of a cluster of hosts, though everybody knows all addresses and calls them; and a
ban and a new secret while the cluster works. No job."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.clusters import admit, ban, found_cluster
from support.figures import Figures
from support.hosts import Network
from support.machines import PSK, Machine, agreed, form, machines, marks
from support.sniffer import Capture, Sniffer

pytestmark = pytest.mark.needs_root_netns

OTHER = "cd" * 32
PAGE = "security"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Six machines: the first three are in one cluster, and up."""
    root = tmp_path_factory.mktemp("machines")
    with ExitStack() as stack:
        network = stack.enter_context(Network(6))
        peers = ",".join(host.address for host in network)
        made = stack.enter_context(machines(network, root, psk="", POTLUCK_PEERS=peers))
        found_cluster(*(each.home for each in made[:3]), psk=bytes.fromhex(PSK))
        form(*made[:3])
        yield made


def test_hosts_that_do_not_belong_never_get_in(
    members: list[Machine], figures: Figures, tmp_path: Path
) -> None:
    inside, strangers = members[:3], members[3:]
    other, none, banned = strangers
    found_cluster(other.home, psk=bytes.fromhex(OTHER))
    found_cluster(none.home, psk=secrets.token_bytes(32))  # as its agent would at its first start
    since = marks(inside)
    ban(inside[0].home, admit(inside[0].home, banned.home), "sold")
    for each in inside:
        each.says("banned: ", since=0)
    with ExitStack() as stack:
        sniffers = [stack.enter_context(Sniffer(each.host, tmp_path)) for each in strangers]
        for each in strangers:
            each.start()
        for each in strangers:
            each.sees(each)  # it founds a cluster of its own
        other.changes_nothing(3.0, since=other.mark)
        shown = [each.cluster() for each in (inside[0], *strangers)]
        captures = [sniffer.stop() for sniffer in sniffers]
    for each in strangers:
        each.kill()
    seen = {node for each in inside for _, nodes in each.views_since(since[each]) for node in nodes}
    known = {each["node"] for each in shown[0]["nodes"]}
    faults = ("another secret", "no secret", "banned, with the secret")
    for who, stranger, status, capture in zip(faults, strangers, shown[1:], captures, strict=True):
        assert stranger.node not in known
        assert [each["node"] for each in status["nodes"] if each["role"]] == [stranger.node]
        calls = capture.after_the_call()
        assert calls, "nobody called it, nor did it call anybody"
        fault, is_in = f"fourth host: {who}", int(stranger.id in seen)
        figures.take(fault, "times in a view:", is_in, asked=0, unit="", page=PAGE)
        if stranger is banned:
            assert any(calls.values()), "it holds the secret: handshakes come to their end"
            heard = most_heard(capture, stranger)
            what = "most that it heard in a connection (handshake and refusal):"
            figures.take(fault, what, heard, asked=4096, unit="bytes", page=PAGE)
        else:
            said = sum(calls.values())
            figures.take(
                fault, "after a knock, from either side:", said, asked=0, unit="bytes", page=PAGE
            )
        figures.take(fault, "calls that came to nothing:", len(calls), unit="", page=PAGE)


def most_heard(capture: Capture, stranger: Machine) -> int:
    """The largest number of bytes that one TCP stream brought to it, TLS handshake included."""
    own = (stranger.host.address, stranger.host.address6, stranger.host.link_local)
    return max(len(data) for stream, data in capture.streams.items() if stream[2] in own)


def test_a_ban_takes_a_member_out_and_changes_the_secret(
    members: list[Machine], figures: Figures
) -> None:
    ada, bob, carl = members[:3]
    form(ada, bob, carl)
    since, began = marks([ada, bob, carl]), time.monotonic()
    done = ada.runs("ban", carl.node, "--yes")
    assert done.returncode == 0, done.stderr
    banned = agreed(ada, bob, since=since) - began
    carl.says("this node is banned from the cluster", since=since[carl])
    figures.take("`potluck ban` of a member", "out of the view after", banned, page=PAGE)

    before, began = (ada.epoch, bob.epoch), time.monotonic()
    rotated = ada.runs("rotate")
    took = time.monotonic() - began
    assert rotated.returncode == 0, rotated.stderr
    assert "2 of 2 machines have it" in rotated.stdout
    held = {(each.home / "cluster_secret").read_text().strip() for each in (ada, bob)}
    assert len(held) == 1
    assert held != {PSK}
    assert (carl.home / "cluster_secret").read_text().strip() == PSK
    assert (ada.epoch, bob.epoch) == before, "a new secret changes no view"
    bob.kill()
    again = form(ada, bob)  # with the new secret alone
    figures.take("`potluck rotate`", "all have the new secret after", took, page=PAGE)
    figures.take("`potluck rotate`", "an agent that starts again is in after", again, page=PAGE)
