from __future__ import annotations

import threading

import pytest

from potluck._core.engine.work import Together, Work, again, finished
from potluck.errors import OperationTimeout, PeerLost


def test_a_work_ends_once() -> None:
    work = Work("w", 5)
    assert not work.done()
    work.finish()
    work.finish(PeerLost("too late"))
    assert work.done()
    assert work.wait() == 5
    assert work.exception() is None


def test_an_error_is_raised_afresh_each_time_with_all_it_knows() -> None:
    cause = ValueError("because")
    error = PeerLost("gone", rank=3, epoch=4, operation="w", certain=True)
    error.__cause__ = cause
    work = Work("w")
    work.finish(error)
    raised = []
    for _ in range(2):
        with pytest.raises(PeerLost, match="gone") as caught:
            work.wait()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    for each in raised:
        assert (each.rank, each.epoch, each.operation, each.certain) == (3, 4, "w", True)
        assert each.__cause__ is cause
    other = KeyError("not a group's")
    assert again(other) is other


def test_waiting_too_short_leaves_the_work_alone() -> None:
    work = Work("w", 1)
    with pytest.raises(OperationTimeout, match=r"w has not ended after 0\.0 s"):
        work.wait(0.0)
    work.finish()
    assert work.wait(0.0) == 1


def test_transforms_run_once_in_order_even_for_many_waiters() -> None:
    calls: list[str] = []
    ready = threading.Event()

    def first(value: int) -> int:
        calls.append("first")
        ready.wait(5)
        return value + 1

    work = Work("w", 1).then(first).then(lambda value: value * 10)
    work.finish()
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(work.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    ready.set()
    for thread in threads:
        thread.join()
    assert results == [20] * 4
    assert calls == ["first"]


def test_callbacks_are_called_at_the_end_or_at_once(caplog: pytest.LogCaptureFixture) -> None:
    work = Work("w")
    seen: list[object] = []

    def broken(_: Work) -> None:
        raise RuntimeError("a callback's own")

    work.add_done_callback(broken)
    work.add_done_callback(seen.append)
    assert seen == []
    work.finish()
    work.add_done_callback(seen.append)
    assert seen == [work, work]
    assert "a callback's own" in caplog.text


def test_a_finished_work() -> None:
    assert finished("w", [1]).wait() == [1]


def test_works_together_end_with_the_last_of_them() -> None:
    parts = [Work("one"), Work("two")]
    both = Together("both", parts, "result")
    parts[1].finish()
    assert not both.done()
    with pytest.raises(OperationTimeout, match="both has not ended"):
        both.wait(0.01)
    parts[0].finish()
    assert both.done()
    assert both.wait() == "result"
    assert Together("none", [], "nothing").wait() == "nothing"


def test_works_together_fail_with_the_first_that_fails() -> None:
    parts = [Work("one"), Work("two")]
    both = Together("both", parts)
    parts[1].finish(ValueError("two failed"))
    assert both.done()
    parts[0].finish()
    with pytest.raises(ValueError, match="two failed"):
        both.wait()
