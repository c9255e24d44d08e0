"""Alignment: the replicas of machines that round differently are kept together.

All ranks apply the same reduced gradients, but a GPU, a processor with fused multiply-add and one
without it round an optimizer's update differently, in the last bit. So equal hashes can't be asked
of a group of unlike machines. There the ranks compare hashes every ``hash_every`` steps, and where
these differ, ranks receive the parameters of rank 0, look whether rounding explains the difference,
and take them over. The optimizer's state is not sent: it stays each rank's own, in its last bits.

Ranks of equal *arithmetic* must still have equal bits, if their states have the same *origin*: a
rank that has received its state from a machine that rounds otherwise continues with the optimizer
state of that machine.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from potluck.errors import Diverged
from potluck.training.rounding import Distance, distance
from potluck.training.transfer import Expected, broadcast_state

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext
    from potluck.training.policy import Policy
    from potluck.training.progress import Progress
    from potluck.training.replica import Replica

_log = logging.getLogger(__name__)

_COST = 0.02
"""The part of the time of a training that alignments may take."""


def kind_of(arithmetic: str) -> int:
    """``arithmetic`` as a number below 2**48, equal on all machines for equal texts."""
    return int.from_bytes(hashlib.sha256(arithmetic.encode()).digest()[:6], "little")


class Alignment:
    """Keeps the ``replica`` of this rank together with those of the others.

    ``is_unlike``: the group has ranks of unlike arithmetic or origin, or has a member of a group
    that had. All members decide alike when to align, since the decision follows from the group's
    history and from numbers that all receive.
    """

    def __init__(
        self, ctx: DistributedContext, progress: Progress, replica: Replica, policy: Policy
    ) -> None:
        self.is_unlike = False
        self._ctx = ctx
        self._progress = progress
        self._replica = replica
        self._policy = policy
        self._kind = kind_of(replica.arithmetic)
        self._origin = 0  # the epoch in which the state came from an unlike machine; 0 for none
        self._kinds: list[tuple[int, int]] = []  # arithmetic and origin, by rank
        self._next = 0  # the step before which the next alignment is due
        self._may_be_cut = False  # the last alignment may have been interrupted by a loss
        self._equal_at = -1  # not known: the state came from another member
        self._equal_since = time.monotonic()
        self._has_reported = False

    @property
    def row(self) -> tuple[int, int, int]:
        """Arithmetic, origin and ``is_unlike``, which this rank sends to the next group."""
        return self._kind, self._origin, self.is_unlike

    def new_group(self, rows: NDArray[Any], source: int, receivers: Sequence[int]) -> None:
        """A group has formed, whose ranks have these ``rows``. ``receivers`` will get the state of
        rank ``source``; -1 for a state that no rank has trained yet."""
        kinds = [(int(kind), int(origin)) for kind, origin, _ in rows]
        for rank in receivers:
            kind, origin = kinds[rank][0], 0
            if source >= 0:
                theirs, origin = kinds[source]
                origin = origin if kind == theirs else self._ctx.epoch
            kinds[rank] = kind, origin
        self._kinds = kinds
        self._may_be_cut = bool(rows[:, 2].any())
        self.is_unlike = len(set(kinds)) > 1 or self._may_be_cut
        self._next = 0

    def received(self) -> None:
        """This rank has received the state that was announced to ``new_group``."""
        self._origin = self._kinds[self._ctx.rank][1]

    def align(self, *, now: bool = False) -> None:
        """Make the parameters of all ranks equal, if that is due, or ``now`` and not yet done in
        this group at this step. A collective call, between two steps.

        Diverged, on all ranks, if ranks of equal arithmetic differ, or others by more than rounding
        explains. Cost: an all_gather of 40 bytes per rank; where parameters differ a broadcast of
        them, so seldom that it takes 2% of the time.
        """
        step = self._progress.step
        # Members may come to a step's last call by way of unlike ones (``ElasticLoop.save``).
        is_due = step >= self._next or (now and step != self._equal_at)
        if not (self.is_unlike and is_due):
            return
        ctx, began = self._ctx, time.monotonic()
        mine = np.frombuffer(bytes.fromhex(self._replica.fingerprint()), np.int64)
        rows = ctx.all_gather(np.array([*mine, self._equal_at])).reshape(ctx.world_size, -1)
        hashes = [row[:-1].tobytes() for row in rows]
        if not self._may_be_cut:
            self._compare_likes(hashes)
        spacing = self._policy.hash_every
        if len(set(hashes)) > 1:
            known = rows[rows[:, -1] >= 0, -1]
            num_steps = step - int(known.min(initial=step))
            self._take(num_steps, wanted=hashes[ctx.rank] != hashes[0])
            spacing = max(spacing, self._spacing(step, began))
        self._next, self._may_be_cut = step + spacing, False
        self._equal_at, self._equal_since = step, time.monotonic()

    def _compare_likes(self, hashes: list[bytes]) -> None:
        """Diverged if two ranks of equal arithmetic and origin have unlike parameters."""
        firsts: dict[tuple[int, int], int] = {}
        for rank, kind in enumerate(self._kinds):
            first = firsts.setdefault(kind, rank)
            if hashes[rank] != hashes[first]:
                self._ctx.settle()
                raise Diverged(
                    f"{self._now}: the parameters of rank {rank} differ from those of rank "
                    f"{first}, whose machine rounds in the same way; resume from the last "
                    "checkpoint"
                )

    def _take(self, num_steps: int, *, wanted: bool) -> None:
        """Adopt the parameters of rank 0 where ``wanted``, if rounding explains the difference."""
        ctx, own = self._ctx, self._replica.shared()
        expected = Expected(own=own, fixed=own, max_bytes=self._policy.max_state_bytes)
        theirs = broadcast_state(ctx, own, 0, wanted=wanted, expected=expected)
        found = distance(own, theirs, num_steps) if wanted else Distance()
        excess = ctx.all_gather(np.array([found.excess])).reshape(-1)
        if not excess.max() <= 1:
            ctx.settle()
            raise Diverged(self._describe(int(np.argmax(excess)), found))
        if not wanted:
            return
        self._replica.take_shared(theirs)
        if not self._has_reported:
            self._has_reported = True
            text = (
                f"rank {ctx.rank} rounds otherwise than rank 0, and takes over its parameters now "
                f"and then: {found.where} is {found.what} ({self._replica.arithmetic})"
            )
            _log.info("%s", text)
            ctx.report(event=text)

    def _describe(self, rank: int, found: Distance) -> str:
        text = f"{self._now}: rank {rank} differs from rank 0"
        if rank == self._ctx.rank:
            text += f" in {found.where} ({found.what})"
        return (
            f"{text}, and not by rounding: look for an update outside of the step or a learning "
            "rate of its own; resume from the last checkpoint"
        )

    @property
    def _now(self) -> str:
        return f"step {self._progress.step} in epoch {self._ctx.epoch}"

    def _spacing(self, step: int, began: float) -> int:
        """Steps until the next alignment, as rank 0 has timed this one, which began then."""
        took_s = time.monotonic() - began
        step_s = (began - self._equal_since) / max(1, step - self._equal_at)
        steps = np.array([took_s / max(step_s, 1e-6) / _COST])
        self._ctx.broadcast(steps)
        return math.ceil(min(float(steps[0]), 1e6))
