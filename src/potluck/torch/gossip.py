"""Gossip: parameters of each rank's own, averaged with those of its neighbours after each round."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck._core.collectives.spanning_tree import Cut
from potluck.checkpoint.state import State, fingerprint
from potluck.graphs import Graph
from potluck.torch.outer import LEAST_BYTES_PER_S, OuterStrategy, Part
from potluck.training.strategies import Strategy

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)
_LEAST_PRESENT = 1e-6
"""Less is rounding: no rank had finite numbers."""


class GossipStrategy(OuterStrategy):
    """Gossip on one model: a ``training.rounds.RoundStrategy`` without global parameters.

    Ranks are equal only after a round without samples, in which they take the mean over all ranks.
    The loop makes such a round before each checkpoint and at the end. A newcomer gets the
    parameters of the most senior member.

    A tensor with NaN or inf does not count: its rank sends zeros, and 1 in place of 0 in a flag
    beside the numbers, by whose mean all who receive it know how much is missing. So they, and the
    rank itself, get the mean of the others, weighted as in the graph. ``num_nonfinite`` counts the
    elements by name, on the rank that has them.
    """

    def __init__(
        self,
        config: Strategy,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Mapping[str, Any],
    ) -> None:
        super().__init__(config, model, optimizers, also)
        self.num_fragments = 2  # more than one round: all are equal after one without samples only
        self._are_equal = False
        self._whole: dict[int, bool] = {}
        self._graphs: dict[tuple[int, Cut], tuple[Graph, ...]] = {}  # by world size and cut links

    def begin(self, number: int) -> None:
        self._are_equal = False

    def close(self, number: int, *, whole: bool) -> None:
        self._whole[number] = whole
        for name, tensor in zip(self._names, self._tensors, strict=True):
            num = tensor.numel() - int(tensor.detach().isfinite().sum())
            if num:
                self.num_nonfinite[name] += num
                _log.warning(
                    "%s: %d of %d elements are inf or NaN after round %d on this rank: "
                    "the mean leaves them out", name, num, tensor.numel(), number,
                )  # fmt: skip

    @torch.no_grad()
    def start(
        self, ctx: DistributedContext, number: int, weight: float, timeout_s: float
    ) -> Callable[[], None]:
        now = {index: tensor.detach().cpu() for index, tensor in enumerate(self._tensors)}
        parts = [part for parts in self._fragments for part in parts]
        self._sums = [(part, _with_flags(part, now)) for part in parts]
        timeout_s += sum(flat.nbytes for _, flat in self._sums) / LEAST_BYTES_PER_S
        options: dict[str, Any] = {"timeout": timeout_s, "async_op": True}
        if self._whole[number]:
            works = [ctx.all_reduce(flat, "mean", **options) for _, flat in self._sums]
        else:
            links = ctx.world_size, ctx.group.cut
            if links not in self._graphs:
                self._graphs[links] = self.config.graphs(*links)
            sequence = self._graphs[links]
            graph = sequence[number % len(sequence)]
            works = [ctx.neighbor_all_reduce(flat, graph, **options) for _, flat in self._sums]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    @torch.no_grad()
    def apply(self, number: int, fraction: float, *, delayed: bool) -> None:
        missing = {
            index: float(flag)
            for part, flat in self._sums
            for index, flag in zip(part.bucket.parameters, flat[part.bucket.numel :], strict=True)
        }
        for index, mean in self._gradients():
            if missing[index]:
                present = 1 - missing[index]
                mean = mean / present if present > _LEAST_PRESENT else mean.fill_(math.nan)
            self._tensors[index].copy_(mean)
        self._are_equal = self._whole.pop(number)
        self._sums = []

    # ------------------------------------------------------------ the state

    def capture(self) -> State:
        return {"strategy": f"Gossip(every={self.config.every})", "are_equal": self._are_equal}

    def restore(self, state: State) -> None:
        self._are_equal = bool(state["are_equal"])
        self._whole.clear()

    def fingerprint(self) -> str:
        """Of the parameters where they are equal on all ranks; else of their names."""
        return fingerprint(list(self._tensors) if self._are_equal else self._names)


def outer_of(
    config: Strategy,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    also: Mapping[str, Any],
) -> OuterStrategy:
    """The exchange at the end of a round by this strategy, which is one of rounds."""
    made = GossipStrategy if config.neighbors_only else OuterStrategy
    return made(config, model, optimizers, also)


def _with_flags(part: Part, now: Mapping[int, Tensor]) -> Tensor:
    """The tensors of a part, then a flag for each: 1 for zeros in place of one that is not
    finite."""
    bad = {index for index in part.bucket.parameters if not now[index].isfinite().all()}
    sent = {index: torch.zeros_like(t) if index in bad else t for index, t in now.items()}
    flags = torch.tensor([float(i in bad) for i in part.bucket.parameters], dtype=part.dtype)
    return torch.cat([part.flat(sent, 1.0), flags])
