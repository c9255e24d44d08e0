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

from potluck.collectives.plan import Operation, Step
from potluck.collectives.seat import Builder, Draft, Seat, copy, reduce_from, send


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


def _family(seat: Seat, chunk: int) -> tuple[int | None, list[int]]:
    """The parent rank (None at the root) and the child ranks in the tree that carries ``chunk``."""
    size = seat.world_size
    if chunk == 0:
        up, down = _binary_tree(seat.position, size)
    else:
        up, down = _binary_tree(_relabel(seat.position, size, back=True), size)
        up = up and _relabel(up, size, back=False)
        down = [_relabel(label, size, back=False) for label in down]
    parent = None if up is None else seat.rank_at(up)
    return parent, [seat.rank_at(position) for position in down]


def _up(seat: Seat, chunk: int) -> list[Step]:
    parent, children = _family(seat, chunk)
    steps = [reduce_from(child, chunk) for child in children]
    if parent is not None:
        steps.append(send(parent, chunk))
    return steps


def _down(seat: Seat, chunk: int) -> list[Step]:
    parent, children = _family(seat, chunk)
    steps = [] if parent is None else [copy(parent, chunk)]
    return steps + [send(child, chunk) for child in children]


def broadcast(seat: Seat) -> Draft:
    """Down both trees."""
    return Draft(2, _down(seat, 0) + _down(seat, 1))


def reduce(seat: Seat) -> Draft:
    """Up both trees."""
    return Draft(2, _up(seat, 0) + _up(seat, 1))


def all_reduce(seat: Seat) -> Draft:
    """Up both trees and down again."""
    return Draft(2, reduce(seat).steps + broadcast(seat).steps)


def barrier(seat: Seat) -> Draft:
    """An empty chunk goes up the first tree and down again."""
    return Draft(1, _up(seat, 0) + _down(seat, 0))


def _binomial(seat: Seat) -> tuple[int, int]:
    """Parent position and end of the subtree ``[position, end)`` in the binomial tree."""
    position, size = seat.position, seat.world_size
    if position == 0:
        return 0, size
    low = position & -position
    return position - low, min(position + low, size)


def _child_towards(position: int, far: int) -> int:
    """The child of ``position`` whose subtree holds ``far``."""
    return position + (1 << (far - position).bit_length() - 1)


def scatter(seat: Seat) -> Draft:
    """Down a binomial tree; every rank passes on its subtree's chunks, the farthest first."""
    position, (parent, end) = seat.position, _binomial(seat)
    steps: list[Step] = []
    for far in range(end - 1, position - 1, -1):
        if position > 0:
            steps.append(copy(seat.rank_at(parent), seat.rank_at(far)))
        if far > position:
            child = seat.rank_at(_child_towards(position, far))
            steps.append(send(child, seat.rank_at(far)))
    return Draft(seat.world_size, steps)


def gather(seat: Seat) -> Draft:
    """Up a binomial tree, the nearest first."""
    position, (parent, end) = seat.position, _binomial(seat)
    steps: list[Step] = []
    for far in range(position, end):
        if far > position:
            child = seat.rank_at(_child_towards(position, far))
            steps.append(copy(child, seat.rank_at(far)))
        if position > 0:
            steps.append(send(seat.rank_at(parent), seat.rank_at(far)))
    return Draft(seat.world_size, steps)


def all_gather(seat: Seat) -> Draft:
    """In round ``k`` all chunks known so far go to the rank ``2**k`` to the right."""
    w, distance = seat.world_size, 1
    steps: list[Step] = []
    while distance < w:
        for i in range(min(distance, w - distance)):
            steps.append(send(seat.right(distance), seat.left(i)))
            steps.append(copy(seat.left(distance), seat.left(distance + i)))
        distance *= 2
    return Draft(w, steps)


def reduce_scatter(seat: Seat) -> Draft:
    """all_gather backwards: partial sums converge on their owners, the longest ways first."""
    w = seat.world_size
    distance = 1 << (w - 1).bit_length() - 1 if w > 1 else 0
    steps: list[Step] = []
    while distance > 0:
        for i in range(min(distance, w - distance)):
            steps.append(send(seat.left(distance), seat.left(distance + i)))
            steps.append(reduce_from(seat.right(distance), seat.left(i)))
        distance //= 2
    return Draft(w, steps)


BUILDERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
    Operation.BROADCAST: broadcast,
    Operation.REDUCE: reduce,
    Operation.SCATTER: scatter,
    Operation.GATHER: gather,
    Operation.BARRIER: barrier,
}
