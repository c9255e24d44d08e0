"""A collective on two levels: who does what is in ``collectives/two_level.py``, here it is done.

Each level is a sub-group: the workers of this node twice (inwards and outwards), and those who
speak for their nodes. A block takes one call on each, begun when the one before has ended. Calls
on one level begin in the order of the blocks, and of the calls that they belong to, so all its
ranks make them in one order, while blocks on different levels run at the same time. A level
inside a node goes through a window where it can, else over the links of the node.

The whole call is also a barrier over links of all ranks, beside the data: it compares what the
ranks have called, keeps the deadline, and says who has not called. The calls on the levels have a
little longer, so that they name whom they wait for only when all have called.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from potluck.collectives.plan import Algorithm, Operation
from potluck.collectives.two_level import Block, members_of, pays, schedule
from potluck.engine.arrays import kernels
from potluck.engine.arrays.coding import Encoding
from potluck.engine.arrays.layout import Array, part
from potluck.engine.call import Call
from potluck.engine.failures.inquest import ANSWER_S
from potluck.engine.request import Request
from potluck.engine.work import Work, deadline_after
from potluck.types import ReduceOp

_BETWEEN_S, _OUTWARD_S = 2 * ANSWER_S, 4 * ANSWER_S
"""How much longer a call may take between the nodes, and outwards: who waits for the level before
must not be blamed first."""


NO_LEVELS = (
    "algorithm='two-level' needs several nodes, one of them with several workers, and windows "
    "switched on"
)

_BY_RANK = frozenset({Operation.ALL_GATHER, Operation.REDUCE_SCATTER})
"""What describes these is one rank's part of the data."""


class Level(Protocol):
    """What is needed of the communicator of a level."""

    def part(
        self,
        whole: Call,
        operation: Operation,
        array: Array,
        *,
        root: int = 0,
        is_result: bool = True,
        encoding: Encoding | None = None,
        timeout_s: float,
    ) -> Work: ...


Key = str | tuple[int, ...]
"""Names a level: "inward", "outward", or those who speak for their nodes."""

Start = Callable[[], Work]
OnEnd = Callable[[Call, int, float, BaseException | None], None]


class Whole:
    """A call under way on two levels. All but ``work`` is under the levels' lock."""

    def __init__(self, call: Call, work: Work, deadline: float, nbytes: int) -> None:
        self.call = call
        self.work = work
        self.deadline = deadline
        self.nbytes = nbytes
        self.began = time.monotonic()
        self.num_left = 1
        """Calls on levels that have not ended well, and one while not all are queued."""
        self.num_running = 0
        self.error: BaseException | None = None
        self.is_told = False

    def ended_one(self) -> None:
        """A call on a level has ended well."""
        self.num_left -= 1

    def left_s(self, more_s: float = 0.0) -> float:
        """Seconds that a call on a level may take."""
        return max(self.deadline - time.monotonic(), 0.0) + more_s

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self.num_running == 0 and (self.num_left == 0 or self.error is not None)


class _Step:
    """One call on one level: begun once it is ready and all before it on that level have begun."""

    __slots__ = ("is_ready", "start", "then", "whole")

    def __init__(self, whole: Whole, start: Start, then: Callable[[], None]) -> None:
        self.whole = whole
        self.start = start
        self.then = then
        self.is_ready = False


