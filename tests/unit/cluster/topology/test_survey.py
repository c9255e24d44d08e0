"""What a node knows of all links, and which it measures next: a table of times and events."""

from __future__ import annotations

from potluck._core.cluster.topology.survey import AGAIN_S, Survey, is_news, shares_interfaces
from potluck._core.wire.facts import Address, Facts, LinkFacts, NodeFacts

LAN = Address("192.168.1.2", "192.168.1.0/24", "eth0", 125e6)
WIFI = Address("192.168.2.2", "192.168.2.0/24", "wlan0")
THEIR_LAN = Address("192.168.1.7", "192.168.1.0/24", "eth0", 125e6)
THEIR_WIFI = Address("192.168.2.7", "192.168.2.0/24", "wlan0")


def survey(node: str = "a") -> Survey:
    return Survey(NodeFacts(node, 4, 8 << 30, (), None, (LAN, WIFI)))


def due_within(subject: Survey, since: float, busy: tuple[str, ...] = ()) -> float:
    """After how many tenths of a second from ``since`` something is due."""
    return next(n / 10 for n in range(100_000) if subject.due(since + n / 10, busy)) + since


def test_of_a_pair_the_lesser_measures_and_the_greater_only_if_it_does_not() -> None:
    lesser, greater = survey("a"), survey("b")
    lesser.linked("b", THEIR_LAN.host, 1, 0.0)
    greater.linked("a", LAN.host, 1, 0.0)
    soon, later = due_within(lesser, 0.0), due_within(greater, 0.0)
    assert soon < 3
    assert later > soon + 3
    lesser.measured("b", 100.0, 200.0, soon)
    greater.measured("a", 200.0, 100.0, soon)
    assert due_within(lesser, soon) >= soon + AGAIN_S
    assert due_within(greater, soon) > soon + AGAIN_S
    [link] = lesser.row({}, {}).links
    [back] = greater.row({}, {}).links
    assert (link.bandwidth, back.bandwidth) == (100.0, 200.0)


def test_nothing_is_measured_while_a_job_runs_at_either_end() -> None:
    subject = survey()
    for node in ("b", "c"):
        subject.linked(node, THEIR_LAN.host, 1, 0.0)
    assert subject.due(50.0, ("a",)) == ""
    assert subject.due(50.0, ("b",)) == "c"
    assert subject.due(50.0, ("b", "c")) == ""


def test_a_path_that_can_not_be_measured_is_tried_less_and_less_often() -> None:
    subject = survey()
    subject.linked("b", THEIR_LAN.host, 1, 0.0)
    now, waits = 10.0, []
    for _ in range(9):
        subject.failed("b", now)
        at = due_within(subject, now)
        waits.append(at - now)
        now = at
    assert waits == sorted(waits)
    assert waits[0] < 3
    assert 100 < waits[-1] < 130


def test_a_link_that_comes_back_elsewhere_is_measured_again_and_one_that_is_gone_is_not() -> None:
    subject = survey()
    subject.linked("b", THEIR_LAN.host, 1, 0.0)
    subject.measured("b", 1.0, 1.0, 0.0)
    subject.lost("b")
    assert subject.due(2 * AGAIN_S, ()) == ""
    assert subject.row({}, {}).links == ()
    subject.linked("b", THEIR_LAN.host, 1, 5.0)
    assert due_within(subject, 5.0) >= AGAIN_S, "the same path is known"
    subject.linked("b", THEIR_WIFI.host, 1, 6.0)
    assert due_within(subject, 6.0) < 10.0


def test_the_present_address_is_tried_first_then_the_likeliest() -> None:
    subject = survey()
    subject.linked("b", THEIR_WIFI.host, 7, 0.0)
    assert subject.places("b") == [(THEIR_WIFI.host, 7)]
    vpn = Address("10.8.0.7", "10.8.0.0/24", "tun0")
    theirs = (vpn, THEIR_WIFI, THEIR_LAN, Address("127.0.1.1", "127.0.0.0/8", "lo"))
    subject.heard("b", Facts(NodeFacts("b", addresses=theirs)))
    hosts = [THEIR_WIFI.host, THEIR_LAN.host, vpn.host]
    assert subject.places("b") == [(host, 7) for host in hosts]


