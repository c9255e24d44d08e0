"""Optimizers on the server: pure functions of a tensor, its gradient and its state.

Each step returns new arrays and leaves the old ones as they are, because pulls, checkpoints and
replies may still use them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from potluck._core import hints
from potluck._core.portable_math import power
from potluck.parameter_server.layout import Array

_LR = {"lr": "write learning_rate="}

State = Mapping[str, Array]
"""What an optimizer keeps of one tensor, by name; empty before the first step."""


@hints.of_init(_LR, "SGD(0.1)")
@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent, with momentum as PyTorch's ``SGD`` defines it.

    ``v = momentum * v + g``, ``p -= learning_rate * v``; with ``nesterov`` ``g + momentum * v``
    takes the place of ``v`` in the second. ``weight_decay * p`` is added to the gradient.
    ValueError for a negative number, or a momentum of 1 and more.
    """

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum above 0")

    def step(
        self, parameter: Array, gradient: Array, state: State, number: int, rate: float
    ) -> tuple[Array, State]:
        """The tensor after a step at learning rate ``rate``, and the state after it."""
        gradient = _decayed(gradient, parameter, self.weight_decay)
        if not self.momentum:
            return parameter - _as(rate, parameter) * gradient, state
        velocity = state.get("velocity")
        momentum = _as(self.momentum, parameter)
        velocity = gradient if velocity is None else momentum * velocity + gradient
        direction = gradient + momentum * velocity if self.nesterov else velocity
        return parameter - _as(rate, parameter) * direction, {"velocity": velocity}


@hints.of_init(_LR, "Adam(0.001)")
@dataclass(frozen=True, slots=True)
class Adam:
    """Adam (Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1).

    ``weight_decay * p`` is added to the gradient. ValueError for a negative number, or a beta of 1
    and more.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def step(
        self, parameter: Array, gradient: Array, state: State, number: int, rate: float
    ) -> tuple[Array, State]:
        """The tensor after step ``number``, counted from 1, at learning rate ``rate``, and the
        state after it. Real and imaginary parts are numbers by themselves, as in torch."""
        if parameter.dtype.kind == "c":
            own = {name: _parts(each) for name, each in state.items()}
            moved, kept = self.step(_parts(parameter), _parts(gradient), own, number, rate)
            after = {name: _joined(each, parameter) for name, each in kept.items()}
            return _joined(moved, parameter), after
        gradient = _decayed(gradient, parameter, self.weight_decay)
        mean = _blend(state.get("mean"), gradient, self.beta1)
        square = _blend(state.get("square"), gradient * gradient, self.beta2)
        corrected = rate / (1 - power(self.beta1, number))
        scale = np.sqrt(square) / _as(math.sqrt(1 - power(self.beta2, number)), parameter)
        change: Array = _as(corrected, parameter) * mean / (scale + _as(self.epsilon, parameter))
        return parameter - change, {"mean": mean, "square": square}


Optimizer = SGD | Adam


def _blend(before: Array | None, now: Array, beta: float) -> Array:
    blended: Array = _as(1 - beta, now) * now
    if before is not None:
        blended += _as(beta, now) * before
    return blended


def _parts(array: Array) -> Array:
    """The real and imaginary parts of complex numbers, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)


def _joined(parts: Array, like: Array) -> Array:
    return parts.view(like.dtype).reshape(like.shape)


def _decayed(gradient: Array, parameter: Array, decay: float) -> Array:
    return gradient + _as(decay, parameter) * parameter if decay else gradient


def _as(number: float, like: Array) -> Any:
    """``number`` in the dtype of ``like``: a float64 would turn float32 tensors into float64."""
    return like.dtype.type(number)


def check_number(name: str, value: Any, *, below: float = math.inf) -> None:
    """TypeError for what is no number, ValueError unless it is from 0 to ``below``."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r:.80}; it must be a number")
    if not 0 <= float(value) < below:
        bound = "finite and at least 0" if below == math.inf else f"from 0 to below {below:g}"
        raise ValueError(f"{name} is {value!r}; it must be {bound}")


def _check(optimizer: Optimizer) -> None:
    for name in optimizer.__dataclass_fields__:
        below = 1 if name in ("momentum", "beta1", "beta2") else math.inf
        check_number(name, getattr(optimizer, name), below=below)
