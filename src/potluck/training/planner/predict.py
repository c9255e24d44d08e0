"""The time of a step by a strategy, predicted from what was measured. Pure.

A rank's backward makes gradients at an even rate in the last two thirds of its computation. A
bucket is encoded when its gradients are there, by one thread, then sent, one bucket after the
other; after backward all are decoded and written back. The network is ``collectives.simulate``'s,
with the exact bytes of each payload and the slowest link everywhere, for a ring is as fast as that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from potluck.collectives.choose import estimate
from potluck.collectives.links import LINKS, LinkModel, Wire
from potluck.collectives.plan import Algorithm, Operation
from potluck.collectives.registry import build_plan
from potluck.compressors import PowerSGD, TopK
from potluck.compressors.encoded import Encoded
from potluck.training.planner.candidates import Candidate
from potluck.training.planner.measured import Measured
from potluck.training.strategies import DataParallel, DiLoCo
from potluck.types import Engine

BACKWARD_PART = 2 / 3
"""Assumed: of a step's computation, the part in which gradients are made."""
BUCKET_BYTES = 25 << 20
_DENSE_BELOW = 4096
_COPIES, _OUTER_COPIES = 2, 6
"""Passes over the memory of the gradients in a step, and of the parameters in an exchange."""
_VOTE_BYTES = 48


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of one strategy; nothing here was measured."""

    candidate: Candidate
    step_s: float
    efficiency: float
    """The computation's part of a step, 0 to 1."""
    bytes_per_step: float
    """That a rank sends, on average over the steps of a round."""


def predict(measured: Measured, candidate: Candidate) -> Prediction:
    """The step of ``candidate`` in a group with these figures. A world of one sends nothing."""
    compute_s = max(measured.compute_s)
    if measured.world_size == 1:
        return Prediction(candidate, compute_s, 1.0, 0.0)
    net = _Network(measured, candidate)
    strategy = candidate.strategy
    if isinstance(strategy, DataParallel):
        step_s = net.step_s(compute_s)
        sent = net.bytes_sent(1.0)
    else:
        fragments = strategy.fragments if isinstance(strategy, DiLoCo) else 1
        num_steps = strategy.every / fragments
        visible_s, on_the_way_s = net.exchange_s(1 / fragments)
        delay_s = strategy.delay * compute_s if isinstance(strategy, DiLoCo) else 0.0
        visible_s += max(0.0, on_the_way_s - delay_s)
        step_s = compute_s + visible_s / num_steps
        sent = net.bytes_sent(1 / fragments) / num_steps
    return Prediction(candidate, step_s, compute_s / step_s, sent)


