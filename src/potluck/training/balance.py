"""The balance of tasks of unlike cost among workers. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

from potluck._core import hints
from potluck._core.checks import checked_whole


@hints.arguments({}, same=hints.WORKLOAD)
def balance_workload(
    task_costs: Sequence[float], num_workers: int, speeds: Sequence[float] | None = None
) -> list[list[int]]:
    """Assign every task to one worker so that the last worker ends early; no communication.

    Returns the numbers of each worker's tasks, in ascending order. ``task_costs`` are in any unit;
    worker ``w`` takes ``cost / speeds[w]`` for a task (without ``speeds`` all workers are equal).

    Method: longest processing time first. Each task, from the costliest on, goes to the worker that
    would end it first; ties go to the lower number. With equal speeds the last worker ends at most
    4/3 - 1/(3 m) times as late as in the best assignment to m workers (Graham 1969, "Bounds on
    multiprocessing timing anomalies"), with other speeds at most 2 - 2/(m + 1) times (Gonzalez,
    Ibarra and Sahni 1977, "Bounds for LPT schedules on uniform processors"). Cost: O(n log n) with
    equal speeds, O(n m) else.

    ValueError for a cost that is negative or not finite, for fewer than one worker, and for speeds
    that are not positive or not one per worker; TypeError for what are no numbers.
    """
    if checked_whole("num_workers", num_workers, at_least=0) < 1:
        raise ValueError(f"num_workers is {num_workers}; it must be at least 1")
    costs = _numbers("task_costs", task_costs)
    for task, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"the cost of task {task} is {cost}; it must be finite, at least 0")
    if speeds is not None:
        speeds = _numbers("speeds", speeds)
        if len(speeds) != num_workers:
            raise ValueError(f"there are {len(speeds)} speeds for {num_workers} workers")
        if not all(0 < speed < math.inf for speed in speeds):
            raise ValueError(f"speeds are {list(speeds)}; they must be positive and finite")
    tasks: list[list[int]] = [[] for _ in range(num_workers)]
    longest_first = sorted(range(len(costs)), key=lambda task: -costs[task])
    if speeds is None:
        loads = [(0.0, worker) for worker in range(num_workers)]
        for task in longest_first:
            load, worker = loads[0]
            heapq.heapreplace(loads, (load + costs[task], worker))
            tasks[worker].append(task)
    else:
        work = [0.0] * num_workers
        for task in longest_first:
            ends = [(work[w] + costs[task]) / speeds[w] for w in range(num_workers)]
            worker = ends.index(min(ends))
            work[worker] += costs[task]
            tasks[worker].append(task)
    return [sorted(each) for each in tasks]


def _numbers(name: str, given: Any) -> list[float]:
    try:
        return [float(each + 0) for each in given]  # "2" is no number
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {given!r:.100}; it must be a list of numbers") from None
