"""A dense network whose layers are cut over the ranks: micro-batches pass along them and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from potluck.torch.pipeline.plan import Layer, Node, plan_stages
from potluck.training.trainer import by_name

if TYPE_CHECKING:
    from potluck.context import DistributedContext

_MICRO_BATCHES = 4
"""A batch is cut into so many parts, so that ranks compute at the same time (GPipe: Huang et al.
2019, section 2)."""


class LayerPipeline:
    """This rank's ``part`` of a sequence of layers, with neighbouring layers on neighbouring ranks.

    A layer is a linear one, with the activation behind it. Ranks have about equally many
    parameters. Every call is collective, and raises PeerLost if a rank is lost: its layers are lost
    with it. ValueError for more ranks than layers.
    """

    def __init__(self, ctx: DistributedContext, network: nn.Sequential) -> None:
        firsts = [index for index, each in enumerate(network) if isinstance(each, nn.Linear)]
        linears = [each for each in network if isinstance(each, nn.Linear)]
        if len(linears) < ctx.world_size:
            raise ValueError(
                f"a network of {len(linears)} layers can't be cut for {ctx.world_size} workers: "
                "add hidden_dims, or take fewer workers"
            )
        costs = [Layer(sum(p.numel() for p in each.parameters())) for each in linears]
        runs = plan_stages(costs, [Node()] * ctx.world_size).stages
        ends = [*firsts[1:], len(network)]
        self._ctx = ctx
        self._widths = [linears[run.start].in_features for run in runs]
        self._width_out = linears[-1].out_features
        self._shapes: list[dict[str, torch.Size]] = []  # of each rank's parameters
        self.part = nn.Sequential()
        for rank, run in enumerate(runs):
            mine = range(firsts[run.start], ends[run.stop - 1])
            named = {
                f"{index}.{name}": value.shape
                for index in mine
                for name, value in network[index].state_dict().items()
            }
            self._shapes.append(named)
            if rank == ctx.rank:
                for index in mine:
                    self.part.add_module(str(index), network[index])

    def step(
        self, inputs: Tensor, wanted: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor]
    ) -> float | None:
        """Forward and backward of one batch. ``loss_of(outputs, wanted)`` is the mean loss of some
        samples. The gradients of the mean loss of the batch are added to the parameters'; returns
        that loss on the last rank, None elsewhere. ``inputs`` count on the first rank, ``wanted``
        on the last."""
        size = len(inputs)
        step = -(-size // _MICRO_BATCHES)
        parts = [slice(at, min(at + step, size)) for at in range(0, size, step)]
        kept = [(part, *self._forward(inputs[part])) for part in parts]
        total = 0.0
        for part, received, found in kept:
            if self._is_last:
                loss = loss_of(found, wanted[part]) * ((part.stop - part.start) / size)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            else:
                gradient = self._ctx.recv(torch.empty(found.shape), self._ctx.rank + 1)
                found.backward(gradient)  # type: ignore[no-untyped-call]
            if received is not None:
                assert received.grad is not None
                self._ctx.send(received.grad.contiguous(), self._ctx.rank - 1)
        return total if self._is_last else None

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """The outputs of all layers, on every rank. ``inputs`` count on rank 0."""
        _, found = self._forward(inputs)
        if not self._is_last:
            found = torch.empty((len(inputs), self._width_out))
        result: Tensor = self._ctx.broadcast(found.contiguous(), root=self._ctx.world_size - 1)
        return result

    def gather(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the parameters of all layers by name, on every rank."""
        mine = {name: value.numpy() for name, value in self.part.state_dict().items()}
        whole = {}
        for root, named in enumerate(self._shapes):
            for name, shape in named.items():
                array = mine[name].copy() if root == self._ctx.rank else np.empty(shape, np.float32)
                whole[name] = self._ctx.broadcast(array, root=root)
        return whole

    def load(self, given: Mapping[str, NDArray[np.float32]] | ArrayLike) -> None:
        """Take this rank's from the parameters of all layers, by name or as a flat vector.
        ValueError if a name is missing or unknown."""
        shapes = {name: shape for named in self._shapes for name, shape in named.items()}
        parameters, names = by_name(given, shapes), list(shapes)
        if set(names) != set(parameters):
            raise ValueError(f"parameters are {sorted(parameters)}; {sorted(names)} are needed")
        state = {n: torch.from_numpy(np.array(parameters[n])) for n in self.part.state_dict()}
        self.part.load_state_dict(state)

    @property
    def _is_last(self) -> bool:
        return self._ctx.rank == self._ctx.world_size - 1

    def _forward(self, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
        """What came from the rank before, None on the first, and this rank's outputs."""
        received = None
        if self._ctx.rank:
            shape = (len(inputs), self._widths[self._ctx.rank])
            received = self._ctx.recv(torch.empty(shape), self._ctx.rank - 1)
            received.requires_grad_(torch.is_grad_enabled())
        found: Tensor = self.part(inputs if received is None else received).float()
        if not self._is_last:
            self._ctx.send(found.detach().contiguous(), self._ctx.rank + 1)
        return received, found
