"""The thread that encodes beside backward: order, errors, and a system without threads."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from potluck.torch import encoding
from potluck.torch.encoding import Encoder


def test_tasks_run_in_order_and_an_error_drops_those_behind_it() -> None:
    encoder, done = Encoder(), list[int]()

    def fails() -> None:
        raise ArithmeticError("no")

    encoder.add(lambda: done.append(1))
    encoder.drain()
    encoder.add(lambda: done.append(2))
    encoder.add(fails)
    encoder.add(lambda: done.append(3))
    with pytest.raises(ArithmeticError, match="no"):
        encoder.drain()
    encoder.add(lambda: done.append(4))
    encoder.drain()
    assert done == [1, 2, 4]


def test_a_system_that_has_no_thread_raises_and_the_next_task_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    encoder, done = Encoder(), list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(encoding, "start_thread", refuses)
        with pytest.raises(RuntimeError, match="can't start"):
            encoder.add(lambda: done.append(1))
    encoder.drain()
    encoder.add(lambda: done.append(2))
    encoder.drain()
    assert done == [2]


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "potluck-encode"]


def test_one_thread_serves_an_encoder_for_its_life_and_ends_with_it() -> None:
    encoder, found = Encoder(), list[threading.Thread]()
    assert threads() == [], "an encoder that encodes nothing has no thread"
    for _ in range(3):
        for _ in range(2):
            encoder.add(lambda: found.append(threading.current_thread()))
        encoder.drain()
    [thread] = threads()
    assert found == [thread] * 6
    encoder.add(lambda of=encoder: found.append(of))  # type: ignore[misc]
    encoder.drain()
    found.clear()
    del encoder
    thread.join(30)
    assert not thread.is_alive()


def test_a_drop_forgets_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, done, began, drops = Encoder(), list[int](), threading.Event(), threading.Event()
    ended = encoder._queue.ended

    def noting() -> BaseException | None:
        drops.set()
        return ended()

    def holds() -> None:
        began.set()
        assert drops.wait(30)
        done.append(1)

    encoder.add(holds)
    encoder.add(lambda: done.append(2))
    assert began.wait(30)
    monkeypatch.setattr(encoder._queue, "ended", noting)
    encoder.drop()
    encoder.add(lambda: done.append(3))
    encoder.drain()
    assert done == [1, 3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_has_a_thread_of_its_own() -> None:
    encoder, done = Encoder(), list[int]()
    encoder.add(lambda: done.append(1))
    encoder.drain()
    child = os.fork()
    if not child:
        signal.alarm(30)
        encoder.drain()
        encoder.add(lambda: done.append(2))
        encoder.drain()
        os._exit(0 if done == [1, 2] and len(threads()) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    encoder.add(lambda: done.append(3))
    encoder.drain()
    assert done == [1, 3]
