"""A request: one call as its caller made it, before it is decided how it travels."""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import Any

from potluck.collectives import doubling
from potluck.collectives.plan import Algorithm, Operation
from potluck.engine.arrays import coding
from potluck.engine.arrays.coding import Encoding
from potluck.engine.arrays.layout import Array
from potluck.engine.arrays.reduction import check
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
        code_of(self.described.dtype)
        if self.op is not None:
            check(self.op, self.described.dtype)
        if self.encoding is not None:
            assert self.source is not None
            coding.check(self.encoding, self.operation, self.source, self.op, self.algorithm)
        if not 0 <= self.root < world_size:
            raise ValueError(f"root {self.root} is outside a world of {world_size}")
        if self.algorithm is Algorithm.DOUBLING and self.op not in (None, *doubling.OPS):
            raise ValueError(doubling.ONLY_SUMS)

    def call(
        self,
        algorithm: Algorithm,
        segment_bytes: int,
        ranks: tuple[int, ...],
        *,
        on_behalf_of: str = "",
    ) -> Call:
        """This request, made by ``algorithm``, as ranks compare it. The arguments: see ``Call``."""
        return _call(
            self.operation,
            algorithm,
            self.described.dtype,
            self.described.shape,
            self.op,
            self.root,
            segment_bytes,
            ranks,
            self.encoding.codec.name if self.encoding is not None else "",
            on_behalf_of,
        )

    def label(self) -> str:
        """The call, as errors name it."""
        return label(self.operation, self.algorithm, self.described, self.op, self.root)


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
