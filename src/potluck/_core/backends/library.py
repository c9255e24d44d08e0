"""``Library``: the interface of Gloo, NCCL and MPI, with blocking calls on flat arrays.

For reductions that a library can't do as potluck does (bfloat16 in MPI, the maximum of floats with
NaN), ranks exchange bytes and potluck's kernels combine them in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.arrays.reduction import combine
from potluck._core.types import ReduceOp
from potluck.errors import PotluckError

ANY_SOURCE = -1

Waiter = Callable[[float], int]
"""``wait(deadline)`` waits for a message until ``deadline`` (monotonic seconds); the sender's
rank."""


class FlatCall(NamedTuple):
    """A collective on flat arrays: ``source`` and ``result`` are as in ``engine.request``."""

    source: Array | None
    result: Array | None
    op: ReduceOp = ReduceOp.SUM
    root: int = 0


Collective = Callable[[FlatCall, float], None]
"""``run(call, deadline)`` carries out a call until ``deadline`` (monotonic seconds)."""


class Library(Protocol):
    """One group of another library. Arrays are flat; calls block and raise GroupErrors only.

    Deadlines are monotonic seconds. All methods but ``send`` and ``recv`` are called by one thread.
    """

    name: str
    rank: int
    world_size: int
    device: str | None
    tag_limit: int
    """The highest tag of a message; 0 if messages have no tags, only an order."""

    @property
    def collectives(self) -> Mapping[Operation, Collective]:
        """The function for each operation. Missing reductions are done by ``exchange``."""

    def can_reduce(self, op: ReduceOp, dtype: Any) -> bool:
        """Whether the library reduces this dtype by ``op`` with the same result as potluck.
        TypeError if potluck can't reduce it either."""

    def settle(self) -> None:
        """Wait for computations (on a GPU) that write the arrays; called before an operation."""

    def check_message(self, peer: int, tag: int) -> None:
        """ValueError for a peer or tag that the library does not support, though the tag is not
        above ``tag_limit``."""

    def send(self, array: Array, peer: int, tag: int) -> Waiter:
        """Start a send."""

    def recv(self, array: Array, peer: int, tag: int) -> Waiter:
        """Start a receive; ``peer`` may be ANY_SOURCE."""

    def split(self, ranks: tuple[int, ...], number: int, deadline: float) -> Library | None:
        """The group of ``ranks``; None on other ranks. A collective call."""

    def listen(self, on_error: Callable[[PotluckError], None]) -> None:
        """Call ``on_error(error)`` when another rank ends this group."""

    def tell(self, error: PotluckError) -> None:
        """Tell the other ranks the error that ends this group, if they can be reached."""

    def close(self, is_orderly: bool) -> None:
        """Leave the group. ``is_orderly``: it ended without an error."""


def exchange(library: Library, operation: Operation, call: FlatCall, deadline: float) -> None:
    """Carry out a reduction that the library lacks: exchange bytes, combine them in rank order.

    Cost: each rank sends ``(w - 1) / w`` times the array's bytes for a reduce_scatter, twice that
    for an all_reduce; for a reduce the array's bytes.
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
