"""Averaging with neighbours in a graph, instead of with all ranks.

A call is carried out by messages, on every kind of communicator: the plan's sends, and before each
a *notice* of 32 bytes, which says what call it belongs to. No message passes between ranks that
have no edge.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple, NoReturn

import numpy as np

from potluck._core.backends.base import Communicator
from potluck._core.checks import Duration
from potluck._core.collectives.direct import plans_for
from potluck._core.collectives.plan import Action
from potluck._core.context.arrays import Adapted
from potluck._core.context.collectives import Collectives
from potluck._core.context.uneven import UNEVEN_TAG, left_until
from potluck._core.engine.work import Together, Work
from potluck._core.wire.dtypes import NAMES, code_of
from potluck.graphs import Graph

_NOTICE_TAG = UNEVEN_TAG + 1
LAST_NEIGHBOR_TAG = _NOTICE_TAG + 1
_DATA_TAG = LAST_NEIGHBOR_TAG
_MAX_AHEAD = 1024
"""Calls that a rank with neighbours of its own can be ahead of a neighbour's."""


class _Notice(NamedTuple):
    """What travels ahead of an array, as int64."""

    number: int
    graph: int
    dtype: int
    num_elements: int

    def __str__(self) -> str:
        if not 0 < self.dtype <= len(NAMES):
            return "a call that can't be read"
        what = f"{self.num_elements} elements of {NAMES[self.dtype - 1]}"
        return f"call {self.number} with {what} and a graph of hash {self.graph:016x}"


