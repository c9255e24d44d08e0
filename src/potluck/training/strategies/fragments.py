"""Fragments of the parameters, one of which a round reduces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def partition(sizes: Sequence[int], num_fragments: int) -> list[tuple[int, ...]]:
    """Divide tensors of ``sizes`` elements into fragments of neighbours with near-equal elements.

    Returns the tensors' numbers; no fragment is empty. ValueError for more fragments than tensors.
    """
    if num_fragments > len(sizes):
        raise ValueError(
            f"fragments is {num_fragments}, but the model has {len(sizes)} parameters and buffers "
            "to divide: take fewer"
        )
    total, done = sum(sizes), 0
    fragments: list[list[int]] = [[]]
    for number, size in enumerate(sizes):
        left = len(sizes) - number  # tensors, and fragments that still need one
        is_full = done >= total * len(fragments) / num_fragments
        must = left == num_fragments - len(fragments)
        if fragments[-1] and len(fragments) < num_fragments and (is_full or must):
            fragments.append([])
        fragments[-1].append(number)
        done += size
    return [tuple(fragment) for fragment in fragments]


def fragment_of(number: int, num_fragments: int) -> int:
    """The fragment that round ``number`` reduces: a function of what is committed, so that all
    members of any group reduce the same one."""
    return number % num_fragments
