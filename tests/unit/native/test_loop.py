"""The native loop's thread and Python's lock."""

from __future__ import annotations

import ctypes
import socket
import sys
import time

import numpy as np
import pytest

from potluck._core import native
from support.links import tls_ends

pytestmark = pytest.mark.skipif(
    not hasattr(native.core, "ProgressLoop") or sys.platform == "win32",
    reason="needs the native loop",
)

COUNT, NBYTES = 8, 1000


def test_operations_end_while_another_thread_keeps_the_interpreter_lock() -> None:
    links = tls_ends(*socket.socketpair(), native=(True, True))
    loops = [native.core.ProgressLoop(1, rank, 2, 1 << 16, 1 << 20) for rank in range(2)]
    arrays = np.arange(COUNT * NBYTES, dtype=np.uint8).reshape(COUNT, NBYTES)
    arrived = np.zeros_like(arrays)
    tickets = [[loop.ticket(number) for number in range(COUNT)] for loop in loops]
    deadline = time.monotonic() + 20.0
    # Unlike ctypes.CDLL and time.sleep, this keeps the lock; nobody may ask for it back either.
    stay = ctypes.PyDLL(None).usleep
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        for rank, link in enumerate(links):
            loops[rank].adopt(rank, 1 - rank, link.stream, "the other", 0, (), ())
        for number in range(COUNT):
            source, target = arrays[number].ctypes.data, arrived[number].ctypes.data
            loops[0].send(tickets[0][number], "send", 1, 0, 0, 0, source, NBYTES, deadline + 20)
            loops[1].receive(
                tickets[1][number], "recv", 0, 0, [0, 1], 0, 0, target, NBYTES, deadline + 20
            )
        while time.monotonic() < deadline and any(
            ticket.state == "running" for each in tickets for ticket in each
        ):
            stay(1000)
        states = [[ticket.state for ticket in each] for each in tickets]
    finally:
        sys.setswitchinterval(interval)
        for loop in loops:
            loop.close()
        for loop in loops:
            loop.join()
        for link in links:
            link.close()
    assert states == [["done"] * COUNT] * 2
    assert np.array_equal(arrived, arrays)


def test_a_loop_that_breaks_says_why_and_lets_go_who_waits() -> None:
    links = tls_ends(*socket.socketpair(), native=(True, True))
    loop = native.core.ProgressLoop(1, 0, 2, 1 << 16, 1 << 20)
    waiting, target = loop.ticket(1), np.zeros(NBYTES, dtype=np.uint8)
    deadline = time.monotonic() + 600.0
    loop.receive(waiting, "recv", 1, 0, [0, 1], 0, 0, target.ctypes.data, NBYTES, deadline)
    for link in links:
        link.close()
    # A descriptor that nobody can wait for.
    loop.adopt(2, 1, links[0].stream, "the other", 0, (), ())
    kinds: list[str] = []
    while "group failed" not in kinds:
        kinds += [kind for kind, _ in loop.events(20.0)]
    kind, rank, text, *_ = loop.failure()
    assert (kind, rank) == ("broke", 0)
    assert text
    loop.set_abort(b"", False)
    assert waiting.wait(20.0)
    assert waiting.state == "failed"
    loop.join()
