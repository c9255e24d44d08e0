"""Proof of a set of plans: a symbolic run of all ranks' steps under the three rules.

The run has no buffers: a SEND completes together with its matching receive (but for doubling, whose
SENDs complete before: a receiver keeps what comes). What may run is then a fixed graph: the k-th
SEND from ``a`` to ``b`` meets the k-th receive from ``a`` at ``b`` (links are ordered), and edges
come from rule 1 (same chunk) and rule 2 (same link and direction). So:

- no deadlock in *any* schedule exactly when the graph has no cycle. Buffers only remove edges, and
  segments refine the graph without adding edges between transfers, so neither brings one back;
- all schedules give *the same* result: two accesses to one chunk of one rank are always ordered by
  rule 1, so every topological order computes the same values. One order proves all. ``seed`` picks
  another one, for the doubtful.

A symbolic value is ``(who made it, whose contributions are in it)``. Every REDUCE makes a value of
its own, so equal values on two ranks mean equal bits: one rank computed it and the others copied.
Only in doubling, which is for sums, the same two values give the same third on any rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan

_REDUCTIONS = frozenset({Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER})


class VerificationError(ValueError):
    """The plans do not do what their operation promises. Says where: rank, step and chunk."""


class _Value(NamedTuple):
    maker: int
    """Rank of an untouched contribution; for a combined value, a number no other value has."""
    ranks: int
    """Bit ``r`` is set when rank ``r``'s contribution is in the value."""


class _Transfer(NamedTuple):
    sender: int
    send_step: int
    receiver: int
    receive_step: int
    chunk: int
    action: Action


def verify(
    plans: Sequence[Plan],
    *,
    seed: int | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
) -> None:
    """Prove that ``plans``, one per rank and in rank order, fulfil their operation.

    ``outputs``: the chunks with which each rank is to end, where data only moves; by default those
    that the operation promises.

    Raises :class:`VerificationError` where sends and receives do not match, where ranks wait for
    each other in a circle, where a rank sends or combines what it does not have, where a
    contribution is counted twice or never, and where ranks end with differently computed results.
    Cost: linear in the number of steps.
    """
    _check_heads(plans)
    transfers = _match(plans)
    order = _schedule(plans, transfers, seed, is_buffered=_is_doubling(plans))
    if plans[0].operation is Operation.BARRIER:
        _run_barrier(plans, transfers, order)
    else:
        wanted = outputs if outputs is not None else [_outputs(plan) for plan in plans]
        _check_results(plans, _run(plans, transfers, order), wanted)


def _is_doubling(plans: Sequence[Plan]) -> bool:
    return plans[0].algorithm is Algorithm.DOUBLING


def _at(plan: Plan, index: int) -> str:
    """For people: ``ring all_reduce of 4, rank 2, step 5 (SEND chunk 3 to rank 3)``."""
    action, peer, chunk = plan.steps[index]
    way = "to" if action is Action.SEND else "from"
    return f"{_head(plan)}, step {index} ({Action(action).name} chunk {chunk} {way} rank {peer})"


def _head(plan: Plan) -> str:
    return f"{plan.algorithm} {plan.operation} of {plan.world_size}, rank {plan.rank}"


def _check_heads(plans: Sequence[Plan]) -> None:
    if not plans:
        raise VerificationError("there are no plans")
    first = plans[0]
    parts = _num_parts(first)
    if parts is not None and first.num_chunks != parts:
        raise VerificationError(
            f"{_head(first)}: has {first.num_chunks} chunks; the parts of this operation are "
            f"{parts}, one chunk each"
        )
    same = (first.operation, first.algorithm, len(plans), first.num_chunks, first.root)
    for rank, plan in enumerate(plans):
        if plan.rank != rank:
            raise VerificationError(f"{_head(plan)}: stands at place {rank} of the plans")
        if same != (plan.operation, plan.algorithm, plan.world_size, plan.num_chunks, plan.root):
            raise VerificationError(f"{_head(plan)}: is not of one collective with rank 0's plan")
        for index, (_, peer, chunk) in enumerate(plan.steps):
            if not 0 <= peer < plan.world_size or peer == rank:
                raise VerificationError(f"{_at(plan, index)}: has no such peer")
            if not 0 <= chunk < plan.num_chunks:
                raise VerificationError(f"{_at(plan, index)}: has no such chunk")


