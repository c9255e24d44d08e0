"""The cost model of links: latency and bandwidth of the wires, work of the ranks at their ends.

``LINKS`` has one model for each engine, the only place with such figures; ``measured_links`` puts
the measured paths of a cluster in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from potluck._core.types import Engine, MeasuredPath

Sites = tuple[tuple[int, ...], ...]
"""By level, the innermost first: the index of each rank's group of nodes."""


class Wire(NamedTuple):
    """One direction between two ranks."""

    alpha_s: float
    """Seconds a byte is on its way (latency), in which neither rank is busy."""
    beta_s_per_byte: float
    """Seconds per byte (one over the bandwidth); the wire is busy that long at both ends."""
    work_s_per_byte: float = 0.0
    """Seconds of work that a byte costs its sender and its receiver: system calls, TLS, copies."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The model of a group's links and of the work of its ranks.

    A rank has one thread, which works for one frame at a time, sent or received; meanwhile its
    wires carry earlier frames, one in each direction.

    ``nodes[r]`` is the node index of rank ``r``; without it every rank is a node of its own.
    ``pairs`` names the wires that differ: ``((src, dst, wire), ...)``. With ``shared_wire`` the
    ranks of one node take turns at their node's wire, in each direction. At most ``processors``
    ranks work at a time (0: all of them), as on a machine with several ranks for each core.
    ``sites`` are groups of nodes with fast links inside, as in ``make_plan``; with ``shared_wire``
    the nodes of a site take turns at its uplink, too, which is as fast as the wire that a frame
    goes over.
    """

    remote: Wire
    """Between ranks of different nodes."""
    local: Wire
    """Between ranks of one node."""
    frame_s: float
    """Seconds of work that every frame costs its sender and its receiver, whatever its length."""
    gamma_s_per_byte: float
    """Seconds of work to combine one received byte with one's own."""
    nodes: tuple[int, ...] | None = None
    shared_wire: bool = True
    pairs: tuple[tuple[int, int, Wire], ...] = ()
    processors: int = 0
    sites: Sites = ()
    between: tuple[Wire, ...] = ()
    """By level of ``sites``: between ranks that are apart there; without it as between nodes."""

    @property
    def is_uniform(self) -> bool:
        """All ranks see the same wires: only one node, or only nodes of one rank."""
        if self.pairs or self.sites:
            return False
        return self.nodes is None or len(set(self.nodes)) in (1, len(self.nodes))

    def encoded(self, share: float, *, within_nodes: bool) -> LinkModel:
        """The same links for bytes of which a codec leaves ``share``: between nodes, and
        ``within_nodes`` if they are encoded there, too."""

        def faster(wire: Wire) -> Wire:
            return Wire(wire.alpha_s, wire.beta_s_per_byte * share, wire.work_s_per_byte * share)

        return replace(
            self,
            remote=faster(self.remote),
            local=faster(self.local) if within_nodes else self.local,
            between=tuple(map(faster, self.between)),
            pairs=tuple((src, dst, faster(wire)) for src, dst, wire in self.pairs),
        )

    def wires(self) -> Callable[[int, int], Wire]:
        """A function from two ranks to the wire between them."""
        pairs = {(src, dst): wire for src, dst, wire in self.pairs}
        nodes, local, remote = self.nodes, self.local, self.remote
        outermost_first = tuple(zip(self.sites, self.between, strict=False))[::-1]

        def wire(src: int, dst: int) -> Wire:
            if pairs and (src, dst) in pairs:
                return pairs[src, dst]
            for groups, between in outermost_first:
                if groups[src] != groups[dst]:
                    return between
            return local if nodes is not None and nodes[src] == nodes[dst] else remote

        return wire


SEGMENT_BYTES = 1 << 19
"""What the simulation takes for the engine's segment unless told otherwise."""

_BETA = 2.5e-9
"""Assumed: 3.2 Gbit/s, halfway between 1 and 10 on a scale of ratios. Nodes with agents, and
processes that find each other, measure their paths."""

_LOCAL = Wire(alpha_s=10e-6, beta_s_per_byte=0.0, work_s_per_byte=1 / 8e9)
"""Latency: assumed, one wake-up of a waiting thread. Work: one copy, measured at 8 GB/s."""

