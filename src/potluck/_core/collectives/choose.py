"""Which algorithm for which operation, size and world: the one the model says is fastest.

A function of its arguments alone, so that all ranks, asking with the same arguments, get the same
answer. Answers are kept, one for every power of two of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

from potluck._core.collectives import doubling
from potluck._core.collectives.links import (
    LINKS,
    SEGMENT_BYTES,
    LinkModel,
    measured_links,
)
from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan
from potluck._core.collectives.registry import algorithms_for, build_plan
from potluck._core.collectives.simulate import chunk_sizes, simulate, simulate_rotated
from potluck._core.collectives.spanning_tree import Cut
from potluck._core.types import Engine, Group, ReduceOp

ROTATED = frozenset(
    {
        (Algorithm.RING, Operation.ALL_REDUCE),
        (Algorithm.RING, Operation.REDUCE_SCATTER),
        (Algorithm.RING, Operation.ALL_GATHER),
        (Algorithm.RING, Operation.ALL_TO_ALL),
        (Algorithm.TREE, Operation.REDUCE_SCATTER),
        (Algorithm.TREE, Operation.ALL_GATHER),
        (Algorithm.DIRECT, Operation.ALL_REDUCE),
        (Algorithm.DIRECT, Operation.REDUCE_SCATTER),
        (Algorithm.DIRECT, Operation.ALL_GATHER),
        (Algorithm.DIRECT, Operation.ALL_TO_ALL),
        (Algorithm.DIRECT, Operation.BARRIER),
    }
)
"""The plans that look alike from every rank."""

BY_NAME_ONLY = {Algorithm.SPANNING_TREE}  # for cut links
"""Algorithms that no call gets without asking for them."""

_BUDGET = 1000
"""The budget of one simulation in segment transfers; a larger case is simulated in part and
scaled."""

_EQUALLY_FAST = 1.01
"""By the model, which is not more exact than that."""


def choose(
    operation: Operation,
    nbytes: int,
    world_size: int,
    op: ReduceOp | None = None,
    *,
    nodes: tuple[int, ...] | None = None,
    links: LinkModel | None = None,
) -> Algorithm:
    """The algorithm with the least simulated time, for ``root=0``.

    ``nbytes`` is the whole data, as in ``chunk_sizes`` (``simulate.py``), and is
    rounded up to a power of two. ``op`` is what combines, where something does: not all algorithms
    are for all of them (``doubling.py``). ``nodes`` is as in ``make_plan``; without it hierarchical
    is not a candidate. ``links`` is the model of the links (its own ``nodes`` are ignored), else
    that of the native engine.
    Cost: about a microsecond when asked before; the first time some tens of milliseconds for 64
    ranks, and more beyond. Raises ``ValueError`` for negative ``nbytes`` and bad worlds.
    """
    return fastest(operation, nbytes, world_size, op, nodes=nodes, links=links)[0]


def fastest(
    operation: Operation,
    nbytes: int,
    world_size: int,
    op: ReduceOp | None = None,
    *,
    nodes: tuple[int, ...] | None = None,
    links: LinkModel | None = None,
) -> tuple[Algorithm, float]:
    """What :func:`choose` picks, and the seconds that the model gives it."""
    bucket = _bucket(operation, nbytes)
    may_double = op in doubling.OPS and nbytes <= doubling.MAX_BYTES
    return _choose(operation, bucket, world_size, may_double, nodes, links)


def choose_coded(
    operation: Operation,
    nbytes: int,
    world_size: int,
    share: float,
    *,
    nodes: tuple[int, ...] | None = None,
    links: LinkModel | None = None,
) -> Algorithm:
    """The algorithm for a call with a codec that leaves ``share`` of the bytes.

    Direct, which encodes all that it sends, or for an all_reduce hierarchical, which encodes what
    it sends between nodes.
    """
    if operation is not Operation.ALL_REDUCE or _is_flat(nodes, world_size):
        return Algorithm.DIRECT
    return _choose_coded(_bucket(operation, nbytes), world_size, share, nodes, links)


class Chooser:
    """``choose`` and ``choose_coded`` for some ranks of a group, with what it knows of its links.

    All ranks hold the same figures, so all choose alike. ``cut`` are pairs of ``ranks``, by their
    places there, that can't reach each other: then everything goes over the tree that spares them.
    """

    def __init__(
        self, group: Group, ranks: Sequence[int], nodes: tuple[int, ...], cut: Cut = ()
    ) -> None:
        self._cut = cut
        on = [group.members[rank].node for rank in ranks]
        names = [group.members[rank].site for rank in ranks]
        links = measured_links(LINKS[group.engine], on, group.paths, names)
        self.sites = links.sites
        """Groups of nodes, by their names or the measured links; for hierarchical plans without a
        codec."""
        self._choose = partial(choose, nodes=nodes, links=links)
        self.choose_coded = partial(choose_coded, nodes=nodes, links=links)

    def choose(
        self, operation: Operation, nbytes: int, world_size: int, op: ReduceOp | None = None
    ) -> Algorithm:
        """:func:`choose` for these ranks."""
        if self._cut:
            return Algorithm.SPANNING_TREE
        return self._choose(operation, nbytes, world_size, op)


def _bucket(operation: Operation, nbytes: int) -> int:
    """Calls in one bucket get one algorithm: 0 for no bytes, else one for each power of two."""
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative: {nbytes}")
    return 0 if operation is Operation.BARRIER or nbytes == 0 else (nbytes - 1).bit_length() + 1


def _is_flat(nodes: tuple[int, ...] | None, world_size: int) -> bool:
    """Whether there is one node, or one rank a node: hierarchical is direct or ring then."""
    return nodes is None or len(set(nodes)) in (1, world_size)


@lru_cache(maxsize=1024)
def _choose_coded(
    bucket: int,
    world_size: int,
    share: float,
    nodes: tuple[int, ...] | None,
    links: LinkModel | None,
) -> Algorithm:
    nbytes = 1 << bucket - 1 if bucket else 0
    links = replace(links or LINKS[Engine.NATIVE], nodes=nodes)
    options = [
        (
            build_plan(Operation.ALL_REDUCE, algorithm, world_size, 0, nodes=nodes, is_coded=True),
            links.encoded(share, within_nodes=algorithm is Algorithm.DIRECT),
        )
        for algorithm in (Algorithm.DIRECT, Algorithm.HIERARCHICAL)
    ]
    return _fastest(options, nbytes, is_coded=True)[0]


@lru_cache(maxsize=4096)
def _choose(
    operation: Operation,
    bucket: int,
    world_size: int,
    may_double: bool,
    nodes: tuple[int, ...] | None,
    links: LinkModel | None,
) -> tuple[Algorithm, float]:
    nbytes = 1 << bucket - 1 if bucket else 0
    links = replace(links or LINKS[Engine.NATIVE], nodes=nodes)
    flat = nodes is None or (_is_flat(nodes, world_size) and not links.sites)
    options = [
        (build_plan(operation, algorithm, world_size, 0, nodes=nodes, sites=links.sites), links)
        for algorithm in algorithms_for(operation)
        if not (flat and algorithm is Algorithm.HIERARCHICAL)
        and algorithm not in BY_NAME_ONLY
        and (may_double or algorithm is not Algorithm.DOUBLING)
    ]
    return _fastest(options, nbytes)


def _fastest(
    options: Iterable[tuple[Plan, LinkModel]], nbytes: int, *, is_coded: bool = False
) -> tuple[Algorithm, float]:
    """The algorithm of the fastest plan, each by a model of its own, and its seconds.

    Of plans that are equally fast, the plan with the fewest bytes on all wires, and of these the
    plan with the fewest links: on a real machine other programs want the processor, too, and
    relayed bytes and further links cost them time. A plan is not simulated if its
    ``least_seconds`` are more than another's time.
    """
    candidates = [(least_seconds(plan, nbytes, links), plan, links) for plan, links in options]
    candidates.sort(key=lambda candidate: candidate[0])
    found: list[tuple[float, Plan, LinkModel]] = []
    lowest = float("inf")
    for least, plan, links in candidates:
        if least > lowest * _EQUALLY_FAST:
            break
        seconds = estimate(plan, nbytes, links, is_coded=is_coded)
        found.append((seconds, plan, links))
        lowest = min(lowest, seconds)
    equal = [each for each in found if each[0] <= lowest * _EQUALLY_FAST]
    if len(equal) > 1:
        equal.sort(key=lambda each: (_moved(each[1], each[2], nbytes, is_coded), each[0]))
    seconds, plan, _ = equal[0]
    return plan.algorithm, seconds


def least_seconds(plan: Plan, nbytes: int, links: LinkModel) -> float:
    """A time that ``plan``'s rank needs in any case, for its own work or its bytes on the wires."""
    wire_of, sizes = links.wires(), chunk_sizes(plan, nbytes)
    working, on_wires = 0.0, dict.fromkeys(product((True, False), repeat=2), 0.0)
    for action, peer, chunk in plan.steps:
        is_send, size = action is Action.SEND, sizes[chunk]
        wire = wire_of(plan.rank, peer) if is_send else wire_of(peer, plan.rank)
        working += max(1, -(-size // SEGMENT_BYTES)) * links.frame_s + size * wire.work_s_per_byte
        if action is Action.REDUCE:
            working += size * links.gamma_s_per_byte
        is_local = links.nodes is not None and links.nodes[peer] == links.nodes[plan.rank]
        on_wires[is_send, is_local] += size * wire.beta_s_per_byte
    return max(working, *on_wires.values())


def _moved(plan: Plan, links: LinkModel, nbytes: int, is_coded: bool) -> tuple[int, int]:
    """The bytes that all ranks send together, before any codec; and the links that they need, where
    chunks are whole segments: few links then carry more bytes for each system call."""
    sizes, period = chunk_sizes(plan, nbytes), _period(plan, links)
    plans = _first_plans(plan, period, links, is_coded)
    sends = [
        (one.rank, peer, sizes[chunk])
        for one in plans
        for action, peer, chunk in one.steps
        if action is Action.SEND
    ]
    sent = sum(size for _, _, size in sends)
    is_bulk = max(sizes, default=0) >= SEGMENT_BYTES
    links_used = len({(rank, peer) for rank, peer, _ in sends}) if is_bulk else 0
    return sent * plan.world_size // period, links_used * plan.world_size // period


def _first_plans(plan: Plan, count: int, links: LinkModel, is_coded: bool) -> list[Plan]:
    """The plans of ranks 0 to ``count - 1`` in the world of ``plan``."""
    return [
        build_plan(
            *(plan.operation, plan.algorithm, plan.world_size, rank, 0, links.nodes, is_coded),
            sites=() if is_coded else links.sites,
        )
        for rank in range(count)
    ]


def estimate(plan: Plan, nbytes: int, links: LinkModel, *, is_coded: bool = False) -> float:
    """The model's seconds for the collective of which ``plan`` is rank 0's (``is_coded``: with a
    codec, as in ``make_plan``).

    Large data is not simulated to its end: once the pipelines are full, time grows in proportion
    to the bytes, so two smaller simulations give the line on which it lies.
    """
    period = _period(plan, links)
    plans = _first_plans(plan, period, links, is_coded)

    def seconds(size: int) -> float:
        if period < plan.world_size:
            return simulate_rotated(plans, size, links)
        return simulate(plans, size, links).seconds

    transfers = sum(len(one.steps) for one in plans) // 2
    chunk = max(chunk_sizes(plan, nbytes), default=0)
    segments = max(3, _BUDGET // max(1, transfers))
    if chunk <= segments * SEGMENT_BYTES:
        return seconds(nbytes)
    far = nbytes * segments * SEGMENT_BYTES // chunk
    near = far // 2
    at_near, at_far = seconds(near), seconds(far)
    return at_far + (at_far - at_near) * (nbytes - far) / (far - near)


def _period(plan: Plan, links: LinkModel) -> int:
    """After how many ranks the world looks the same again: 1 on uniform wires, else a node."""
    w, nodes = plan.world_size, links.nodes
    is_rotated = (plan.algorithm, plan.operation) in ROTATED
    if not is_rotated or links.pairs or links.sites or links.processors:
        return w
    if links.is_uniform:
        # The wire of a single node is no bottleneck, and that of a single rank is its own.
        return 1
    assert nodes is not None
    first = nodes.count(nodes[0])
    blocks = [set(nodes[i : i + first]) for i in range(0, w, first)]
    alike = w % first == 0 and all(len(block) == 1 for block in blocks)
    return first if alike and len(set(nodes)) == len(blocks) else w
