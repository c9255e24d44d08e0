"""A request: one call as its caller made it, before it is decided how it travels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any, Protocol

import numpy as np

from potluck._core.checks import check_within
from potluck._core.collectives import doubling
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.engine.arrays import coding, reduction
from potluck._core.engine.arrays.coding import Encoding
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.call import Call
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import code_of

NOTHING = np.empty(0, dtype=np.uint8)
"""What a barrier moves."""

_RESULT_IS_A_PART = frozenset({Operation.REDUCE_SCATTER, Operation.SCATTER})


class FastPath(Protocol):
    """Runs a blocking collective here and now, without a Request.

    Returns False if the fast path can't take this call, and nothing was done: the caller then uses
    ``run``. Raises what the call has failed with. ``source`` and ``result`` are as in ``Request``,
    as NumPy arrays or CPU tensors of torch that need not be copied; ``op`` is the name of a
    ReduceOp or None. ``is_flat``: both count as arrays of one dimension, whatever their shape.
    """

    def __call__(
        self,
        operation: Operation,
        source: Any,
        result: Any,
        op: str | None,
        root: int,
        timeout_s: float,
        is_flat: bool,
        /,
    ) -> bool: ...


class Request:
    """One collective call.

    ``source`` is what this rank gives, ``result`` where the outcome goes: one array for operations
    in place, None where this rank has no such array (a scatter's source or a gather's or reduce's
    result on ranks that are not the root). Arrays are C-contiguous. With ``count`` elements as one
    rank's part:

    =====================================  ===================  ====================
    operation                              source               result
    =====================================  ===================  ====================
    all_reduce, broadcast, reduce          count                count, in place
    reduce_scatter, scatter                world size * count   count
    all_gather, gather                     count                world size * count
    all_to_all                             world size * count   world size * count
    =====================================  ===================  ====================
    """

    __slots__ = (
        "algorithm",
        "encoding",
        "op",
        "operation",
        "result",
        "root",
        "sequence",
        "source",
        "timeout_s",
    )

    def __init__(
        self,
        operation: Operation,
        source: Array | None = NOTHING,
        result: Array | None = NOTHING,
        op: ReduceOp | None = None,
        *,
        root: int = 0,
        algorithm: str | None = None,
        encoding: Encoding | None = None,
        timeout_s: float,
    ) -> None:
        """``algorithm``: what the caller wants, None for the best; ValueError for a word that is
        none. ``encoding``: how the bytes are to look on the wire, None: as in memory."""
        self.operation = operation
        self.source = source
        self.result = result
        self.op = op
        self.root = index(root)
        self.algorithm = None if algorithm is None else Algorithm(algorithm)
        self.encoding = encoding
        self.timeout_s = timeout_s
        self.sequence = 0
        """Set by ``ChannelMemory`` only; a call over links gets its number in
        ``Communicator._run_over_links``."""

    @property
    def described(self) -> Array:
        """One rank's part, whose dtype and shape stand in errors."""
        part: Array = part_of_call(self.operation, self.source, self.result)
        return part

    def check(self, world_size: int) -> None:
        """TypeError or ValueError for what has no meaning."""
        check(self.described.dtype, self.op, self.root, self.algorithm, world_size)
        if self.encoding is not None:
            self.check_encoding()

    def check_encoding(self) -> None:
        """The same for how the bytes are to look on the wire."""
        assert self.encoding is not None
        assert self.source is not None
        coding.check(self.encoding, self.operation, self.source, self.op, self.algorithm)

    def label(self) -> str:
        """The call, as errors name it."""
        return label(self.operation, self.algorithm, self.described, self.op, self.root)


def part_of_call(operation: Operation, source: Any, result: Any) -> Any:
    """Which of a call's arrays is as long as one rank's part."""
    if operation is Operation.BARRIER:
        return NOTHING
    return result if operation in _RESULT_IS_A_PART else source


def check(
    dtype: np.dtype[Any],
    op: ReduceOp | None,
    root: int,
    algorithm: Algorithm | None,
    world_size: int,
) -> None:
    """TypeError or ValueError for what has no meaning."""
    code_of(dtype)
    if op is not None:
        reduction.check(op, dtype)
    if not 0 <= root < world_size:
        raise ValueError(f"root {root} is outside a world of {world_size}")
    if algorithm is Algorithm.DOUBLING and op not in (None, *doubling.OPS):
        raise ValueError(doubling.ONLY_SUMS)


def checked_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """The ranks of a sub-group; ValueError unless they are distinct ranks."""
    chosen = tuple(ranks)
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"the ranks of a group must be distinct: {chosen}")
    for rank in chosen:
        check_within("rank", rank, world_size)
    return chosen


def label(
    operation: Operation,
    algorithm: Algorithm | None,
    array: Any,
    op: ReduceOp | None,
    root: int,
) -> str:
    """A call on ``array`` (NumPy's or a torch tensor), as errors name it."""
    how = algorithm or Algorithm.SHARED_MEMORY
    return str(_call(operation, how, array.dtype, tuple(array.shape), op, root))


@lru_cache(maxsize=1024)  # a training makes the same calls over and over
def _call(operation: Operation, algorithm: Algorithm, dtype: Any, *rest: Any) -> Call:
    return Call(operation, algorithm, str(dtype).removeprefix("torch."), *rest)
