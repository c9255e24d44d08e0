"""Pollers: one notice for each connection, on one of many threads, on every system's terms."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from potluck.services import poller as pollers
from potluck.services.poller import Poller, SelectorPoller

LATE_S = 20.0

KINDS: dict[str, Callable[[], Poller]] = {"selector": SelectorPoller, "own": pollers.poller}


@pytest.fixture(params=KINDS)
def poller(request: pytest.FixtureRequest) -> Iterator[Poller]:
    made = KINDS[request.param]()
    yield made
    made.close()


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def heard(poller: Poller) -> int:
    """The next descriptor; ``wait`` may return None for no reason."""
    deadline = time.monotonic() + LATE_S
    while time.monotonic() < deadline:
        if (fd := poller.wait(1.0)) is not None:
            return fd
    raise AssertionError("nothing was ready")


def is_silent(poller: Poller) -> bool:
    return all(poller.wait(0.01) is None for _ in range(5))


def test_one_notice_and_then_none_until_it_is_watched_again(poller: Poller) -> None:
    with pair() as (mine, theirs):
        poller.watch(mine.fileno(), write=False)
        assert is_silent(poller)
        theirs.send(b"x")
        assert heard(poller) == mine.fileno()
        assert is_silent(poller)  # the byte is still there
        poller.watch(mine.fileno(), write=False)
        assert heard(poller) == mine.fileno()
        poller.watch(mine.fileno(), write=True)
        assert heard(poller) == mine.fileno()
        theirs.close()
        poller.watch(mine.fileno(), write=False)
        assert heard(poller) == mine.fileno()


def test_what_is_forgotten_is_not_heard_of(poller: Poller) -> None:
    with pair() as (mine, theirs):
        poller.watch(mine.fileno(), write=False)
        poller.forget(mine.fileno())
        poller.forget(mine.fileno())
        theirs.send(b"x")
        assert is_silent(poller)
        poller.watch(mine.fileno(), write=False)
        assert heard(poller) == mine.fileno()
        poller.forget(mine.fileno())


def test_a_number_that_another_connection_has_now(poller: Poller) -> None:
    with pair() as (mine, _):
        poller.watch(mine.fileno(), write=False)
        poller.forget(mine.fileno())
        number = mine.fileno()
    with pair() as (mine, theirs):
        assert mine.fileno() == number
        poller.watch(number, write=False)
        theirs.send(b"x")
        assert heard(poller) == number


def test_each_of_many_connections_is_heard_by_one_thread(poller: Poller) -> None:
    got: list[int] = []
    over = threading.Event()

    def wait() -> None:
        while not over.is_set():
            if (fd := poller.wait(LATE_S)) is not None:
                got.append(fd)
        poller.wake()

    threads = [threading.Thread(target=wait) for _ in range(4)]
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(pair()) for _ in range(50)]
        for each in threads:
            each.start()
        for mine, theirs in pairs:
            poller.watch(mine.fileno(), write=False)
            theirs.send(b"x")
        deadline = time.monotonic() + LATE_S
        while len(got) < len(pairs) and time.monotonic() < deadline:
            over.wait(0.01)
        over.set()
        poller.wake()
        for each in threads:
            each.join(LATE_S)
            assert not each.is_alive()
        assert sorted(got) == sorted(mine.fileno() for mine, _ in pairs)


def test_a_wake_before_the_wait_is_not_lost(poller: Poller) -> None:
    poller.wake()
    began = time.monotonic()
    assert poller.wait(60.0) is None
    assert time.monotonic() - began < LATE_S


def test_a_closed_poller_takes_what_late_threads_say() -> None:
    for make in KINDS.values():
        made = make()
        made.close()
        made.wake()
        made.forget(0)
