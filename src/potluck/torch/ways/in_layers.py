"""MODEL_PARALLEL: each rank has some layers; samples of all ranks pass along them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck._core.context.structure import compare, hash_of
from potluck.errors import DataError
from potluck.torch.layer_pipeline import LayerPipeline
from potluck.torch.loading import schedule_of
from potluck.torch.structure import SAME_MODEL
from potluck.torch.ways.samples import Part, TrainerSamples
from potluck.torch.ways.way import EpochEnd, Recipe, Way
from potluck.training.callbacks import Callbacks
from potluck.training.own_samples import warn_of_equal_samples
from potluck.training.sampler import Batch, Holding, Schedule
from potluck.training.training import abort_on_error
from potluck.training.transfer import gather_states


class InLayers(Way):
    """With ``samples="own"`` the inputs of a step go to the rank with the first layers, its targets
    to the one with the last. After each call of ``train`` all ranks have all parameters."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert isinstance(recipe.network, nn.Sequential)
        self._pipeline = LayerPipeline(recipe.ctx, recipe.network)
        self.model = self._pipeline.part
        has_layers = any(True for _ in self.model.parameters())
        self.optimizer = recipe.optimizer(self.model) if has_layers else None

    def train(
        self,
        samples: TrainerSamples,
        epochs: int,
        first: int,
        on_epoch: Callable[[EpochEnd], None],
        callbacks: Sequence[object],
    ) -> None:
        for epoch in range(epochs):
            schedule, empty = self._agree(samples, first + epoch, warns=not (first or epoch))
            local, loss, num = self._train_epoch(samples, schedule, empty)
            on_epoch(EpochEnd(epoch, loss, local, num))
            with abort_on_error(self.recipe.ctx):
                Callbacks(callbacks).call("on_epoch_end", epoch, loss)
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
