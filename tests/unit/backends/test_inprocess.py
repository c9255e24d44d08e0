"""The hub of in-process worlds: links, once per pair of ranks."""

from __future__ import annotations

import pytest

from potluck._core.backends.inprocess import MOST_NATIVE, Hub, _Connector
from potluck._core.transport.link import Link
from potluck.errors import GroupClosed


class Rank:
    """A connector, with the links that it has delivered and could not make, by rank."""

    def __init__(self, hub: Hub, worker: str) -> None:
        self.connector = _Connector(hub, hub.group(worker, 0, 1.0))
        self.links: dict[int, Link] = {}
        self.failures: dict[int, Exception] = {}
        self.connector.start(self.links.__setitem__, self.failures.__setitem__)


@pytest.mark.parametrize("most_native", [0, MOST_NATIVE], ids=["pipes", "sockets"])
def test_a_request_that_comes_when_the_other_has_linked_and_left_is_no_loss(
    most_native: int,
) -> None:
    """The native loop requests a link by an event, which may be handled after the whole call."""
    hub = Hub(2)
    hub.most_native = most_native
    first, second = Rank(hub, "0"), Rank(hub, "1")
    first.connector.request(1)
    assert (first.links.keys(), second.links.keys()) == ({1}, {0})
    first.connector.close(GroupClosed("this context was closed", epoch=1))
    hub.leave("0")
    second.connector.request(0)
    assert not second.failures
    for link in (*first.links.values(), *second.links.values()):
        link.close()


def test_a_request_for_one_that_left_before_there_was_a_link_fails() -> None:
    hub = Hub(2)
    first, second = Rank(hub, "0"), Rank(hub, "1")
    first.connector.close(GroupClosed("this context was closed", epoch=1))
    second.connector.request(0)
    assert "left the group" in str(second.failures[0])
