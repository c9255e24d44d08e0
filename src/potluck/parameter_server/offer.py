"""The services of a parameter server, as other workers call them: ``Offer`` of the first server,
``FollowerOffer`` of each other one.

Each public method is one call. What callers send is checked here: they are other programs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from potluck.parameter_server.follower import Follower
from potluck.parameter_server.host import Host
from potluck.parameter_server.layout import Array, of_plain
from potluck.parameter_server.model import Gradient
from potluck.parameter_server.shard_calls import ShardCalls
from potluck.parameter_server.signals import AskAgain
from potluck.printable import MAX_NAME
from potluck.services import Call

MAX_WAIT_S = 10.0
"""Of one call: a caller that waits longer asks again."""


class ShardOffer:
    """What each of several servers offers."""

    def __init__(self, calls: ShardCalls) -> None:
        self._calls = calls

    def stage(
        self, call: Call, model: str, tensors: Any, layout: Any, step: int, push: int, wait_s: float
    ) -> Future[Any]:
        """``layout`` with parameters, None with a gradient."""
        gradient = Gradient(call.worker, call.rank, int(push), int(step))
        return self._calls.stage(
            _model(model),
            call.worker,
            gradient.push,
            _tensors(tensors),
            gradient.of(model) if layout is None else f"what is set for {model!r}",
            None if layout is None else of_plain(layout),
            _seconds(wait_s),
        )

    def fetch(
        self, call: Call, model: str, version: int, incarnation: int, wait_s: float
    ) -> Future[Any]:
        return self._calls.fetch(
            _model(model), call.worker, int(version), int(incarnation), _seconds(wait_s)
        )


class Offer(ShardOffer):
    """The first server's."""

    def __init__(self, host: Host, began: Callable[[], None] = lambda: None) -> None:
        """``began()`` is called when another server begins."""
        super().__init__(host.shard_calls)
        self._host = host
        self._began = began

    def agree(self, call: Call, mode: str, optimizer: str, servers: str) -> None:
        for what, theirs, mine in zip(
            ("mode", "optimizer", "servers"),
            (mode, optimizer, servers),
            self._host.arguments,
            strict=True,
        ):
            if theirs != mine:
                raise ValueError(
                    f"every worker makes its ParameterServer with equal arguments, but {what} is "
                    f"{theirs:.200} on worker {call.worker} and {mine} on the server"
                )
        if call.worker in self._host.servers[1:]:
            self._began()

    def begun(self, call: Call, wait_s: float) -> Any:
        return self._host.begun(_seconds(wait_s))

    def create(
        self,
        call: Call,
        model: str,
        tensors: Any,
        layout: Any,
        push: int,
        replace: bool,
        incarnations: list[int],
    ) -> dict[str, Any]:
        """``incarnations``: those of several servers, where all is staged; then ``tensors`` is
        None."""
        version = self._host.create(
            _model(model),
            None if tensors is None else _tensors(tensors),
            call.worker,
            int(push),
            layout=of_plain(layout),
            replace=bool(replace),
            incarnations=[int(each) for each in incarnations],
        )
        if version is None:
            return {"waits_for": "a server that began anew"}
        return {"version": version}

    def push(
        self, call: Call, model: str, tensors: Any, step: int, push: int, incarnation: int
    ) -> Any:
        if call.rank < 0:
            raise AskAgain(f"worker {call.worker} is not in the group of this parameter server")
        gradient = Gradient(call.worker, call.rank, int(push), int(step))
        given = None if tensors is None else _tensors(tensors)
        outcome = self._host.push(model, gradient, given, int(incarnation))
        return None if outcome is None else outcome.reply()

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

    def abandon(self, call: Call, model: str, push: int) -> None:
        self._host.abandon(_model(model), call.worker, int(push))

    def stats(self, call: Call) -> dict[str, Any]:
        return self._host.stats()

    def leave(self, call: Call) -> None:
        self._host.leave(call.worker)


class FollowerOffer(ShardOffer):
    """Another server's."""

    def __init__(self, follower: Follower, first: str) -> None:
        """``first`` is the worker of the first server."""
        super().__init__(follower.calls)
        self._follower = follower
        self._first = first

    def follow(self, call: Call, incarnation: int, first: int, data: bytes) -> dict[str, Any]:
        self._hear_first(call)
        return self._follower.follow(int(incarnation), int(first), data)

    def checkpoints(self, call: Call) -> dict[str, Any]:
        self._hear_first(call)
        return self._follower.checkpoints()

    def load(self, call: Call, checkpoint: int | None, incarnation: int, index: int) -> None:
        self._hear_first(call)
        checkpoint = None if checkpoint is None else int(checkpoint)
        self._follower.load(checkpoint, int(incarnation), int(index))

    def _hear_first(self, call: Call) -> None:
        if call.worker != self._first:
            raise ValueError(f"{call.method} is for worker {self._first}, the first server")


def _seconds(wait_s: float) -> float:
    return min(max(0.0, float(wait_s)), MAX_WAIT_S)


def _model(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"a model's name is 1 to {MAX_NAME} printable characters")
    return name


def _tensors(given: Any) -> dict[str, Array]:
    if not isinstance(given, dict):
        raise TypeError(f"tensors are a dict of arrays by name, not {type(given).__name__}")
    for name, array in given.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r:.60} is not the name of an array")
    return given
