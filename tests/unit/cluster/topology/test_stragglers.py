"""Who holds the others up, as people are told."""

from __future__ import annotations

import itertools

from potluck._core.cluster.topology.graph import slow_links, stragglers
from potluck._core.wire.facts import LinkFacts

GIGABIT = 125e6


def links(names: str, **unlike: tuple[float, float]) -> list[LinkFacts]:
    """All links of 0.2 ms and 1 Gbit/s, but those named: ``ab=(latency_s, bandwidth)``."""
    return [
        LinkFacts(a, b, *unlike.get(a + b, (0.0002, GIGABIT)))
        for a, b in itertools.permutations(names, 2)
    ]


def test_alike_links_have_no_straggler() -> None:
    wireless = (0.003, GIGABIT / 3)
    assert stragglers(links("abc"), str) == ()
    assert stragglers(links("abc", ac=wireless, ca=wireless), str) == ()
    assert stragglers([], str) == ()


def test_a_node_behind_a_narrow_cable_is_named_with_its_figures() -> None:
    narrow = (0.0002, GIGABIT / 100)
    found = stragglers(links("abc", ac=narrow, cb=narrow), str.upper)
    assert found == ("C: 10 Mbit/s (best link: 1000)",)


def test_a_far_node_is_named() -> None:
    far = (0.05, GIGABIT)
    found = stragglers(links("abc", ac=far, bc=far), str)
    assert found == ("c: 50 ms (best link: 0.2)",)


def test_one_slow_link_names_both_its_ends() -> None:
    found = stragglers(links("abcd", bd=(0.0002, GIGABIT / 10)), str)
    assert found == ("b and d: 100 Mbit/s (best link: 1000)",)


def test_what_was_not_measured_is_not_slow() -> None:
    unknown = (0.0, 0.0)
    assert slow_links(links("abc", ab=unknown, ba=unknown)) == ()


def test_a_pair_alone_has_nobody_to_be_compared_with() -> None:
    assert stragglers(links("ab", ab=(0.05, 1e6), ba=(0.05, 1e6)), str) == ()