LINKS = {
    Engine.NATIVE: LinkModel(
        remote=Wire(alpha_s=130e-6, beta_s_per_byte=_BETA, work_s_per_byte=0.58e-9),
        local=_LOCAL,
        frame_s=17.5e-6,
        gamma_s_per_byte=0.18e-9,
    ),
    Engine.PYTHON: LinkModel(
        remote=Wire(alpha_s=190e-6, beta_s_per_byte=_BETA, work_s_per_byte=0.5e-9),
        local=_LOCAL,
        frame_s=76e-6,
        gamma_s_per_byte=0.6e-9,
    ),
}
"""By engine, for paths that were not measured. Latency and work between nodes were fitted to the
cells of ``benchmarks/cost_model.py --fit`` on a 2-core Linux machine (Xeon, AVX-512);
docs/performance.md says how well they do."""


_GAP = 4.0
"""Links within a site are at least so much faster than those between sites: less is no reason for
a detour, and measurements differ by less than that."""


def measured_links(
    model: LinkModel,
    nodes: Sequence[str],
    paths: Iterable[MeasuredPath],
    names: Sequence[str] = (),
) -> LinkModel:
    """``model`` with the measured ``paths`` between the nodes of a group whose rank ``r`` is on
    ``nodes[r]``, which stands at the site ``names[r]`` (empty: nobody said).

    Other paths count as fast as the fastest of these, if that is above the model's rate: of many
    nodes a group is told of the slowest paths only. Between named sites they count as ``_GAP``
    times slower at each level.
    """
    paths = tuple(paths)
    found = {(path.source, path.target): path for path in paths if path.bandwidth > 0}
    pairs = tuple(
        (i, j, model.remote._replace(alpha_s=path.latency_s, beta_s_per_byte=1 / path.bandwidth))
        for i, source in enumerate(nodes)
        for j, target in enumerate(nodes)
        if (path := found.get((source, target))) is not None
    )
    fastest = min((wire.beta_s_per_byte for _, _, wire in pairs), default=float("inf"))
    beta = min(model.remote.beta_s_per_byte, fastest)
    remote = model.remote._replace(beta_s_per_byte=beta)
    named = named_sites(nodes, names)
    sites = named or sites_of(nodes, paths, 1 / beta)
    slower = (remote._replace(beta_s_per_byte=beta * _GAP**k) for k in range(1, len(named) + 1))
    return replace(model, remote=remote, pairs=pairs, sites=sites, between=tuple(slower))


def named_sites(nodes: Sequence[str], names: Sequence[str]) -> Sites:
    """Groups of the ``nodes`` of a group's ranks by the ``names`` of their sites, which have
    several levels, the outermost first: ``home/rack1``. Empty if no level has fewer groups than
    nodes, and more than one.

    A node without a name is a site of its own, and nodes whose names end at a level are together in
    the levels below.
    """
    place = {node: name.casefold().split("/") for node, name in zip(nodes, names, strict=False)}
    levels: dict[tuple[int, ...], None] = {}
    for depth in range(max(map(len, place.values()), default=0), 0, -1):
        keys = [tuple(place[node][:depth]) if any(place[node]) else node for node in nodes]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        if 1 < len(numbers) < len(place):
            levels[tuple(numbers[key] for key in keys)] = None
    return tuple(levels)


def sites_of(nodes: Sequence[str], paths: Iterable[MeasuredPath], bandwidth: float) -> Sites:
    """Groups of the ``nodes`` of a group's ranks, by measured ``paths``, in as many levels as the
    bandwidths have gaps; empty if there are none. Paths that were not measured have ``bandwidth``.

    At each gap the nodes that faster links connect are one site, if all pairs in it have them.
    """
    names = list(dict.fromkeys(nodes))
    rates: dict[tuple[str, str], float] = {}
    for path in paths:
        pair = min(path.source, path.target), max(path.source, path.target)
        if path.source != path.target and {*pair} <= {*names} and path.bandwidth > 0:
            rates[pair] = min(path.bandwidth, rates.get(pair, math.inf))
    ordered = sorted({*rates.values(), bandwidth})
    found: list[tuple[int, ...]] = []
    for slow, fast in itertools.pairwise(ordered):
        if fast < _GAP * slow:
            continue
        site_of: dict[str, int] = {}
        for name in names:
            near = {
                site
                for other, site in site_of.items()
                if rates.get((min(name, other), max(name, other)), bandwidth) > slow
            }
            site_of[name] = near.pop() if len(near) == 1 else len(set(site_of.values()))
        alike = all(
            (rates.get((min(a, b), max(a, b)), bandwidth) > slow) == (site_of[a] == site_of[b])
            for a, b in itertools.combinations(names, 2)
        )
        if alike and 1 < len(set(site_of.values())) < len(names):
            found.insert(0, tuple(site_of[name] for name in nodes))
    return tuple(found)
