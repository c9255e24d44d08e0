"""A comparison of peers: all are started, rounds alternate between them, and figures are medians.

A round of a peer is one warm-up call (but for calls that take long), a barrier, and as many calls
as fill ``round_s``; its figure is the seconds per call of the slowest rank. The order of the peers
rotates with every round. While one peer is measured, the workers of the others block on their
control channels, outside of their libraries.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from potluck._core import native
from potluck._core.collectives.choose import estimate, fastest
from potluck._core.collectives.links import LINKS
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.collectives.registry import build_plan
from potluck._core.engine.loop.native import is_available
from potluck._core.types import Engine, ReduceOp
from potluck.cli.bench import operations
from potluck.cli.bench.crew import Crew
from potluck.cli.bench.machine import core_to_core_s, load, machine
from potluck.cli.bench.peers import NO_SHARED_MEMORY, PEERS, Competitor
from potluck.cli.bench.placement import BenchError, Here
from potluck.cli.bench.table import show


def predicted_s(
    peer: Competitor, operation: str, world_size: int, nbytes: int, placement: Here
) -> float | None:
    """The predicted seconds of one call, or None where the model does not apply.

    The model covers potluck's plans over links: no other library, no codec, no shared memory.
    """
    if peer.module != "ours" or "codec" in peer.arguments:
        return None
    is_native = peer.environment.get(native.VARIABLE) != "0" and is_available()
    nodes = None
    if not NO_SHARED_MEMORY.items() <= peer.environment.items():
        firsts = (placement.local_rank(rank) == 0 for rank in range(world_size))
        nodes = tuple(accumulate(map(int, firsts)))
    links = LINKS[Engine.NATIVE if is_native else Engine.PYTHON]
    if len({placement.address(rank) for rank in range(world_size)}) == 1:
        links = replace(links, remote=links.remote._replace(beta_s_per_byte=0.0))  # the loopback
    kind = Operation(operation.replace("-", "_"))
    algorithm = peer.arguments.get("algorithm") if kind is Operation.ALL_REDUCE else None
    if algorithm is not None:
        plan = build_plan(kind, Algorithm(algorithm), world_size, 0, nodes=nodes)
        return estimate(plan, nbytes, replace(links, nodes=nodes))
    if is_native and nodes is not None and len(set(nodes)) == 1:
        return None
    return fastest(kind, nbytes, world_size, ReduceOp.SUM, nodes=nodes, links=links)[1]


Report = Callable[[str, float], None]
"""``report(text, part)`` is called with the current step and the part (0 to 1) that is done."""


_MAX_CALLS = 20_000
_MANY_CALLS = 1_000
"""A round of at least this many calls also times this many calls one by one."""
_LONG_S = 0.25
"""Calls that take longer get no warm-up: their data does not stay in the caches anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """What to compare. Sizes are bytes of the whole data, as ``operations`` defines them."""

    peers: Sequence[str]
    world_sizes: Sequence[int] = (2, 4)
    cases: Sequence[tuple[str, int]]
    """Operations, and bytes of each."""
    rounds: int = 7
    round_s: float = 0.1
    memory: bool = True
    """Whether to measure memory above the buffers too, at the largest size of each operation."""

    def largest(self, operation: str) -> int:
        """The largest size of ``operation``, in bytes."""
        return max(nbytes for name, nbytes in self.cases if name == operation)


def compare(
    plan: ComparisonPlan,
    *,
    placement: Here | None = None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
    report: Report = lambda text, part: None,
) -> dict[str, Any]:
    """Run the whole plan. The result is ready for JSON; ``on_row`` is called with each finished
    row.

    If a peer of another library fails, the other peers go on, and the result's ``left_out`` maps
    its name to the reason. BenchError if a peer of potluck fails.
    """
    facts = machine()
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    described: dict[str, str] = {}
    total = len(plan.world_sizes) * len(plan.cases)
    for world_size in plan.world_sizes:
        report(
            f"starting {world_size} workers of each of {', '.join(plan.peers)}", len(rows) / total
        )
        names = [name for name in plan.peers if name not in left_out]
        with crews(names, world_size, left_out, placement) as started:
            for operation, nbytes in plan.cases:
                case = operation, world_size, nbytes
                measuring = _Row(plan, case, started, left_out, placement or Here())
                row = measuring.run(lambda text, part: report(text, (len(rows) + part) / total))
                rows.append(row)
                on_row(row)
            for crew in started:
                described[crew.peer.name] = crew.ask("describe")[0]["text"]
    facts["load_after"] = load()
    return {
        "benchmark": "collectives",
        "machine": facts,
        "peers": described,
        "left_out": left_out,
        "rows": rows,
    }


