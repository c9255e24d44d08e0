"""A peer that holds the secret and sends nonsense: it is named, and nothing else happens."""

from __future__ import annotations

import contextlib
import random
import resource
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from potluck._core.collectives.plan import Operation
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.request import Request
from potluck._core.engine.work import Work
from potluck._core.transport.link import Deliver, Fail, Link
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import Group, Member, ReduceOp
from potluck._core.wire import frames
from potluck._core.wire.dtypes import code_of
from potluck._core.wire.frames import FRAME_BYTES, IN_LINK_MEMORY, Frame, Kind
from potluck.errors import Desync, GroupError, LinkError, OperationTimeout, PeerLost
from support.links import LINK_KINDS, Blocking, inproc_ends

EPOCH = 3
GROUP = Group(EPOCH, 0, (Member("a"), Member("b"), Member("c")))

NATIVE = [kind for kind in ("native", "native+shm") if kind in LINK_KINDS]
"""Links whose near end the native loop runs, where it is."""


def summing(array: np.ndarray, timeout_s: float, algorithm: str | None = None) -> Request:
    """An all_reduce of ``array``, in place."""
    return Request(
        Operation.ALL_REDUCE, array, array, ReduceOp.SUM, algorithm=algorithm, timeout_s=timeout_s
    )


class OneLink:
    """A connector that has one link, to rank 1, from the start."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.is_native = isinstance(link, TcpLink) and link.stream is not None

    def start(self, deliver: Deliver, fail: Fail) -> None:
        deliver(1, self._link)

    def request(self, rank: int) -> None:
        return None

    def close(self, error: BaseException) -> None:
        return None


class Enemy:
    """Rank 1's end of the link."""

    def __init__(self, communicator: Communicator, link: Link) -> None:
        self.communicator = communicator
        self.link = link
        self.blocking = Blocking(link)

    def say(self, kind: Kind, payload: bytes = b"", **fields: int) -> None:
        frame = Frame(kind, EPOCH, length=len(payload), source=1)._replace(**fields)
        self.blocking.send_all(frames.encode(frame) + payload)

    def say_header(self, header: bytes) -> None:
        self.blocking.send_all(header)

    def hear(self) -> tuple[Frame, bytes]:
        frame = frames.decode(self.blocking.receive(FRAME_BYTES))
        if frame.flags & IN_LINK_MEMORY:
            assert self.link.memory is not None
            return frame, bytes(self.link.memory.incoming(frame.tag)[: frame.length])
        return frame, self.blocking.receive(frame.length)


@contextlib.contextmanager
def at_war(kind: str = "inproc", *, capacity: int = 0, **options: int) -> Iterator[Enemy]:
    """``capacity``: bytes that a link in process holds, instead of as many as usual."""
    with inproc_ends(capacity) if capacity else LINK_KINDS[kind]() as (mine, theirs):
        communicator = Communicator.open(GROUP, OneLink(mine), **options)
        try:
            yield Enemy(communicator, theirs)
        finally:
            theirs.close()
            communicator.close()


def reduce_with_the_enemy(communicator: Communicator) -> Work:
    pair = communicator.subgroup([0, 1])
    assert pair is not None
    return pair.run(summing(np.ones(3000), 20, "direct"))


def lost(work: Work) -> GroupError:
    with pytest.raises((PeerLost, Desync)) as caught:
        work.wait(30)
    assert caught.value.rank == 1
    assert "rank 1 (worker b)" in str(caught.value)
    return caught.value


