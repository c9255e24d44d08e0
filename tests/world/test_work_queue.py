"""A queue of tasks between workers of one process, over every kind of link."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

import potluck
from potluck.context import DistributedContext
from potluck.errors import ServiceTimeout
from potluck.testing.world import run_world
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
        with pytest.raises(ValueError, match="worker 0 has the list"):
            potluck.WorkQueue(ctx)
        with potluck.WorkQueue(ctx, [1]) as queue:
            with pytest.raises(ValueError, match="there is no task 3"):
                queue.finish(3)
            with pytest.raises(TypeError, match="is of type set"):
                queue.finish(0, {1})
            with pytest.raises(ServiceTimeout, match="tasks that no worker takes"):
                queue.results(timeout=0.1)
            assert [task.number for task in queue if queue.finish(task)] == [0]

    run_world(1, run)


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
