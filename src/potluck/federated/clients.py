"""How a server reaches its clients: the same for a simulation and for a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from potluck.federated.participant import Answer


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of one call: the ``client``'s ``answer``, or the ``reason`` why there is none, such
    as its death."""

    client: str
    answer: Answer | None
    reason: str = ""


class Clients(Protocol):
    """All clients of a federation. ``is_simulated``: they are computed here, one by one."""

    is_simulated: bool

    def wait(self, num: int, timeout_s: float) -> Sequence[str]:
        """The names of the clients that are there, when they are ``num`` or after ``timeout_s``."""

    def called(self, client: str) -> str:
        """What people call a client: its name, and its machine if that has one."""

    def none_fit(self) -> str:
        """Why no client can take part; empty if one can, or has not said yet."""

    def start(
        self,
        method: str,
        arguments: Mapping[str, Mapping[str, Any]],
        timeout_s: float | None,
        put: Callable[[Reply], None],
    ) -> Callable[[], None]:
        """Call ``method`` of each client in ``arguments``; ``put`` gets one reply for each whose
        call ends within ``timeout_s``, from any thread. The returned function gives up: what has
        not begun does not begin, and further replies are dropped."""
