from __future__ import annotations

from types import SimpleNamespace

import pytest

from potluck.errors import ProtocolError

LIMIT = 100_000


def test_a_sender_stops_at_the_limit_and_goes_on_when_credit_returns(twin: SimpleNamespace) -> None:
    flow = twin.FlowControl(LIMIT)
    num = 0
    while flow.may_send(0, num, 10_000):
        flow.sent(10_000)
        num += 1
    assert num == LIMIT // (10_000 + twin.FRAME_OVERHEAD)
    flow.add_credit(10_000 + twin.FRAME_OVERHEAD)
    assert flow.may_send(0, num, 10_000)


def test_a_frame_larger_than_the_limit_may_go_alone(twin: SimpleNamespace) -> None:
    flow = twin.FlowControl(LIMIT)
    assert flow.may_send(0, 0, 2 * LIMIT)
    flow.sent(1)
    assert not flow.may_send(0, 0, 2 * LIMIT)


def test_operations_that_the_peer_has_begun_need_no_credit(twin: SimpleNamespace) -> None:
    flow = twin.FlowControl(LIMIT)
    flow.sent(2 * LIMIT)
    assert not flow.may_send(3, 7, 10)
    flow.has_begun(3, 7)
    assert flow.may_send(3, 7, 10)
    assert flow.may_send(3, 0, 10), "calls on one channel begin in order"
    assert not flow.may_send(3, 8, 10)
    assert not flow.may_send(2, 7, 10), "channels are apart"
    flow.has_begun(3, 2)
    assert flow.may_send(3, 7, 10), "what has begun stays begun"
    assert not flow.has_credit(10)


def test_more_credit_than_was_spent_is_a_lie(twin: SimpleNamespace) -> None:
    flow = twin.FlowControl(LIMIT)
    flow.sent(10)
    with pytest.raises(
        ProtocolError, match="it returned credit for 1000 bytes, but only 266 were sent"
    ):
        flow.add_credit(1000)


def test_credit_returns_a_quarter_of_the_limit_at_a_time(twin: SimpleNamespace) -> None:
    flow, peer = twin.FlowControl(LIMIT), twin.FlowControl(LIMIT)
    returned = []
    for _ in range(100):
        peer.sent(1000)
        if credit := flow.consume(1000):
            returned.append(credit)
            peer.add_credit(credit)
    assert returned == [20 * (1000 + twin.FRAME_OVERHEAD)] * 5
    assert peer.in_flight == 0


def test_what_is_held_has_a_bound_even_if_it_is_empty(twin: SimpleNamespace) -> None:
    flow = twin.FlowControl(LIMIT)
    for _ in range(2 * LIMIT // twin.FRAME_OVERHEAD):
        flow.hold(0)
    with pytest.raises(ProtocolError, match="is max_early_bytes, here 100000, the same"):
        flow.hold(0)


def test_a_receiver_speaks_up_once_it_holds_a_quarter(twin: SimpleNamespace) -> None:
    flow = twin.FlowControl(LIMIT)
    flow.hold(10_000)
    assert not flow.is_filling
    flow.hold(20_000)
    assert flow.is_filling
    flow.release(20_000)
    flow.release(10_000)
    assert flow.held_bytes == 0
    assert not flow.is_filling


def test_later_operations_that_took_all_credit_never_block_an_earlier_one(
    twin: SimpleNamespace,
) -> None:
    """The receiver waits in operation 0; operations 1 to n have taken the sender's credit."""
    sender, receiver = twin.FlowControl(LIMIT), twin.FlowControl(LIMIT)
    number = 1
    while sender.may_send(0, number, 9000):
        sender.sent(9000)
        receiver.hold(9000)
        number += 1
    assert not sender.may_send(0, 0, 9000)
    assert receiver.is_filling, "so the receiver tells that it has begun operation 0"
    sender.has_begun(0, 0)
    assert sender.may_send(0, 0, 9000)