def _match(plans: Sequence[Plan]) -> list[_Transfer]:
    """Pair the k-th send of every link with its k-th receive."""
    sends: dict[tuple[int, int], list[int]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    for plan in plans:
        for index, (action, peer, _) in enumerate(plan.steps):
            if action is Action.SEND:
                sends.setdefault((plan.rank, peer), []).append(index)
            else:
                receives.setdefault((peer, plan.rank), []).append(index)
    transfers: list[_Transfer] = []
    for link in sends.keys() | receives.keys():
        sender, receiver = plans[link[0]], plans[link[1]]
        sent, received = sends.get(link, []), receives.get(link, [])
        for send_step, receive_step in zip(sent, received, strict=False):
            chunk = sender.steps[send_step].chunk
            action, _, expected = receiver.steps[receive_step]
            if chunk != expected:
                raise VerificationError(
                    f"{_at(sender, send_step)}: the receiver expects chunk {expected} there, "
                    f"at its step {receive_step}"
                )
            transfers.append(
                _Transfer(link[0], send_step, link[1], receive_step, chunk, Action(action))
            )
        if len(sent) > len(received):
            raise VerificationError(f"{_at(sender, sent[len(received)])}: is never received")
        if len(received) > len(sent):
            raise VerificationError(f"{_at(receiver, received[len(sent)])}: is never sent")
    transfers.sort()
    return transfers


def _schedule(
    plans: Sequence[Plan], transfers: list[_Transfer], seed: int | None, *, is_buffered: bool
) -> list[int]:
    """A topological order of the transfers (Kahn's), or the circle that prevents one.

    If links are buffered, of their ends: ``n`` is where transfer ``n`` is sent, ``~n`` where it is
    received.
    """
    of_step = [[0] * len(plan.steps) for plan in plans]
    after: dict[int, list[int]] = {}
    num_before: dict[int, int] = {}
    for number, transfer in enumerate(transfers):
        received = ~number if is_buffered else number
        of_step[transfer.sender][transfer.send_step] = number
        of_step[transfer.receiver][transfer.receive_step] = received
        after[received], after[number] = [], [received] if is_buffered else []
        num_before[number], num_before[received] = 0, int(is_buffered)
    for plan, numbers in zip(plans, of_step, strict=True):
        last_on_chunk: dict[int, int] = {}
        last_on_link: dict[tuple[int, bool], int] = {}
        for number, (action, peer, chunk) in zip(numbers, plan.steps, strict=True):
            link = (peer, action is Action.SEND)
            for before in (last_on_chunk.get(chunk), last_on_link.get(link)):
                if before is not None:
                    after[before].append(number)
                    num_before[number] += 1
            last_on_chunk[chunk] = last_on_link[link] = number
    rng = random.Random(seed)
    ready = [number for number, count in num_before.items() if count == 0]
    order: list[int] = []
    while ready:
        if seed is not None:
            pick = rng.randrange(len(ready))
            ready[pick], ready[-1] = ready[-1], ready[pick]
        number = ready.pop()
        order.append(number)
        for later in after[number]:
            num_before[later] -= 1
            if num_before[later] == 0:
                ready.append(later)
    if len(order) < len(num_before):
        raise VerificationError(_circle(plans, transfers, after, set(order)))
    return order


def _circle(
    plans: Sequence[Plan], transfers: list[_Transfer], after: dict[int, list[int]], done: set[int]
) -> str:
    """The text of a deadlock: the transfers that wait for each other, in order."""
    waits_for: dict[int, int] = {}
    for number, laters in after.items():
        if number not in done:
            waits_for.update((later, number) for later in laters)
    path = [next(iter(waits_for))]
    while path[-1] not in path[:-1]:
        path.append(waits_for[path[-1]])
    circle = path[path.index(path[-1]) :]
    ends = [
        (transfers[n].sender, transfers[n].send_step)
        if n >= 0
        else (transfers[~n].receiver, transfers[~n].receive_step)
        for n in circle
    ]
    waits = [_at(plans[rank], step) for rank, step in ends]
    return "deadlock: " + "; which waits for ".join(waits)


def _num_parts(plan: Plan) -> int | None:
    """How many chunks the operation has; None where an array may be cut into any number."""
    match plan.operation:
        case Operation.ALL_GATHER | Operation.GATHER | Operation.SCATTER | Operation.REDUCE_SCATTER:
            return plan.world_size
        case Operation.ALL_TO_ALL:
            return plan.world_size**2
        case _:
            return None


def _inputs(plan: Plan) -> list[int]:
    """The chunks that hold this rank's own contribution at the start."""
    w, rank, everything = plan.world_size, plan.rank, list(range(plan.num_chunks))
    match plan.operation:
        case Operation.BROADCAST | Operation.SCATTER:
            return everything if rank == plan.root else []
        case Operation.ALL_GATHER | Operation.GATHER:
            return [rank]
        case Operation.ALL_TO_ALL:
            return [rank * w + dst for dst in range(w)]
        case _:
            return everything


def _outputs(plan: Plan) -> list[int]:
    """The chunks that hold the result at the end."""
    w, rank, everything = plan.world_size, plan.rank, list(range(plan.num_chunks))
    match plan.operation:
        case Operation.REDUCE | Operation.GATHER:
            return everything if rank == plan.root else []
        case Operation.REDUCE_SCATTER | Operation.SCATTER:
            return [rank]
        case Operation.ALL_TO_ALL:
            return [src * w + rank for src in range(w)]
        case _:
            return everything


def _run(
    plans: Sequence[Plan], transfers: list[_Transfer], order: list[int]
) -> list[dict[int, _Value]]:
    """What every rank holds in every chunk at the end; a chunk it does not hold is garbage."""
    held = [dict.fromkeys(_inputs(plan), _Value(plan.rank, 1 << plan.rank)) for plan in plans]
    is_doubling = _is_doubling(plans)
    made: dict[frozenset[_Value], _Value] = {}
    next_maker = len(plans)
    moving: dict[int, _Value] = {}
    for end in order:
        number = end if end >= 0 else ~end
        sender, send_step, receiver, receive_step, chunk, action = transfers[number]
        if end >= 0:
            value = held[sender].get(chunk)
            if value is None:
                raise VerificationError(f"{_at(plans[sender], send_step)}: sends garbage")
            moving[number] = value
            if is_doubling:
                continue
        theirs, mine = moving.pop(number), held[receiver].get(chunk)
        if action is Action.COPY:
            held[receiver][chunk] = theirs
            continue
        if mine is None:
            where = _at(plans[receiver], receive_step)
            raise VerificationError(f"{where}: combines with garbage")
        if mine.ranks & theirs.ranks:
            where, twice = _at(plans[receiver], receive_step), _names(mine.ranks & theirs.ranks)
            raise VerificationError(f"{where}: counts the contribution of {twice} twice")
        value = _Value(next_maker, mine.ranks | theirs.ranks)
        next_maker += 1
        if is_doubling:
            value = made.setdefault(frozenset((mine, theirs)), value)
        held[receiver][chunk] = value
    return held


def _check_results(
    plans: Sequence[Plan], held: list[dict[int, _Value]], outputs: Sequence[Sequence[int]]
) -> None:
    everyone = (1 << len(plans)) - 1
    results: dict[int, tuple[int, _Value]] = {}
    for plan, mine, wanted in zip(plans, held, outputs, strict=True):
        if plan.operation in _REDUCTIONS:
            for chunk in wanted:
                value = mine[chunk]
                if value.ranks != everyone:
                    raise VerificationError(
                        f"{_head(plan)}: ends with chunk {chunk} lacking the contribution of "
                        f"{_names(everyone & ~value.ranks)}"
                    )
                first, expected = results.setdefault(chunk, (plan.rank, value))
                if value != expected:
                    raise VerificationError(
                        f"{_head(plan)}: ends with chunk {chunk} computed otherwise than "
                        f"rank {first}'s, so their bits may differ"
                    )
            continue
        # Where data only moves, a chunk has one source, so what is not garbage is the source's.
        for chunk in wanted:
            if chunk not in mine:
                raise VerificationError(f"{_head(plan)}: ends with garbage in chunk {chunk}")


def _run_barrier(plans: Sequence[Plan], transfers: list[_Transfer], order: list[int]) -> None:
    """A rank may finish only after all ranks have started: the sets of ranks that each has heard
    of, directly or through others, are followed along the transfers."""
    heard = [[1 << plan.rank] * plan.num_chunks for plan in plans]
    for number in order:
        transfer = transfers[number]
        heard[transfer.receiver][transfer.chunk] |= heard[transfer.sender][transfer.chunk]
    everyone = (1 << len(plans)) - 1
    for plan, chunks in zip(plans, heard, strict=True):
        missing = everyone
        for ranks in chunks:
            missing &= ~ranks
        if missing:
            raise VerificationError(f"{_head(plan)}: may leave before {_names(missing)} has come")


def _names(ranks: int) -> str:
    return "rank " + ", ".join(str(r) for r in range(ranks.bit_length()) if ranks >> r & 1)
