"""``Connector``: makes the links of one group for the progress loop.

Implementations: ``mesh.py`` (TCP), ``backends/inprocess.py`` (threads of one process).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from potluck._core.transport.link import Link

Deliver = Callable[[int, Link], None]
"""``deliver(rank, link)``: a link to ``rank`` is there. Called from any thread."""

Fail = Callable[[int, Exception], None]
"""``fail(rank, error)``: no link to ``rank`` can be had."""


class Connector(Protocol):
    @property
    def is_native(self) -> bool:
        """Whether its links are the native core's, so that the native loop can run them."""

    def start(self, deliver: Deliver, fail: Fail) -> None:
        """Deliver links from now on, also those that peers have asked for."""

    def request(self, rank: int) -> None:
        """A link to ``rank`` is wanted. Returns at once; asking again changes nothing."""

    def close(self, error: BaseException) -> None:
        """No more links: attempts under way end, links delivered later are closed.

        ``error`` is why the group is over here; peers that ask for a link are told.
        """
