"""Recursive doubling: pairs of ranks exchange all their data, then pairs of pairs, and so on.

An all_reduce takes ``log2 w`` hops, the fewest possible, because every rank computes the whole
result itself. For the same reason each rank sends ``n log2 w`` bytes, so it is for small data; and
it is only for operations that give the same bits on every rank: sums (of two values, in either
order), except for the payload of a NaN. Where ``w`` is no power of two, the ranks beyond the last
power of two give their data to a partner first, and get the result at the end (Thakur, Rabenseifner
and Gropp, "Optimization of collective communication operations in MPICH", 2005).

Partners send at the same time, so the data of one is kept until its partner's own data is sent:
this is the only algorithm here that needs buffers.
"""

from __future__ import annotations

from potluck._core.collectives.plan import Draft, Rank, Step, copy, reduce_from, send
from potluck._core.types import ReduceOp

MAX_BYTES = 16 * 1024
"""The largest size for which doubling is chosen: on four hosts at 1 Gbit/s it beats ``direct`` up
to here and loses from 64 KiB on (measured)."""

OPS = frozenset({ReduceOp.SUM, ReduceOp.MEAN})
"""The reductions that give the same bits whichever rank combines."""

ONLY_SUMS = (
    "algorithm='doubling' is for op='sum' and op='mean': in it every rank combines for itself"
)


def all_reduce(me: Rank) -> Draft:
    """Exchange with the rank whose number differs in one binary digit, for each digit."""
    w, rank = me.world_size, me.rank
    inner = 1 << w.bit_length() - 1  # the largest power of two in w
    if rank >= inner:
        return Draft(1, [send(rank - inner, 0), copy(rank - inner, 0)])
    steps: list[Step] = []
    beyond = rank + inner
    if beyond < w:
        steps.append(reduce_from(beyond, 0))
    for digit in range(inner.bit_length() - 1):
        partner = rank ^ 1 << digit
        steps += [send(partner, 0), reduce_from(partner, 0)]
    if beyond < w:
        steps.append(send(beyond, 0))
    return Draft(1, steps)
