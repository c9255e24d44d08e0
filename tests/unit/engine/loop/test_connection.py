"""A connection of either loop on a link that gives and takes as little as it likes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from potluck._core.engine.loop.connections import Connection, Outgoing, Sink
from potluck._core.metrics import LinkMeter
from potluck._core.wire import frames
from potluck._core.wire.frames import FRAME_BYTES, IN_LINK_MEMORY, Frame, Kind
from potluck.errors import LinkError, ProtocolError


class FakeLinkMemory:
    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.mine = [bytearray(slot_bytes) for _ in range(num_slots)]
        self.theirs = [bytearray(slot_bytes) for _ in range(num_slots)]

    def outgoing(self, slot: int) -> memoryview:
        return memoryview(self.mine[slot])

    def incoming(self, slot: int) -> memoryview:
        if not 0 <= slot < self.num_slots:
            raise ProtocolError(f"link-memory slot {slot}")
        return memoryview(self.theirs[slot])

    def close(self) -> None:
        return None


class FakeLink:
    """Takes at most ``step()`` bytes a call; like TLS it wants the same bytes again after 0."""

    peer = "fake"
    readable = False

    def __init__(self, step: Callable[[], int], memory: FakeLinkMemory | None = None) -> None:
        self.step = step
        self.memory = memory
        self.wire = bytearray()
        self.incoming = bytearray()
        self.ended = False
        self._owed: bytes | None = None

    def fileno(self) -> int:
        return -1

    def bind(self, wake: Callable[[], None]) -> None:
        return None

    def send(self, data: memoryview) -> int:
        assert len(data), "nothing was offered"
        if self._owed is not None:
            assert bytes(data[: len(self._owed)]) == self._owed, "other bytes than those refused"
        count = min(self.step(), len(data))
        self._owed = None if count else bytes(data[:64])
        self.wire += data[:count]
        return count

    def recv_into(self, buffer: memoryview) -> int:
        assert len(buffer), "no room was offered"
        count = min(self.step(), len(buffer), len(self.incoming))
        if count == 0 and self.ended:
            raise LinkError("ended")
        buffer[:count] = self.incoming[:count]
        del self.incoming[:count]
        return count

    def close(self) -> None:
        return None


def connection_on(
    twin: SimpleNamespace, step: Callable[[], int], memory: FakeLinkMemory | None = None
) -> tuple[Connection, FakeLink]:
    link = FakeLink(step, memory)
    return twin.Connection(1, link, LinkMeter()), link


def data_frame(payload: bytes, kind: Kind = Kind.DATA, **fields: int) -> Frame:
    return Frame(kind, 3, length=len(payload), source=0)._replace(**fields)


def parse(wire: bytearray) -> list[tuple[Frame, bytes]]:
    parsed = []
    at = 0
    while at < len(wire):
        frame = frames.decode(wire[at : at + FRAME_BYTES])
        at += FRAME_BYTES
        size = 0 if frame.flags & IN_LINK_MEMORY else frame.length
        parsed.append((frame, bytes(wire[at : at + size])))
        at += size
    return parsed


def source_of(queue: deque[Outgoing]) -> Callable[[Connection], Outgoing | None]:
    return lambda _: queue.popleft() if queue else None


def steps_of(seed: int) -> Callable[[], int]:
    choose = random.Random(seed)
    return lambda: choose.choice([0, 0, 1, 1, 2, 5, 40, 48, 49, 1000, 20_000])


PAYLOADS = [
    b"",
    b"x",
    b"12345678",
    bytes(range(256)) * 4,
    bytes(9000),
    b"",
    bytes(range(100)) * 300,
]


@pytest.mark.parametrize("stutter", [0, 1, 7])
def test_frames_cross_a_link_that_takes_one_byte_at_a_time(
    twin: SimpleNamespace, stutter: int
) -> None:
    calls = iter(range(10**9))
    connection, link = connection_on(
        twin, lambda: int(not stutter or next(calls) % (stutter + 1) == 0)
    )
    sent: list[int] = []
    queue = deque(
        Outgoing(data_frame(each), memoryview(each), lambda number=number: sent.append(number))
        for number, each in enumerate(PAYLOADS[:4])
    )
    while queue or connection.is_writing:
        connection.write(source_of(queue))
    assert [payload for _, payload in parse(link.wire)] == PAYLOADS[:4]
    assert sent == [0, 1, 2, 3]

    arrived: list[bytes] = []
    link.incoming, link.wire = link.wire, bytearray()

    def route(_: Connection, frame: Frame) -> Sink:
        buffer = memoryview(bytearray(frame.length))
        return Sink(buffer, lambda payload: arrived.append(bytes(payload)))

    while link.incoming:
        connection.read(route)
    assert arrived == PAYLOADS[:4]


def test_random_steps_with_control_frames_in_between(twin: SimpleNamespace, seed: int) -> None:
    connection, link = connection_on(twin, steps_of(seed))
    queue = deque(Outgoing(data_frame(each), memoryview(each)) for each in PAYLOADS * 3)
    number = 0
    while queue or connection.is_writing:
        if number < 20 and random.Random(seed + number).random() < 0.2:
            connection.control.append(
                Outgoing(Frame(Kind.SLOT_FREE, 3, tag=number), memoryview(b""))
            )
            number += 1
        connection.write(source_of(queue))
    parsed = parse(link.wire)
    assert [payload for frame, payload in parsed if frame.kind is Kind.DATA] == PAYLOADS * 3
    credits = [frame.tag for frame, _ in parsed if frame.kind is Kind.SLOT_FREE]
    assert credits == list(range(number)), "whole frames, in order, between whole frames"


def test_memory_is_let_go_only_when_its_last_byte_has_left(twin: SimpleNamespace) -> None:
    room = [0]

    def step() -> int:
        return room[0]

    connection, link = connection_on(twin, step)
    payload = bytearray(b"a" * 20_000)
    done: list[bool] = []
    queue = deque([Outgoing(data_frame(payload), memoryview(payload), lambda: done.append(True))])
    connection.write(source_of(queue))
    assert connection.is_blocked
    assert connection.is_writing
    assert not done
    room[0] = 10_000
    while len(link.wire) < 20_000:
        connection.write(source_of(queue))
        room[0] = 0 if len(link.wire) >= 19_000 else 10_000
        if len(link.wire) < FRAME_BYTES + 20_000:
            assert not done
            room[0] = 10
    room[0] = 10_000
    connection.write(source_of(queue))
    assert done == [True]
    assert parse(link.wire) == [(data_frame(payload), bytes(payload))]


def test_a_link_full_of_bytes_gives_others_their_turn(twin: SimpleNamespace) -> None:
    connection, _ = connection_on(twin, lambda: 1 << 20)
    payload = bytes(1 << 20)
    endless = Outgoing(data_frame(payload), memoryview(payload))
    assert connection.write(lambda _: endless), "there is more"
    assert 0 <= connection.meter.bytes_sent - twin.BUDGET < 2 << 20

    connection, link = connection_on(twin, lambda: 1 << 20)
    link.incoming = bytearray((frames.encode(data_frame(payload)) + payload) * 12)
    scratch = memoryview(bytearray(1 << 20))
    assert connection.read(lambda _, frame: Sink(scratch, lambda _: None))
    assert 0 <= connection.meter.bytes_received - twin.BUDGET < 2 << 20


def test_bytes_before_the_end_of_a_link_count(twin: SimpleNamespace) -> None:
    connection, link = connection_on(twin, lambda: 100)
    link.incoming = bytearray(frames.encode(data_frame(b"abc")) + b"abc")
    link.ended = True
    got: list[bytes] = []

    def route(_: Connection, frame: Frame) -> Sink:
        return Sink(memoryview(bytearray(frame.length)), lambda data: got.append(bytes(data)))

    with pytest.raises(LinkError):
        connection.read(route)
    assert got == [b"abc"]


# ---------------------------------------------------------------- link memory

SLOT = 8192


def test_slots_are_used_until_there_are_none_and_again_after_a_credit(
    twin: SimpleNamespace,
) -> None:
    memory = FakeLinkMemory(2, SLOT)
    connection, link = connection_on(twin, lambda: 1 << 20, memory)
    payloads = [bytes([number]) * 5000 for number in range(3)]
    let_go: list[int] = []
    queue = deque(
        Outgoing(data_frame(each), memoryview(each), lambda number=number: let_go.append(number))
        for number, each in enumerate(payloads)
    )

    def next_outgoing(connection: Connection) -> Outgoing | None:
        return queue.popleft() if queue and connection.can_start(len(queue[0].payload)) else None

    connection.write(next_outgoing)
    assert len(queue) == 1
    assert let_go == [0, 1], "the copy is made: the memory is free at once"
    assert [bytes(slot[:5000]) for slot in memory.mine] == payloads[:2]
    assert [(frame.flags, frame.tag) for frame, _ in parse(link.wire)] == [
        (IN_LINK_MEMORY, 0),
        (IN_LINK_MEMORY, 1),
    ]
    assert not connection.can_start(5000)
    assert connection.can_start(100), "small payloads go through the stream"
    assert connection.can_start(SLOT + 1), "and so do those that fit no slot"

    link.incoming += frames.encode(Frame(Kind.SLOT_FREE, 3, source=1, tag=1))
    connection.read(lambda *_: pytest.fail("credits are the connection's own business"))
    connection.write(next_outgoing)
    assert bytes(memory.mine[1][:5000]) == payloads[2]
    assert connection.meter.bytes_in_shared_memory == 15_000


def test_messages_with_a_tag_keep_it(twin: SimpleNamespace) -> None:
    connection, link = connection_on(twin, lambda: 1 << 20, FakeLinkMemory(2, SLOT))
    payload = bytes(6000)
    frame = data_frame(payload, Kind.EAGER, tag=77)
    connection.control.append(Outgoing(frame, memoryview(payload)))
    connection.write(lambda _: None)
    assert parse(link.wire) == [(frame, payload)]


def test_a_payload_in_the_shared_memory_is_credited_once_it_is_used(twin: SimpleNamespace) -> None:
    memory = FakeLinkMemory(2, SLOT)
    connection, link = connection_on(twin, lambda: 1 << 20, memory)
    memory.theirs[1][:5] = b"hello"
    for into_buffer in (True, False):
        got: list[bytes] = []
        link.incoming += frames.encode(
            Frame(Kind.DATA, 3, length=5, source=1, flags=IN_LINK_MEMORY, tag=1)
        )
        buffer = memoryview(bytearray(5)) if into_buffer else None
        connection.read(
            lambda *_, buffer=buffer, got=got: Sink(
                buffer, lambda payload: got.append(bytes(payload))
            )
        )
        assert got == [b"hello"]
        connection.write(lambda _: None)
        assert parse(link.wire)[-1][0] == Frame(Kind.SLOT_FREE, 3, tag=1, source=0)


@pytest.mark.parametrize(
    "hostile",
    [
        Frame(Kind.SLOT_FREE, 3, source=1, tag=0),
        Frame(Kind.SLOT_FREE, 3, source=1, tag=-1),
        Frame(Kind.SLOT_FREE, 3, source=1, tag=2),
        Frame(Kind.DATA, 3, length=10, source=1, flags=IN_LINK_MEMORY, tag=2),
        Frame(Kind.DATA, 3, length=10, source=1, flags=IN_LINK_MEMORY, tag=-1),
        Frame(Kind.DATA, 3, length=SLOT + 1, source=1, flags=IN_LINK_MEMORY, tag=0),
    ],
)
def test_slots_that_a_peer_must_not_name(twin: SimpleNamespace, hostile: Frame) -> None:
    connection, link = connection_on(twin, lambda: 1 << 20, FakeLinkMemory(2, SLOT))
    link.incoming += frames.encode(hostile)
    with pytest.raises(ProtocolError):
        connection.read(lambda *_: pytest.fail("must not be routed"))


def test_a_slot_is_not_used_again_before_its_credit_has_left(twin: SimpleNamespace) -> None:
    """Else a peer that reads no credits could make us pile them up."""
    connection, link = connection_on(twin, lambda: 1 << 20, FakeLinkMemory(1, SLOT))
    frame = Frame(Kind.DATA, 3, length=1, source=1, flags=IN_LINK_MEMORY, tag=0)
    sink = Sink(None, lambda _: None)
    link.incoming += frames.encode(frame) * 2
    with pytest.raises(ProtocolError, match="used again before it was free"):
        connection.read(lambda *_: sink)


def test_memory_that_this_link_does_not_have(twin: SimpleNamespace) -> None:
    connection, link = connection_on(twin, lambda: 1 << 20)
    frame = Frame(Kind.DATA, 3, length=1, source=1, flags=IN_LINK_MEMORY, tag=0)
    link.incoming += frames.encode(frame)
    with pytest.raises(ProtocolError, match="does not have"):
        connection.read(lambda *_: Sink(None, lambda _: None))
