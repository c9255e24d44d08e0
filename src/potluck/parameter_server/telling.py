"""``Telling``: replies of the first server, each given once the other servers that are present have
carried out all that it tells of."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from potluck.parameter_server.replica import Replica
from potluck.parameter_server.signals import AskAgain

_TELL_S = 1.0
"""A caller that waits longer for the other servers asks again."""


class Telling:
    """With ``replica.changed`` held. Where each tensor lies on one server only, nothing waits: what
    a lost server had is lost anyhow."""

    def __init__(
        self, replica: Replica, may_answer: Callable[[], bool], carry_out: Callable[[], None]
    ) -> None:
        """``may_answer()``: whether this is the first server; it raises what has failed.
        ``carry_out()`` makes entries of what was decided."""
        self._replica = replica
        self._may_answer = may_answer
        self._carry_out = carry_out

    def told(self, reply: Any) -> Any:
        """``reply``, which tells of the entries so far, or a Future of it. None for None."""
        at = self._now()
        if reply is None or self._may_tell(at):
            return reply

        def attempt() -> Any:
            if not self._may_answer() or at[0] != self._replica.incarnation:
                raise AskAgain("the servers have begun anew")
            return reply if self._may_tell(at) else None

        def otherwise() -> Any:
            raise AskAgain("another server of this parameter server does not answer")

        return self._replica.waits.add(attempt, otherwise, _TELL_S)

    def when(
        self, attempt: Callable[[], Any], otherwise: Callable[[], dict[str, Any]], wait_s: float
    ) -> Future[Any]:
        """The reply of ``attempt()``, as soon as there is one; after ``wait_s`` that of
        ``otherwise()``."""
        found: Any = None
        at: tuple[int | None, int] = (None, 0)

        def attempt_and_tell() -> Any:
            nonlocal found, at
            if not self._may_answer():
                return None
            if found is None or at[0] != self._replica.incarnation:
                found = attempt()
                self._carry_out()
                at = self._now()
            return found if found is not None and self._may_tell(at) else None

        def otherwise_or_untold() -> dict[str, Any]:
            if found is not None and self._may_answer():
                return {"waits_for": "the other servers, to carry it out"}
            return otherwise()

        return self._replica.waits.add(attempt_and_tell, otherwise_or_untold, wait_s)

    def _now(self) -> tuple[int | None, int]:
        return self._replica.incarnation, self._replica.log.index

    def _may_tell(self, at: tuple[int | None, int]) -> bool:
        return self._replica.copies == 1 or self._replica.log.is_everywhere(at[1])
