"""``Offer``: the service of a parameter server, as other workers call it."""

from __future__ import annotations

from typing import Any

import numpy as np

from potluck.parameter_server.host import Host, as_reply
from potluck.parameter_server.model import Gradient
from potluck.parameter_server.optimizers import Array
from potluck.printable import MAX_NAME
from potluck.services import Call

MAX_WAIT_S = 10.0
"""Of one call: a caller that waits longer asks again."""


class NotInGroup(Exception):
    """The caller is in the next group, which this server has not entered yet: to be asked again."""


class Offer:
    """Each public method is one call. What callers send is checked here: they are other
    programs."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def agree(self, call: Call, mode: str, optimizer: str) -> None:
        for what, theirs, mine in zip(
            ("mode", "optimizer"), (mode, optimizer), self._host.arguments, strict=True
        ):
            if theirs != mine:
                raise ValueError(
                    f"every worker makes its ParameterServer with equal arguments, but {what} is "
                    f"{theirs:.200} on worker {call.worker} and {mine} on the server"
                )

    def create(self, call: Call, model: str, tensors: Any, number: int, replace: bool) -> int:
        if not isinstance(model, str) or not model.isprintable() or not 0 < len(model) <= MAX_NAME:
            raise ValueError(f"a model's name is 1 to {MAX_NAME} printable characters")
        given = (call.worker, int(number)) if replace else None
        return self._host.create(model, _tensors(tensors), replace=given)

    def push(
        self, call: Call, model: str, tensors: Any, step: int, push: int, incarnation: int
    ) -> Any:
        if call.rank < 0:
            raise NotInGroup(f"worker {call.worker} is not in the group of this parameter server")
        gradient = Gradient(call.worker, call.rank, int(push), int(step), _tensors(tensors))
        outcome = self._host.push(model, gradient, int(incarnation))
        return None if outcome is None else as_reply(outcome)

    def outcome(self, call: Call, model: str, push: int, wait_s: float) -> Any:
        return self._host.outcome(model, call.worker, int(push), _seconds(wait_s))

    def pull(
        self, call: Call, model: str, after: tuple[int, int] | None, wait_s: float, compute: bool
    ) -> Any:
        if after is not None:
            after = int(after[0]), int(after[1])
        return self._host.pull(model, call.worker, after, _seconds(wait_s), compute=bool(compute))

    def ready(self, call: Call, model: str) -> bool:
        return self._host.is_ready(model)

    def apply(self, call: Call, model: str, step: int, rate: float | None) -> int:
        return self._host.apply(model, int(step), None if rate is None else float(rate))

    def clear(self, call: Call, model: str, step: int) -> None:
        self._host.clear(model, int(step))

    def stats(self, call: Call) -> dict[str, Any]:
        return self._host.stats()

    def leave(self, call: Call) -> None:
        self._host.leave(call.worker)


def _seconds(wait_s: float) -> float:
    return min(max(0.0, float(wait_s)), MAX_WAIT_S)


def _tensors(given: Any) -> dict[str, Array]:
    if not isinstance(given, dict) or not given:
        raise TypeError(
            "parameters and gradients are a dict of arrays by name, with at least one, not "
            f"{type(given).__name__} of {len(given) if isinstance(given, dict) else 'something'}"
        )
    for name, array in given.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r:.60} is not the name of an array")
    return given
