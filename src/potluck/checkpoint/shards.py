"""Sharding: which rank writes which tensors of a state that all ranks hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def assign(sizes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Split tensors, given by names and sizes in bytes, into ``num_parts`` parts of similar size.

    Returns the names of each part. Greedy: the largest tensor first, each to the smallest part
    (Graham, "Bounds on multiprocessing timing anomalies", 1969: at most a third above the optimum).
    Deterministic, so all ranks get the same result.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; it must be at least 1")
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    filled = [0] * num_parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        part = filled.index(min(filled))
        parts[part].append(name)
        filled[part] += sizes[name]
    return parts
