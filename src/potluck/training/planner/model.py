"""A model of the time that a strategy adds to a step, from the measured links and work. Pure.

A rank's backward makes gradients at an even rate in the last two thirds of its computation. A
bucket is copied, encoded by a thread beside backward, then sent, one bucket after the other; after
backward all are decoded and written back. The network is ``collectives.simulate``'s, with the exact
bytes of each payload and the slowest link everywhere, for a ring is as fast as that. What a rank
does itself is counted in passes over its gradients, at the measured speed of a copy.

It leaves out ranks that share a processor, lost packets, and waits of threads for each other. So it
predicts how long a rehearsal will take, and scales rehearsed times to groups and buckets that were
not rehearsed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from potluck._core.collectives.choose import estimate
from potluck._core.collectives.links import LINKS, LinkModel, Wire
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.collectives.registry import build_plan
from potluck._core.types import Engine
from potluck.compressors.base import Cost
from potluck.training.buckets import Slot, assign
from potluck.training.planner.candidates import Candidate
from potluck.training.planner.measured import Measured
from potluck.training.strategies import Strategy

BACKWARD_PART = 2 / 3
"""Assumed: of a step's computation, the part in which gradients are made."""
MB = 1 << 20
EXCHANGE_BYTES = 25 << 20
"""Of the arrays that a round exchanges."""
_DENSE_BELOW = 4096
_VOTE_BYTES = 48


class Times(NamedTuple):
    """What a strategy adds to the computation, in seconds."""

    own_s: float
    """In which a rank does nothing else: with data parallelism of a step, all that is not hidden
    behind the computation; with rounds of an exchange."""
    way_s: float
    """Of an exchange: in which a rank may go on computing, if the strategy has a delay."""


def times_of(measured: Measured, candidate: Candidate, elements: int | None = None) -> Times:
    """The modelled seconds that ``candidate`` adds; zeros in a world of one. With ``elements`` for
    a model of only so many of the gradients, whose computation is shorter in proportion, or for an
    exchange of so many parameters."""
    if measured.world_size == 1:
        return Times(0.0, 0.0)
    strategy, total = candidate.strategy, measured.num_elements
    if not strategy.in_rounds:
        part = measured if elements is None else measured.part(elements)
        took_s = _Network(part, candidate).step_s(part.step_compute_s)
        return Times(max(0.0, took_s - part.step_compute_s), 0.0)
    net = _Network(measured, candidate)
    share = 1 / strategy.fragments if elements is None else elements / max(1, total)
    if strategy.neighbors_only:
        return net.gossip_s(strategy, share)
    return net.exchange_s(share)


def bytes_of(measured: Measured, candidate: Candidate) -> float:
    """The bytes that a rank sends for a step, on average over the steps of a round."""
    if measured.world_size == 1:
        return 0.0
    net, strategy = _Network(measured, candidate), candidate.strategy
    if strategy.neighbors_only:
        return net.num_out(strategy) * 4 * measured.num_elements / strategy.round_steps
    return net.bytes_sent(1 / strategy.fragments) / strategy.round_steps