ATTACKS: dict[str, Callable[[Enemy, Frame], None]] = {
    "random bytes": lambda enemy, _: enemy.blocking.send_all(random.randbytes(4096)),
    "another protocol": lambda enemy, _: enemy.blocking.send_all(b"GET / HTTP/1.1\r\n" * 8),
    "another version": lambda enemy, mine: enemy.say_header(b"PL\xff" + frames.encode(mine)[3:]),
    "a stale epoch": lambda enemy, _: enemy.say(Kind.CLOSE, epoch=EPOCH - 1),
    "a later epoch": lambda enemy, mine: enemy.say(
        Kind.DATA, b"", epoch=EPOCH + 1, fingerprint=mine.fingerprint
    ),
    "another rank's name": lambda enemy, _: enemy.say(Kind.EAGER, b"abc", source=2),
    "my own name": lambda enemy, _: enemy.say(Kind.EAGER, b"abc", source=0),
    "a huge length": lambda enemy, _: enemy.say(Kind.DATA, length=0xFFFF_FFFF),
    "a long eager message": lambda enemy, _: enemy.say(Kind.EAGER, length=frames.EAGER_BYTES + 1),
    "a payload where none belongs": lambda enemy, _: enemy.say(Kind.CLOSE, b"x"),
    "unknown flags": lambda enemy, _: enemy.say(Kind.CLOSE, flags=0x80),
    "link memory there is not": lambda enemy, mine: enemy.say_header(
        frames.encode(mine._replace(source=1, flags=IN_LINK_MEMORY, tag=0))
    ),
    "a control frame in shared memory": lambda enemy, _: enemy.say(
        Kind.CLOSE, flags=IN_LINK_MEMORY
    ),
    "another chunk": lambda enemy, mine: enemy.say(
        Kind.DATA, bytes(mine.length), channel=1, chunk=17, fingerprint=mine.fingerprint, dtype=4
    ),
    "another segment": lambda enemy, mine: enemy.say(
        Kind.DATA, bytes(mine.length), channel=1, segment=1, fingerprint=mine.fingerprint, dtype=4
    ),
    "another length": lambda enemy, mine: enemy.say(
        Kind.DATA, bytes(8), channel=1, fingerprint=mine.fingerprint, dtype=4
    ),
    "another dtype": lambda enemy, mine: enemy.say(
        Kind.DATA, bytes(mine.length), channel=1, fingerprint=mine.fingerprint, dtype=7
    ),
    "another fingerprint": lambda enemy, mine: enemy.say(
        Kind.DATA, bytes(mine.length), channel=1, fingerprint=1, dtype=4
    ),
    "another call, in a question": lambda enemy, _: enemy.say(
        Kind.HANG_QUERY, channel=1, fingerprint=1, segment=1
    ),
    "a free slot that is not in use": lambda enemy, _: enemy.say(Kind.SLOT_FREE, tag=0),
    "a negative slot": lambda enemy, _: enemy.say(Kind.SLOT_FREE, tag=-1),
    "a CTS for nothing": lambda enemy, _: enemy.say(Kind.CTS, sequence=5),
    "a piece of nothing": lambda enemy, _: enemy.say(Kind.PIECE, b"abc", sequence=5),
    "a malformed RTS": lambda enemy, _: enemy.say(Kind.RTS, b"\xc1"),
    "an RTS that is no UTF-8": lambda enemy, _: enemy.say(Kind.RTS, b"\x81\xa1\xff\x01"),
    "a malformed abort": lambda enemy, _: enemy.say(Kind.ABORT, b"\x93abc"),
    "a deeply nested abort": lambda enemy, _: enemy.say(
        Kind.ABORT, b"\x81\xa1q" + b"\x91" * 15_000
    ),
    "two closes": lambda enemy, _: (enemy.say(Kind.CLOSE), enemy.say(Kind.CLOSE)),  # type: ignore[func-returns-value]
    "a close without the data": lambda enemy, _: (enemy.say(Kind.CLOSE), enemy.link.close()),  # type: ignore[func-returns-value]
    "half a frame": lambda enemy, mine: (  # type: ignore[func-returns-value]
        enemy.say_header(frames.encode(mine._replace(source=1))),
        enemy.blocking.send_all(b"abc"),
        enemy.link.close(),
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("kind", ["inproc", "tls", *NATIVE[:1]])
def test_nonsense_costs_its_sender_the_membership(
    kind: str, attack: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    random.seed(seed)
    with at_war(kind) as enemy:
        work = reduce_with_the_enemy(enemy.communicator)
        mine, _ = enemy.hear()
        with contextlib.suppress(LinkError):  # of two messages the first may have been enough
            ATTACKS[attack](enemy, mine)
        error = lost(work)
        with pytest.raises(type(error)):
            enemy.communicator.run(Request(Operation.BARRIER, timeout_s=1)).wait(30)
    assert "broke" not in str(error)
    assert not caplog.records, "nothing may escape to the progress loop"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", ["inproc", *NATIVE[:1]])
def test_a_message_that_is_announced_twice_leaves_no_receive_without_an_end(
    kind: str, is_late: bool
) -> None:
    def announce(enemy: Enemy) -> None:
        request = frames.encode_rts(frames.Rts(100_000))
        for _ in range(2):
            enemy.say(Kind.RTS, request, sequence=7, dtype=code_of(np.dtype(np.uint8)))

    with at_war(kind) as enemy:
        if is_late:
            announce(enemy)
        receives = [
            enemy.communicator.recv(np.zeros(100_000, np.uint8), 1, 0, timeout_s=20)
            for _ in range(2)
        ]
        if not is_late:
            announce(enemy)
        assert all("again" in str(lost(work)) for work in receives)


@pytest.mark.parametrize("kind", ["tls+shm", *NATIVE[1:]])
def test_slots_of_a_shared_memory_that_are_not_theirs_to_name(kind: str) -> None:
    def credit_for_a_free_slot(enemy: Enemy) -> None:
        frame, _ = enemy.hear()
        enemy.say(Kind.SLOT_FREE, tag=frame.tag)
        enemy.say(Kind.SLOT_FREE, tag=frame.tag)

    def slot_that_is_not_there(enemy: Enemy) -> None:
        frame, data = enemy.hear()
        enemy.blocking.send_all(
            frames.encode(frame._replace(source=1, flags=IN_LINK_MEMORY, tag=99, length=len(data)))
        )

    def empty_payload_in_a_slot(enemy: Enemy) -> None:
        frame, _ = enemy.hear()
        enemy.blocking.send_all(
            frames.encode(frame._replace(source=1, flags=IN_LINK_MEMORY, tag=0, length=0))
        )

    def more_than_a_slot(enemy: Enemy) -> None:
        frame, _ = enemy.hear()
        enemy.blocking.send_all(
            frames.encode(frame._replace(source=1, flags=IN_LINK_MEMORY, tag=0, length=2 << 20))
        )

    for attack in (
        credit_for_a_free_slot,
        slot_that_is_not_there,
        empty_payload_in_a_slot,
        more_than_a_slot,
    ):
        with at_war(kind) as enemy:
            work = reduce_with_the_enemy(enemy.communicator)
            attack(enemy)
            lost(work)


@pytest.mark.parametrize("kind", ["inproc", "tls", "tls+shm", *NATIVE])
def test_random_frames_never_break_the_loop(
    kind: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    choose = random.Random(seed)
    for _ in range(40):
        with at_war(kind) as enemy:
            work = reduce_with_the_enemy(enemy.communicator)
            mine, _data = enemy.hear()
            with contextlib.suppress(LinkError):
                for _ in range(200):
                    payload = choose.randbytes(choose.choice([0, 0, 3, 8, 100, mine.length]))
                    frame = Frame(
                        choose.choice(list(Kind)),
                        choose.choice([EPOCH] * 9 + [0]),
                        channel=choose.choice([0, 1, 1, 1, 9]),
                        chunk=choose.choice([0, 1, 2, 2**32 - 1]),
                        sequence=choose.choice([0, 0, 1, 2**64 - 1]),
                        segment=choose.choice([0, 0, 1, 2**32 - 1]),
                        length=len(payload),
                        fingerprint=choose.choice([mine.fingerprint] * 3 + [0]),
                        source=choose.choice([1] * 9 + [0, 65535]),
                        dtype=choose.choice([4, 4, 0, 255]),
                        flags=choose.choice([0] * 9 + [1, 255]),
                        tag=choose.choice([0, 0, 1, -1, 2**31 - 1]),
                    )
                    enemy.blocking.send_all(frames.encode(frame) + payload)
            enemy.link.close()
            with pytest.raises(GroupError) as caught:
                work.wait(30)
                enemy.communicator.run(Request(Operation.BARRIER, timeout_s=5)).wait(30)
            assert "please report" not in str(caught.value)
    assert not caplog.records


FLOODS: dict[str, Callable[[Enemy, int], None]] = {
    "frames of operations to come": lambda enemy, n: enemy.say(
        Kind.DATA, bytes(1000), channel=0, sequence=n
    ),
    "empty frames of operations to come": lambda enemy, n: enemy.say(Kind.DATA, sequence=n),
    "frames on channels that never come": lambda enemy, n: enemy.say(Kind.DATA, channel=n + 2),
    "messages nobody receives": lambda enemy, n: enemy.say(Kind.EAGER, bytes(2000), tag=n),
    "requests nobody grants": lambda enemy, n: enemy.say(
        Kind.RTS, frames.encode_rts(frames.Rts(10**12)), sequence=n, tag=n
    ),
    "questions about operations to come": lambda enemy, n: enemy.say(Kind.HANG_QUERY, sequence=n),
    "hang queries to pass on": lambda enemy, n: enemy.say(Kind.HANG_QUERY, sequence=n, segment=1),
    "answers nobody asked for": lambda enemy, n: enemy.say(Kind.HANG_REPORT, sequence=n, chunk=1),
}


HARMLESS = {"questions about operations to come", "answers nobody asked for"}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_takes_a_bounded_part_of_the_memory(flood: str) -> None:
    bound = 64 * 1024
    # What lies in the link is taken, too: all it holds, if the loop does not run for a moment.
    with at_war(capacity=bound, max_early_bytes=bound, segment_bytes=8192) as enemy:
        tracemalloc.start()
        try:
            with contextlib.suppress(LinkError):
                for number in range(8000):
                    FLOODS[flood](enemy, number)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken < 16 * bound
        wait_s = 0.1 if flood in HARMLESS else 10
        expected = OperationTimeout if flood in HARMLESS else PeerLost
        with pytest.raises(expected) as caught:
            enemy.communicator.recv(np.ones(1), 1, 99_999, timeout_s=wait_s).wait(30)
        assert caught.value.rank == 1


@pytest.mark.parametrize("kind", ["tls", *NATIVE[:1]])
def test_a_peer_that_does_not_read_makes_a_stalled_call_keep_no_more_than_its_plan(
    kind: str,
) -> None:
    """Rank 0 can't send, so that what rank 1 sends has to wait. 1.5 GiB are on offer."""
    array = np.ones(16 << 20, np.float32)
    segment_bytes, chunk_bytes = 1 << 19, array.nbytes // 2
    with at_war(kind, segment_bytes=segment_bytes) as enemy:
        pair = enemy.communicator.subgroup([0, 1])
        assert pair is not None
        work = pair.run(summing(array, 60, "ring"))
        mine, _ = enemy.hear()  # and nothing after it
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def send(chunk: int, number: int, nbytes: int) -> None:
            described = {"chunk": chunk, "segment": number, "dtype": mine.dtype}
            enemy.say(
                Kind.DATA, bytes(nbytes), channel=1, fingerprint=mine.fingerprint, **described
            )

        with contextlib.suppress(LinkError):
            for number in range(chunk_bytes // segment_bytes):
                send(1 - mine.chunk, number, segment_bytes)  # combined at once
            for number in range(50):
                send(mine.chunk, number, segment_bytes)  # waits until that chunk was sent
            for number in range(96):
                send(mine.chunk, number, 16 << 20)
        assert "it sent segment 0 of chunk" in str(lost(work))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # What waits, a frame of 16 MiB here and at the enemy, and what a busy machine frees late.
    assert grown < 160 << 10, f"{grown >> 10} MiB"
