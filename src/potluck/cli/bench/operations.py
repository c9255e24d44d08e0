"""The collectives that are measured: their inputs, expected results and bus bandwidth.

Bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): size over time, times the part of
the data that must cross each rank's network interface, so that it compares with the interface's
speed. The size counts the whole data: the buffer for all-reduce, broadcast and reduce, all ranks'
parts together for the others. All elements are float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_PERIOD = 65_521
"""Inputs repeat after this many numbers. A prime, so that no chunk size is a multiple of the period
and a misplaced chunk has wrong numbers."""

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all")


def bus_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth (size over time)."""
    if operation in ("broadcast", "reduce"):
        return 1.0
    factor = (world_size - 1) / world_size
    return 2 * factor if operation == "all-reduce" else factor


def bus_bandwidth(operation: str, world_size: int, nbytes: int, seconds: float) -> float:
    """Bus bandwidth, in bytes per second, of one call that took ``seconds``."""
    return nbytes / seconds * bus_factor(operation, world_size)


def zeros(operation: str, world_size: int, nbytes: int) -> Floats:
    """An input for timing: zeros, which stay zeros in repeated sums.

    The memory is written, because the system backs unwritten memory by a single page of zeros,
    which is read faster.
    """
    return np.full(_count(operation, world_size, nbytes), 0, np.float32)


def known(operation: str, world_size: int, nbytes: int, rank: int) -> Floats:
    """The input of ``rank`` for checks: standard normal numbers, from a seed that all ranks
    share."""
    return _repeated(_block(rank), _count(operation, world_size, nbytes))


def expected(operation: str, world_size: int, nbytes: int, rank: int) -> Floats:
    """The right result on ``rank`` (root 0) for inputs of ``known``.

    Sums are computed in float64 and rounded once. Empty where the result is undefined: of a reduce
    on ranks other than the root. ValueError for an operation that is not measured.
    """
    count = _count(operation, world_size, nbytes)
    match operation:
        case "all-reduce":
            return _repeated(_block_of_sums(world_size), count)
        case "reduce":
            return _repeated(_block_of_sums(world_size), count if rank == 0 else 0)
        case "reduce-scatter":
            return _part(_repeated(_block_of_sums(world_size), count), world_size, rank)
        case "all-gather":
            return np.concatenate([_repeated(_block(each), count) for each in range(world_size)])
        case "broadcast":
            return _repeated(_block(0), count)
        case "all-to-all":
            wholes = [_repeated(_block(each), count) for each in range(world_size)]
            return np.concatenate([_part(whole, world_size, rank) for whole in wholes])
    raise ValueError(f"{operation!r} is not measured; choose from {', '.join(OPERATIONS)}")


def same_on_all(operation: str) -> bool:
    """Whether all ranks must end with the same bits."""
    return operation in ("all-reduce", "all-gather", "broadcast")


def _block(rank: int) -> Floats:
    return np.random.default_rng([2026, rank]).standard_normal(_PERIOD, np.float32)


def _block_of_sums(world_size: int) -> Floats:
    blocks = np.stack([_block(rank) for rank in range(world_size)])
    total: Floats = blocks.sum(axis=0, dtype=np.float64).astype(np.float32)
    return total


def _repeated(block: Floats, count: int) -> Floats:
    return np.resize(block, count) if count else np.empty(0, np.float32)


def _part(whole: Floats, world_size: int, rank: int) -> Floats:
    part: Floats = whole.reshape(world_size, -1)[rank]
    return part


def _count(operation: str, world_size: int, nbytes: int) -> int:
    """The number of elements of one rank's input."""
    count = nbytes // 4
    if operation in ("broadcast", "reduce", "all-reduce"):
        return count
    part = count // world_size
    if not part:
        raise ValueError(
            f"{nbytes} bytes are less than one float32 for each of {world_size} ranks; {operation} "
            f"needs a size of at least {4 * world_size} bytes"
        )
    return part if operation == "all-gather" else part * world_size
