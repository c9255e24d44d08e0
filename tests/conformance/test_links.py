"""What every link promises, on every implementation of one."""

from __future__ import annotations

import hashlib
import random
import select
import threading
from collections.abc import Iterator

import pytest

from potluck._core.transport.link import Link
from potluck.errors import LinkError
from support.links import LINK_KINDS, Blocking

Ends = tuple[Link, Link]
CHUNK = memoryview(bytes(64 * 1024))


@pytest.fixture(params=list(LINK_KINDS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with LINK_KINDS[request.param]() as pair:
        yield pair


def in_thread(target, *arguments) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments)
    thread.start()
    return thread


def shows_bytes(link: Link) -> bool:
    """Whether the descriptor, if there is one, tells of bytes to read."""
    poll = select.poll()
    if link.fileno() >= 0:
        poll.register(link.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def fill(link: Link) -> int:
    """Send zeros until the link takes no more; returns how many it took.

    The system may still be moving bytes to the other side after a refusal: it takes three, with
    pauses for the link to become ready.
    """
    poll = select.poll()
    if link.fileno() >= 0:
        poll.register(link.fileno(), select.POLLOUT)
    total = num_refused = 0
    while num_refused < 3:
        count = link.send(CHUNK)
        total += count
        num_refused = 0 if count else num_refused + 1
        if num_refused and link.fileno() >= 0:
            poll.poll(50)
        assert total < 1 << 28, "a link that never fills has no backpressure"
    return total


def test_bytes_arrive_in_order_whatever_the_sizes_of_sends_and_receives(
    ends: Ends, seed: int
) -> None:
    choose = random.Random(seed)
    data = choose.randbytes(3_000_000)
    pieces = []
    start = 0
    while start < len(data):
        size = choose.choice([1, 2, 7, 100, 4096, 16_384, 16_385, 100_000])
        pieces.append(data[start : start + size])
        start += size

    def send() -> None:
        for piece in pieces:
            Blocking(ends[0]).send_all(piece)

    sender = in_thread(send)
    receiver = Blocking(ends[1])
    received = b""
    while len(received) < len(data):
        size = min(choose.choice([1, 3, 500, 20_000, 70_000]), len(data) - len(received))
        received += receiver.receive(size)
    sender.join()
    assert received == data


def test_both_directions_carry_large_transfers_at_the_same_time(ends: Ends, seed: int) -> None:
    data = random.Random(seed).randbytes(24 << 20)
    digests: dict[int, bytes] = {}

    # One thread owns a link, so each end takes turns at sending and receiving.
    def both(which: int) -> None:
        end = ends[which]
        view, buffer = memoryview(data), memoryview(bytearray(1 << 20))
        digest = hashlib.sha256()
        sent = got = 0
        woken = threading.Event()
        end.bind(woken.set)
        while sent < len(data) or got < len(data):
            woken.clear()
            moved = end.send(view[sent:]) if sent < len(data) else 0
            sent += moved
            count = end.recv_into(buffer) if got < len(data) else 0
            digest.update(buffer[:count])
            got += count
            if moved or count:
                continue
            if end.fileno() < 0:
                assert woken.wait(30)
            else:
                poll = select.poll()
                poll.register(
                    end.fileno(), select.POLLIN | (select.POLLOUT if sent < len(data) else 0)
                )
                assert poll.poll(30_000)
        digests[which] = digest.digest()

    threads = [in_thread(both, which) for which in (0, 1)]
    for thread in threads:
        thread.join()
    assert digests == {0: hashlib.sha256(data).digest(), 1: hashlib.sha256(data).digest()}


def test_a_full_link_takes_nothing_and_recovers_when_it_is_read(ends: Ends) -> None:
    sender, receiver = ends
    total = fill(sender)
    assert total > 0
    assert sender.send(CHUNK) == 0
    far = Blocking(receiver)
    drain = in_thread(far.receive, total)
    # What was refused is offered again first, then something one can recognise.
    Blocking(sender).send_all(CHUNK)
    Blocking(sender).send_all(b"the end")
    drain.join()
    assert far.receive(len(CHUNK)) == bytes(CHUNK)
    assert far.receive(7) == b"the end"


def test_an_idle_link_gives_nothing_and_wakes_its_reader_when_bytes_come(ends: Ends) -> None:
    near, far = ends
    assert near.recv_into(memoryview(bytearray(10))) == 0
    assert not near.readable
    received: list[bytes] = []
    reader = in_thread(lambda: received.append(Blocking(near).receive(5)))
    Blocking(far).send_all(b"hello")
    reader.join()
    assert received == [b"hello"]


def test_bytes_that_are_already_decrypted_are_announced(ends: Ends) -> None:
    near, far = ends
    Blocking(far).send_all(b"x" * 1000)
    assert Blocking(near).receive(1) == b"x"
    assert near.readable or shows_bytes(near)
    Blocking(near).receive(999)
    assert not near.readable
    assert not shows_bytes(near)


def test_nothing_is_sent_or_received_by_empty_views(ends: Ends) -> None:
    near, far = ends
    Blocking(far).send_all(b"y")
    assert near.send(memoryview(b"")) == 0
    assert near.recv_into(memoryview(bytearray())) == 0
    assert Blocking(near).receive(1) == b"y"


def test_what_was_sent_before_the_peer_closed_can_still_be_read(ends: Ends) -> None:
    near, far = ends
    Blocking(far).send_all(b"last words")
    far.close()
    end = Blocking(near)
    assert end.receive(10) == b"last words"
    with pytest.raises(LinkError):
        end.receive(1)
    assert near.readable, "an end is something to be read"
    with pytest.raises(LinkError):
        end.receive(1)


def test_sending_to_a_peer_that_closed_raises_instead_of_waiting(ends: Ends) -> None:
    near, far = ends
    far.close()
    with pytest.raises(LinkError) as caught:
        Blocking(near).send_all(bytes(1 << 28))
    assert near.peer in str(caught.value)


def test_last_words_can_be_read_after_a_send_has_failed(ends: Ends) -> None:
    """A peer that aborts says why and closes; bytes that are on the way to it are refused."""
    near, far = ends
    Blocking(far).send_all(b"last words")
    far.close()
    with pytest.raises(LinkError):
        Blocking(near).send_all(bytes(1 << 28))
    with pytest.raises(LinkError):
        near.send(memoryview(b"more"))
    assert Blocking(near).receive(10) == b"last words"
    with pytest.raises(LinkError):
        Blocking(near).receive(1)


def test_a_closing_peer_wakes_whoever_waits_to_read(ends: Ends) -> None:
    near, far = ends
    caught: list[BaseException] = []

    def read() -> None:
        try:
            Blocking(near).receive(1)
        except LinkError as error:
            caught.append(error)

    reader = in_thread(read)
    far.close()
    reader.join()
    assert len(caught) == 1


def test_a_closed_link_can_be_closed_again_and_raises_for_everything_else(ends: Ends) -> None:
    near, _ = ends
    near.close()
    near.close()
    with pytest.raises(LinkError):
        near.send(memoryview(b"x"))
    with pytest.raises(LinkError):
        near.recv_into(memoryview(bytearray(1)))


def test_a_link_names_its_peer(ends: Ends) -> None:
    assert ends[0].peer
    assert ends[0].peer in repr(ends[0])


def test_link_memory_where_there_is_one_shows_each_side_what_the_other_wrote(
    ends: Ends,
) -> None:
    near, far = ends
    assert (near.memory is None) == (far.memory is None)
    if near.memory is None or far.memory is None:
        return
    assert near.memory.num_slots == far.memory.num_slots
    for slot in range(near.memory.num_slots):
        near.memory.outgoing(slot)[:] = bytes([slot + 1]) * near.memory.slot_bytes
        far.memory.outgoing(slot)[:] = bytes([slot + 101]) * far.memory.slot_bytes
    for slot in range(near.memory.num_slots):
        assert far.memory.incoming(slot) == bytes([slot + 1]) * near.memory.slot_bytes
        assert near.memory.incoming(slot) == bytes([slot + 101]) * near.memory.slot_bytes
