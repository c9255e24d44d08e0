"""Two levels: windows inside the nodes, links between them, one block behind the other.

The data is cut into *blocks*, and every block has one *speaker* on each node. Inwards, the
workers of a node combine their contributions through memory that they share, and the speaker ends
with the node's; between, the speakers run a plan over links, of one rank per node; outwards, the
workers copy the result from their speaker. While block ``k`` is between the nodes, block ``k +
1`` is combined inside them. So a node's wire carries each byte as often as that of a single rank
would, however many workers share it.

Speakers take turns, as far as every node has one more: with ``m`` workers on the smallest node
there are ``m`` *lanes*, and the others only combine. Numbers of workers may differ, and be one.
In a rooted operation the root speaks for its node. all_gather is a broadcast of every rank's
part, reduce_scatter a reduce of it. scatter, gather and all_to_all have no two data that could be
combined or shared inside a node, and a barrier no data: they have no two levels.

Here is only who does what, as pure data; ``engine/windows/two_level.py`` does it. Source of leaders
that take turns: Bayatpour et al., "Scalable reduction collectives with data partitioning-based
multi-leader design", SC 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from potluck.collectives.choose import fastest
from potluck.collectives.links import DEFAULT_LINKS, LinkModel
from potluck.collectives.plan import Operation
from potluck.types import ReduceOp

_BETWEEN = {
    Operation.ALL_REDUCE: Operation.ALL_REDUCE,
    Operation.REDUCE_SCATTER: Operation.REDUCE,
    Operation.REDUCE: Operation.REDUCE,
    Operation.ALL_GATHER: Operation.BROADCAST,
    Operation.BROADCAST: Operation.BROADCAST,
}
"""What the speakers of a block do."""

_COMBINES = frozenset({Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER})
_COPIES = frozenset({Operation.ALL_REDUCE, Operation.BROADCAST, Operation.ALL_GATHER})
_ROOTED = frozenset({Operation.BROADCAST, Operation.REDUCE})


@dataclass(frozen=True, slots=True)
class Block:
    """One block's way. ``chunk`` is its place among ``num_chunks`` near-equal parts of the data.

    ``speakers[i]`` is the rank that speaks for node ``i``. ``home`` is the place among them of the
    one from which the data comes or to which it goes, None for all of them.
    """

    chunk: int
    num_chunks: int
    speakers: tuple[int, ...]
    home: int | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """What all ranks do, the same on each; one's own share follows from the speakers."""

    operation: Operation
    blocks: tuple[Block, ...]

    @property
    def combines(self) -> bool:
        """Whether the workers of a node combine a block before it is between the nodes."""
        return self.operation in _COMBINES

    @property
    def copies(self) -> bool:
        """Whether the workers of a node copy a block that was between the nodes."""
        return self.operation in _COPIES

    @property
    def between(self) -> Operation:
        """What the speakers do."""
        return _BETWEEN[self.operation]


