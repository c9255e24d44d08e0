"""A pool of connections: the last one used comes first, and no more are in use than agreed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from potluck._core.transport.bulk import BulkLink, socket_pair
from potluck.errors import LinkError
from potluck.services.channel import Blocks
from potluck.services.client import AllInUseError, Connection, Pool

LATE_S = 20.0


def soon() -> float:
    return time.monotonic() + LATE_S


class Dialled:
    """A pool of two connections, and the far ends of those that it has made."""

    def __init__(self) -> None:
        self.ends: list[BulkLink] = []
        self.may_use = True
        self.failure: Exception | None = None
        self.pool = Pool(self._dial, lambda: self.may_use, 2)

    def _dial(self, deadline: float) -> Connection:
        if self.failure is not None:
            raise self.failure
        mine, theirs = socket_pair("client", "server")
        self.ends.append(theirs)
        return Connection(mine, 1, Blocks(0))

    def num_open(self) -> int:
        """How many of the connections the pool has not closed."""
        return sum(not has_ended(end) for end in self.ends)

    def close(self) -> None:
        self.pool.close()
        self.close_ends()

    def close_ends(self) -> None:
        assert self.num_open() == 0
        for end in self.ends:
            end.close()


def has_ended(end: BulkLink) -> bool:
    try:
        return end.recv_into(memoryview(bytearray(1))) > 0
    except LinkError:
        return True


def test_the_last_one_used_is_the_next() -> None:
    made = Dialled()
    one, other = made.pool.take(soon()), made.pool.take(soon())
    made.pool.give_back(other)
    made.pool.give_back(one)
    assert [made.pool.take(soon()) for _ in range(2)] == [one, other]
    assert len(made.ends) == 2
    for each in (one, other):
        made.pool.give_back(each)
    made.close()


def test_at_most_so_many_are_in_use() -> None:
    made = Dialled()
    held = [made.pool.take(soon()) for _ in range(2)]
    with pytest.raises(AllInUseError):
        made.pool.take(time.monotonic() + 0.1)
    got: list[Connection] = []
    threads = [
        threading.Thread(target=lambda: got.append(made.pool.take(soon()))) for _ in range(2)
    ]
    for each in threads:
        each.start()
    made.pool.give_back(held[0])
    held[1].close()
    made.pool.give_back(None)  # the call failed; another connection is made in its place
    for each in threads:
        each.join(LATE_S)
        assert not each.is_alive()
    assert held[0] in got
    assert len(made.ends) == 3
    for connection in got:
        made.pool.give_back(connection)
    made.close()


def test_one_that_the_server_has_ended_is_not_used_again() -> None:
    made = Dialled()
    held = [made.pool.take(soon()) for _ in range(2)]
    for each in held:
        made.pool.give_back(each)
    made.ends[1].close()
    assert made.pool.take(soon()) is held[0]
    made.pool.give_back(held[0])
    made.may_use = False  # the node is banned
    another = made.pool.take(soon())
    assert another not in held
    assert made.num_open() == 1
    made.pool.give_back(another)
    made.close()


def test_a_failure_to_connect_takes_no_place() -> None:
    made = Dialled()
    made.failure = LinkError("nobody is there")
    for _ in range(5):
        with pytest.raises(LinkError, match="nobody"):
            made.pool.take(soon())
    made.failure = None
    for each in [made.pool.take(soon()) for _ in range(2)]:
        made.pool.give_back(each)
    made.close()


def test_after_close_a_connection_ends_with_its_call() -> None:
    made = Dialled()
    connection = made.pool.take(soon())
    made.pool.close()
    assert made.num_open() == 1
    made.pool.give_back(connection)
    made.close()


def test_a_pool_that_nobody_refers_to_closes_its_connections() -> None:
    made = Dialled()
    made.pool.give_back(made.pool.take(soon()))
    assert made.num_open() == 1
    del made.pool
    made.close_ends()


def test_an_error_in_a_look_at_a_connection_costs_no_place() -> None:
    made = Dialled()
    made.pool.give_back(made.pool.take(soon()))

    def broken() -> bool:
        raise OSError("the list of bans can't be read")

    made.pool._may_use = broken
    for _ in range(3):
        with pytest.raises(OSError, match="can't be read"):
            made.pool.take(soon())
        made.pool._may_use = lambda: True
        made.pool.give_back(made.pool.take(soon()))
        made.pool._may_use = broken
    made.pool._may_use = lambda: True
    both = [made.pool.take(soon()), made.pool.take(soon())]
    for connection in both:
        made.pool.give_back(connection)
    made.close()


def test_a_connection_that_is_given_back_while_the_pool_closes_is_closed() -> None:
    made = Dialled()
    connection = made.pool.take(soon())

    class ClosedMeanwhile(list[Connection | None]):
        """Another thread closes the pool just before the first insertion."""

        is_first = True

        def insert(self, position: Any, item: Connection | None) -> None:
            if self.is_first:
                self.is_first = False
                made.pool.close()
            super().insert(position, item)

    made.pool._free = ClosedMeanwhile(made.pool._free)
    made.pool.give_back(connection)
    assert made.num_open() == 0
    assert len(made.pool._free) == 2
    made.close_ends()
