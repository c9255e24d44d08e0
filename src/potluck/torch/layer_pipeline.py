"""A dense network whose layers are cut over the ranks: micro-batches pass along them and back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from potluck.torch.pipeline.plan import Layer, Node, plan_stages
from potluck.torch.structure import broadcast_tensors, device_of

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

_MICRO_BATCHES = 4
"""A batch is cut into so many parts, so that ranks compute at the same time (GPipe: Huang et al.
2019, section 2)."""


class LayerPipeline:
    """This rank's ``part`` of a sequence of layers, with neighbouring layers on neighbouring ranks.

    A layer is a linear one, with the activation behind it. Ranks have about equally many
    parameters; ranks beyond the number of layers have none, which rank 0 logs. ``part`` has the
    modules of ``network`` themselves. Every call is collective, and raises PeerLost if a rank is
    lost: its layers are lost with it.
    """

    def __init__(self, ctx: DistributedContext, network: nn.Sequential) -> None:
        firsts = [index for index, each in enumerate(network) if isinstance(each, nn.Linear)]
        linears = [each for each in network if isinstance(each, nn.Linear)]
        self.last = min(len(linears), ctx.world_size) - 1
        """The rank with the last layers."""
        if self.last + 1 < ctx.world_size and ctx.is_master:
            _log.warning(
                "a network of %d layers is cut for %d of the %d workers; the others only give "
                "their samples: add hidden_dims, or take fewer workers",
                *(len(linears), self.last + 1, ctx.world_size),
            )
        costs = [Layer(sum(p.numel() for p in each.parameters())) for each in linears]
        runs = plan_stages(costs, [Node()] * (self.last + 1)).stages
        ends = [*firsts[1:], len(network)]
        self._ctx = ctx
        self._device = device_of(network)
        self._dtype = linears[0].weight.dtype
        self._widths = [linears[run.start].in_features for run in runs]
        self._stages = [
            {str(i): network[i] for i in range(firsts[run.start], ends[run.stop - 1])}
            for run in runs
        ]
        self.part = nn.Sequential()
        for name, module in self._stages[ctx.rank].items() if ctx.rank <= self.last else ():
            self.part.add_module(name, module)

    def bring(self, mine: Tensor, counts: tuple[int, ...], to: int) -> Tensor:
        """The samples of all ranks on rank ``to``, in rank order: ``counts`` of each; ``mine``
        elsewhere. Rows have the shape and dtype of ``mine``."""
        ctx = self._ctx
        if ctx.rank != to:
            if len(mine):
                ctx.send(mine.cpu().contiguous(), to)
            return mine
        parts = []
        for rank, count in enumerate(counts):
            part = mine
            if rank != to:
                part = torch.empty((count, *mine.shape[1:]), dtype=mine.dtype)
                part = ctx.recv(part, rank) if count else part
            parts.append(part.to(self._device))
        return torch.cat(parts)

    def step(
        self, inputs: Tensor, wanted: Tensor, size: int, loss_of: Callable[[Tensor, Tensor], Tensor]
    ) -> float | None:
        """Forward and backward of one batch of ``size`` samples. ``loss_of(outputs, wanted)`` is
        the mean loss of some samples. The gradients of the mean loss of the batch are added to the
        parameters'; returns that loss on the rank ``last``, None elsewhere. ``inputs`` count on
        rank 0, ``wanted`` on the last."""
        if self._ctx.rank > self.last:
            return None
        step = -(-size // _MICRO_BATCHES)
        parts = [slice(at, min(at + step, size)) for at in range(0, size, step)]
        kept = [(part, *self._forward(inputs, part)) for part in parts]
        total = 0.0
        for part, received, found in kept:
            if self._ctx.rank == self.last:
                loss = loss_of(found, wanted[part]) * ((part.stop - part.start) / size)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            else:
                gradient = torch.empty(found.shape, dtype=found.dtype)
                gradient = self._ctx.recv(gradient, self._ctx.rank + 1)
                found.backward(gradient.to(self._device))  # type: ignore[no-untyped-call]
            if received is not None:
                assert received.grad is not None
                self._ctx.send(received.grad.cpu().contiguous(), self._ctx.rank - 1)
        return total if self._ctx.rank == self.last else None

    def share_layers(self) -> None:
        """Give the parameters of each rank's layers to the ``network`` of all. Cost: a broadcast of
        the network."""
        for rank, stage in enumerate(self._stages):
            tensors = {
                f"{index}.{name}": each
                for index, module in stage.items()
                for name, each in module.named_parameters()
            }
            broadcast_tensors(self._ctx, tensors, root=rank)

    def _forward(self, inputs: Tensor, part: slice) -> tuple[Tensor | None, Tensor]:
        """What came from the rank before, None on the first, and this rank's outputs."""
        received = None
        if self._ctx.rank:
            shape = (part.stop - part.start, self._widths[self._ctx.rank])
            received = self._ctx.recv(torch.empty(shape, dtype=self._dtype), self._ctx.rank - 1)
            received = received.to(self._device).requires_grad_()
        found: Tensor = self.part(inputs[part] if received is None else received).to(self._dtype)
        if self._ctx.rank != self.last:
            self._ctx.send(found.detach().cpu().contiguous(), self._ctx.rank + 1)
        return received, found
