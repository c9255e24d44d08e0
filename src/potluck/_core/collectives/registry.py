"""``make_plan``: from the names of an operation and an algorithm to one rank's plan; and
``register``, for algorithms of one's own."""

from __future__ import annotations

import itertools
from functools import lru_cache
from hashlib import blake2b

from potluck._core.checks import check_within
from potluck._core.collectives import (
    centralized,
    direct,
    doubling,
    hierarchical,
    ring,
    spanning_tree,
    tree,
)
from potluck._core.collectives.links import Sites
from potluck._core.collectives.plan import (
    OWN_ALGORITHMS,
    Algorithm,
    Builder,
    Operation,
    Plan,
    Rank,
    own_algorithm,
)
from potluck._core.collectives.spanning_tree import Cut
from potluck._core.collectives.verify import verify

_FILES = {
    Algorithm.RING: ring,
    Algorithm.TREE: tree,
    Algorithm.DIRECT: direct,
    Algorithm.CENTRALIZED: centralized,
    Algorithm.DOUBLING: doubling,
    Algorithm.HIERARCHICAL: hierarchical,
    Algorithm.SPANNING_TREE: spanning_tree,
}
"""The module of each algorithm. Its functions have the names of the operations that it has."""

ROOTED = frozenset({Operation.BROADCAST, Operation.REDUCE, Operation.SCATTER, Operation.GATHER})
"""The operations in which one rank is the source or the destination."""


_OWN: dict[tuple[str, Operation], Builder] = {}


def register(name: str, operation: str, builder: Builder) -> None:
    """Register an algorithm of one's own, to be called by ``algorithm=name``.

    ``builder(rank)`` takes a [Rank][potluck.collectives.Rank] and returns a
    [Draft][potluck.collectives.Draft]: into how many chunks the data is cut, and the steps of this
    rank. It must be a function of its argument alone, and the same on all ranks. Before the first
    call in a world of some size (and root, nodes and cut links) the plans of all its ranks are
    verified: the call raises VerificationError, a ValueError, where they would hang, or give a
    wrong result, or another one on some rank. Ranks whose plans differ get Desync.

    ValueError for the name of an algorithm that there is, TypeError for a builder that can't be
    called. Registering the same builder again does nothing.
    """
    chosen = Operation(operation)
    if not callable(builder):
        raise TypeError(f"builder is {builder!r}; it must be a function of a Rank")
    if not name.isidentifier() or name in tuple(Algorithm):
        raise ValueError(f"{name!r} can't be the name of an algorithm: take another identifier")
    if _OWN.setdefault((name, chosen), builder) is not builder:
        raise ValueError(f"there is another {chosen} algorithm {name!r} already")
    own_algorithm(name)


@lru_cache(maxsize=256)
def digest(
    operation: Operation,
    algorithm: Algorithm,
    world_size: int,
    root: int,
    nodes: tuple[int, ...] | None,
    cut: Cut = (),
) -> str:
    """Verify the plans of all ranks of a registered algorithm; returns a hash of all their steps.

    Empty for potluck's algorithms, which are the same everywhere. VerificationError as
    ``register``.
    """
    if algorithm not in OWN_ALGORITHMS:
        return ""
    ranks = range(world_size)
    plans = [
        build_plan(operation, algorithm, world_size, rank, root, nodes, cut=cut) for rank in ranks
    ]
    verify(plans)
    hashed = blake2b(digest_size=16)
    for plan in plans:
        hashed.update(repr((plan.num_chunks, [tuple(map(int, s)) for s in plan.steps])).encode())
    return hashed.hexdigest()


def algorithms_for(operation: Operation) -> tuple[Algorithm, ...]:
    """The algorithms that ``operation`` has, in the order of :class:`Algorithm`."""
    return tuple(each for each in _FILES if hasattr(_FILES[each], operation))


