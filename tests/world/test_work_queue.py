"""A queue of tasks between workers of one process, over every kind of link."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import potluck
from potluck._core.context import DistributedContext
from potluck.errors import ServiceTimeout, UnknownService
from potluck.testing.world import run_world
from potluck.training.work_queue import Task
from support.worlds import open_world

KINDS = ("inproc", "tls")


@pytest.mark.parametrize("kind", KINDS)
def test_every_task_has_one_result_on_every_worker(kind: str) -> None:
    begun: Counter[int] = Counter()

    def run(ctx: DistributedContext) -> list[Any]:
        tasks = [{"x": np.full(10, float(each))} for each in range(25)]
        with potluck.WorkQueue(ctx, tasks if ctx.rank == 0 else None, backups=0) as queue:
            for task in queue:
                begun[task.number] += 1
                assert queue.finish(task, task.payload["x"].sum())
            return queue.results()

    with open_world(kind, 3) as world:
        expected = [10.0 * each for each in range(25)]
        assert world.run(run) == [expected] * 3
    assert begun == Counter(range(25))


def test_a_slow_worker_is_overtaken_by_a_copy_and_its_result_is_refused() -> None:
    is_over = threading.Event()

    def slow_first(ctx: DistributedContext) -> dict[str, int]:
        # Rank 1 takes the slow task before the others begin.
        with potluck.WorkQueue(ctx, ["slow", "fast", "fast"], backups=1) as queue:
            tasks = iter(queue)
            mine = next(tasks) if ctx.rank == 1 else None
            ctx.barrier()
            if mine is not None:
                assert mine.payload == "slow"
                assert is_over.wait(20)
                assert not queue.finish(mine, "late")
            for task in tasks:
                assert queue.finish(task, "first")
            is_over.set()
            assert queue.results() == ["first"] * 3
            ctx.barrier()  # the late result was refused
            return queue.stats()

    stats, _ = run_world(2, slow_first)
    assert stats["done"] == 3
    assert (stats["copies"], stats["refused"]) == (1, 1)


def test_the_tasks_of_a_silent_worker_are_handed_out_again() -> None:
    is_over = threading.Event()

    def run(ctx: DistributedContext) -> int:
        queue = potluck.WorkQueue(ctx, list(range(6)), backups=0, silence_s=0.4)
        if ctx.rank == 1:
            tasks = iter(queue)
            next(tasks)
            queue._is_closed.set()  # no sign of life any more
            ctx.barrier()
            assert is_over.wait(20)
            return 0
        ctx.barrier()
        for task in queue:
            queue.finish(task, task.payload)
        assert queue.results() == list(range(6))
        again = queue.stats()["again"]
        is_over.set()
        queue.close()
        return again

    assert run_world(2, run) == [1, 0]


def test_a_task_that_is_never_finished_ends_the_queue_with_its_number() -> None:
    def run(ctx: DistributedContext) -> None:
        queue = potluck.WorkQueue(ctx, ["fine", "poison"], max_attempts=2)
        with pytest.raises(RuntimeError, match="task 1 was begun 2 times"):
            for task in queue:
                if task.payload == "fine":
                    queue.finish(task)
        with pytest.raises(RuntimeError, match="task 1 was begun 2 times"):
            queue.results()
        queue.close()

    run_world(1, run)


def test_mistakes_are_one_clear_error_each() -> None:
    def run(ctx: DistributedContext) -> None:
        for wrong, message in [
            ({"backups": -1}, "backups is -1"),
            ({"max_attempts": 0}, "max_attempts is 0"),
            ({"silence_s": 0}, "must be above 0"),
            ({"server": 7}, "no such worker; there are: 0"),
        ]:
            with pytest.raises(ValueError, match=message):
                potluck.WorkQueue(ctx, [1], **wrong)
        unfit: list[tuple[dict[str, Any], str]] = [
            ({"backups": "2"}, "backups is '2'; it must be a whole number"),
            ({"max_attempts": 1.5}, "max_attempts is 1.5; it must be a whole number"),
            ({"ctx": None}, r"takes a context, potluck\.init\(\), not None"),
        ]
        for given, message in unfit:
            with pytest.raises(TypeError, match=message):
                potluck.WorkQueue(**{"ctx": ctx, "tasks": [1], **given})
        with pytest.raises(ValueError, match="worker 0 has the list"):
            potluck.WorkQueue(ctx)
        with potluck.WorkQueue(ctx, [1]) as queue:
            with pytest.raises(ValueError, match="there is no task 3"):
                queue.finish(3)
            with pytest.raises(TypeError, match="the result of task 0 is of type set"):
                queue.finish(0, {1})
            with pytest.raises(TypeError, match=r'the result of task 0\["x"\] is of type object'):
                queue.finish(Task(0, 1), {"x": object()})
            for number in (1.7, "0", None):
                with pytest.raises(TypeError, match=f"task is {number!r}; it must be a whole"):
                    queue.finish(number)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="task is -1"):
                queue.finish(-1)
            with pytest.raises(ServiceTimeout, match="tasks that no worker takes"):
                queue.results(timeout=0.1)
            assert [task.number for task in queue if queue.finish(task)] == [0]

    run_world(1, run)


def test_tasks_may_be_any_iterable() -> None:
    def run(ctx: DistributedContext) -> list[Any]:
        tasks = (10 * each for each in range(3)) if ctx.rank == 0 else None
        with potluck.WorkQueue(ctx, tasks) as queue:
            for task in queue:
                queue.finish(task, task.payload + 1)
            return queue.results()

    assert run_world(2, run) == [[1, 11, 21]] * 2


class Broken:
    def __iter__(self) -> Iterator[int]:
        yield 1
        raise OSError("no such disk")


@pytest.mark.parametrize(
    ("tasks", "kind", "elsewhere", "why"),
    [
        (3, TypeError, TypeError, "tasks is 3; it must be a list, or another iterable"),
        (None, ValueError, ValueError, "worker 0 has the list: pass it"),
        (["fine", {1}], TypeError, TypeError, r"tasks\[1\] is of type set; a payload holds"),
        ([1, 2, {"x": object()}], TypeError, TypeError, r'tasks\[2\]\["x"\] is of type object'),
        (Broken(), OSError, RuntimeError, "no such disk"),
    ],
    ids=["number", "none", "set", "object", "broken"],
)
def test_what_is_wrong_with_the_tasks_is_told_to_all_at_once_and_may_be_mended(
    tasks: Any, kind: type[Exception], elsewhere: type[Exception], why: str
) -> None:
    def run(ctx: DistributedContext) -> list[Any]:
        if ctx.rank == 0:
            with pytest.raises(kind, match=why):
                potluck.WorkQueue(ctx, tasks)
        else:
            with pytest.raises(elsewhere, match=f"can't make the list of queue 'work': .*{why}"):
                potluck.WorkQueue(ctx)
        ctx.barrier()
        if ctx.rank == 0:
            queue = potluck.WorkQueue(ctx, ["mended"])
            ctx.barrier()
        else:
            ctx.barrier()
            queue = potluck.WorkQueue(ctx)
        with queue:
            for task in queue:
                queue.finish(task, task.payload)
            return queue.results()

    assert run_world(2, run) == [["mended"]] * 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"backups": -1}, "backups is -1"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"silence_s": 0.0}, "must be above 0"),
    ],
    ids=["backups", "max_attempts", "silence_s"],
)
def test_a_wrong_option_of_the_worker_with_the_list_is_told_to_all(
    wrong: dict[str, Any], why: str
) -> None:
    def run(ctx: DistributedContext) -> None:
        with pytest.raises(ValueError, match=why):
            potluck.WorkQueue(ctx, [1], **wrong if ctx.rank == 0 else {})
        ctx.barrier()

    run_world(2, run)


def test_a_wrong_option_of_another_worker_is_its_own_mistake() -> None:
    def run(ctx: DistributedContext) -> list[Any]:
        if ctx.rank == 1:
            with pytest.raises(ValueError, match="backups is -1"):
                potluck.WorkQueue(ctx, backups=-1)
        with potluck.WorkQueue(ctx, [1]) as queue:
            for task in queue:
                queue.finish(task, task.payload)
            return queue.results()

    assert run_world(2, run) == [[1]] * 2


def test_a_mistake_is_heard_once_by_each_worker_however_late() -> None:
    """Worker 1 tries again before worker 0 does, worker 2 comes when the queue is there already."""
    has_tried_again, is_mended = threading.Event(), threading.Event()

    def run(ctx: DistributedContext) -> list[Any]:
        if ctx.rank == 2:
            assert is_mended.wait(20)
        with pytest.raises(ValueError, match="worker 0 has the list: pass it"):
            potluck.WorkQueue(ctx)
        if ctx.rank == 0:
            assert has_tried_again.wait(20)
        if ctx.rank == 1:
            connect = ctx.connect

            def noted(*args: Any, **named: Any) -> Any:
                has_tried_again.set()
                return connect(*args, **named)

            ctx.connect = noted  # type: ignore[method-assign]
        queue = potluck.WorkQueue(ctx, ["mended"] if ctx.rank == 0 else None)
        is_mended.set()
        with queue:
            for task in queue:
                queue.finish(task, task.payload)
            results = queue.results()
        if ctx.rank == 0:  # all have heard of the mistake
            with pytest.raises(UnknownService, match=r"worker 0.*: 'work \(2\)'$"):
                ctx.connect("work", rank=0, timeout=2.0)
        ctx.barrier()
        return results

    assert run_world(3, run) == [["mended"]] * 3


@pytest.mark.parametrize(
    ("num_tasks", "result"),
    [
        (300, {str(each): float(each) for each in range(2000)}),
        (60, "x" * 400_000),
        (70, np.zeros(70_000)),
        (3, [0] * 600_000),
    ],
    ids=["1.2 million values", "24 MB of text", "39 MB of arrays", "large ones"],
)
def test_results_beyond_one_payload_come_in_parts(num_tasks: int, result: Any) -> None:
    is_array = isinstance(result, np.ndarray)

    def run(ctx: DistributedContext) -> None:
        tasks = list(range(num_tasks)) if ctx.rank == 0 else None
        with potluck.WorkQueue(ctx, tasks) as queue:
            if ctx.rank == 0:
                for task in queue:
                    assert queue.finish(task, (task.number, result))
            ctx.barrier()
            for _ in range(2):
                found = queue.results()
                assert [number for number, _ in found] == list(range(num_tasks))
                assert np.array_equal(found[-1][1], result) if is_array else found[-1][1] == result
                found[0] = found[-1] = None  # the caller's own

    run_world(2, run)


def test_a_result_that_could_not_be_handed_out_is_refused_when_it_is_given() -> None:
    def run(ctx: DistributedContext) -> None:
        with potluck.WorkQueue(ctx, [0] if ctx.rank == 0 else None) as queue:
            if ctx.rank == 1:
                task = next(iter(queue))
                with pytest.raises(ValueError, match=r"result of task 0.* than 1048576 values"):
                    queue.finish(task, [0] * 2**20)
                with pytest.raises(ValueError, match=r"result of task 0 .*16777216: send long"):
                    queue.finish(task, "x" * 2**24)
                assert queue.finish(task, "right")
            assert queue.results() == ["right"]

    run_world(2, run)


def test_no_tasks_are_no_results() -> None:
    def run(ctx: DistributedContext) -> list[Any]:
        with potluck.WorkQueue(ctx, []) as queue:
            assert list(queue) == []
            return queue.results()

    assert run_world(2, run) == [[], []]


def test_a_queue_that_is_never_closed_leaves_no_thread() -> None:
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "potluck-queue-forgotten"]

    def run(ctx: DistributedContext) -> None:
        queue = potluck.WorkQueue(ctx, [1], name="forgotten")
        [thread] = threads()
        del queue
        gc.collect()
        thread.join(20)
        assert not threads()

    run_world(1, run)


def test_a_second_queue_of_the_same_name_is_refused_on_all_workers() -> None:
    """The others would find the first one, and get its results."""

    def run(ctx: DistributedContext) -> list[Any]:
        with potluck.WorkQueue(ctx, [1, 2, 3]) as queue:
            for task in queue:
                queue.finish(task, task.payload)
        with pytest.raises(ValueError, match="has had a WorkQueue 'work' already: give the next"):
            potluck.WorkQueue(ctx, [4, 5])
        with potluck.WorkQueue(ctx, [4, 5], name="more") as queue:
            for task in queue:
                queue.finish(task, task.payload)
            return queue.results()

    assert run_world(2, run) == [[4, 5], [4, 5]]
