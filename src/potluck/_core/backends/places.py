"""The machines of ranks by the launcher's variables, for messages about missing ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping


def listed(ranks: Iterable[int]) -> str:
    """The numbers in ascending order, runs of three and more shortened: ``0, 2, 4 to 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts)


def placed(ranks: Iterable[int], environment: Mapping[str, str] = os.environ) -> str:
    """Ranks with their machines: ``rank 1 on ada, rank 4 to 7 on bob``; without machines if no
    variable names them.

    ``potluck run`` sets POTLUCK_NODES, a name for each rank. Under torchrun (GROUP_RANK is set)
    LOCAL_WORLD_SIZE consecutive ranks share a machine.
    """
    by_place: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_place.setdefault(_place(rank, environment), []).append(rank)
    return ", ".join(f"rank {listed(found)}{place}" for place, found in by_place.items())


def _place(rank: int, environment: Mapping[str, str]) -> str:
    nodes = environment.get("POTLUCK_NODES", "").split(",")
    if rank < len(nodes) and nodes[rank]:
        return f" on {nodes[rank]}"
    per_node = environment.get("LOCAL_WORLD_SIZE", "")
    if "GROUP_RANK" in environment and per_node.isdigit() and int(per_node) > 0:
        return f" on torchrun's node {rank // int(per_node)}"
    return ""
