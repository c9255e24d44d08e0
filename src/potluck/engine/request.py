"""A request: one call as its caller made it, before it is decided how it travels."""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import Any

import numpy as np

from potluck.collectives import doubling
from potluck.collectives.plan import Algorithm, Operation
from potluck.engine.arrays import coding, reduction
from potluck.engine.arrays.coding import Encoding
from potluck.engine.arrays.layout import Array
from potluck.engine.call import Call
from potluck.types import ReduceOp
from potluck.wire.dtypes import code_of


class Request:
    """One call. ``described`` is one rank's part, whose dtype and shape stand in errors."""

    __slots__ = (
        "algorithm",
        "described",
        "encoding",
        "number",
        "op",
        "operation",
        "result",
        "root",
        "source",
        "timeout_s",
    )

    def __init__(
        self,
        operation: Operation,
        source: Array | None,
        result: Array | None,
        described: Array,
        op: ReduceOp | None,
        root: int,
        timeout_s: float,
        algorithm: Algorithm | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        """``algorithm``: what the caller wants, None for the best."""
        self.operation = operation
        self.source = source
        self.result = result
        self.described = described
        self.op = op
        self.root = index(root)
        self.timeout_s = timeout_s
        self.algorithm = algorithm
        self.encoding = encoding
        self.number = 0

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


def label(
    operation: Operation,
    algorithm: Algorithm | None,
    array: Any,
    op: ReduceOp | None,
    root: int,
) -> str:
    """A call on ``array`` (NumPy's or a torch tensor), as errors name it."""
    how = algorithm or Algorithm.WINDOW
    return str(_call(operation, how, array.dtype, tuple(array.shape), op, root))


@lru_cache(maxsize=1024)  # a training makes the same calls over and over
def _call(operation: Operation, algorithm: Algorithm, dtype: Any, *rest: Any) -> Call:
    return Call(operation, algorithm, str(dtype).removeprefix("torch."), *rest)
