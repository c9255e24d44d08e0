"""What only links between threads do: capacity to the byte, wakers, cuts, deaths."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from potluck._core.transport.inproc import inproc_pair, new_killed, socket_pair
from potluck._core.transport.native_tls import is_available
from potluck.errors import LinkError

needs_native = pytest.mark.skipif(not is_available(), reason="needs the native core")
both = pytest.mark.parametrize(
    "make", [inproc_pair, pytest.param(socket_pair, marks=needs_native)], ids=["pipes", "sockets"]
)


def test_a_pipe_holds_its_capacity_and_not_a_byte_more() -> None:
    a, b = inproc_pair("a", "b", capacity=10)
    assert a.send(memoryview(b"0123456")) == 7
    assert a.send(memoryview(b"789abc")) == 3
    assert a.send(memoryview(b"abc")) == 0
    buffer = bytearray(4)
    assert b.recv_into(memoryview(buffer)) == 4
    assert a.send(memoryview(b"abcdef")) == 4  # round the end of the ring
    rest = bytearray(20)
    assert b.recv_into(memoryview(rest)) == 10
    assert buffer + rest[:10] == b"0123456789abcd"


def test_a_pipe_without_room_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        inproc_pair("a", "b", capacity=0)


def test_each_end_names_the_other_and_has_no_descriptor() -> None:
    a, b = inproc_pair("rank 0", "rank 1")
    assert (a.peer, b.peer) == ("rank 1", "rank 0")
    assert (a.fileno(), b.fileno()) == (-1, -1)
    assert a.memory is None


def test_wakers_hear_of_bytes_of_room_and_of_the_end() -> None:
    a, b = inproc_pair("a", "b", capacity=4)
    heard: list[str] = []
    a.bind(lambda: heard.append("a"))
    b.bind(lambda: heard.append("b"))
    assert heard == []
    a.send(memoryview(b"12345678"))
    assert heard == ["b"]
    b.recv_into(memoryview(bytearray(2)))
    assert heard == ["b", "a"]
    b.recv_into(memoryview(bytearray(2)))
    b.recv_into(memoryview(bytearray(2)))  # nothing there: nothing to tell
    assert heard == ["b", "a", "a"]
    a.close()
    assert heard == ["b", "a", "a", "b"]


def test_a_waker_bound_after_the_bytes_came_is_called_at_once() -> None:
    a, b = inproc_pair("a", "b")
    a.send(memoryview(b"x"))
    heard: list[str] = []
    b.bind(lambda: heard.append("b"))
    assert heard == ["b"]


def test_an_end_of_a_killed_worker_moves_no_byte_and_can_be_closed() -> None:
    a, b = inproc_pair("a", "b")
    b.send(memoryview(b"lost"))
    a.killed.set()
    with pytest.raises(LinkError, match="this worker was killed"):
        a.recv_into(memoryview(bytearray(4)))
    with pytest.raises(LinkError, match="this worker was killed"):
        a.send(memoryview(b"x"))
    a.close()
    with pytest.raises(LinkError, match="a closed the link"):
        b.send(memoryview(b"x"))


@both
def test_all_links_of_a_killed_worker_end_at_one_moment(make: Callable[..., Any]) -> None:
    dead, alive = new_killed(), new_killed()
    pairs = [make("dead", f"peer {number}", (dead, alive)) for number in range(2)]
    for mine, theirs in pairs:
        mine.send(memoryview(b"last words"))
        theirs.send(memoryview(b"not heard"))
    dead.set()
    for mine, _ in pairs:
        with pytest.raises(LinkError, match="this worker was killed"):
            mine.send(memoryview(b"x"))
        with pytest.raises(LinkError, match="this worker was killed"):
            mine.recv_into(memoryview(bytearray(9)))
    for mine, theirs in pairs:
        mine.cut()
        heard = bytearray(20)
        assert theirs.recv_into(memoryview(heard)) == len(b"last words")
        with pytest.raises(LinkError, match="dead closed the link while receiving"):
            theirs.recv_into(memoryview(heard))
        with pytest.raises(LinkError, match="dead closed the link while sending"):
            theirs.send(memoryview(b"x"))
        mine.close()
        theirs.close()


@both
def test_a_cut_from_another_thread_may_come_when_the_link_is_closed(
    make: Callable[..., Any],
) -> None:
    mine, theirs = make("a", "b", (new_killed(), new_killed()))
    mine.close()
    thread = threading.Thread(target=mine.cut)
    thread.start()
    thread.join()
    with pytest.raises(LinkError, match="link to b was closed here"):
        mine.send(memoryview(b"x"))
    theirs.close()