class _Network:
    """The collectives of one candidate in one group."""

    def __init__(self, measured: Measured, candidate: Candidate) -> None:
        self.measured, self.method = measured, candidate.compression
        self.encode_s = measured.encode_s.get(candidate.name, 0.0)
        self.decode_s = measured.decode_s.get(candidate.name, 0.0)
        self.world_size = measured.world_size
        places = {node: number for number, node in enumerate(dict.fromkeys(measured.nodes))}
        self.nodes = tuple(places[node] for node in measured.nodes)
        links = LINKS[Engine.NATIVE]
        beta = 1 / min(measured.bytes_per_s)
        # The measured rate has the ranks' work in it; one machine has no wire between its ranks.
        remote = Wire(measured.latency_s, beta, 0.0)
        self.links: LinkModel = replace(links, remote=remote, nodes=self.nodes)
        if len(places) == 1:
            self.links = replace(self.links, local=Wire(measured.latency_s, beta, 0.0))
        sizes = [math.prod(shape) for shape in measured.shapes]
        self.num_dense = sum(s for s in sizes if s < _DENSE_BELOW) if self.method else sum(sizes)
        self.num_coded = sum(sizes) - self.num_dense

    def buckets(self, part: float = 1.0) -> Iterator[int]:
        """The elements of each bucket, in the order in which backward completes them."""
        left = round((self.num_dense + self.num_coded) * part)
        while left > 0:
            size = min(left, BUCKET_BYTES // 4)
            yield size
            left -= size

    def step_s(self, compute_s: float) -> float:
        """The seconds of a step in which gradients are reduced."""
        measured, total = self.measured, self.num_dense + self.num_coded
        compute_s += _COPIES / 2 * total * measured.copy_s
        if isinstance(self.method, PowerSGD):
            coded_s = self.num_coded * self.encode_s + self._powersgd_s()
            return compute_s + coded_s + total * measured.copy_s + self._vote_s()
        is_beside = self.method is not None and not isinstance(self.method, Encoded)
        done, encoded, sent, finished = 0, 0.0, 0.0, compute_s
        for size in self.buckets():
            done += size
            ready = compute_s * (1 - BACKWARD_PART + BACKWARD_PART * done / total)
            work_s = size * self.encode_s
            encoded = max(encoded, ready) + (work_s if is_beside else 0.0)
            # A codec works while its segments are sent: the slower of the two takes the time.
            wire_s, late_s = self.sum_s(size)
            sent = max(sent, encoded) + (wire_s if is_beside else max(wire_s, work_s))
            finished = max(finished, sent + late_s) + self._decode_s(size)
        return finished + total * measured.copy_s + self._vote_s()

    def exchange_s(self, part: float) -> tuple[float, float]:
        """The exchange of a part of the parameters: the seconds in which a rank does it, and those
        in which it may go on computing."""
        own = way = late = 0.0
        for size in self.buckets(part):
            own += size * (_OUTER_COPIES * self.measured.copy_s + self.encode_s)
            own += self._decode_s(size)
            wire_s, late_s = self.sum_s(size)
            way, late = way + wire_s, max(late, late_s)
        return own + self._vote_s(), way + late

    def sum_s(self, size: int) -> tuple[float, float]:
        """The sum of a bucket of ``size`` elements over all ranks: the seconds that it takes the
        links, and those that the latency adds, in which the next bucket is on its way."""
        whole_s, links = self._sum_s(size), self.links
        self.links = replace(
            links, remote=links.remote._replace(alpha_s=0), local=links.local._replace(alpha_s=0)
        )
        wire_s = self._sum_s(size)
        self.links = links
        return wire_s, max(0.0, whole_s - wire_s)

    def _sum_s(self, size: int) -> float:
        coded = round(size * self.num_coded / (self.num_dense + self.num_coded))
        dense_s = self._all_reduce_s(4 * (size - coded)) if size > coded else 0.0
        if not coded:
            return dense_s
        if isinstance(self.method, Encoded):
            share = self.method.codec.encoded_bytes(coded) / (4 * coded)
            return dense_s + self._all_reduce_s(4 * coded, share)
        return dense_s + self._gather_s(_payload_bytes(self.method, coded))

    def bytes_sent(self, part: float) -> float:
        """The bytes that a rank sends for this part of the model."""
        w = self.world_size
        ring = 2 * (w - 1) / w
        dense, coded = 4 * self.num_dense * part, round(self.num_coded * part)
        if not coded:
            return dense * ring
        if isinstance(self.method, PowerSGD):
            return (dense + self._powersgd_bytes()) * ring
        if isinstance(self.method, Encoded):
            return (dense + self.method.codec.encoded_bytes(coded)) * ring
        return dense * ring + _payload_bytes(self.method, coded) * (w - 1)

    def _decode_s(self, size: int) -> float:
        return size * self.decode_s * self.world_size if isinstance(self.method, TopK) else 0.0

    def _powersgd_bytes(self) -> int:
        assert isinstance(self.method, PowerSGD)
        coded = (each for each in self.measured.shapes if math.prod(each) >= _DENSE_BELOW)
        return sum(self.method.payload_bytes(shape) for shape in coded)

    def _powersgd_s(self) -> float:
        """P, and then Q, after backward."""
        half = self._powersgd_bytes() // 2
        return self._all_reduce_s(4 * self.num_dense) + 2 * self._all_reduce_s(half)

    def _all_reduce_s(self, nbytes: int, share: float | None = None) -> float:
        several = 1 < len(set(self.nodes)) < self.world_size
        best = math.inf
        for algorithm in (
            *((Algorithm.DIRECT,) if share else (Algorithm.RING, Algorithm.DIRECT)),
            *((Algorithm.HIERARCHICAL,) if several else ()),
        ):
            plan = build_plan(
                *(Operation.ALL_REDUCE, algorithm, self.world_size, 0),
                nodes=self.nodes,
                is_coded=share is not None,
            )
            links = self.links
            if share is not None:
                links = links.encoded(share, within_nodes=algorithm is Algorithm.DIRECT)
            best = min(best, estimate(plan, nbytes, links, is_coded=share is not None))
        return best

    def _gather_s(self, nbytes: int) -> float:
        plans = (
            build_plan(Operation.ALL_GATHER, algorithm, self.world_size, 0)
            for algorithm in (Algorithm.RING, Algorithm.DIRECT)
        )
        return min(estimate(plan, nbytes * self.world_size, self.links) for plan in plans)

    def _vote_s(self) -> float:
        return self._gather_s(_VOTE_BYTES)


def _payload_bytes(method: object, count: int) -> int:
    assert isinstance(method, TopK)
    return method.payload_bytes(count)
