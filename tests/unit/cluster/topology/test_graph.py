"""Nodes and links as measured, and the orders and addresses that follow."""

from __future__ import annotations

import itertools
import random

import pytest

from potluck._core.cluster.topology.graph import Topology, in_ring, rank_addresses
from potluck._core.collectives.links import LINKS, measured_links
from potluck._core.types import Engine, MeasuredPath, Member
from potluck._core.wire.facts import Address, LinkFacts, NodeFacts

GIGABIT = 125e6
SLOW = 1.25e6


def topology(names: str, slow: dict[str, float] | None = None) -> Topology:
    """One node for each letter, all links of 1 Gbit/s but those named, such as ``{"ab": SLOW}``."""
    slow = slow or {}
    return Topology(
        [NodeFacts(name) for name in names],
        [
            LinkFacts(a, b, 0.0002, slow.get(a + b, GIGABIT))
            for a, b in itertools.permutations(names, 2)
        ],
    )


def links_of(ring: tuple[str, ...]) -> set[str]:
    return {a + b for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)}


def test_the_ring_avoids_the_slow_link() -> None:
    ring = topology("abcd", {"ab": SLOW, "ba": SLOW}).ring()
    assert sorted(ring) == list("abcd")
    assert not {"ab", "ba"} & links_of(ring)


def test_a_ring_of_three_turns_the_way_that_is_fast() -> None:
    assert "ab" not in links_of(topology("abc", {"ab": SLOW}).ring())
    assert "ba" not in links_of(topology("abc", {"ba": SLOW}).ring())


def test_with_equal_bandwidth_latency_decides() -> None:
    far = {frozenset("ac"), frozenset("bd")}
    nodes = [NodeFacts(name) for name in "abcd"]
    links = [
        LinkFacts(a, b, 0.05 if {a, b} in far else 0.0001, GIGABIT)
        for a, b in itertools.permutations("abcd", 2)
    ]
    assert not {"ac", "ca", "bd", "db"} & links_of(Topology(nodes, links).ring())


@pytest.mark.parametrize("seed", range(5))
def test_large_rings_avoid_slow_links_where_they_can(seed: int) -> None:
    chance = random.Random(seed)
    names = "abcdefghijkl"
    slow = {}
    for a, b in chance.sample(list(itertools.combinations(names, 2)), 12):
        slow[a + b] = slow[b + a] = SLOW
    ring = topology(names, slow).ring()
    assert sorted(ring) == list(names)
    assert not slow.keys() & links_of(ring), f"seed {seed}"


def test_small_worlds_have_rings_too() -> None:
    assert topology("").ring() == ()
    assert topology("a").ring() == ("a",)
    assert topology("ab").ring() == ("a", "b")


def test_the_slowest_link_is_named_first() -> None:
    slowest = topology("abc", {"cb": SLOW}).slowest_first()[0]
    assert (slowest.source, slowest.target, slowest.bandwidth) == ("c", "b", SLOW)


def test_an_unmeasured_link_is_the_default() -> None:
    link = Topology([NodeFacts("a"), NodeFacts("b")]).link("a", "b")
    assert link.bandwidth == pytest.approx(0.4e9)
    with pytest.raises(ValueError, match="unknown nodes"):
        Topology([NodeFacts("a")], [LinkFacts("a", "b", 0, 1)])


MEMBERS = (
    Member("0", "b", local_rank=0),
    Member("1", "a", local_rank=0),
    Member("2", "b", local_rank=1),
    Member("3", "d", local_rank=0),
    Member("4", "c", local_rank=0),
)


def test_ranks_follow_the_ring_from_the_most_senior_on() -> None:
    graph = topology("abcd", {"ab": SLOW, "ba": SLOW})
    ranks = in_ring(MEMBERS, graph.ring())
    assert ranks[0] == MEMBERS[0], "rank 0 still leads"
    nodes = tuple(dict.fromkeys(member.node for member in ranks))
    assert not {"ab", "ba"} & links_of(nodes)
    assert [m.worker for m in ranks if m.node == "b"] == ["0", "2"], "one node stands together"
    assert ranks[1].worker == "2"


def test_without_a_ring_seniority_is_the_order_and_strangers_come_last() -> None:
    assert in_ring(MEMBERS, ()) == MEMBERS
    assert in_ring((), ("a",)) == ()
    assert [m.worker for m in in_ring(MEMBERS, ("a", "b"))] == ["0", "2", "1", "3", "4"]
    assert [m.worker for m in in_ring(MEMBERS, ("c", "d"))] == ["0", "2", "4", "3", "1"]


