"""A model of the time a collective takes: plans on wires with latency, bandwidth and frame costs.

The model is LogGP's (Alexandrov et al., "LogGP: incorporating long messages into the LogP model",
1995) with the field's alpha-beta-gamma names, run event by event over the plans' own steps, so that
pipelining, waiting and contention come from the plans and are not assumed. It knows nothing of
lost packets, of other traffic, or of the scheduler of the machine: it ranks algorithms and shows
trends; it is not a measurement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from potluck._core.collectives.links import SEGMENT_BYTES, LinkModel
from potluck._core.collectives.plan import Action, Operation, Plan


@dataclass(frozen=True, slots=True)
class SimulatedTime:
    """What the model says; nothing here was measured."""

    seconds: float
    """From the common start until the last rank has finished."""
    rank_seconds: tuple[float, ...]
    """Until each rank has finished."""
    bytes_sent: tuple[int, ...]
    """Payload bytes each rank sent."""
    wire_bytes_sent: tuple[int, ...]
    """The part of ``bytes_sent`` that went to other nodes."""


def chunk_sizes(plan: Plan, nbytes: int) -> list[int]:
    """Bytes of every chunk, near-equal, where ``nbytes`` is the whole data of the operation.

    The whole is the one buffer of all_reduce, reduce and broadcast; all ``w`` chunks of the gathers
    and scatters; one rank's input (``w`` of the ``w * w`` chunks) of all_to_all. barrier has none.
    """
    if plan.operation is Operation.BARRIER:
        nbytes = 0
    parts = plan.world_size if plan.operation is Operation.ALL_TO_ALL else plan.num_chunks
    base, rest = divmod(nbytes, parts)
    return [base + (chunk % parts < rest) for chunk in range(plan.num_chunks)]


def simulate(
    plans: Sequence[Plan], nbytes: int, links: LinkModel, segment_bytes: int = SEGMENT_BYTES
) -> SimulatedTime:
    """The model's time for ``plans`` (one per rank, verified) to move ``nbytes``.

    ``nbytes`` is as in :func:`chunk_sizes`. Receivers have buffers: a sender never waits for a
    receiver that is busy elsewhere. Raises ``ValueError`` for a negative ``nbytes``, an empty
    segment or ``links.nodes`` of another world.

    Cost: some microseconds per segment and transfer; a ring all_reduce of 1,000 ranks is 2 million
    transfers.
    """
    return _simulate(plans, len(plans), nbytes, links, segment_bytes)


def simulate_rotated(
    plans: Sequence[Plan], nbytes: int, links: LinkModel, segment_bytes: int = SEGMENT_BYTES
) -> float:
    """The model's seconds for a world that looks alike every ``len(plans)`` ranks.

    ``plans`` are those of the first ``k`` ranks; rank ``r + k`` must do what rank ``r`` does, ``k``
    places further to the right, over the same kind of wires (a node's ranks all among the first
    ``k``, or all alone). Then it also does it at the same moment, and what a rank sends to its
    ``d``-th right neighbour is what it receives from its ``d``-th left: ``k`` ranks tell all.
    ``links.processors`` must be 0, since the ranks that are not simulated would need some, too.
    """
    return _simulate(plans, len(plans), nbytes, links, segment_bytes).seconds


def _simulate(
    plans: Sequence[Plan], period: int, nbytes: int, links: LinkModel, segment_bytes: int
) -> SimulatedTime:
    w = plans[0].world_size
    if nbytes < 0 or segment_bytes < 1:
        raise ValueError(f"cannot send {nbytes} bytes in segments of {segment_bytes}")
    if links.nodes is not None and len(links.nodes) != w:
        raise ValueError(f"nodes names {len(links.nodes)} ranks in a world of {w}")
    sizes = chunk_sizes(plans[0], nbytes)
    if period < w:
        sizes = [max(sizes)] * len(sizes)
    run = _Run(plans, sizes, links, segment_bytes)
    receives: dict[tuple[int, int], deque[int]] = {}
    numbered = [(plan.rank, step) for plan in plans for step in plan.steps]
    for number, (rank, (action, peer, _)) in enumerate(numbered):
        if action is not Action.SEND:
            receives.setdefault((rank, (rank - peer) % w), deque()).append(number)
    for number, (rank, (action, peer, _)) in enumerate(numbered):
        if action is Action.SEND:
            run.match[number] = receives[peer % period, (peer - rank) % w].popleft()
    return run.result()


# Kinds of events; the two low bits of an event's code. _READY: the item's frame is there, or it is
# the item's turn on its link.
_SENT, _ARRIVED, _READY, _DONE = range(4)


class _Run:
    """One simulation. Steps of all ranks are numbered through; an *item* is a step's segment,
    ``step * stride + segment``. An item waits for two things: its chunk's previous step, and its
    frame (COPY, REDUCE) or its turn on its link (SEND): when the previous item has been handed to
    the wire, and the item before that has left it."""

    def __init__(
        self,
        plans: Sequence[Plan],
        sizes: list[int],
        links: LinkModel,
        segment_bytes: int,
    ) -> None:
        self.plans, self.links = plans, links
        self.sizes = sizes
        self.num_segments = [max(1, -(-size // segment_bytes)) for size in sizes]
        self.stride = max(self.num_segments)
        num_steps = sum(len(plan.steps) for plan in plans)
        self.match = [-1] * num_steps
        self.next_on_chunk = [-1] * num_steps
        self.next_on_link = [-1] * num_steps
        self.waits = bytearray(b"\2") * (num_steps * self.stride)
        self.first: list[int] = []
        self.rank_of: list[int] = []
        number = 0
        for place, plan in enumerate(plans):
            last_on_chunk: dict[int, int] = {}
            last_on_link: dict[int, int] = {}
            for action, peer, chunk in plan.steps:
                before = last_on_chunk.get(chunk, -1)
                if before >= 0:
                    self.next_on_chunk[before] = number
                else:
                    item = number * self.stride
                    self.first.extend(range(item, item + self.num_segments[chunk]))
                last_on_chunk[chunk] = number
                if action is Action.SEND:
                    before = last_on_link.get(peer, -1)
                    if before >= 0:
                        self.next_on_link[before] = number
                    else:
                        self.first.append(number * self.stride)
                    last_on_link[peer] = number
                number += 1
            self.rank_of.extend([place] * len(plan.steps))

    def result(self) -> SimulatedTime:
        """Run to the end."""
        links, stride, match, waits = self.links, self.stride, self.match, self.waits
        next_on_chunk, next_on_link, rank_of = self.next_on_chunk, self.next_on_link, self.rank_of
        num_segments, sizes = self.num_segments, self.sizes
        frame_s, gamma = links.frame_s, links.gamma_s_per_byte
        steps = [step for plan in self.plans for step in plan.steps]
        num_places = len(self.plans)
        wire_of = links.wires()
        nodes = links.nodes or tuple(range(self.plans[0].world_size))
        # Wires that several ranks share, those of nodes and of sites: when each is free again.
        levels = (links.nodes, *links.sites) if links.shared_wire else ()
        uplinks = [
            (groups, dict.fromkeys(groups, 0.0), dict.fromkeys(groups, 0.0))
            for groups in levels
            if groups is not None
        ]

        # The work of each rank, of which the first piece is under way or waits for a processor.
        queues: list[deque[tuple[float, int]]] = [deque() for _ in range(num_places)]
        waiting: deque[int] = deque()
        num_idle = links.processors or num_places
        # When each rank's ends of its wires are free again: [to its own node, to other nodes].
        out_free, in_free = [[0.0, 0.0] for _ in self.plans], [[0.0, 0.0] for _ in self.plans]
        left: dict[tuple[int, int], float] = {}  # when a link's latest segment has left the wire
        finished, bytes_sent, wire_bytes_sent = (
            [0.0] * num_places,
            [0] * num_places,
            [0] * num_places,
        )
        events: list[tuple[float, int]] = []
        now = 0.0

        def size_of(chunk: int, segment: int) -> int:
            base, rest = divmod(sizes[chunk], num_segments[chunk])
            return base + (segment < rest)

        def work(place: int, seconds: float, code: int) -> None:
            """Have the rank at ``place`` work for so long, after its earlier work."""
            queues[place].append((seconds, code))
            if len(queues[place]) == 1:
                waiting.append(place)
                dispatch()

        def worked(place: int) -> None:
            """The rank at ``place`` has ended a piece of work."""
            nonlocal num_idle
            num_idle += 1
            queues[place].popleft()
            if queues[place]:
                waiting.append(place)
            dispatch()

        def dispatch() -> None:
            nonlocal num_idle
            while waiting and num_idle:
                num_idle -= 1
                seconds, code = queues[waiting.popleft()][0]
                heappush(events, (now + seconds, code))

        def settle(item: int) -> None:
            """One of the two things that ``item`` waited for has happened."""
            waits[item] -= 1
            if waits[item]:
                return
            number, segment = divmod(item, stride)
            action, peer, chunk = steps[number]
            place = rank_of[number]
            size, rank = size_of(chunk, segment), self.plans[place].rank
            if action is Action.SEND:
                busy = frame_s + size * wire_of(rank, peer).work_s_per_byte
                work(place, busy, item << 2 | _SENT)
            else:
                busy = frame_s + size * wire_of(peer, rank).work_s_per_byte
                busy += size * gamma if action is Action.REDUCE else 0.0
                work(place, busy, item << 2 | _DONE)

        def done(item: int, number: int) -> None:
            finished[rank_of[number]] = now
            later = next_on_chunk[number]
            if later >= 0:
                settle(later * stride + item % stride)

        for item in self.first:
            settle(item)
        while events:
            now, code = heappop(events)
            item, kind = code >> 2, code & 3
            number, segment = divmod(item, stride)
            _, peer, chunk = steps[number]
            place = rank_of[number]
            if kind == _SENT:
                worked(place)
                src = self.plans[place].rank
                size, wire = size_of(chunk, segment), wire_of(src, peer)
                busy = size * wire.beta_s_per_byte
                is_remote = nodes[src] != nodes[peer]
                end = out_free[place][is_remote] = max(now, out_free[place][is_remote]) + busy
                bytes_sent[place] += size
                if is_remote:
                    wire_bytes_sent[place] += size
                    for groups, free, _ in uplinks:
                        if groups[src] != groups[peer]:
                            end = free[groups[src]] = max(end, free[groups[src]] + busy)
                done(item, number)
                # One segment may wait for its wire while the rank works for the next.
                ready, left[place, peer] = left.get((place, peer), 0.0), end
                later = next_on_link[number] * stride
                following = item + 1 if segment + 1 < num_segments[chunk] else later
                if following >= 0 and ready > now:
                    heappush(events, (ready, following << 2 | _READY))
                elif following >= 0:
                    settle(following)
                arrived = (match[number] * stride + segment) << 2 | _ARRIVED
                heappush(events, (end + wire.alpha_s, arrived))
            elif kind == _ARRIVED:
                dst = self.plans[place].rank
                busy = size_of(chunk, segment) * wire_of(peer, dst).beta_s_per_byte
                is_remote = nodes[dst] != nodes[peer]
                end = max(now, in_free[place][is_remote] + busy)
                for groups, _, free in uplinks if is_remote else ():
                    if groups[dst] != groups[peer]:
                        end = free[groups[dst]] = max(end, free[groups[dst]] + busy)
                in_free[place][is_remote] = end
                if end > now:
                    heappush(events, (end, item << 2 | _READY))
                else:
                    settle(item)
            elif kind == _READY:
                settle(item)
            else:
                worked(place)
                done(item, number)
        assert not any(waits[item] for item in self._items()), "these plans never finish"
        return SimulatedTime(
            max(finished), tuple(finished), tuple(bytes_sent), tuple(wire_bytes_sent)
        )

    def _items(self) -> list[int]:
        return [
            number * self.stride + segment
            for number, (_, _, chunk) in enumerate(s for plan in self.plans for s in plan.steps)
            for segment in range(self.num_segments[chunk])
        ]
