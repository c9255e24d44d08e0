from __future__ import annotations

import numpy as np

from potluck.engine.loop.mailbox import ANY_SOURCE, Arrived, Mailbox, Receiving, fits, sending
from potluck.engine.loop.running import as_bytes
from potluck.engine.work import Work
from potluck.wire.frames import Frame, Kind

RANKS = (0, 1, 2)


def receiving(source: int, tag: int = 0, channel: int = 0, count: int = 4) -> Receiving:
    array = np.zeros(count)
    return Receiving(
        source=source,
        channel=channel,
        ranks=RANKS,
        tag=tag,
        dtype=4,
        array=array,
        data=as_bytes(array),
        work=Work("recv"),
        deadline=0.0,
    )


def arrived(
    source: int, tag: int = 0, channel: int = 0, nbytes: int = 32, number: int = 1
) -> Arrived:
    frame = Frame(Kind.EAGER, 1, channel=channel, operation=number, dtype=4, tag=tag)
    return Arrived(source, frame, nbytes, bytearray(nbytes))


def test_a_receive_finds_the_message_that_waits() -> None:
    box = Mailbox()
    message = arrived(1)
    assert box.arrive(message) is None
    assert box.post(receiving(1)) is message
    later = receiving(1)
    assert box.post(later) is None
    assert box.arrive(arrived(1)) is later
    assert box.pending() == []


def test_equal_tags_keep_the_order_in_which_they_came() -> None:
    box = Mailbox()
    messages = [arrived(1, number=number) for number in range(3)]
    for message in messages:
        box.arrive(message)
    assert [box.post(receiving(1)) for _ in range(3)] == messages
    posts = [receiving(1) for _ in range(3)]
    for post in posts:
        box.post(post)
    assert [box.arrive(arrived(1)) for _ in range(3)] == posts


def test_tag_channel_and_source_must_fit() -> None:
    box = Mailbox()
    for other in (arrived(1, tag=1), arrived(1, channel=1), arrived(2)):
        box.arrive(other)
    assert box.post(receiving(1)) is None
    assert box.post(receiving(ANY_SOURCE, tag=1)) is not None
    assert box.post(receiving(ANY_SOURCE, channel=1)) is not None


def test_any_source_is_any_member_of_the_channel() -> None:
    box = Mailbox()
    stranger = arrived(7)
    box.arrive(stranger)
    post = receiving(ANY_SOURCE)
    assert box.post(post) is None
    assert box.arrive(arrived(2)) is post


def test_a_message_of_another_size_or_dtype_does_not_fit() -> None:
    assert fits(receiving(1), arrived(1))
    assert not fits(receiving(1), arrived(1, nbytes=31))
    message = arrived(1)
    message.frame = message.frame._replace(dtype=7)
    assert not fits(receiving(1), message)


def test_what_is_pending_says_whom_it_waits_for() -> None:
    box = Mailbox()
    item = sending(2, 0, 5, 4, 1, np.zeros(3), Work("send"), 0.0)
    box.sending[1] = item
    post = receiving(ANY_SOURCE, tag=3)
    box.post(post)
    assert [each.awaited() for each in box.pending()] == [
        [(2, "send of 24 bytes, tag 5")],
        [(ANY_SOURCE, "receive of 32 bytes, tag 3")],
    ]
    post.matched = 1
    assert post.awaited() == [(1, "receive of 32 bytes, tag 3")]


def test_who_must_not_leave() -> None:
    item = sending(2, 0, 5, 4, 1, np.zeros(3), Work("send"), 0.0)
    assert item.missing({0, 1}) is None
    assert item.missing({1, 2}) == 2
    anyone = receiving(ANY_SOURCE)
    assert anyone.missing({1}) is None, "rank 2 may still send"
    assert anyone.missing({1, 2}) == 1
    anyone.matched = 2
    assert anyone.missing({1}) is None
    assert anyone.missing({2}) == 2
    assert receiving(1).missing({1}) == 1
    assert receiving(1).missing({2}) is None