def test_nobody_speaks_for_another() -> None:
    subject = survey()
    subject.heard("b", Facts(NodeFacts("c")))
    subject.heard("b", Facts(NodeFacts("b"), (LinkFacts("c", "a", 1.0, 1.0),)))
    assert subject.rows == {}
    subject.heard("b", Facts(NodeFacts("b"), (LinkFacts("b", "a", 1.0, 1.0),)))
    assert set(subject.rows) == {"b"}
    subject.forget(())
    assert subject.rows == {}, "what is neither linked nor in the view is not kept"


def test_the_graph_has_what_was_measured_between_the_nodes_asked_for() -> None:
    subject = survey()
    subject.linked("b", THEIR_LAN.host, 1, 0.0)
    subject.linked("c", THEIR_LAN.host, 1, 0.0)
    subject.measured("b", 100.0, 200.0, 1.0)
    row = subject.row({"b": (0.001, 0.0001)}, {"b": LAN.host, "c": "fe80::1%wlan0"})
    assert [(link.target, link.interface) for link in row.links] == [("b", "eth0"), ("c", "wlan0")]
    subject.heard("b", Facts(NodeFacts("b", 16), (LinkFacts("b", "a", 0.001, 200.0),)))
    graph = subject.topology(row, ("a", "b", "d"))
    assert graph.nodes == ("a", "b", "d")
    assert graph.facts("b").cores == 16
    measured = {(link.source, link.target, link.bandwidth) for link in graph.slowest_first()}
    assert measured == {("a", "b", 100.0), ("b", "a", 200.0)}


def test_a_pair_that_talks_by_way_of_a_third_node_does_so_until_it_has_a_link_of_its_own() -> None:
    """When that node dies, the two still do not reach each other."""
    subject, pair = survey(), frozenset({("a", "b")})

    def relayed() -> frozenset[tuple[str, str]]:
        return subject.relayed(subject.row({}, {}), ("a", "b", "c"))

    subject.linked("b", "", 1, 0.0, via="c")
    assert relayed() == pair
    assert subject.due(1e6, ()) == "", "such a link is not measured"
    subject.lost("b")
    assert relayed() == pair
    subject.linked("b", THEIR_LAN.host, 1, 9.0)
    assert relayed() == frozenset()
    subject.lost("b")
    assert relayed() == frozenset()
    subject.linked("b", "", 1, 0.0, via="c")
    subject.lost("b")
    subject.forget(())
    assert relayed() == frozenset(), "b has gone"


def test_only_news_is_told() -> None:
    node = NodeFacts("a")
    row = Facts(node, (LinkFacts("a", "b", 0.010, 5.0),))
    assert is_news(row, None)
    assert not is_news(row, row)
    assert not is_news(Facts(node, (LinkFacts("a", "b", 0.011, 5.0),)), row)
    assert is_news(Facts(node, (LinkFacts("a", "b", 0.020, 5.0),)), row)
    assert is_news(Facts(node, (LinkFacts("a", "b", 0.010, 6.0),)), row)
    assert is_news(Facts(NodeFacts("a", 2), row.links), row)
    assert is_news(Facts(node), row)


def test_two_addresses_of_the_same_cable_are_one_path() -> None:
    six = Address("fd00::2", "fd00::/64", "eth0")
    mine = NodeFacts("a", addresses=(LAN, six))
    theirs = NodeFacts("b", addresses=(THEIR_LAN, Address("fd00::7", "fd00::/64", "eth0")))
    ends = shares_interfaces(THEIR_LAN.host, LAN.host, (), (mine, theirs))
    assert ends == ("eth0", "eth0")
    assert shares_interfaces("fd00::7", six.host, {ends}, (mine, theirs)) is None
    assert shares_interfaces(THEIR_WIFI.host, WIFI.host, {ends}, (mine, theirs)) is not None
