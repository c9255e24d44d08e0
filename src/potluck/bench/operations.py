"""What is measured: the collectives, their inputs, their right results, their bus bandwidth.

Bus bandwidth is nccl-tests' (its doc/PERFORMANCE.md): the size over the time, times the part of the
data that has to cross each rank's wire, so that it can be compared with what the wire does. The
size is that of the whole data: of the buffer for all-reduce, broadcast and reduce, of all ranks'
parts together for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

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
    """An input to time with: zeros stay zeros however often they are summed."""
    return np.zeros(_count(operation, world_size, nbytes), np.float32)


def random_inputs(operation: str, world_size: int, nbytes: int) -> list[Floats]:
    """All ranks' inputs, the same in each process that asks."""
    count = _count(operation, world_size, nbytes)
    return [
        np.random.default_rng([nbytes, rank]).standard_normal(count, np.float32)
        for rank in range(world_size)
    ]


def expected(operation: str, inputs: Sequence[Floats], rank: int) -> npt.NDArray[np.float64]:
    """What rank ``rank`` must end with; root 0. Empty where nothing is said of the result."""
    world_size = len(inputs)
    match operation:
        case "all-reduce":
            return _sum(inputs)
        case "reduce":
            return _sum(inputs) if rank == 0 else np.empty(0)
        case "reduce-scatter":
            return _sum([each.reshape(world_size, -1)[rank] for each in inputs])
        case "all-gather":
            return np.concatenate(inputs).astype(np.float64)
        case "broadcast":
            return inputs[0].astype(np.float64)
        case "all-to-all":
            parts = [each.reshape(world_size, -1)[rank] for each in inputs]
            return np.concatenate(parts).astype(np.float64)
    raise ValueError(f"{operation!r} is not measured; choose from {', '.join(OPERATIONS)}")


def same_on_all(operation: str) -> bool:
    """Whether all ranks end with the same bits."""
    return operation in ("all-reduce", "all-gather", "broadcast")


def _sum(arrays: Sequence[Floats]) -> npt.NDArray[np.float64]:
    total: npt.NDArray[np.float64] = np.sum(arrays, axis=0, dtype=np.float64)
    return total


def _count(operation: str, world_size: int, nbytes: int) -> int:
    """Elements of one rank's input."""
    count = nbytes // 4
    if operation in ("broadcast", "reduce", "all-reduce"):
        return count
    part = count // world_size
    if not part:
        raise ValueError(f"{nbytes} bytes are less than one float32 for each of {world_size} ranks")
    return part if operation == "all-gather" else part * world_size
