"""The thread that encodes beside backward: order, errors, and a system without threads."""

from __future__ import annotations

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
