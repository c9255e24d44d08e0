"""Fingerprints: a call in 64 bits, equal on all ranks that make the same call.

=====  ====================================================================================
bits   meaning
=====  ====================================================================================
60-63  operation, counted from 1; 0: an internal call of the engine, which errors do not describe
56-59  dtype, its code on the wire
52-55  reduction, counted from 1; 0: none
47-51  algorithm, counted from 1; a call with a codec: the pair of algorithm and codec, counted on
24-46  elements of one rank's part; the largest number stands for all above it
0-23   hash of the whole call, with its shape, root, segment size and members
=====  ====================================================================================

Every frame carries the fingerprint of its call, and so does the shared memory of a channel
(``native/bind_shm.cpp`` lays out the same 64 bits). A rank that receives another fingerprint than
its own can therefore name the peer's call in its error.
"""

from __future__ import annotations

import itertools
from hashlib import blake2b

from potluck._core.codecs import NAMES as CODECS
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import NAMES, code_of_name

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
"""The native core counts both in this order, too."""

_HOW = (
    *((algorithm, "") for algorithm in Algorithm),
    *itertools.product((Algorithm.DIRECT, Algorithm.HIERARCHICAL), CODECS),
)
"""Pairs of algorithm and codec; five bits hold 31, of which the last is any registered algorithm.
The native core writes (shared_memory, "")."""
_REGISTERED = 31
_MANY = (1 << 23) - 1


def fingerprint_of(
    operation: Operation,
    dtype: str,
    op: ReduceOp | None,
    algorithm: Algorithm,
    codec: str,
    count: int,
    text: str,
) -> int:
    """The fingerprint of a call on ``count`` elements; ``text`` is the whole call, for the hash."""
    words = (
        (OPERATIONS.index(operation) + 1, 60),
        (code_of_name(dtype), 56),
        (0 if op is None else REDUCTIONS.index(op) + 1, 52),
        (_HOW.index((algorithm, codec)) + 1 if (algorithm, codec) in _HOW else _REGISTERED, 47),
        (min(count, _MANY), 24),
    )
    return sum(word << shift for word, shift in words) | _hash(text, 24)


def undescribed(text: str) -> int:
    """The fingerprint of an internal call of the engine, which ``describe`` does not name."""
    return _hash(text, 60)


def _hash(text: str, bits: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 64 - bits


def describe(fingerprint: int) -> str:
    """The call as errors name it, without shape and root; empty for an internal or unknown call."""
    operation, dtype, op = (fingerprint >> shift & 15 for shift in (60, 56, 52))
    how = fingerprint >> 47 & 31
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
        algorithm, codec = _HOW[how - 1]
        parts += [algorithm, f"codec {codec}"] if codec else [algorithm]
    elif how == _REGISTERED:
        parts.append("a registered algorithm")
    return f"{OPERATIONS[operation - 1]}({', '.join(parts)})"
