"""Trees of arrays: means of gradients over the ranks, and a replica for the elastic loop. What is
JAX's and MLX's own is in ``potluck.jax`` and ``potluck.mlx``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from potluck._core.system import processor_name, software_name
from potluck._core.wire.immutable import library_of
from potluck.checkpoint.state import State
from potluck.errors import CheckpointError
from potluck.training.buckets import Slot, assign
from potluck.training.replica import StateReplica

if TYPE_CHECKING:
    from potluck._core.context.collectives import Collectives

BUCKET_BYTES = 25 << 20


def mean_of_leaves(
    ctx: Collectives,
    leaves: Sequence[Any],
    *,
    weight: float | None,
    codec: str | None,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Any]:
    """The mean of each leaf over all ranks, as arrays of the leaves' own kinds. Arguments and
    errors are those of ``potluck.jax.average_gradients``."""
    data = [read(leaf) for leaf in leaves]
    for each in data:
        if not np.issubdtype(each.dtype, np.inexact) and each.dtype.name != "bfloat16":
            raise TypeError(f"the mean of {each.dtype} values is not {each.dtype}; pass floats")
    scale = 1.0
    if weight is not None:
        total = ctx.all_reduce(np.array([weight if weight >= 0 else -np.inf], np.float64))
        if not 0 < total[0] < np.inf:  # the same on all ranks: the group goes on
            raise ValueError(
                f"the weights of all ranks have the sum {total[0]}, that of this rank is {weight}; "
                "a weight is 0 or more, and one rank has more than 0"
            )
        scale = weight / float(total[0])
    slots = [Slot(each.size, each.itemsize, each.dtype) for each in data]
    buckets = assign(slots, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    flats, works = [], []
    for bucket in buckets:
        flat = np.empty(bucket.numel, data[bucket.parameters[0]].dtype)
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            own = data[index].reshape(-1)
            if weight == 0:
                own = np.zeros_like(own)  # its values may be NaN: a mean of nothing
            elif weight is not None:  # in float32, for those of 16 bits
                own = own * (scale if own.dtype.itemsize > 4 else np.float32(scale))
            flat[offset : offset + own.size] = own
        op = "mean" if weight is None else "sum"
        works.append(ctx.all_reduce(flat, op, codec=codec, async_op=True))
        flats.append(flat)
    means = list(leaves)
    for bucket, flat, work in zip(buckets, flats, works, strict=True):
        work.wait()
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            part = flat[offset : offset + slots[index].numel].reshape(data[index].shape)
            means[index] = made(part, leaves[index])
    return means


def read(leaf: Any) -> NDArray[Any]:
    """A leaf's elements, read-only. TypeError for what is no array."""
    library = library_of(leaf)
    if library is not None:
        return library.read(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(leaf)
    raise TypeError(f"a leaf is a {type(leaf).__name__}; leaves are arrays of JAX, MLX or NumPy")


def made(data: NDArray[Any], like: Any) -> Any:
    """``data`` as an array like the leaf ``like``."""
    library = library_of(like)
    return data.copy() if library is None else library.make(data, like)


class TreeReplica(StateReplica):
    """A replica of a tree of arrays, whose subclass says what its leaves are, by name."""

    def __init__(self, library: str, device: str) -> None:
        arithmetic = f"{library}, {software_name()}, {device}, {processor_name()}"
        super().__init__(self._state, self._set, device, arithmetic, self._structure)

    @abstractmethod
    def leaves(self) -> dict[str, Any]:
        """The arrays and numbers of the tree, by their paths."""

    @abstractmethod
    def take(self, leaves: Mapping[str, Any]) -> None:
        """Make the tree anew of ``leaves``, which has the names of ``leaves()``."""

    def fixed(self) -> State:
        return self._state()

    def _state(self) -> State:
        return {
            name: leaf if isinstance(leaf, int | float) else read(leaf)
            for name, leaf in self.leaves().items()
        }

    def _structure(self) -> dict[str, str]:
        return {name: _described(value) for name, value in self._state().items()}

    def _set(self, state: State) -> None:
        mine, own = self._structure(), self.leaves()
        theirs = {name: _described(value) for name, value in state.items()}
        if theirs != mine:
            name = min(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
            raise CheckpointError(
                f"the state belongs to another tree: {name!r} is {theirs.get(name, 'missing')} in "
                f"the state, {mine.get(name, 'missing')} here"
            )
        self.take(
            {
                name: value if isinstance(value, int | float) else made(value, own[name])
                for name, value in state.items()
            }
        )


def _described(value: Any) -> str:
    if isinstance(value, int | float):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)}"
