"""``LocalBackend``: a world of one worker, without a network; the baseline of other backends."""

from __future__ import annotations

from potluck._core.backends.base import StaticBackend
from potluck._core.backends.service_transport import (
    LocalServiceNetwork,
    LocalServiceTransport,
    ServiceTransport,
)
from potluck._core.engine.communicator import Communicator
from potluck._core.transport.link import Deliver, Fail
from potluck._core.types import Group, Member


class _Alone:
    """The connector in a world of one, which never connects."""

    is_native = False

    def start(self, deliver: Deliver, fail: Fail) -> None:
        return None

    def request(self, rank: int) -> None:
        raise AssertionError(f"a world of one has no rank {rank}")

    def close(self, error: BaseException) -> None:
        return None


class LocalBackend(StaticBackend[Communicator]):
    """The backend of a group of one rank."""

    no_next_group = "a single worker has no next group"

    def __init__(self) -> None:
        self._transport = LocalServiceTransport(LocalServiceNetwork(), "0")

    @property
    def service_transport(self) -> ServiceTransport:
        return self._transport

    def _form(self, timeout_s: float) -> Communicator:
        return Communicator.open(Group(1, 0, (Member("0"),)), _Alone())