@contextlib.contextmanager
def crews(
    names: Sequence[str],
    world_size: int,
    left_out: dict[str, str],
    placement: Here | None = None,
) -> Iterator[list[Crew]]:
    """A crew for each peer, all started at once. Peers that fail to start go to ``left_out``."""
    with (
        tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        begun = []
        for name in names:
            crew = Crew(PEERS[name], world_size, Path(folder), placement=placement)
            begun.append(stack.enter_context(crew))
        started = []
        for crew in begun:
            try:
                crew.join()
                started.append(crew)
            except BenchError as error:
                _leave_out(crew, error, left_out)
        yield started


def _leave_out(crew: Crew, error: BenchError, left_out: dict[str, str]) -> None:
    if crew.peer.module == "ours":
        raise error
    left_out[crew.peer.name] = str(error)
    crew.kill()


class _Row:
    """The measurement of one row: an operation, a size and a number of workers, for all peers."""

    def __init__(
        self,
        plan: ComparisonPlan,
        case: tuple[str, int, int],
        crews: list[Crew],
        left_out: dict[str, str],
        placement: Here,
    ) -> None:
        """``case``: the operation, the number of workers, the bytes of the whole data."""
        operation, world_size, nbytes = case
        self._placement = placement
        self._plan, self._crews, self._left_out = plan, crews, left_out
        self._what: dict[str, Any] = {"operation": operation, "nbytes": nbytes}
        self._operation, self._world_size, self._nbytes = operation, world_size, nbytes
        self._cells: dict[str, dict[str, Any]] = {}
        self._calls: dict[str, int] = {}
        self._is_short: dict[str, bool] = {}

    def run(self, report: Report) -> dict[str, Any]:
        """Check the results of each peer, then time the peers in turns; the row for the table."""
        plan = self._plan
        report(f"{self._title()}: checking sums", 0.0)
        self._each(self._begin)
        copies, hops = [], []
        for number in range(plan.rounds):
            report(f"{self._title()}: round {number + 1} of {plan.rounds}", number / plan.rounds)
            first = number % max(1, len(self._crews))
            self._each(self._round, first)
            copies.append(_seconds_of_a_copy(self._nbytes))
            hops.append(core_to_core_s())
        if plan.memory and self._nbytes == plan.largest(self._operation):
            self._each(self._memory)
        for name, cell in self._cells.items():
            self._finish(cell, self._calls[name])
        return {
            "operation": self._operation,
            "world_size": self._world_size,
            "nbytes": self._nbytes,
            "copy_s": statistics.median(copies),
            "core_to_core_s": statistics.median(seen) if (seen := [*filter(None, hops)]) else None,
            "peers": self._cells,
        }

    def _title(self) -> str:
        return f"{self._operation}, {self._world_size} workers, {show(self._nbytes)}"

    def _each(self, do: Callable[[Crew], None], first: int = 0) -> None:
        for crew in [*self._crews[first:], *self._crews[:first]]:
            try:
                do(crew)
            except BenchError as error:
                _leave_out(crew, error, self._left_out)
                self._crews.remove(crew)
                self._cells.pop(crew.peer.name, None)

    def _begin(self, crew: Crew) -> None:
        checks = crew.ask("check", **self._what)
        if not all(answer["has"] for answer in checks):
            return
        error = max(answer["max_error"] for answer in checks)
        same = len({answer["digest"] for answer in checks}) == 1
        self._calls[crew.peer.name] = self._calls_for(crew)
        self._cells[crew.peer.name] = {
            "correct": error <= crew.peer.tolerance
            and (same or not operations.same_on_all(self._operation)),
            "max_error": error,
            "same_bits": same,
            "samples_s": [],
            "cpu_s": 0.0,
            "call_medians_s": [],
            "predicted_s": predicted_s(
                crew.peer, self._operation, self._world_size, self._nbytes, self._placement
            ),
        }

    def _calls_for(self, crew: Crew) -> int:
        """The number of calls that fill a round. It grows in steps with the shortest time seen, so
        that a single stall does not decide it."""
        calls, each = 1, self._time(crew, 1, warm=False)["seconds"]
        while calls * each < self._plan.round_s / 2 and calls < _MAX_CALLS:
            calls = min(10 * calls, max(2 * calls, round(self._plan.round_s / each)), _MAX_CALLS)
            each = min(each, self._time(crew, calls)["seconds"] / calls)
        self._is_short[crew.peer.name] = each < _LONG_S
        return max(1, min(_MAX_CALLS, round(self._plan.round_s / each)))

    def _round(self, crew: Crew) -> None:
        cell = self._cells.get(crew.peer.name)
        if cell is None:
            return
        calls = self._calls[crew.peer.name]
        answer = self._time(crew, calls, warm=self._is_short[crew.peer.name])
        cell["samples_s"].append(answer["seconds"] / calls)
        cell["cpu_s"] += answer["cpu_s"]
        if calls >= _MANY_CALLS:
            answers = crew.ask("one_call", **self._what, calls=_MANY_CALLS)
            cell["call_medians_s"].append(max(each["seconds"] for each in answers))
        else:
            cell["call_medians_s"].append(answer["seconds"] / calls)

    def _time(self, crew: Crew, calls: int, *, warm: bool = True) -> dict[str, float]:
        answers = crew.ask("time", **self._what, calls=calls, warm=warm)
        return {
            "seconds": max(answer["seconds"] for answer in answers),
            "cpu_s": sum(answer["cpu_s"] for answer in answers),
        }

    def _memory(self, crew: Crew) -> None:
        if crew.peer.name in self._cells:
            found = [answer["bytes"] for answer in crew.ask("memory", **self._what)]
            most = None if None in found else max(found)
            self._cells[crew.peer.name]["memory_bytes"] = most

    def _finish(self, cell: dict[str, Any], calls: int) -> None:
        median = statistics.median(cell["samples_s"])
        moved = self._nbytes * calls * len(cell["samples_s"])
        cell["calls_per_round"] = calls
        cell["median_s"] = median
        cell["call_median_s"] = statistics.median(cell.pop("call_medians_s"))
        cell["bus_bytes_per_s"] = operations.bus_bandwidth(
            self._operation, self._world_size, self._nbytes, median
        )
        cell["cpu_s_per_gb"] = cell.pop("cpu_s") / (moved / 1e9)


def _seconds_of_a_copy(nbytes: int) -> float:
    """Seconds in which one thread copies ``nbytes`` of touched memory: the machine's own speed."""
    source, target = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
    np.copyto(target, source)
    calls = max(1, (4 << 20) // nbytes)
    start = time.perf_counter()
    for _ in range(calls):
        np.copyto(target, source)
    return (time.perf_counter() - start) / calls
