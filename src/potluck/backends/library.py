"""What Gloo, NCCL and MPI are to us: blocking calls on flat arrays, and what they can't do.

What a library can't combine as we do (bfloat16 in MPI, the maximum of floats with a NaN among them)
is exchanged as bytes and combined by our own kernels, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from potluck.engine.arrays.layout import Array
from potluck.engine.arrays.reduction import combine
from potluck.errors import PotluckError
from potluck.types import ReduceOp

ANY_SOURCE = -1

Waiter = Callable[[float], int]
"""Called with a deadline (monotonic seconds): waits for a message, gives its sender's rank."""


class Library(Protocol):
    """One group in another library. Arrays are flat, calls block and raise GroupErrors only.

    ``deadline`` is in monotonic seconds. Calls but ``send`` and ``recv`` come from one thread.
    """

    name: str
    rank: int
    world_size: int
    device: str | None

    def can_reduce(self, op: ReduceOp, dtype: Any) -> bool:
        """Whether the library combines this itself, as potluck does. TypeError if nobody can."""

    def all_reduce(self, array: Array, op: ReduceOp, deadline: float) -> None:
        """In place."""

    def reduce(self, array: Array, op: ReduceOp, root: int, deadline: float) -> None:
        """In place on the root; others' arrays stay as they are."""

    def reduce_scatter(self, output: Array, array: Array, op: ReduceOp, deadline: float) -> bool:
        """``output`` becomes part ``rank`` of the combined ``array``. False: it can't do that."""

    def all_gather(self, output: Array, array: Array, deadline: float) -> None:
        """Bytes of every rank, in rank order."""

    def broadcast(self, array: Array, root: int, deadline: float) -> None:
        """In place."""

    def scatter(self, output: Array, array: Array | None, root: int, deadline: float) -> None:
        """The root's ``array`` in equal parts."""

    def gather(self, output: Array | None, array: Array, root: int, deadline: float) -> None:
        """The reverse of ``scatter``."""

    def all_to_all(self, output: Array, array: Array, deadline: float) -> None:
        """Equal parts, part ``i`` to rank ``i``."""

    def barrier(self, deadline: float) -> None:
        """Until all ranks are here."""

    def settle(self) -> None:
        """Called by whoever calls an operation: what computes its arrays must end first."""

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


def exchange_parts(
    library: Library, part: Array, parts: Array, op: ReduceOp, deadline: float
) -> None:
    """A reduce-scatter: ``w - 1`` parts sent, ``w - 1`` received, combined in rank order."""
    rows = np.empty((library.world_size, part.size), dtype=parts.dtype)
    library.all_to_all(rows.reshape(-1), parts, deadline)
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            combine(op, rows[0], row)
    part[:] = rows[0]


def exchange_all(library: Library, array: Array, op: ReduceOp, deadline: float) -> None:
    """An all-reduce: ``2 (w - 1) / w`` times the array's bytes sent by each rank."""
    parts, part = _in_parts(library, array)
    exchange_parts(library, part, parts, op, deadline)
    library.all_gather(parts, part, deadline)
    array[:] = parts[: array.size]


def exchange_to(library: Library, root: int, array: Array, op: ReduceOp, deadline: float) -> None:
    """A reduce: as ``exchange_all``, with the parts gathered on the root only."""
    parts, part = _in_parts(library, array)
    exchange_parts(library, part, parts, op, deadline)
    is_root = library.rank == root
    library.gather(parts if is_root else None, part, root, deadline)
    if is_root:
        array[:] = parts[: array.size]


def _in_parts(library: Library, array: Array) -> tuple[Array, Array]:
    """A copy padded to equal parts, and room for one of them."""
    count = -(-array.size // library.world_size)
    parts = np.zeros(count * library.world_size, dtype=array.dtype)
    parts[: array.size] = array
    return parts, np.empty(count, dtype=array.dtype)
