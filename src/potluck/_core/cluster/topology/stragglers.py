"""Stragglers: nodes and links that are much slower than the best of the cluster. Pure.

Every collective lasts as long as its slowest link, so a straggler is worth a person's look: at the
cable, at the distance to the access point, or at `potluck ban`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from potluck._core.wire.facts import LinkFacts

_TIMES_SLOWER = 4.0
"""A link is slow if the best one is more than this factor better. Two bands of Wi-Fi differ by
less."""

_LATENCY_S = 5e-3
"""Nor is a link slow whose latency is within this of the best: wireless links jitter by as much."""


def slow_links(links: Iterable[LinkFacts]) -> tuple[frozenset[str], ...]:
    """The pairs of nodes whose link, in either direction, has less than a quarter of the best
    link's bandwidth, or more than four times the least latency and 5 ms more. A link that was not
    measured (0) is not slow. In order of the names."""
    known = tuple(links)
    best = max((link.bandwidth for link in known), default=0.0)
    least = min((link.latency_s for link in known if link.latency_s), default=0.0)
    limit = max(_TIMES_SLOWER * least, least + _LATENCY_S)
    slow = {
        frozenset((link.source, link.target))
        for link in known
        if 0 < link.bandwidth < best / _TIMES_SLOWER or link.latency_s > limit
    }
    return tuple(sorted(slow, key=sorted))


def stragglers(links: Iterable[LinkFacts], called: Callable[[str], str]) -> tuple[str, ...]:
    """One sentence for each node all of whose links are slow, and for each other slow link.

    In a cluster of two nodes no link is slow: there is none to compare it with. ``called`` gives a
    node's name for people.
    """
    known = tuple(links)
    slow = slow_links(known)
    pairs = {frozenset((link.source, link.target)) for link in known}
    nodes = sorted({node for pair in slow for node in pair})
    behind = [n for n in nodes if all(pair in slow for pair in pairs if n in pair)]
    alone = [pair for pair in slow if not pair & set(behind)]
    return (
        *(f"{called(node)}: {_worst(known, node)}" for node in behind),
        *(
            f"{' and '.join(sorted(map(called, pair)))}: {_worst(known, *sorted(pair))}"
            for pair in alone
        ),
    )


def _worst(links: tuple[LinkFacts, ...], *nodes: str) -> str:
    """The figures of the links that touch all ``nodes``, beside the best of the cluster."""
    mine = [link for link in links if all(node in (link.source, link.target) for node in nodes)]
    rates = [link.bandwidth for link in links if link.bandwidth]
    my_rates = [link.bandwidth for link in mine if link.bandwidth]
    delays = [link.latency_s for link in links if link.latency_s]
    my_delays = [link.latency_s for link in mine if link.latency_s]
    parts = []
    if my_rates and min(my_rates) < max(rates) / _TIMES_SLOWER:
        parts.append(f"{_mbit(min(my_rates))} Mbit/s (best link: {_mbit(max(rates))})")
    if my_delays and max(my_delays) > max(_TIMES_SLOWER * min(delays), min(delays) + _LATENCY_S):
        parts.append(f"{1e3 * max(my_delays):.3g} ms (best link: {1e3 * min(delays):.2g})")
    return ", ".join(parts)


def _mbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.3g}" if bytes_per_s < 125e6 else f"{8 * bytes_per_s / 1e6:.0f}"
