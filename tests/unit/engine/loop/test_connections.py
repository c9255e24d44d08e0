"""The connections of a group on links that the test makes: who may be read, who must be told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from potluck._core.engine.loop.connections import Outgoing, Sink
from potluck._core.wire import frames
from potluck._core.wire.frames import FRAME_BYTES, Frame, Kind
from potluck.errors import LinkError

EPOCH = 3
LIMIT = 100_000
OVERHEAD = 256


class FakeLink:
    """Takes ``room`` bytes, gives ``incoming``; its descriptor is there to be waited on."""

    peer = "fake"
    readable = False
    memory = None

    def __init__(self) -> None:
        self.room = 1 << 20
        self.wire = bytearray()
        self.incoming = bytearray()
        self.is_broken = False
        self.has_ended = False
        self.is_closed = False
        self._ends = socket.socketpair()

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def send(self, data: memoryview) -> int:
        if self.is_broken:
            raise LinkError("broken pipe")
        count = min(self.room, len(data))
        self.room -= count
        self.wire += data[:count]
        return count

    def recv_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self.incoming))
        if count == 0 and self.has_ended:
            raise LinkError("the peer closed it")
        buffer[:count] = self.incoming[:count]
        del self.incoming[:count]
        return count

    def close(self) -> None:
        self.is_closed = True
        for end in self._ends:
            end.close()

    def sent(self) -> list[Frame]:
        """The frames on the wire, which have no payload here."""
        wire, self.wire = self.wire, bytearray()
        return [
            frames.decode(wire[at : at + FRAME_BYTES]) for at in range(0, len(wire), FRAME_BYTES)
        ]


@pytest.fixture
def links() -> Iterator[list[FakeLink]]:
    """Four links, which the test need not close."""
    made = [FakeLink() for _ in range(4)]
    yield made
    for link in made:
        link.close()


def frame_of(kind: Kind, **fields: int) -> Frame:
    return Frame(kind, EPOCH, source=0)._replace(**fields)


def told(kind: Kind, **fields: int) -> Outgoing:
    return Outgoing(frame_of(kind, **fields), memoryview(b""))


class Group:
    """The connections of rank 0 of four, with the test as the loop."""

    def __init__(self, twin: SimpleNamespace) -> None:
        self.all: Any = twin.Connections(EPOCH, 4, LIMIT)
        self.came: list[tuple[int, Frame]] = []
        self.queues: dict[int, list[Outgoing]] = {rank: [] for rank in range(4)}

    def move(self) -> None:
        self.all.move(self._route, self._next)

    def _route(self, rank: int, frame: Frame) -> Sink:
        self.came.append((rank, frame))
        return Sink(None, lambda _: None)

    def _next(self, rank: int) -> Outgoing | None:
        return self.queues[rank].pop(0) if self.queues[rank] else None


def test_a_frame_for_a_rank_without_a_link_asks_for_one_and_waits(
    twin: SimpleNamespace, links: list[FakeLink]
) -> None:
    group = Group(twin)
    group.all.send_control(2, told(Kind.CTS, sequence=5))
    group.all.send_control(2, told(Kind.CTS, sequence=6))
    assert set(group.all.wanted) == {2}
    group.all.adopt(2, links[2])
    group.queues[2] = [told(Kind.BEGUN)]
    group.move()
    assert [(sent.kind, sent.sequence) for sent in links[2].sent()] == [
        (Kind.CTS, 5),
        (Kind.CTS, 6),
        (Kind.BEGUN, 0),
    ]
    group.all.need([1, 2])
    assert group.all.wanted[-1] == 1, "rank 2 has a link"


def test_a_second_link_to_a_rank_is_closed(twin: SimpleNamespace, links: list[FakeLink]) -> None:
    group = Group(twin)
    group.all.adopt(1, links[1])
    group.all.adopt(1, links[2])
    assert links[2].is_closed
    assert not links[1].is_closed


def test_links_that_pause_go_on_when_a_blocked_link_has_room(
    twin: SimpleNamespace, links: list[FakeLink]
) -> None:
    group = Group(twin)
    for rank in (1, 2):
        group.all.adopt(rank, links[rank])
    group.move()
    links[1].room = 10
    group.all.send_control(1, told(Kind.BEGUN))
    group.all.pause(2)
    group.queues[2] = [told(Kind.BEGUN)]
    group.move()
    group.move()
    assert group.queues[2], "nothing has changed: rank 2 is not asked"
    links[1].room = 1000
    group.all.can_write(1)
    group.move()
    group.move()
    assert not group.queues[2]
    assert [sent.kind for sent in links[2].sent()] == [Kind.BEGUN]
    assert [sent.kind for sent in links[1].sent()] == [Kind.BEGUN], "whole, after two parts"


def test_credit_returns_once_a_quarter_of_the_limit_was_used(
    twin: SimpleNamespace, links: list[FakeLink]
) -> None:
    group = Group(twin)
    group.all.adopt(1, links[1])
    group.all.hold(1, 20_000)
    assert group.all.held == [1]
    group.all.consume(1, 10_000)
    group.move()
    assert links[1].sent() == []
    group.all.release(1, 20_000)
    group.move()
    credit = 30_000 + 2 * OVERHEAD
    assert links[1].sent() == [frame_of(Kind.CREDIT, sequence=credit)]


def test_a_peer_that_closed_has_departed_and_is_not_lost(
    twin: SimpleNamespace, links: list[FakeLink]
) -> None:
    group = Group(twin)
    group.all.adopt(1, links[1])
    links[1].incoming += frames.encode(Frame(Kind.CLOSE, EPOCH, source=1))
    links[1].has_ended = True
    group.move()
    assert group.all.departed == {1}
    assert group.all.failure is None
    assert links[1].is_closed
    group.all.adopt(1, links[2])
    assert links[2].is_closed, "nor does it come back"


def test_a_link_that_ends_without_close_ends_the_group(
    twin: SimpleNamespace, links: list[FakeLink]
) -> None:
    group = Group(twin)
    group.all.adopt(1, links[1])
    links[1].has_ended = True
    group.move()
    assert group.all.failure == (1, "the peer closed it")
    assert not group.all.has_link(1)


def test_bytes_that_make_no_sense_end_the_group(
    twin: SimpleNamespace, links: list[FakeLink]
) -> None:
    group = Group(twin)
    group.all.adopt(1, links[1])
    links[1].incoming += b"GET / HTTP/1.1\r\n".ljust(FRAME_BYTES)
    group.move()
    rank, text = group.all.failure
    assert rank == 1
    assert text.startswith("not a potluck frame: it begins with")
    assert group.all.has_link(1), "it is still told why"


def test_the_last_words_of_a_peer_that_can_not_be_written_to_are_read(
    twin: SimpleNamespace, links: list[FakeLink]
) -> None:
    """They may name another rank, which that peer has lost."""
    group = Group(twin)
    group.all.adopt(1, links[1])
    group.move()
    links[1].incoming += frames.encode(Frame(Kind.BEGUN, EPOCH, sequence=7, source=1))
    links[1].is_broken = True
    group.all.send_control(1, told(Kind.CTS))
    group.move()
    assert [(rank, frame.sequence) for rank, frame in group.came] == [(1, 7)]
    assert group.all.failure == (1, "broken pipe")
    assert not group.all.has_link(1)
