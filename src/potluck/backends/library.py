"""``Library``: the interface to Gloo, NCCL and MPI, with blocking calls on flat arrays.

Reductions that a library can't do as potluck does (bfloat16 in MPI, the maximum of floats with a
NaN among them) are exchanged as bytes and combined by potluck's own kernels, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from potluck.collectives.plan import Operation
from potluck.engine.arrays.layout import Array
from potluck.engine.arrays.reduction import combine
from potluck.errors import PotluckError
from potluck.types import ReduceOp

ANY_SOURCE = -1

Waiter = Callable[[float], int]
"""Called with a deadline (monotonic seconds): waits for a message, gives its sender's rank."""


class FlatCall(NamedTuple):
    """A collective on flat arrays: ``source`` and ``result`` are as in ``engine.request``."""

    source: Array | None
    result: Array | None
    op: ReduceOp = ReduceOp.SUM
    root: int = 0


Collective = Callable[[FlatCall, float], None]
"""Carries out a call until a deadline (monotonic seconds)."""


class Library(Protocol):
    """One group in another library. Arrays are flat, calls block and raise GroupErrors only.

    ``deadline`` is in monotonic seconds. Calls but ``send`` and ``recv`` come from one thread.
    """

    name: str
    rank: int
    world_size: int
    device: str | None

    @property
    def collectives(self) -> Mapping[Operation, Collective]:
        """The function for each operation. A reduction may be missing; its bytes are exchanged."""

    def can_reduce(self, op: ReduceOp, dtype: Any) -> bool:
        """Whether the library combines this dtype by ``op`` with potluck's result. TypeError if
        potluck can't combine it either."""

    def settle(self) -> None:
        """Called before an operation: waits for work that still computes its arrays (on a GPU)."""

    def check_message(self, peer: int, tag: int) -> None:
        """ValueError for a sender or tag that the library has no word for."""

    def send(self, array: Array, peer: int, tag: int) -> Waiter:
        """Begin to send."""

    def recv(self, array: Array, peer: int, tag: int) -> Waiter:
        """Begin to receive; ``peer`` may be ANY_SOURCE."""

    def split(self, ranks: tuple[int, ...], number: int, deadline: float) -> Library | None:
        """The group of some of the ranks, None elsewhere. All ranks call it."""

    def listen(self, on_error: Callable[[PotluckError], None]) -> None:
        """From now on call ``on_error`` when another rank has told why this group ends."""

    def tell(self, error: PotluckError) -> None:
        """Let the other ranks know why this group ends, as far as that is possible."""

    def close(self, is_orderly: bool) -> None:
        """Leave."""


def exchange(library: Library, operation: Operation, call: FlatCall, deadline: float) -> None:
    """A reduction that the library does not do: bytes are moved, and combined in rank order.

    Each rank sends ``(w - 1) / w`` times the array's bytes for a reduce_scatter, as much again for
    an all_reduce, and as much to the root for a reduce.
    """
    source, result = call.source, call.result
    assert source is not None
    if operation is Operation.REDUCE_SCATTER:
        assert result is not None
        _exchange_parts(library, result, source, call.op, deadline)
        return
    count = -(-source.size // library.world_size)
    parts = np.zeros(count * library.world_size, dtype=source.dtype)  # padded to equal parts
    parts[: source.size] = source
    part = np.empty(count, dtype=source.dtype)
    _exchange_parts(library, part, parts, call.op, deadline)
    into = None if result is None else parts
    collect = Operation.ALL_GATHER if operation is Operation.ALL_REDUCE else Operation.GATHER
    library.collectives[collect](FlatCall(part, into, root=call.root), deadline)
    if result is not None:
        result[:] = parts[: result.size]


def _exchange_parts(
    library: Library, part: Array, parts: Array, op: ReduceOp, deadline: float
) -> None:
    rows = np.empty((library.world_size, part.size), dtype=parts.dtype)
    library.collectives[Operation.ALL_TO_ALL](FlatCall(parts, rows.reshape(-1)), deadline)
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            combine(op, rows[0], row)
    part[:] = rows[0]
