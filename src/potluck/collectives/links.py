"""What the simulation believes about links: latency, bandwidth, cost per frame, cost of combining.

The constants are the only place with such figures. Each says where it comes from; a cluster that
has measured its own links passes a :class:`LinkModel` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from potluck.types import MeasuredPath


class Wire(NamedTuple):
    """One direction between two ranks."""

    alpha_s: float
    """Seconds a byte is on its way (latency), in which neither rank is busy."""
    beta_s_per_byte: float
    """Seconds per byte (one over the bandwidth); sender and receiver are busy that long."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Every rank sends one frame and receives one frame at a time, both at once.

    ``nodes[r]`` is the node index of rank ``r``; without it every rank is a node of its own.
    ``pairs`` names the wires that differ: ``((src, dst, wire), ...)``. With ``shared_wire`` the
    ranks of one node take turns at their node's wire, in each direction.
    """

    remote: Wire
    """Between ranks of different nodes."""
    local: Wire
    """Between ranks of one node."""
    frame_s: float
    """Seconds that every frame costs its sender and its receiver, whatever its length."""
    gamma_s_per_byte: float
    """Seconds to combine one received byte with one's own; one frame at a time per rank."""
    nodes: tuple[int, ...] | None = None
    shared_wire: bool = True
    pairs: tuple[tuple[int, int, Wire], ...] = ()

    @property
    def is_uniform(self) -> bool:
        """All ranks see the same wires: only one node, or only nodes of one rank."""
        if self.pairs:
            return False
        return self.nodes is None or len(set(self.nodes)) in (1, len(self.nodes))

    def encoded(self, share: float, *, within_nodes: bool) -> LinkModel:
        """The same links for bytes of which a codec leaves ``share``: between nodes, and
        ``within_nodes`` if they are encoded there, too."""

        def faster(wire: Wire) -> Wire:
            return Wire(wire.alpha_s, wire.beta_s_per_byte * share)

        return replace(
            self,
            remote=faster(self.remote),
            local=faster(self.local) if within_nodes else self.local,
            pairs=tuple((src, dst, faster(wire)) for src, dst, wire in self.pairs),
        )

    def wires(self) -> Callable[[int, int], Wire]:
        """A function from two ranks to the wire between them."""
        pairs = {(src, dst): wire for src, dst, wire in self.pairs}
        nodes, local, remote = self.nodes, self.local, self.remote

        def wire(src: int, dst: int) -> Wire:
            if pairs and (src, dst) in pairs:
                return pairs[src, dst]
            return local if nodes is not None and nodes[src] == nodes[dst] else remote

        return wire


SEGMENT_BYTES = 1 << 19
"""What the simulation takes for the engine's segment unless told otherwise."""

DEFAULT_LINKS = LinkModel(
    # Latency: assumed, half of the 0.2 ms round trip of a quiet wired LAN.
    # Bandwidth: TLS 1.3 through Python's ssl, one core, measured at 1 GB/s.
    remote=Wire(alpha_s=100e-6, beta_s_per_byte=1e-9),
    # Latency: assumed, one wake-up of a waiting thread. Bandwidth: one copy, measured at 8 GB/s.
    local=Wire(alpha_s=10e-6, beta_s_per_byte=1 / 8e9),
    # The Python engine's work per frame, measured at 60 microseconds.
    frame_s=60e-6,
    # Combining reads two streams and writes one at memory speed, measured at 8 GB/s.
    gamma_s_per_byte=1 / 8e9,
)
"""For clusters that have not measured their links. Measured on a 2-core Linux machine."""


def measured_links(nodes: Sequence[str], paths: Iterable[MeasuredPath]) -> LinkModel | None:
    """The model of a group whose rank ``r`` is on ``nodes[r]``, from measured ``paths`` between
    nodes; None if none of them is between two of these."""
    found = {(path.source, path.target): path for path in paths if path.bandwidth > 0}
    pairs = tuple(
        (i, j, Wire(found[source, target].latency_s, 1 / found[source, target].bandwidth))
        for i, source in enumerate(nodes)
        for j, target in enumerate(nodes)
        if (source, target) in found
    )
    return replace(DEFAULT_LINKS, pairs=pairs) if pairs else None