class _Network:
    """The collectives of one candidate in one group."""

    def __init__(self, measured: Measured, candidate: Candidate) -> None:
        self.measured, self.candidate = measured, candidate
        self.method = candidate.compression
        self.encodes_first = self.method is not None and self.method.encodes_first
        self.at_end = self.method is not None and self.method.needs_matrices
        self.encode_s = measured.encode_s.get(candidate.name, 0.0)
        self.decode_s = measured.decode_s.get(candidate.name, 0.0)
        self.world_size = measured.world_size
        places = {node: number for number, node in enumerate(dict.fromkeys(measured.nodes))}
        self.nodes = tuple(places[node] for node in measured.nodes)
        self._sums: dict[int, tuple[float, float]] = {}  # of buckets of one size
        self.links = self._links_of(measured.bytes_per_s)
        self.crossing = self._links_of(measured.crossing_bytes_per_s)
        sizes = [math.prod(shape) for shape in measured.shapes]
        self.num_dense = sum(s for s in sizes if s < _DENSE_BELOW) if self.method else sum(sizes)
        self.num_coded = sum(sizes) - self.num_dense

    def _links_of(self, rates: tuple[float, ...]) -> LinkModel:
        # The measured rate has the ranks' work in it. Nothing goes over it in what is left of a
        # group on one machine.
        wire = Wire(self.measured.latency_s, 1 / min(rates), 0.0)
        return replace(LINKS[Engine.NATIVE], remote=wire, nodes=self.nodes)

    def _step_buckets(self) -> list[int]:
        """The elements of each bucket of gradients, in the order in which backward completes
        them."""
        slots = [Slot(math.prod(shape), 4, None) for shape in self.measured.shapes]
        size = round(self.candidate.bucket_size_mb * MB)
        buckets = assign(slots, bucket_bytes=size, first_bucket_bytes=min(size, MB))
        return [each.numel for each in buckets]

    def _parts(self, part: float) -> Iterator[int]:
        """The elements of each array of an exchange of this part of the parameters."""
        left = round((self.num_dense + self.num_coded) * part)
        while left > 0:
            size = min(left, EXCHANGE_BYTES // 4)
            yield size
            left -= size

    def step_s(self, compute_s: float) -> float:
        """The seconds of a step in which gradients are reduced."""
        copy_s, total = self.measured.copy_s, self.num_dense + self.num_coded
        passes = self.method.cost([]).passes if self.method is not None else 0
        # Into the bucket; a codec's residual is copied there, too, so that it can be undone.
        compute_s += (1 if self.encodes_first else max(1, passes)) * total * copy_s
        beside_s = self.encode_s + passes * copy_s if self.encodes_first else 0.0
        done, encoded, sent, finished = 0, 0.0, 0.0, compute_s
        for size in self._step_buckets():
            done += size
            ready = compute_s * (1 - BACKWARD_PART + BACKWARD_PART * done / total)
            encoded = max(encoded, ready) + size * beside_s
            if self.at_end:
                finished = max(finished, encoded)
                continue
            wire_s, late_s = self.sum_s(size)
            sent = max(sent, encoded) + max(wire_s, self._engine_s(size))
            finished = max(finished, sent + late_s) + self._take_s(size)
        if self.at_end:
            finished += self._matrices_s() + total * copy_s + self.num_coded * self.decode_s
        return finished + total * copy_s + self._vote_s()

    def exchange_s(self, part: float) -> Times:
        """The exchange of a part of the parameters."""
        passes, encode_s = _outer_passes(self.candidate), self.encode_s if self.encodes_first else 0
        own = way = late = 0.0
        for size in self._parts(part):
            own += size * (passes * self.measured.copy_s + encode_s)
            own += self._sum_payloads_s(size)
            wire_s, late_s = self.sum_s(size)
            way, late = way + max(wire_s, self._engine_s(size)), max(late, late_s)
        return Times(own + self._vote_s(), way + late)

    def num_out(self, strategy: Strategy) -> float:
        """The neighbours that a rank sends to in a round, on average over the rounds, of the rank
        that has the most."""
        graphs, ranks = strategy.graphs(self.world_size), range(self.world_size)
        most = [max(len(graph.out_neighbors(rank)) for rank in ranks) for graph in graphs]
        return sum(most) / len(most)

    def gossip_s(self, strategy: Strategy, part: float) -> Times:
        """The exchange of a part of the parameters with the neighbours in a graph."""
        total, count = (self.num_dense + self.num_coded) * part, self.num_out(strategy)
        is_one = len(set(self.nodes)) == 1
        wire = self.crossing.local if is_one else self.crossing.remote
        copies = 3 + 2 * count  # into what is sent, the check of it, the result; for each neighbour
        own = total * copies * self.measured.copy_s + self._vote_s()
        return Times(own, wire.alpha_s + count * 4 * total * wire.beta_s_per_byte)

    def _engine_s(self, size: int) -> float:
        """The engine's work for a bucket that a codec encodes inside an all_reduce: each rank
        encodes its own, adds up what it receives of its part, and decodes the parts of others."""
        encoded_bytes = self._cost(size).encoded_bytes
        if not encoded_bytes:
            return 0.0
        received = 2 * (self.world_size - 1) / self.world_size
        sent = received * encoded_bytes
        work_s = LINKS[Engine.NATIVE].remote.work_s_per_byte
        return size * (self.encode_s + received * self.decode_s) + 2 * sent * work_s

    def _take_s(self, size: int) -> float:
        """After the sum of a bucket: payloads are added up, and what is not finite is looked
        for."""
        checks = 0 if self.method is None else 1
        return size * checks * self.measured.copy_s + self._sum_payloads_s(size)

    def _sum_payloads_s(self, size: int) -> float:
        if not self._cost(size).gathered_bytes:
            return 0.0
        return size * (self.measured.copy_s + self.world_size * self.decode_s)

    def sum_s(self, size: int) -> tuple[float, float]:
        """The sum of a bucket of ``size`` elements over all ranks: the seconds that it takes the
        links, and those that the latency adds, in which the next bucket is on its way."""
        if size in self._sums:
            return self._sums[size]
        whole_s, kept = self._sum_s(size), (self.links, self.crossing)
        self.links, self.crossing = (
            replace(
                links,
                remote=links.remote._replace(alpha_s=0),
                local=links.local._replace(alpha_s=0),
            )
            for links in kept
        )
        wire_s = self._sum_s(size)
        self.links, self.crossing = kept
        self._sums[size] = wire_s, max(0.0, whole_s - wire_s)
        return self._sums[size]

    def _sum_s(self, size: int) -> float:
        coded = round(size * self.num_coded / (self.num_dense + self.num_coded))
        dense_s = self._all_reduce_s(4 * (size - coded)) if size > coded else 0.0
        if not coded:
            return dense_s
        cost = self._cost(coded)
        if cost.encoded_bytes:
            dense_s += self._all_reduce_s(4 * coded, cost.encoded_bytes / (4 * coded))
        if cost.reduced_bytes:
            dense_s += self._all_reduce_s(cost.reduced_bytes)
        return dense_s + (self._gather_s(cost.gathered_bytes) if cost.gathered_bytes else 0.0)

    def bytes_sent(self, part: float) -> float:
        """The bytes that a rank sends for this part of the model."""
        w = self.world_size
        ring = 2 * (w - 1) / w
        dense, coded = 4 * self.num_dense * part, round(self.num_coded * part)
        if not coded:
            return dense * ring
        cost = self._matrices_cost() if self.at_end else self._cost(coded)
        return (dense + cost.reduced_bytes + cost.encoded_bytes) * ring + cost.gathered_bytes * (
            w - 1
        )

    def _cost(self, count: int) -> Cost:
        """What the compressor sends for so many elements."""
        return Cost() if self.method is None else self.method.cost([(count,)])

    def _matrices_cost(self) -> Cost:
        """What it sends for all tensors of the model."""
        assert self.method is not None
        coded = [each for each in self.measured.shapes if math.prod(each) >= _DENSE_BELOW]
        return self.method.cost(coded)

    def _matrices_s(self) -> float:
        """Two all_reduces of half the bytes each, such as P and then Q, after backward."""
        half = self._matrices_cost().reduced_bytes // 2
        dense_s = self._all_reduce_s(4 * self.num_dense) if self.num_dense else 0.0
        return dense_s + 2 * self._all_reduce_s(half)

    def _all_reduce_s(self, nbytes: int, share: float | None = None) -> float:
        several = 1 < len(set(self.nodes)) < self.world_size
        options: tuple[Algorithm, ...] = (
            *((Algorithm.DIRECT,) if share else (Algorithm.RING, Algorithm.DIRECT)),
            *((Algorithm.HIERARCHICAL,) if several else ()),
        )
        named = self.candidate.strategy.algorithm
        best = math.inf
        for algorithm in options if named is None else (Algorithm(named),):
            plan = build_plan(
                *(Operation.ALL_REDUCE, algorithm, self.world_size, 0),
                nodes=self.nodes,
                is_coded=share is not None,
            )
            links = self._over(algorithm)
            if share is not None:
                links = links.encoded(share, within_nodes=algorithm is Algorithm.DIRECT)
            best = min(best, estimate(plan, nbytes, links, is_coded=share is not None))
        return best

    def _gather_s(self, nbytes: int) -> float:
        found = []
        for algorithm in (Algorithm.RING, Algorithm.DIRECT):
            plan = build_plan(Operation.ALL_GATHER, algorithm, self.world_size, 0)
            found.append(estimate(plan, nbytes * self.world_size, self._over(algorithm)))
        return min(found)

    def _over(self, algorithm: Algorithm) -> LinkModel:
        """The links as this algorithm uses them."""
        return self.crossing if algorithm is Algorithm.DIRECT else self.links

    def _vote_s(self) -> float:
        return self._gather_s(_VOTE_BYTES)


def _outer_passes(candidate: Candidate) -> int:
    """Passes over the memory of the parameters that an exchange takes (``torch.outer``): what has
    changed, the array that is sent, its weight, the step of the outer optimizer, the result."""
    strategy = candidate.strategy
    passes = 5
    if strategy.outer.momentum:
        passes += 3 if strategy.outer.nesterov else 2
    return passes + bool(strategy.delay) + (strategy.compression is not None)