def test_a_group_is_told_of_measured_paths_only_and_its_plans_use_them() -> None:
    graph = Topology(
        [NodeFacts(name) for name in "abc"],
        [LinkFacts("a", "b", 0.00123, SLOW), LinkFacts("b", "a", 0.001, GIGABIT)],
    )
    paths = graph.paths("abc")
    assert [(p.source, p.target, p.latency_s, p.bandwidth) for p in paths] == [
        ("a", "b", 0.0012, 1.2e6),
        ("b", "a", 0.001, 1.2e8),
    ]
    assert graph.paths("ac") == ()
    default = LINKS[Engine.PYTHON]
    wire = measured_links(default, ("a", "a", "b", "c"), paths).wires()
    assert wire(1, 2).beta_s_per_byte == pytest.approx(1 / 1.2e6)
    assert wire(2, 0).beta_s_per_byte == pytest.approx(1 / 1.2e8)
    assert wire(0, 3) == default.remote
    assert wire(1, 2).work_s_per_byte == default.remote.work_s_per_byte
    assert measured_links(default, ("a", "c"), paths) == default
    fast = [MeasuredPath("a", "b", 0.001, 2e9)]
    assert measured_links(default, ("a", "b", "c"), fast).wires()(0, 2).beta_s_per_byte == 1 / 2e9


LAN = Address("192.168.1.7", "192.168.1.0/24", "eth0", GIGABIT)
WIFI = Address("192.168.2.7", "192.168.2.0/24", "wlan0", GIGABIT / 4)
DOCKER = Address("172.17.0.1", "172.17.0.0/16", "docker0")
HOSTS_FILE = Address("127.0.1.1", "127.0.0.0/8", "lo")
ALIAS = Address("127.0.0.2", "127.0.0.0/8", "lo")
SIX = Address("fd00::7", "fd00::/64", "eth0", GIGABIT)
VPN = Address("10.8.0.6", "10.8.0.0/24", "tun0", GIGABIT)
LINK_LOCAL = Address("169.254.3.7", "169.254.0.0/16", "eth1")
MY_LAN = Address("192.168.1.2", "192.168.1.0/24", "eth0", GIGABIT)
MY_WIFI = Address("192.168.2.2", "192.168.2.0/24", "wlan0", GIGABIT / 4)
MY_LO = Address("127.0.0.1", "127.0.0.0/8", "lo")

CHOICES = [
    ("the network both are in", [DOCKER, LAN], [MY_LAN, MY_LO], "", LAN),
    ("the faster of two networks", [WIFI, LAN], [MY_WIFI, MY_LAN], "", LAN),
    ("never 127.0.1.1 of the hosts file", [HOSTS_FILE, LAN], [MY_LO, MY_LAN], "", LAN),
    ("never a loopback alias, though I have that network", [ALIAS, WIFI], [MY_LO], "", WIFI),
    ("nothing but loopback is nothing", [HOSTS_FILE, ALIAS], [MY_LO, MY_LAN], "", None),
    ("loopback in IPv6 dress", [Address("::ffff:127.0.0.1", "::/0"), LAN], [MY_LAN], "", LAN),
    ("what it was heard from, behind a router", [WIFI, LAN], [], "192.168.2.7", WIFI),
    ("IPv4 before IPv6 when all else is equal", [SIX, LAN], [], "", LAN),
    ("no link-local address of another network", [LINK_LOCAL], [MY_LAN], "", None),
    (
        "a cable without a router",
        [LINK_LOCAL],
        [Address("169.254.9.9", "169.254.0.0/16", "eth1")],
        "",
        LINK_LOCAL,
    ),
    ("no address at all", [], [MY_LAN], "", None),
    ("an address that is my own, too, leads to me", [DOCKER], [DOCKER, MY_LAN], "", None),
    ("a VPN that only they are in comes last", [VPN, LAN], [MY_LAN], "", LAN),
    ("what is no address is none", [Address("attic.local", "10.0.0.0/8")], [MY_LAN], "", None),
]


@pytest.mark.parametrize(
    ("theirs", "mine", "heard_from", "wanted"),
    [choice[1:] for choice in CHOICES],
    ids=[choice[0] for choice in CHOICES],
)
def test_the_right_interface_is_chosen_without_being_named(
    theirs: list[Address], mine: list[Address], heard_from: str, wanted: Address | None
) -> None:
    first = [] if wanted is None else [wanted]
    assert rank_addresses(theirs, mine, heard_from)[:1] == first
    assert rank_addresses(theirs[::-1], mine[::-1], heard_from)[:1] == first