def make_plan(
    operation: Operation,
    algorithm: Algorithm,
    world_size: int,
    rank: int,
    *,
    root: int = 0,
    nodes: tuple[int, ...] | None = None,
    is_coded: bool = False,
    cut: Cut = (),
    sites: Sites = (),
) -> Plan:
    """The steps of ``rank`` in one collective of ``world_size`` ranks. Pure, and cached.

    ``root`` is the source or destination of a rooted operation. Of the others only the centralized
    algorithm takes one: the rank through which everything goes. ``nodes[r]`` is the node index of
    rank ``r`` (any integers); the hierarchical algorithm needs it, the others ignore it. All ranks
    must pass the same ``root``, ``nodes``, ``sites`` and ``cut``. ``sites`` are groups of nodes,
    and groups of these, the innermost level first, each given as ``nodes`` is (hierarchical).
    ``cut`` are the pairs of ranks that can't reach each
    other, which the spanning tree spares. ``is_coded``: for a codec; a hierarchical all_reduce then
    has no ring of nodes, in which sums would be encoded again and again. A world of one has an
    empty plan.

    Raises ``ValueError`` for a pair that does not exist (and lists those that do), a rank or root
    outside the world, a ``root`` where none belongs, and ``nodes`` missing or of the wrong length.
    """
    return _kept(operation, algorithm, world_size, rank, root, nodes, is_coded, cut, sites)


def build_plan(
    operation: Operation,
    algorithm: Algorithm,
    world_size: int,
    rank: int,
    root: int = 0,
    nodes: tuple[int, ...] | None = None,
    is_coded: bool = False,
    cut: Cut = (),
    sites: Sites = (),
) -> Plan:
    """:func:`make_plan` without the cache, for code that reads the plans of all ranks once."""
    operation, algorithm = Operation(operation), Algorithm(algorithm)
    file, own = _FILES.get(algorithm), _OWN.get((algorithm, operation))
    builder: Builder | None = own or getattr(file, operation, None)
    if builder is None:
        others = (name for name, of in _OWN if of is operation)
        names = ", ".join((*algorithms_for(operation), *others))
        raise ValueError(f"{operation} has no {algorithm} algorithm; it has: {names}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    check_within("rank", rank, world_size)
    check_within("root", root, world_size)
    if root != 0 and operation not in ROOTED and algorithm is not Algorithm.CENTRALIZED:
        raise ValueError(f"{algorithm} {operation} has no root, but root={root} was given")
    if algorithm is Algorithm.HIERARCHICAL and nodes is None:
        raise ValueError(f"hierarchical {operation} needs nodes, the node index of every rank")
    if nodes is not None and len(nodes) != world_size:
        raise ValueError(f"nodes names {len(nodes)} ranks in a world of {world_size}")
    for inner, outer in itertools.pairwise((nodes or (), *sites)):
        if len(outer) != world_size or len(set(zip(inner, outer, strict=True))) > len(set(inner)):
            raise ValueError(f"sites {outer} of {inner}: each of these is in one of those")
    if is_coded and builder is hierarchical.all_reduce:
        builder = hierarchical.coded_all_reduce
    draft = builder(Rank(world_size, rank, root, nodes or (), cut, sites))
    return Plan(
        operation=operation,
        algorithm=algorithm,
        world_size=world_size,
        rank=rank,
        num_chunks=draft.num_chunks,
        steps=tuple(draft.steps),
        root=root,
    )


_kept = lru_cache(maxsize=1024)(build_plan)


@lru_cache(maxsize=256)
def crossing(
    operation: Operation,
    algorithm: Algorithm,
    world_size: int,
    root: int,
    nodes: tuple[int, ...] | None,
    cut: Cut,
    is_coded: bool,
    sites: Sites = (),
) -> tuple[int, int] | None:
    """A pair of ``cut`` over which some rank's plan would send; None if no plan does.

    Equal on all ranks, so that all refuse such a call.
    """
    for rank in range(world_size) if cut else ():
        plan = build_plan(operation, algorithm, world_size, rank, root, nodes, is_coded, cut, sites)
        for step in plan.steps:
            pair = (min(rank, step.peer), max(rank, step.peer))
            if pair in cut:
                return pair
    return None
