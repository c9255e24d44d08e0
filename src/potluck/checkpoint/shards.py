"""Which rank writes what of a state that all ranks hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def assign(sizes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """The names (with sizes in bytes) of each of ``num_parts`` parts, of nearly equal bytes.

    The largest first, each to the part that has least so far (Graham, "Bounds on multiprocessing
    timing anomalies", 1969: at most a third above the best). The same on every rank.
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