@lru_cache(maxsize=256)
def members_of(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks of every node; nodes in the order of their lowest ranks."""
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


def has_levels(operation: Operation, nodes: tuple[int, ...]) -> bool:
    """Whether there is something to do both inside the nodes and between them."""
    return operation in _BETWEEN and 1 < len(set(nodes)) < len(nodes)


def schedule(
    operation: Operation,
    nbytes: int,
    nodes: tuple[int, ...],
    root: int = 0,
    links: LinkModel = DEFAULT_LINKS,
) -> Schedule:
    """Who does what for ``nbytes`` of data (as in ``chunk_sizes``). Pure: all ranks get the same.

    ``nodes[r]`` is the node of rank ``r``. ValueError where an operation has no two levels.
    """
    if not has_levels(operation, nodes):
        raise ValueError(
            f"two-level {operation} does not exist, or not here: it takes one of "
            f"{', '.join(_BETWEEN)}, several nodes, and a node with several workers"
        )
    members = members_of(nodes)
    num_blocks = _num_blocks(nbytes, len(members), links)
    if operation is Operation.ALL_REDUCE:
        num_lanes = min(map(len, members))
        lanes = [tuple(ranks[lane] for ranks in members) for lane in range(num_lanes)]
        blocks = [Block(i, num_blocks, lanes[i % num_lanes], None) for i in range(num_blocks)]
    elif operation in _ROOTED:
        speakers, home = _speakers_for(root, members)
        blocks = [Block(i, num_blocks, speakers, home) for i in range(num_blocks)]
    else:
        per_rank = -(-num_blocks // len(nodes))
        num_chunks = per_rank * len(nodes)
        ways = [_speakers_for(rank, members) for rank in range(len(nodes))]
        blocks = [Block(i, num_chunks, *ways[i // per_rank]) for i in range(num_chunks)]
    return Schedule(operation, tuple(blocks))


def _speakers_for(root: int, members: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], int]:
    """Whom ``root`` reaches on the other nodes, and the place of its own node."""
    home = next(i for i, ranks in enumerate(members) if root in ranks)
    lane = members[home].index(root)
    return tuple(root if root in ranks else ranks[lane % len(ranks)] for ranks in members), home


def _num_blocks(nbytes: int, num_nodes: int, links: LinkModel) -> int:
    """As many as keep the wire waiting least: for the first block, and for one's overhead each.

    The wire waits while the first block is combined and the last one copied, ``inside_s / k``, and
    each of ``k`` blocks costs ``block_s``; the sum is least at ``sqrt(inside_s / block_s)``.
    """
    return max(1, round(math.sqrt(_inside_s(nbytes, links) / _block_s(num_nodes, links))))


def _inside_s(nbytes: int, links: LinkModel) -> float:
    """To copy into a window, combine, and copy out, everything."""
    return nbytes * (2 * links.local.beta_s_per_byte + links.gamma_s_per_byte)


def _block_s(num_nodes: int, links: LinkModel) -> float:
    """What a block costs however small: three calls are begun, and a frame goes to every node."""
    return (3 + num_nodes) * links.frame_s


@lru_cache(maxsize=1024)
def _seconds(
    operation: Operation,
    bucket: int,
    op: ReduceOp | None,
    nodes: tuple[int, ...],
    links: LinkModel,
) -> float:
    nbytes = 1 << bucket
    num_nodes = len(set(nodes))
    num_blocks = len(schedule(operation, nbytes, nodes, links=links).blocks)
    inside = _inside_s(nbytes, links)
    # reduce_scatter and all_gather are as many reduces and broadcasts, each of its own part.
    _, between = fastest(_LIKE[operation], nbytes, num_nodes, op=op, links=links)
    block_s = _block_s(num_nodes, links)
    # Blocks are begun while others are under way: only the first one's cost is waited for, unless
    # beginning them is what takes longest.
    longest = max(between, inside, num_blocks * block_s)
    # The barrier that compares calls goes beside them, but for small data it is as much work.
    _, compared = fastest(Operation.BARRIER, 0, len(nodes), nodes=nodes, links=links)
    return compared + 2 * links.local.alpha_s + block_s + inside / num_blocks + longest


_LIKE = {
    **_BETWEEN,
    Operation.REDUCE_SCATTER: Operation.REDUCE_SCATTER,
    Operation.ALL_GATHER: Operation.ALL_GATHER,
}
"""What costs as much between the nodes."""


def pays(
    operation: Operation,
    nbytes: int,
    nodes: tuple[int, ...],
    links: LinkModel = DEFAULT_LINKS,
    *,
    op: ReduceOp | None = None,
) -> bool:
    """Whether the model gives two levels less time than every plan over links, for ``root=0``.

    ``nbytes`` is the whole data, rounded up to a power of two, ``op`` as in ``choose``. Cost: as
    ``choose``.
    """
    if not nbytes or not has_levels(operation, nodes):
        return False
    bucket = (nbytes - 1).bit_length()
    _, over_links = fastest(operation, nbytes, len(nodes), op=op, nodes=nodes, links=links)
    return _seconds(operation, bucket, op, nodes, links) < over_links
