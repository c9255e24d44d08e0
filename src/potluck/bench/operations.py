"""What is measured: the collectives, their inputs, their right results, their bus bandwidth.

Bus bandwidth is nccl-tests' (its doc/PERFORMANCE.md): the size over the time, times the part of the
data that has to cross each rank's wire, so that it can be compared with what the wire does. The
size is that of the whole data: of the buffer for all-reduce, broadcast and reduce, of all ranks'
parts together for the others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_PERIOD = 65_521
"""Numbers after which inputs repeat. A prime: a chunk at a wrong place has wrong numbers."""

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all")


def bus_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    if operation in ("broadcast", "reduce"):
        return 1.0
    factor = (world_size - 1) / world_size
    return 2 * factor if operation == "all-reduce" else factor


def bus_bandwidth(operation: str, world_size: int, nbytes: int, seconds: float) -> float:
    """Bytes per second of one call that took ``seconds``."""
    return nbytes / seconds * bus_factor(operation, world_size)


def zeros(operation: str, world_size: int, nbytes: int) -> Floats:
    """An input to time with: zeros stay zeros however often they are summed.

    Written, not only asked for: memory that was never written is one page of zeros to the system,
    and reading that is faster than reading memory.
    """
    return np.full(_count(operation, world_size, nbytes), 0, np.float32)


def known(operation: str, world_size: int, nbytes: int, rank: int) -> Floats:
    """Rank ``rank``'s input to check with: standard normal numbers that all processes know."""
    return _repeated(_block(rank), _count(operation, world_size, nbytes))


def expected(operation: str, world_size: int, nbytes: int, rank: int) -> Floats:
    """What rank ``rank`` must end with (root 0), if all started with ``known`` inputs.

    Sums are float64's, rounded once. Empty where nothing is said of the result.
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
    """Whether all ranks end with the same bits."""
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
    """Elements of one rank's input."""
    count = nbytes // 4
    if operation in ("broadcast", "reduce", "all-reduce"):
        return count
    part = count // world_size
    if not part:
        raise ValueError(f"{nbytes} bytes are less than one float32 for each of {world_size} ranks")
    return part if operation == "all-gather" else part * world_size
