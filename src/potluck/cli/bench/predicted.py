"""The time that potluck's cost model predicts for a call, shown beside the measured time."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from potluck._core import native
from potluck._core.collectives.choose import estimate, fastest
from potluck._core.collectives.links import LINKS
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.collectives.registry import build_plan
from potluck._core.engine.loop.native import is_available
from potluck._core.types import Engine, ReduceOp
from potluck.cli.bench.peers import NO_SHARED_MEMORY, Competitor
from potluck.cli.bench.placement import Here


def predicted_s(
    peer: Competitor, operation: str, world_size: int, nbytes: int, placement: Here
) -> float | None:
    """The predicted seconds of one call, or None where the model does not apply.

    The model covers potluck's plans over links: no other library, no codec, no shared memory.
    """
    if peer.module != "ours" or "codec" in peer.arguments:
        return None
    is_native = peer.environment.get(native.VARIABLE) != "0" and is_available()
    nodes = None
    if not NO_SHARED_MEMORY.items() <= peer.environment.items():
        firsts = (placement.local_rank(rank) == 0 for rank in range(world_size))
        nodes = tuple(accumulate(map(int, firsts)))
    links = LINKS[Engine.NATIVE if is_native else Engine.PYTHON]
    if len({placement.address(rank) for rank in range(world_size)}) == 1:
        links = replace(links, remote=links.remote._replace(beta_s_per_byte=0.0))  # the loopback
    kind = Operation(operation.replace("-", "_"))
    algorithm = peer.arguments.get("algorithm") if kind is Operation.ALL_REDUCE else None
    if algorithm is not None:
        plan = build_plan(kind, Algorithm(algorithm), world_size, 0, nodes=nodes)
        return estimate(plan, nbytes, replace(links, nodes=nodes))
    if is_native and nodes is not None and len(set(nodes)) == 1:
        return None
    return fastest(kind, nbytes, world_size, ReduceOp.SUM, nodes=nodes, links=links)[1]
