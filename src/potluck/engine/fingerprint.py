"""A fingerprint: a call in 64 bits, the same on all ranks that make the same call.

=====  ====================================================================================
bits   meaning
=====  ====================================================================================
60-63  operation, counted from 1; 0: a call of the engine's own, which errors don't describe
56-59  dtype, its code on the wire
52-55  reduction, counted from 1; 0: none
48-51  algorithm, counted from 1; for a call with a codec that, counted on from the last one
24-47  elements of one rank's part; the largest number stands for all above it
0-23   hash of all that the call is: shape, root, segment size, members, codec too
=====  ====================================================================================

Every frame has the fingerprint of its call, and so has the memory of a channel
(``native/bind_shm.cpp`` makes the same 64 bits). So a rank that receives another call than its
own can say at once which one that is.
"""

from __future__ import annotations

from hashlib import blake2b

from potluck.codecs import NAMES as CODECS
from potluck.collectives.plan import Algorithm, Operation
from potluck.types import ReduceOp
from potluck.wire.dtypes import NAMES, code_of_name

OPERATIONS = (
    Operation.ALL_REDUCE,
    Operation.REDUCE_SCATTER,
    Operation.ALL_GATHER,
    Operation.BROADCAST,
    Operation.REDUCE,
    Operation.SCATTER,
    Operation.GATHER,
    Operation.ALL_TO_ALL,
    Operation.BARRIER,
)
REDUCTIONS = tuple(ReduceOp)
"""Both are in the order in which the native core counts them, too."""

_HOW = (*(algorithm.value for algorithm in Algorithm), *(f"codec {name}" for name in CODECS))
_MANY = (1 << 24) - 1


def fingerprint_of(
    operation: Operation,
    dtype: str,
    op: ReduceOp | None,
    algorithm: Algorithm,
    codec: str,
    count: int,
    text: str,
) -> int:
    """The fingerprint of a call on ``count`` elements, of which ``text`` says all there is."""
    words = (
        (OPERATIONS.index(operation) + 1, 60),
        (code_of_name(dtype), 56),
        (0 if op is None else REDUCTIONS.index(op) + 1, 52),
        (_HOW.index(f"codec {codec}" if codec else algorithm.value) + 1, 48),
        (min(count, _MANY), 24),
    )
    return sum(word << shift for word, shift in words) | _hash(text, 24)


def undescribed(text: str) -> int:
    """The fingerprint of a call of the engine's own."""
    return _hash(text, 60)


def _hash(text: str, bits: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 64 - bits


def describe(fingerprint: int) -> str:
    """The call as errors name it, as far as its fingerprint says; empty if it doesn't."""
    operation, dtype, op, how = (fingerprint >> shift & 15 for shift in (60, 56, 52, 48))
    if not 0 < operation <= len(OPERATIONS) or not 0 < dtype <= len(NAMES):
        return ""
    if OPERATIONS[operation - 1] is Operation.BARRIER:
        return "barrier"
    count = fingerprint >> 24 & _MANY
    size = "1 element" if count == 1 else f"{count} elements"
    parts = [NAMES[dtype - 1], f"at least {size}" if count == _MANY else size]
    if 0 < op <= len(REDUCTIONS):
        parts.append(f"op {REDUCTIONS[op - 1]}")
    if 0 < how <= len(_HOW):
        parts.append(_HOW[how - 1])
    return f"{OPERATIONS[operation - 1]}({', '.join(parts)})"
