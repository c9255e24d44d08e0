"""MODEL_PARALLEL: each rank has some layers; samples of all ranks pass along them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck._core.context.structure import compare, hash_of
from potluck.errors import DataError
from potluck.torch.loading import schedule_of
from potluck.torch.pipeline import Layer, Node, plan_stages
from potluck.torch.structure import SAME_MODEL, broadcast_tensors, device_of
from potluck.torch.ways.way import EpochEnd, Part, Recipe, TrainCall, TrainerSamples, Way
from potluck.training.callbacks import Callbacks
from potluck.training.sampler import Batch, Holding, Schedule, warn_of_equal_samples
from potluck.training.training import abort_on_error
from potluck.training.transfer import gather_states

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

_MICRO_BATCHES = 4
"""A batch is cut into so many parts, so that ranks compute at the same time (GPipe: Huang et al.
2019, section 2)."""


class InLayers(Way):
    """With ``samples="own"`` the inputs of a step go to the rank with the first layers, its targets
    to the rank with the last. After each call of ``train`` all ranks have all parameters."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert isinstance(recipe.network, nn.Sequential)
        self._pipeline = LayerPipeline(recipe.ctx, recipe.network)
        self.model = self._pipeline.part
        has_layers = any(True for _ in self.model.parameters())
        self.optimizer = recipe.optimizer(self.model) if has_layers else None

    def train(self, call: TrainCall) -> None:
        samples, first = call.samples, call.first
        for epoch in range(call.epochs):
            schedule, empty = self._agree(samples, first + epoch, warns=not (first or epoch))
            local, loss, num = self._train_epoch(samples, schedule, empty)
            call.on_epoch(EpochEnd(epoch, loss, local, num))
            with abort_on_error(self.recipe.ctx):
                Callbacks(call.callbacks).call("on_epoch_end", epoch, loss)
        self._pipeline.share_layers()

    def _agree(
        self, samples: TrainerSamples, epoch: int, *, warns: bool
    ) -> tuple[Schedule, tuple[Tensor, Tensor]]:
        """The schedule of an epoch, and inputs and targets of 0 samples, with the shapes that all
        have. ValueError on all ranks for samples of one that can't be trained on, Desync for unlike
        networks. Collective."""
        recipe, ctx = self.recipe, self.recipe.ctx
        structure = recipe.structure()
        mine: dict[str, object] = {"reason": "", "model": hash_of(structure)}
        schedule = None
        try:
            samples.check(recipe.sizes, ctx.rank)
            schedule = schedule_of(
                samples.dataset, recipe.batch_size, 1, recipe.seed + epoch, True, recipe.samples
            )
            held = schedule.holding
            mine |= {"held": held.row, "empty": samples.empty()}
        except (ValueError, TypeError, DataError) as error:
            mine["reason"] = str(error)
        rows = gather_states(ctx, mine)
        if len({row["model"] for row in rows}) > 1:
            compare(ctx, "the model", structure, SAME_MODEL)
        for rank, row in enumerate(rows):
            if row["reason"]:
                raise ValueError(f"the samples of {ctx.group.describe(rank)}: {row['reason']}")
        assert schedule is not None
        holdings = [Holding.of(row["held"]) for row in rows]
        schedule = schedule.for_group(holdings, afresh=True)
        if warns and ctx.is_master:
            warn_of_equal_samples(holdings)
        known = [row["empty"] for row in rows if row["empty"] is not None]
        return schedule, tuple(known[0])

    def _batch(
        self,
        samples: TrainerSamples,
        schedule: Schedule,
        batch: Batch,
        empty: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """What this rank gives to a step: its own samples; where all have the same, all that the
        first and the last rank of the pipeline need."""
        wanted = self._wanted(schedule, batch)
        if not len(wanted):
            return empty

        def upcoming() -> Iterator[Part]:
            at = batch.start + batch.size
            while at < schedule.num_samples:
                after = schedule.batch(at)
                yield after.epoch, self._wanted(schedule, after)
                at += after.size

        return samples.load(wanted, batch.epoch, upcoming)

    def _wanted(self, schedule: Schedule, batch: Batch) -> NDArray[np.int64]:
        ctx, last = self.recipe.ctx, self._pipeline.last
        if self.recipe.samples == "own":
            share = schedule.share(batch, ctx.rank, ctx.world_size)
            return share.indices[: share.num_samples]
        return schedule.indices(batch)[: batch.size if ctx.rank in (0, last) else 0]

    def _train_epoch(
        self, samples: TrainerSamples, schedule: Schedule, empty: tuple[Tensor, Tensor]
    ) -> tuple[float, float, int]:
        """One epoch: the loss that this rank has seen, which is that of all samples on the rank
        with the last layers, NaN elsewhere; the loss of all samples on all ranks; their number."""
        recipe, ctx, pipeline = self.recipe, self.recipe.ctx, self._pipeline
        total, num, at, step = 0.0, 0, 0, 0
        self.model.train()
        while at < schedule.num_samples:
            batch = schedule.batch(at)
            counts = schedule.counts([(batch.start, batch.start + batch.size)], ctx.world_size)
            inputs, targets = self._batch(samples, schedule, batch, empty)
            if recipe.samples == "own":
                inputs = pipeline.bring(inputs, counts, 0)
                targets = pipeline.bring(targets, counts, pipeline.last)
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            with recipe.precision():
                loss = pipeline.step(inputs, targets, sum(counts), recipe.loss)
            if self.optimizer is not None:
                self.optimizer.step()
            if loss is not None:
                with abort_on_error(ctx):
                    recipe.check_loss(loss, f"step {step}")
                total, num = total + loss * sum(counts), num + sum(counts)
            at, step = at + batch.size, step + 1
        mean = torch.tensor([total / num if num else math.nan], dtype=torch.float64)
        local = float(mean)
        ctx.broadcast(mean, root=pipeline.last)
        return local, float(mean), num


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
