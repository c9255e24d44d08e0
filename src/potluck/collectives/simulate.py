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

from potluck.collectives.links import SEGMENT_BYTES, LinkModel
from potluck.collectives.plan import Action, Operation, Plan


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


# Kinds of events; the two low bits of an event's code.
_SENT, _ARRIVED, _LANDED, _COMBINED = range(4)


class _Run:
    """One simulation. Steps of all ranks are numbered through; an *item* is a step's segment,
    ``step * stride + segment``. An item waits for two things: its chunk's previous step, and its
    link's previous item (SEND) or its frame (COPY, REDUCE)."""

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
        shared = links.shared_wire and links.nodes is not None
        node_out, node_in = dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 0.0)

        sending = [False] * num_places
        queues: list[deque[int]] = [deque() for _ in range(num_places)]
        receiver_free, combiner_free = [0.0] * num_places, [0.0] * num_places
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

        def start(item: int) -> None:
            """The sender's turn: put one segment on its wire."""
            number, segment = divmod(item, stride)
            _, peer, chunk = steps[number]
            place = rank_of[number]
            src = self.plans[place].rank
            size = size_of(chunk, segment)
            busy = size * wire_of(src, peer).beta_s_per_byte
            end = now + frame_s + busy
            bytes_sent[place] += size
            if nodes[src] != nodes[peer]:
                wire_bytes_sent[place] += size
                if shared:
                    end = node_out[nodes[src]] = max(end, node_out[nodes[src]] + busy)
            sending[place] = True
            heappush(events, (end, item << 2 | _SENT))

        def settle(item: int) -> None:
            """One of the two things that ``item`` waited for has happened."""
            waits[item] -= 1
            if waits[item]:
                return
            number = item // stride
            action, _, chunk = steps[number]
            place = rank_of[number]
            if action is Action.SEND:
                if sending[place]:
                    queues[place].append(item)
                else:
                    start(item)
            elif action is Action.REDUCE and gamma:
                end = max(now, combiner_free[place]) + size_of(chunk, item % stride) * gamma
                combiner_free[place] = end
                heappush(events, (end, item << 2 | _COMBINED))
            else:
                done(item, number)

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
            if kind == _SENT:
                place = rank_of[number]
                sending[place] = False
                if queues[place]:
                    start(queues[place].popleft())
                done(item, number)
                if segment + 1 < num_segments[chunk]:
                    settle(item + 1)
                elif next_on_link[number] >= 0:
                    settle(next_on_link[number] * stride)
                alpha = wire_of(self.plans[place].rank, peer).alpha_s
                heappush(events, (now + alpha, (match[number] * stride + segment) << 2 | _ARRIVED))
            elif kind == _ARRIVED:
                place = rank_of[number]
                dst = self.plans[place].rank
                busy = size_of(chunk, segment) * wire_of(peer, dst).beta_s_per_byte
                end = max(now, receiver_free[place] + frame_s + busy)
                if shared and nodes[dst] != nodes[peer]:
                    end = node_in[nodes[dst]] = max(end, node_in[nodes[dst]] + busy)
                receiver_free[place] = end
                if end > now:
                    heappush(events, (end, item << 2 | _LANDED))
                else:
                    settle(item)
            elif kind == _LANDED:
                settle(item)
            else:
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
