"""``ShardCalls``: workers stage tensors on one of several servers, and fetch versions from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from potluck.parameter_server.layout import Layout, Tensors
from potluck.parameter_server.replica import Replica
from potluck.parameter_server.signals import AskAgain


class ShardCalls:
    """Calls of the shard of ``replica``. Each returns a Future, which ends by what the caller asked
    for, or after ``wait_s`` by what it waits for. For any number of threads."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._shard = replica.shard

    def stage(
        self,
        model: str,
        worker: str,
        push: int,
        tensors: Tensors,
        what: str,
        layout: Layout | None,
        wait_s: float,
    ) -> Future[Any]:
        """Keep a worker's tensors until the log says what becomes of them; a Future of the
        incarnation. ValueError for tensors that are not those of the model here."""

        def attempt() -> dict[str, Any] | None:
            incarnation = self._incarnation()
            if not self._shard.stage(model, worker, push, tensors, what, layout):
                return None
            return {"incarnation": incarnation}

        return self._when(
            attempt, "the first server, which has not said what became of others", wait_s
        )

    def fetch(
        self,
        model: str,
        worker: str,
        version: int,
        incarnation: int,
        names: Sequence[str],
        wait_s: float,
    ) -> Future[Any]:
        """The tensors ``names`` of the version that the first server has granted to ``worker``."""

        def attempt() -> dict[str, Any] | None:
            if self._incarnation() != incarnation:
                return {"waits_for": "the first server, which began anew"}
            found = self._shard.fetch(model, worker, version, names)
            return None if found is None else {"tensors": dict(found)}

        return self._when(attempt, "the first server, which has not granted that version", wait_s)

    def _when(self, attempt: Callable[[], Any], waits_for: str, wait_s: float) -> Future[Any]:
        with self._replica.changed:
            return self._replica.waits.add(attempt, lambda: {"waits_for": waits_for}, wait_s)

    def _incarnation(self) -> int:
        incarnation = self._replica.incarnation
        if incarnation is None:
            raise AskAgain("the servers have not agreed on a state yet")
        return incarnation