class TwoLevel:
    """The levels of one communicator, for one rank of it."""

    def __init__(
        self,
        rank: int,
        nodes: tuple[int, ...],
        split: Callable[[Sequence[int], str], Level],
        compare: Callable[[Call, float], Work],
        lock: Any,
        on_end: OnEnd,
    ) -> None:
        """``split(ranks, name)`` makes a level, ``compare(call, timeout_s)`` begins the barrier.

        ``on_end`` is told of every call that ended, with its bytes and seconds.
        """
        self._rank = rank
        self._nodes = nodes
        self._members = members_of(nodes)
        self._mates = next(ranks for ranks in self._members if rank in ranks)
        self._split = split
        self._compare = compare
        self._lock = lock
        self._on_end = on_end
        self._levels: dict[Key, Level] = {}
        self._lines: dict[Key, deque[_Step]] = {}
        self._is_pumping = False
        self._over: deque[Whole] = deque()

    def takes(self, request: Request) -> bool:
        """Whether a call is for two levels: it is asked for, or the model says that it pays."""
        if request.algorithm is not None:
            return request.algorithm is Algorithm.TWO_LEVEL
        nbytes = request.described.nbytes
        if request.operation in _BY_RANK:
            nbytes *= len(self._nodes)
            if request.encoding is not None:
                return False
        return pays(request.operation, nbytes, self._nodes, op=request.op)

    def start(
        self, call: Call, request: Request, source: Array | None, target: Array | None
    ) -> Work:
        """Begin ``call``, this rank's ``request``.

        ``source`` is what the rank contributes, ``target`` where it wants the outcome (None: it
        gets none), flat; for operations in place they are the same memory. ValueError if ``call``
        has no two levels.
        """
        gathers = call.operation is Operation.ALL_GATHER
        data = target if gathers else source
        assert data is not None
        plan = schedule(call.operation, data.nbytes, self._nodes, call.root)
        deadline = deadline_after(request.timeout_s)
        whole = Whole(call, Work(str(call), request.result), deadline, data.nbytes)
        if gathers:
            assert source is not None
            np.copyto(part(data, len(self._nodes), self._rank), source)
        with self._lock:
            whole.num_left += 1
            self._begin(whole, lambda: self._compare(call, request.timeout_s), whole.ended_one)
            for block in plan.blocks:
                mine = into = part(data, block.num_chunks, block.chunk)
                if call.operation is Operation.REDUCE_SCATTER and self._is_home(block):
                    assert target is not None
                    per_rank = block.num_chunks // len(self._nodes)
                    into = part(target, per_rank, block.chunk % per_rank)
                self._add(whole, block, mine, into, request.encoding)
            whole.ended_one()  # all are queued: from now on it may be over
            self._look(whole)
        self._tell()
        return whole.work

    # -- one block

    def _is_home(self, block: Block) -> bool:
        """Whether it is this rank that the block comes from, or goes to."""
        return block.home is not None and block.speakers[block.home] == self._rank

    def _add(
        self,
        whole: Whole,
        block: Block,
        array: Array,
        target: Array,
        encoding: Encoding | None,
    ) -> None:
        call = whole.call
        combines = call.op is not None
        copies = call.operation not in (Operation.REDUCE, Operation.REDUCE_SCATTER)
        node = next(i for i, ranks in enumerate(self._members) if self._rank in ranks)
        speaker = block.speakers[node]
        speaks = speaker == self._rank
        lane = self._mates.index(speaker)
        keeps = not copies and not self._is_home(block)  # the caller's array must stay as it is
        box: list[Array] = [target]

        def own() -> Array:
            """What the speaker combines in: begun with its own contribution."""
            if keeps:
                box[0] = array.copy()
            elif target is not array:
                np.copyto(target, array)
            return box[0]

        def inward() -> Work:
            mine = own() if speaks else array
            return self._level("inward").part(
                whole.call,
                Operation.REDUCE,
                mine,
                root=lane,
                is_result=speaks,
                timeout_s=whole.left_s(),
            )

        def between() -> Work:
            mine = box[0] if has_mates or not combines else own()
            coded = None
            if encoding is not None:
                residual = encoding.residual
                if residual is not None:
                    residual = part(residual.reshape(-1), block.num_chunks, block.chunk)
                coded = Encoding(encoding.codec, residual)
            what = Operation.ALL_REDUCE
            if block.home is not None:
                what = Operation.REDUCE if combines else Operation.BROADCAST
            return self._level(block.speakers).part(
                whole.call,
                what,
                mine,
                root=block.home or 0,
                is_result=not keeps,
                encoding=coded,
                timeout_s=whole.left_s(_BETWEEN_S),
            )

        def divide() -> None:
            if call.op is ReduceOp.MEAN and not keeps:
                kernels.conclude(call.op, box[0], len(self._nodes))

        def outward() -> Work:
            return self._level("outward").part(
                whole.call,
                Operation.BROADCAST,
                array,
                root=lane,
                timeout_s=whole.left_s(_OUTWARD_S),
            )

        has_mates = len(self._mates) > 1
        chain: list[tuple[Key, Start, Callable[[], None]]] = []
        if combines and has_mates:
            chain.append(("inward", inward, _nothing))
        if speaks:
            chain.append((block.speakers, between, divide))
        if copies and has_mates:
            chain.append(("outward", outward, _nothing))
        self._queue(whole, chain)

    def _queue(self, whole: Whole, chain: Sequence[tuple[Key, Start, Callable[[], None]]]) -> None:
        """Queue calls that must follow each other, each on its level."""
        following: _Step | None = None
        for key, start, after in reversed(chain):
            step = _Step(whole, start, _then(whole, after, following))
            self._lines.setdefault(key, deque()).append(step)
            whole.num_left += 1
            following = step
        if following is not None:
            following.is_ready = True
        self._pump()

    # -- calls on levels; all under the lock

    def _level(self, key: Key) -> Level:
        level = self._levels.get(key)
        if level is None:
            ranks, name = (self._mates, key) if isinstance(key, str) else (key, "between")
            level = self._levels[key] = self._split(ranks, name)
        return level

    def _pump(self) -> None:
        """Begin whatever may begin."""
        if self._is_pumping:
            return  # a call has ended at once: whoever begins them looks again
        self._is_pumping = True
        try:
            while any(self._pump_line(line) for line in self._lines.values()):
                pass
        finally:
            self._is_pumping = False

    def _pump_line(self, line: deque[_Step]) -> bool:
        has_moved = False
        while line and (line[0].is_ready or line[0].whole.error is not None):
            step = line.popleft()
            if step.whole.error is None:
                self._begin(step.whole, step.start, step.then)
            has_moved = True
        return has_moved

    def _begin(self, whole: Whole, start: Start, then: Callable[[], None]) -> None:
        whole.num_running += 1
        try:
            work = start()
        except Exception as error:
            whole.num_running -= 1
            whole.error = error
            self._look(whole)
            return
        work.add_done_callback(lambda ended: self._on_ended(whole, ended, then))

    def _on_ended(self, whole: Whole, work: Work, then: Callable[[], None]) -> None:
        error = work.exception()
        with self._lock:
            whole.num_running -= 1
            if error is not None:
                whole.error = whole.error or error
            else:
                then()
            self._pump()
            self._look(whole)
        self._tell()

    def _look(self, whole: Whole) -> None:
        if whole.is_over and not whole.is_told:
            whole.is_told = True
            self._over.append(whole)

    def _tell(self) -> None:
        """End calls, without the lock: they may have callbacks."""
        while True:
            with self._lock:
                if self._is_pumping or not self._over:
                    return  # (this thread is the one that begins calls: it comes here afterwards)
                whole = self._over.popleft()
            self._on_end(whole.call, whole.nbytes, time.monotonic() - whole.began, whole.error)
            whole.work.finish(whole.error)


def summed(op: ReduceOp | None) -> ReduceOp | None:
    """What a level combines by: a mean is divided once, by the number of all ranks."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _then(whole: Whole, after: Callable[[], None], following: _Step | None) -> Callable[[], None]:
    """What follows a call that has ended well."""

    def then() -> None:
        after()
        whole.ended_one()
        if following is not None:
            following.is_ready = True

    return then


def _nothing() -> None:
    pass
