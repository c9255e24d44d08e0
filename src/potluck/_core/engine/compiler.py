"""From a request to its compiled plan: checked, chosen, planned and laid out once, then kept."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from potluck._core.codecs import Codec
from potluck._core.collectives.choose import Chooser
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.collectives.registry import crossing, digest, make_plan
from potluck._core.collectives.spanning_tree import cut_of
from potluck._core.engine.arrays import reduction
from potluck._core.engine.arrays.layout import lay_out
from potluck._core.engine.call import Call
from potluck._core.engine.loop.running import CompiledPlan
from potluck._core.engine.request import Request, check, part_of_call
from potluck._core.types import Group, ReduceOp

_MANY = 1 << 16
"""Elements, for the share of bytes that a codec leaves."""

_KEPT = 1024
"""Compiled plans of one channel. A training makes the same few calls over and over."""


class Compiler:
    """Compiles the calls of one channel that go over links."""

    def __init__(
        self,
        group: Group,
        channel: int,
        ranks: tuple[int, ...],
        nodes: Sequence[int],
        segment_bytes: int,
    ) -> None:
        """``nodes`` is the node index of every rank of the channel."""
        self._channel = channel
        self._ranks = ranks
        self._nodes = tuple(nodes)
        self._rank = ranks.index(group.rank)
        self._segment_bytes = segment_bytes
        place = {rank: at for at, rank in enumerate(ranks)}
        self._cut = cut_of((place[a], place[b]) for a, b in group.cut if a in place and b in place)
        self._chooser = Chooser(group, ranks, self._nodes, self._cut)
        self._kept: dict[tuple[Any, ...], CompiledPlan] = {}

    def compile(self, request: Request, parent_call: str = "") -> CompiledPlan:
        """The plan of ``request``; costs a microsecond when the same was asked before.

        TypeError or ValueError for what has no meaning, ValueError for what needs a link between
        ranks that can't reach each other. ``parent_call`` is as in ``Call``.
        """
        source, result, encoding = request.source, request.result, request.encoding
        described = part_of_call(request.operation, source, result)
        codec, residual = None, None
        if encoding is not None:
            request.check_encoding()
            codec, residual = encoding
        key = (
            request.operation,
            request.algorithm,
            described.dtype,
            described.shape,
            request.op,
            request.root,
            None if source is None else source.size,
            None if result is None else result.size,
            codec,
            residual is not None,
            parent_call,
        )
        plan = self._kept.get(key)
        if plan is None:
            plan = self._make(*key)
            if len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[key] = plan
        return plan

    def _make(
        self,
        operation: Operation,
        algorithm: Algorithm | None,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        op: ReduceOp | None,
        root: int,
        num_source: int | None,
        num_result: int | None,
        codec: Codec | None,
        has_residual: bool,
        parent_call: str,
    ) -> CompiledPlan:
        world = len(self._ranks)
        check(dtype, op, root, algorithm, world)
        # float16 has no room for a sum, nor for contributions that are scaled first.
        is_widened = op is ReduceOp.MEAN and dtype == np.float16 and world > 1
        within = np.dtype(np.float32) if is_widened else dtype
        nbytes = prod(shape) * within.itemsize
        if algorithm is not None:
            chosen = algorithm
        elif codec is not None:
            share = codec.encoded_bytes(_MANY) / (_MANY * dtype.itemsize)
            chosen = self._chooser.choose_coded(operation, nbytes, world, share)
        else:
            chosen = self._chooser.choose(operation, nbytes, world, op)
        plans = digest(operation, chosen, world, root, self._nodes, self._cut)  # verified first
        self._check_links(operation, chosen, root, codec)
        plan = make_plan(
            operation,
            chosen,
            world,
            self._rank,
            root=root,
            nodes=self._nodes,
            cut=self._cut,
            is_coded=codec is not None,
            sites=() if codec is not None else self._chooser.sites,
        )
        call = Call(
            operation,
            chosen,
            str(dtype),
            shape,
            op,
            root,
            self._segment_bytes,
            self._ranks if self._channel else (),
            codec.name if codec is not None else "",
            parent_call,
            plans,
        )
        is_scaled = op is ReduceOp.MEAN and not is_widened and (codec is None or codec.keeps_range)
        scales = is_scaled and reduction.scale_of(dtype, world) != 1
        return CompiledPlan(
            plan,
            call,
            lay_out(plan, num_source, num_result, scales=scales),
            channel=self._channel,
            peers=self._ranks,
            dtype=within,
            num_result=num_result,
            codec=codec,
            nodes=self._nodes,
            num_residual=num_source if has_residual else None,
        )

    def _check_links(
        self, operation: Operation, algorithm: Algorithm, root: int, codec: Codec | None
    ) -> None:
        """ValueError if the plan of some rank needs a link that is cut."""
        world, is_coded = len(self._ranks), codec is not None
        sites = () if is_coded else self._chooser.sites
        pair = crossing(operation, algorithm, world, root, self._nodes, self._cut, is_coded, sites)
        if pair is None:
            return
        a, b = (self._ranks[place] for place in pair)
        how = f"codec={codec.name!r}" if codec is not None else f"algorithm={str(algorithm)!r}"
        raise ValueError(
            f"{operation} with {how} needs a link between rank {a} and rank {b}, which can't reach "
            f"each other; leave it out, and the call goes by way of other ranks"
        )
