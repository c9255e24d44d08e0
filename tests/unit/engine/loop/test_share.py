from __future__ import annotations

import pytest

from potluck.engine.loop.share import OVERHEAD, Share
from potluck.errors import ProtocolError

LIMIT = 100_000


def test_a_sender_stops_at_the_limit_and_goes_on_when_something_was_used() -> None:
    share = Share(LIMIT)
    num = 0
    while share.may_send(0, num, 10_000):
        share.sent(10_000)
        num += 1
    assert num == LIMIT // (10_000 + OVERHEAD)
    share.reported(10_000 + OVERHEAD)
    assert share.may_send(0, num, 10_000)


def test_a_frame_larger_than_the_limit_may_go_alone() -> None:
    share = Share(LIMIT)
    assert share.may_send(0, 0, 2 * LIMIT)
    share.sent(1)
    assert not share.may_send(0, 0, 2 * LIMIT)


def test_operations_that_the_peer_has_begun_need_no_room() -> None:
    share = Share(LIMIT)
    share.sent(2 * LIMIT)
    assert not share.may_send(3, 7, 10)
    share.has_begun(3, 7)
    assert share.may_send(3, 7, 10)
    assert share.may_send(3, 0, 10), "calls on one channel begin in order"
    assert not share.may_send(3, 8, 10)
    assert not share.may_send(2, 7, 10), "channels are apart"
    share.has_begun(3, 2)
    assert share.may_send(3, 7, 10), "what has begun stays begun"
    assert not share.has_room(10)


def test_more_used_than_was_sent_is_a_lie() -> None:
    share = Share(LIMIT)
    share.sent(10)
    with pytest.raises(ProtocolError, match="it has used 1000 bytes, but only 266 were sent"):
        share.reported(1000)


def test_use_is_reported_a_quarter_of_the_limit_at_a_time() -> None:
    share, peer = Share(LIMIT), Share(LIMIT)
    reports = []
    for _ in range(100):
        peer.sent(1000)
        if report := share.use(1000):
            reports.append(report)
            peer.reported(report)
    assert reports == [20 * (1000 + OVERHEAD)] * 5
    assert peer.ahead == 0


def test_what_is_held_has_a_bound_even_if_it_is_empty() -> None:
    share = Share(LIMIT)
    for _ in range(2 * LIMIT // OVERHEAD):
        share.hold(0)
    with pytest.raises(ProtocolError, match="is max_early_bytes, here 100000, the same"):
        share.hold(0)


def test_a_receiver_speaks_up_once_it_holds_a_quarter() -> None:
    share = Share(LIMIT)
    share.hold(10_000)
    assert not share.is_filling
    share.hold(20_000)
    assert share.is_filling
    share.release(20_000)
    share.release(10_000)
    assert share.held == 0
    assert not share.is_filling


def test_a_share_full_of_later_operations_never_blocks_an_earlier_one() -> None:
    """The receiver waits in operation 0; the sender has filled the share with 1 to n."""
    sender, receiver = Share(LIMIT), Share(LIMIT)
    number = 1
    while sender.may_send(0, number, 9000):
        sender.sent(9000)
        receiver.hold(9000)
        number += 1
    assert not sender.may_send(0, 0, 9000)
    assert receiver.is_filling, "so the receiver tells that it has begun operation 0"
    sender.has_begun(0, 0)
    assert sender.may_send(0, 0, 9000)