class _Notices:
    """The notices of one group that came before the call that they belong to, by sender."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.lock = Lock()
        self.num_calls = 0
        self.early: dict[int, deque[_Notice]] = defaultdict(deque)


class NeighborCollectives(Collectives):
    """Averages over the neighbours in a graph."""

    _notices: _Notices | None = None

    def neighbor_all_reduce(
        self, array: Any, graph: Any, *, timeout: Duration | None = None, async_op: bool = False
    ) -> Any:
        """Average with the in-neighbours in ``graph``, in place, and return ``array``.

        ``graph`` is a ``networkx.DiGraph`` over the ranks, or one of
        [potluck.graphs][potluck.graphs]; its weights, and those that a graph without weights gets,
        are described at [Graph.of][potluck.graphs.Graph.of]. Rank ``i`` ends with the sum of
        ``W[i, j]`` times rank ``j``'s array, added up by rising ``j`` in the array's dtype, or in
        float32 if that is wider. Arrays are floats or complex, equal in dtype and size.

        All ranks call it with the same graph. The call waits for the in-neighbours only; with
        ``async_op=True`` it returns when they have begun it. The plans of all ranks are verified
        before the first call with a graph. Data passes along edges only. Cost: each rank sends its
        array to each of its out-neighbours, and has memory for those of its in-neighbours.

        TypeError for integers and for what is no directed graph; ValueError for a graph whose
        nodes are not the ranks, whose weights have another sum than 1, or with an edge between
        ranks that can't reach each other (``ctx.group.cut``). Desync, on all ranks, as
        soon as a rank hears from one that passed another graph, dtype or size, or was not to send
        to it at all; OperationTimeout if it hears from none.
        """
        deadline = time.monotonic() + self._patience(timeout)
        chosen = Graph.of(graph)
        if chosen.num_nodes != self.world_size:
            raise ValueError(
                f"neighbor_all_reduce: the graph has {chosen.num_nodes} nodes, but there are "
                f"{self.world_size} ranks; its nodes are the ranks"
            )
        if self.communicator.device is not None:
            raise ValueError(
                "neighbor_all_reduce needs links that move host memory, and this group's move "
                f"tensors on {self.communicator.device}; make a second context with backend='gloo'"
            )
        mine = self._adapt(array)
        if mine.array.dtype.kind in "iub":
            raise TypeError(
                f"the mean of {mine.array.dtype} values is not {mine.array.dtype}; pass floats"
            )
        group = self.communicator.group
        for edge in chosen.edges if group.cut else ():
            if (min(edge), max(edge)) in group.cut:
                raise ValueError(
                    f"neighbor_all_reduce: the graph has an edge from rank {edge[0]} to rank "
                    f"{edge[1]}, which can't reach each other in epoch {group.epoch}; pass "
                    "graph.without(ctx.group.cut)"
                )
        plan = plans_for(chosen)[self.rank]
        rooms: dict[int, Any] = {}
        works: list[Work] = []
        aside, notices = self.communicator.aside(), self._present_notices()
        data = mine.array.reshape(-1)
        with notices.lock:  # calls of several threads: one after the other, as elsewhere
            notice = _Notice(notices.num_calls, chosen.digest, code_of(data.dtype), data.size)
            notices.num_calls += 1
            for action, peer, _ in plan.steps:
                left = left_until(deadline)
                if action is Action.SEND:
                    head = np.array(notice, np.int64)
                    works.append(aside.send(head, peer, _NOTICE_TAG, timeout_s=left))
                    if data.size:
                        works.append(aside.send(data, peer, _DATA_TAG, timeout_s=left))
                else:
                    rooms[peer] = np.empty_like(data)
            self._hear(notices, notice, set(rooms), deadline)
            for peer, room in rooms.items():
                if data.size:
                    left = left_until(deadline)
                    works.append(aside.recv(room, peer, _DATA_TAG, timeout_s=left))
        call = (
            f"neighbor_all_reduce({data.dtype}, shape {mine.array.shape}, "
            f"in-neighbours {sorted(rooms)}) in epoch {self.communicator.group.epoch}"
        )

        def done(_: Any) -> Any:
            _mix(mine, rooms, chosen.rows[self.rank])
            return mine.write_back()

        return self._end(Together(call, works), done, async_op)

    # -- inside

    def _present_notices(self) -> _Notices:
        if self._notices is None or self._notices.communicator is not self.communicator:
            self._notices = _Notices(self.communicator)
        return self._notices

    def _hear(self, notices: _Notices, mine: _Notice, senders: set[int], deadline: float) -> None:
        """Wait for the notices of all ``senders``. Desync for any that differs from ``mine``."""
        missing = set(senders)
        for peer, queue in notices.early.items():
            if queue and (peer in senders or queue[0].number <= mine.number):
                self._compare(peer, queue.popleft(), mine)
                missing.remove(peer)  # the same graph, so it is a sender
        aside = self.communicator.aside()
        while missing:
            words = np.zeros(len(mine), np.int64)
            work = aside.recv(words, -1, _NOTICE_TAG, timeout_s=left_until(deadline))
            self._end(work, lambda value: value, False)
            peer, notice = work.source, _Notice(*map(int, words))
            if peer in missing:
                self._compare(peer, notice, mine)
                missing.remove(peer)
            elif notice.number > mine.number:
                if len(notices.early[peer]) == _MAX_AHEAD:
                    self._desync(peer, f"is more than {_MAX_AHEAD} calls ahead", mine)
                notices.early[peer].append(notice)  # it is ahead of this rank's other neighbours
            else:
                self._compare(peer, notice, mine)
                self._desync(peer, "sent twice", mine)

    def _compare(self, peer: int, theirs: _Notice, mine: _Notice) -> None:
        if theirs != mine:
            self._desync(peer, f"made {theirs}", mine)

    def _desync(self, peer: int, what: str, mine: _Notice) -> NoReturn:
        self._end_group(
            f"neighbor_all_reduce in epoch {self.epoch}: rank {peer} {what}, but rank {self.rank} "
            f"made {mine}; all ranks must pass the same graph, and arrays of one dtype and size",
            "neighbor_all_reduce",
            peer,
        )


def _mix(mine: Adapted, rooms: dict[int, Any], row: Sequence[tuple[int, float]]) -> None:
    """The weighted sum of a rank's array and what it received, into its array."""
    data = mine.array.reshape(-1)
    own = {rank: rooms.get(rank, data) for rank, _ in row}
    wide = np.float32 if data.dtype.itemsize < 4 else data.dtype
    total = np.zeros(data.size, wide)
    with np.errstate(all="ignore"):
        for rank, weight in row:
            if weight:
                total += own[rank].astype(wide, copy=False) * weight
        data[:] = total.astype(data.dtype, copy=False)
