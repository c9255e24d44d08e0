"""The service of a parameter server, as other workers call it: ``Offer`` of a server that is alone,
``SharedOffer`` of each of several.

Each public method is one call. What callers send is checked here: they are other programs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from potluck._core.printable import MAX_NAME
from potluck.parameter_server.follower import Follower
from potluck.parameter_server.host import Host
from potluck.parameter_server.layout import Array, of_plain
from potluck.parameter_server.model import Gradient
from potluck.parameter_server.replica import Replica
from potluck.parameter_server.shard_calls import ShardCalls
from potluck.parameter_server.signals import AskAgain
from potluck.services import Call

MAX_WAIT_S = 10.0
"""Of one call: a caller that waits longer asks again."""

ARGUMENTS = "mode", "optimizer", "servers", "replicas"
"""What every worker must give alike, see ``Replica.arguments``."""


class Offer:
    """What workers ask of the first server. AskAgain while this is not the first."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def agree(self, call: Call, *arguments: str) -> None:
        for what, theirs, mine in zip(ARGUMENTS, arguments, self._host.arguments, strict=True):
            if theirs != mine:
                raise ValueError(
                    f"every worker makes its ParameterServer with equal arguments, but {what} is "
                    f"{theirs:.200} on worker {call.worker} and {mine} on the server"
                )

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
        staged: dict[str, int],
    ) -> Any:
        """``staged``: the incarnation of each of several servers, where all is staged; then
        ``tensors`` is None. The version, or None if it is to be staged anew."""
        return self._host.create(
            _model(model),
            None if tensors is None else _tensors(tensors),
            call.worker,
            int(push),
            layout=of_plain(layout),
            replace=bool(replace),
            staged=_staged(staged),
        )

    def push(
        self,
        call: Call,
        model: str,
        tensors: Any,
        step: int,
        push: int,
        incarnation: int,
        staged: dict[str, int],
    ) -> Any:
        if call.rank < 0:
            raise AskAgain(f"worker {call.worker} is not in the group of this parameter server")
        gradient = Gradient(call.worker, call.rank, int(push), int(step))
        given = None if tensors is None else _tensors(tensors)
        return self._host.push(model, gradient, given, int(incarnation), _staged(staged))

    def outcome(self, call: Call, model: str, push: int, incarnation: int, wait_s: float) -> Any:
        asked = int(push), int(incarnation), _seconds(wait_s)
        return self._host.outcome(model, call.worker, *asked)

    def pull(
        self, call: Call, model: str, after: tuple[int, int] | None, wait_s: float, compute: bool
    ) -> Any:
        if after is not None:
            after = int(after[0]), int(after[1])
        return self._host.pull(model, call.worker, after, _seconds(wait_s), compute=bool(compute))

    def ready(self, call: Call, model: str) -> bool:
        return self._host.is_ready(model)

    def apply(self, call: Call, model: str, step: int, rate: float | None) -> Any:
        return self._host.apply(model, int(step), None if rate is None else float(rate))

    def clear(self, call: Call, model: str, step: int) -> None:
        self._host.clear(model, int(step))

    def abandon(self, call: Call, model: str, push: int) -> None:
        self._host.abandon(_model(model), call.worker, int(push))

    def stats(self, call: Call) -> Any:
        return self._host.stats()

    def leave(self, call: Call) -> Any:
        return self._host.leave(call.worker)


class SharedOffer(Offer):
    """And what workers, and the first server, ask of each of several."""

    def __init__(
        self, host: Host, replica: Replica, follower: Follower, began: Callable[[], None]
    ) -> None:
        """``began()`` is called when a server begins."""
        super().__init__(host)
        self._calls = ShardCalls(replica)
        self._follower = follower
        self._began = began
        self._servers = replica.servers
        self._leading = replica.servers if replica.copies > 1 else replica.servers[:1]
        """Who may be the first server: any, where another one can take over."""

    def agree(self, call: Call, *arguments: str) -> None:
        super().agree(call, *arguments)
        if call.worker in self._servers:
            self._began()

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
        self,
        call: Call,
        model: str,
        version: int,
        incarnation: int,
        names: list[str],
        wait_s: float,
    ) -> Future[Any]:
        return self._calls.fetch(
            _model(model),
            call.worker,
            int(version),
            int(incarnation),
            [str(name) for name in names],
            _seconds(wait_s),
        )

    def join(self, call: Call, incarnation: int) -> dict[str, Any]:
        return self._ordered_by(call).join(int(incarnation))

    def kept(self, call: Call, incarnation: int) -> dict[str, Any]:
        return self._ordered_by(call).kept(int(incarnation))

    def catch_up(
        self, call: Call, incarnation: int, base: list[int], newest: list[int], data: bytes
    ) -> bool:
        return self._ordered_by(call).catch_up(int(incarnation), _pair(base), _pair(newest), data)

    def models(self, call: Call, incarnation: int) -> dict[str, Any]:
        return self._ordered_by(call).models(int(incarnation))

    def give(self, call: Call, incarnation: int, model: str, names: list[str]) -> dict[str, Any]:
        return self._ordered_by(call).give(
            int(incarnation), _model(model), [str(each) for each in names]
        )

    def take(self, call: Call, incarnation: int, models: dict[str, Any], gone: list[str]) -> None:
        self._ordered_by(call).take(int(incarnation), models, [str(each) for each in gone])

    def take_part(self, call: Call, incarnation: int, model: str, part: dict[str, Any]) -> None:
        self._ordered_by(call).take_part(int(incarnation), _model(model), part)

    def load(self, call: Call, incarnation: int, checkpoint: int | None) -> dict[str, Any]:
        checkpoint = None if checkpoint is None else int(checkpoint)
        return self._ordered_by(call).load(int(incarnation), checkpoint)

    def begin(self, call: Call, incarnation: int, index: int, position: list[int]) -> None:
        self._ordered_by(call).begin(int(incarnation), int(index), _pair(position))

    def follow(self, call: Call, incarnation: int, first: int, data: bytes) -> dict[str, Any]:
        return self._ordered_by(call).follow(int(incarnation), int(first), data)

    def _ordered_by(self, call: Call) -> Follower:
        """The follower, for the first server alone."""
        if call.worker not in self._leading:
            raise ValueError(
                f"{call.method} is for the first server, worker {' or '.join(self._leading)}"
            )
        return self._follower


def _pair(given: Any) -> tuple[int, int]:
    incarnation, index = given
    return int(incarnation), int(index)


def _staged(given: Any) -> dict[str, int]:
    return {str(server): int(incarnation) for server, incarnation in dict(given).items()}


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
