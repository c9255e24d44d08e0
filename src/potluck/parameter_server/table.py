"""``Table``: the tensors of a model on one server, in immutable versions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from potluck.parameter_server.layout import Array, Tensors
from potluck.parameter_server.optimizers import Optimizer, State


class Table:
    """The newest version of a model's tensors, and what its optimizer keeps.

    A version is never changed: an update makes new arrays. So a reply or a checkpoint of a version
    needs no copy, and can't mix two of them.
    """

    def __init__(self, tensors: Tensors, optimizer: Optimizer) -> None:
        self.tensors = frozen(tensors)
        self._optimizer = optimizer
        self._states: dict[str, State] = {}
        self._num_steps = 0
        self._mixed: Tensors | None = None

    # -- updates, each to a new version

    def step(self, gradients: Sequence[Tensors], rate: float) -> None:
        """A step of the optimizer by the mean of ``gradients``, added in this order, at a learning
        rate of ``rate``."""
        self._step({name: mean([each[name] for each in gradients]) for name in self.tensors}, rate)

    def mix(self, gradient: Tensors, alpha: float, rate: float) -> None:
        """A step by ``alpha * gradient + (1 - alpha) * before``, which is kept for the next one."""
        before = self._mixed
        if before is not None:
            gradient = {
                name: each.dtype.type(alpha) * each + each.dtype.type(1 - alpha) * before[name]
                for name, each in gradient.items()
            }
        self._mixed = frozen(gradient)
        self._step(gradient, rate)

    def add(self, differences: Tensors) -> None:
        """Add ``differences`` to the tensors."""
        self.tensors = frozen({n: each + differences[n] for n, each in self.tensors.items()})

    def replace(self, tensors: Tensors) -> None:
        """Take ``tensors`` instead, and forget what the optimizer kept."""
        self.tensors, self._states, self._num_steps = frozen(tensors), {}, 0
        self._mixed = None

    def _step(self, gradient: Tensors, rate: float) -> None:
        self._num_steps += 1
        tensors: dict[str, Array] = {}
        states: dict[str, State] = {}
        for name, tensor in self.tensors.items():
            tensors[name], state = self._optimizer.step(
                tensor, gradient[name], self._states.get(name, {}), self._num_steps, rate
            )
            states[name] = frozen(state)
        self.tensors, self._states = frozen(tensors), states

    # -- for checkpoints

    def state(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """All of it, as a checkpoint holds it; only of the tensors ``names`` if they are given."""
        wanted = set(self.tensors if names is None else names)

        def part(each: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in each.items() if name in wanted}

        return {
            "tensors": part(self.tensors),
            "optimizer": {name: dict(state) for name, state in part(self._states).items()},
            "num_steps": self._num_steps,
            "mixed": None if self._mixed is None else part(self._mixed),
        }

    def install(self, part: Mapping[str, Any]) -> None:
        """Add the ``state``, whole or a part, of another table of the same model and version."""
        self.tensors = frozen({**self.tensors, **part["tensors"]})
        self._states |= part["optimizer"]
        self._num_steps = part["num_steps"]
        if part["mixed"] is not None:
            self._mixed = {**(self._mixed or {}), **part["mixed"]}


def mean(arrays: Sequence[Array]) -> Array:
    """The mean, added in this order and then divided: what an ``all_reduce`` over a centralized
    plan gives, bit by bit."""
    if len(arrays) == 1:
        return arrays[0]
    total = arrays[0] + arrays[1]
    for each in arrays[2:]:
        total += each
    total /= total.dtype.type(len(arrays))
    return total


def frozen(tensors: Tensors) -> Tensors:
    """``tensors`` as they are, but read-only from now on.

    NumPy's arithmetic returns a scalar, not an array, where all operands have no dimensions; here
    these become arrays again."""
    arrays = {name: np.asarray(each) for name, each in tensors.items()}
    for each in arrays.values():
        each.flags.writeable = False
    return MappingProxyType(arrays)
