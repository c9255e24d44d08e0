"""Tree: a number of rounds that grows with the logarithm of the world size.

- broadcast, reduce and all_reduce run on a *double binary tree*: two trees over the same ranks,
  each carrying half of the buffer, where the inner ranks of one are leaves of the other, so that
  (in the limit) every wire is busy both ways (Sanders, Speck and Traeff, "Two-tree algorithms for
  full bandwidth broadcast, reduction and scan", 2009). The engine's segments pipeline them.
- scatter and gather run on a binomial tree.
- all_gather and reduce_scatter run on ``w`` binomial trees at once, one rooted at every rank (the
  dissemination of Bruck et al., "Efficient algorithms for all-to-all communications", 1997): as
  few bytes as the ring, in ``ceil(log2 w)`` rounds, for any ``w``.
"""

from __future__ import annotations

from potluck._core.collectives.plan import Draft, Rank, Step, copy, reduce_from, send


def _binary_tree(label: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children of ``label`` in the in-order binary tree over ``1..size-1``, below 0.

    Odd labels are leaves. Label 0, the root, has one child.
    """
    if label == 0:
        return None, [1 << (size - 1).bit_length() - 1] if size > 1 else []
    low = label & -label
    parent = (label ^ low) | (low << 1)
    if parent >= size:
        parent = label ^ low
    children = [label - low // 2] if low > 1 else []
    reach = low // 2
    while reach and label + reach >= size:
        reach //= 2
    if reach:
        children.append(label + reach)
    return parent, children


def _relabel(position: int, size: int, *, back: bool) -> int:
    """A place in the second tree: mirrored or shifted by one, so that leaves become inner."""
    if position == 0 or size < 3:
        return position
    if size % 2:
        return size - position
    return (position - 2) % (size - 1) + 1 if back else position % (size - 1) + 1


def _family(me: Rank, chunk: int) -> tuple[int | None, list[int]]:
    """The parent rank (None at the root) and the child ranks in the tree that carries ``chunk``."""
    size = me.world_size
    if chunk == 0:
        up, down = _binary_tree(me.position, size)
    else:
        up, down = _binary_tree(_relabel(me.position, size, back=True), size)
        up = up and _relabel(up, size, back=False)
        down = [_relabel(label, size, back=False) for label in down]
    parent = None if up is None else me.rank_at(up)
    return parent, [me.rank_at(position) for position in down]


def _up(me: Rank, chunk: int) -> list[Step]:
    parent, children = _family(me, chunk)
    steps = [reduce_from(child, chunk) for child in children]
    if parent is not None:
        steps.append(send(parent, chunk))
    return steps


def _down(me: Rank, chunk: int) -> list[Step]:
    parent, children = _family(me, chunk)
    steps = [] if parent is None else [copy(parent, chunk)]
    return steps + [send(child, chunk) for child in children]


def broadcast(me: Rank) -> Draft:
    """Down both trees."""
    return Draft(2, _down(me, 0) + _down(me, 1))


def reduce(me: Rank) -> Draft:
    """Up both trees."""
    return Draft(2, _up(me, 0) + _up(me, 1))


def all_reduce(me: Rank) -> Draft:
    """Up both trees and down again."""
    return Draft(2, reduce(me).steps + broadcast(me).steps)


def barrier(me: Rank) -> Draft:
    """An empty chunk goes up the first tree and down again."""
    return Draft(1, _up(me, 0) + _down(me, 0))


def _binomial(me: Rank) -> tuple[int, int]:
    """Parent position and end of the subtree ``[position, end)`` in the binomial tree."""
    position, size = me.position, me.world_size
    if position == 0:
        return 0, size
    low = position & -position
    return position - low, min(position + low, size)


def _child_towards(position: int, far: int) -> int:
    """The child of ``position`` whose subtree holds ``far``."""
    return position + (1 << (far - position).bit_length() - 1)


def scatter(me: Rank) -> Draft:
    """Down a binomial tree; every rank passes on its subtree's chunks, the farthest first."""
    position, (parent, end) = me.position, _binomial(me)
    steps: list[Step] = []
    for far in range(end - 1, position - 1, -1):
        if position > 0:
            steps.append(copy(me.rank_at(parent), me.rank_at(far)))
        if far > position:
            child = me.rank_at(_child_towards(position, far))
            steps.append(send(child, me.rank_at(far)))
    return Draft(me.world_size, steps)


def gather(me: Rank) -> Draft:
    """Up a binomial tree, the nearest first."""
    position, (parent, end) = me.position, _binomial(me)
    steps: list[Step] = []
    for far in range(position, end):
        if far > position:
            child = me.rank_at(_child_towards(position, far))
            steps.append(copy(child, me.rank_at(far)))
        if position > 0:
            steps.append(send(me.rank_at(parent), me.rank_at(far)))
    return Draft(me.world_size, steps)


def all_gather(me: Rank) -> Draft:
    """In round ``k`` all chunks known so far go to the rank ``2**k`` to the right."""
    w, distance = me.world_size, 1
    steps: list[Step] = []
    while distance < w:
        for i in range(min(distance, w - distance)):
            steps.append(send(me.right(distance), me.left(i)))
            steps.append(copy(me.left(distance), me.left(distance + i)))
        distance *= 2
    return Draft(w, steps)


def reduce_scatter(me: Rank) -> Draft:
    """all_gather backwards: partial sums converge on their owners, the longest ways first."""
    w = me.world_size
    distance = 1 << (w - 1).bit_length() - 1 if w > 1 else 0
    steps: list[Step] = []
    while distance > 0:
        for i in range(min(distance, w - distance)):
            steps.append(send(me.left(distance), me.left(distance + i)))
            steps.append(reduce_from(me.right(distance), me.left(i)))
        distance //= 2
    return Draft(w, steps)
