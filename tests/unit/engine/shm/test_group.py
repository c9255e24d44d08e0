"""The shared memory of a group: which calls are kept, and for how long."""

from __future__ import annotations

from collections.abc import Callable

from potluck._core.engine.shm.group import GroupMemory, SharedMemoryWork
from potluck._core.engine.work import Work
from potluck._core.metrics import Metrics
from potluck._core.types import Group, Member
from potluck.errors import PotluckError

GROUP = Group(1, 0, (Member("a", node="n"), Member("b", node="n")))


class Loop:
    """A group that lives on."""

    error: BaseException | None = None

    def abort(self, error: PotluckError) -> None:
        raise AssertionError(error)

    def when_over(self, callback: Callable[[], None]) -> None:
        pass


class NativeCall:
    """What the native core gives for a call that it runs."""

    def __init__(self) -> None:
        self.done = False
        self.is_watched = False

    def failure(self) -> None:
        return None

    def watch(self) -> bool:
        self.is_watched = not self.done
        return self.is_watched


class Engine:
    """Tells once of each number, then ends."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = [*numbers, 0]

    def next_ended(self) -> int:
        return self._numbers.pop(0)


def start(group: GroupMemory, call: NativeCall, *callbacks: Callable[[Work], None]) -> int:
    """Start ``call``; its number."""
    work = SharedMemoryWork("barrier()", None, group, (0, 1), is_waiting=False)
    for callback in callbacks:
        work.add_done_callback(callback)
    numbers: list[int] = []

    def begin(number: int) -> NativeCall:
        numbers.append(number)
        return call

    group.start(work, begin)
    return numbers[0]


def test_a_call_that_has_ended_is_kept_until_its_callbacks_were_told() -> None:
    group = GroupMemory(GROUP, Loop(), Metrics())
    told: list[Work] = []
    awaited = NativeCall()
    number = start(group, awaited, told.append)
    assert awaited.is_watched
    awaited.done = True  # the notice is on its way, and meanwhile many others come and go
    for _ in range(100):
        call = NativeCall()
        start(group, call)
        call.done = True
    assert told == []
    group._tell(Engine(number))
    assert len(told) == 1
    assert told[0].done()


def test_calls_that_have_ended_and_that_nobody_awaits_are_forgotten() -> None:
    group = GroupMemory(GROUP, Loop(), Metrics())
    running = NativeCall()
    kept = start(group, running)
    for _ in range(1000):
        call = NativeCall()
        start(group, call)
        call.done = True
        assert len(group._inflight) < 40
    assert kept in group._inflight
