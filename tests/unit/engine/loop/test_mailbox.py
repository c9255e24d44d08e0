from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from potluck._core.engine.loop.mailbox import ANY_SOURCE
from potluck._core.wire.frames import Frame, Kind

RANKS = (0, 1, 2)


def receiving(
    twin: SimpleNamespace, source: int, tag: int = 0, channel: int = 0, count: int = 4
) -> Any:
    return twin.receiving(source, channel, RANKS, tag, 4, np.zeros(count))


def arrived(
    twin: SimpleNamespace,
    source: int,
    tag: int = 0,
    channel: int = 0,
    nbytes: int = 32,
    number: int = 1,
) -> Any:
    frame = Frame(Kind.EAGER, 1, channel=channel, sequence=number, dtype=4, tag=tag)
    return twin.Arrived(source, frame, nbytes, bytearray(nbytes))


def test_a_receive_finds_the_message_that_waits(twin: SimpleNamespace) -> None:
    box = twin.Mailbox()
    message = arrived(twin, 1)
    assert box.arrive(message) is None
    assert box.post(receiving(twin, 1)) == message
    later = receiving(twin, 1)
    assert box.post(later) is None
    assert box.arrive(arrived(twin, 1)) is later
    assert box.pending() == []


def test_equal_tags_keep_the_order_in_which_they_came(twin: SimpleNamespace) -> None:
    box = twin.Mailbox()
    messages = [arrived(twin, 1, number=number) for number in range(3)]
    for message in messages:
        box.arrive(message)
    assert [box.post(receiving(twin, 1)) for _ in range(3)] == messages
    posts = [receiving(twin, 1) for _ in range(3)]
    for post in posts:
        box.post(post)
    assert [box.arrive(arrived(twin, 1)) for _ in range(3)] == posts


def test_tag_channel_and_source_must_fit(twin: SimpleNamespace) -> None:
    box = twin.Mailbox()
    for other in (arrived(twin, 1, tag=1), arrived(twin, 1, channel=1), arrived(twin, 2)):
        box.arrive(other)
    assert box.post(receiving(twin, 1)) is None
    assert box.post(receiving(twin, ANY_SOURCE, tag=1)) is not None
    assert box.post(receiving(twin, ANY_SOURCE, channel=1)) is not None


def test_any_source_is_any_member_of_the_channel(twin: SimpleNamespace) -> None:
    box = twin.Mailbox()
    stranger = arrived(twin, 7)
    box.arrive(stranger)
    post = receiving(twin, ANY_SOURCE)
    assert box.post(post) is None
    assert box.arrive(arrived(twin, 2)) is post


def test_a_message_of_another_size_or_dtype_does_not_fit(twin: SimpleNamespace) -> None:
    assert twin.fits(receiving(twin, 1), arrived(twin, 1))
    assert not twin.fits(receiving(twin, 1), arrived(twin, 1, nbytes=31))
    message = arrived(twin, 1)
    message.frame = message.frame._replace(dtype=7)
    assert not twin.fits(receiving(twin, 1), message)


def test_what_is_pending_says_whom_it_waits_for(twin: SimpleNamespace) -> None:
    box = twin.Mailbox()
    item = twin.sending(2, 0, 5, 4, 1, np.zeros(3))
    twin.add_sending(box, item)
    post = receiving(twin, ANY_SOURCE, tag=3)
    box.post(post)
    assert [each.awaited() for each in box.pending()] == [
        [(2, "send of 24 bytes, tag 5")],
        [(ANY_SOURCE, "receive of 32 bytes, tag 3")],
    ]
    post.matched = 1
    assert post.awaited() == [(1, "receive of 32 bytes, tag 3")]


def test_who_must_not_leave(twin: SimpleNamespace) -> None:
    item = twin.sending(2, 0, 5, 4, 1, np.zeros(3))
    assert item.missing({0, 1}) is None
    assert item.missing({1, 2}) == 2
    anyone = receiving(twin, ANY_SOURCE)
    assert anyone.missing({1}) is None, "rank 2 may still send"
    assert anyone.missing({1, 2}) == 1
    anyone.matched = 2
    assert anyone.missing({1}) is None
    assert anyone.missing({2}) == 2
    assert receiving(twin, 1).missing({1}) == 1
    assert receiving(twin, 1).missing({2}) is None
