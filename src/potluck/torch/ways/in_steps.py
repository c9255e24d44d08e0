"""DATA_PARALLEL and DECENTRALIZED: all ranks take each step together, in an elastic loop."""

from __future__ import annotations

import math
from collections.abc import Callable

from potluck.torch.ddp import DistributedDataParallel
from potluck.torch.loop import ElasticLoop
from potluck.torch.structure import broadcast_tensors
from potluck.torch.ways.way import EpochEnd, Recipe, TrainCall, Way
from potluck.training.policy import Policy
from potluck.training.strategies import Gossip
from potluck.training.training import LOST


class InSteps(Way):
    """With ``gossip`` ranks average parameters with their neighbours after each step, else
    gradients with all ranks in it."""

    def __init__(self, recipe: Recipe, policy: Policy, *, gossip: bool) -> None:
        super().__init__(recipe)
        self.model: DistributedDataParallel = DistributedDataParallel(
            recipe.network, ctx=recipe.ctx
        )
        self.optimizer = recipe.optimizer(recipe.network)
        self._policy = policy
        self._gossip = gossip

    def train(self, call: TrainCall) -> None:
        recipe, scaler, optimizer = self.recipe, self.recipe.scaler, self.optimizer
        samples = call.samples
        assert optimizer is not None
        mine = _OwnLoss(call.on_epoch)
        job = ElasticLoop(
            self.model,
            optimizer,
            samples.dataset,
            batch_size=recipe.batch_size,
            epochs=call.epochs,
            seed=recipe.seed + call.first,
            also={"scaler": scaler},
            policy=self._policy,
            callbacks=[mine, *call.callbacks],
            ctx=recipe.ctx,
            strategy=Gossip() if self._gossip else None,
            samples="own" if recipe.samples == "own" else "all",
        )
        is_checked, has_samples = False, len(samples.dataset) > 0
        for batch in job:
            with job.step():
                if not is_checked:  # here, so that the other ranks hear of it
                    samples.check(recipe.sizes, recipe.ctx.rank)
                    is_checked = True
                optimizer.zero_grad()
                if has_samples:
                    inputs, targets = samples.pair(batch)
                    with recipe.precision():
                        loss = recipe.loss(self.model(inputs), targets)
                    if not scaler.enabled:
                        recipe.check_loss(loss.item(), f"step {job.step_number}")
                else:
                    loss = self.model.zero_loss()
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                job.log(loss=loss if has_samples else math.nan)
                scaler.step(optimizer)
                scaler.update()
                mine.add(loss.item(), job.num_samples)
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Rank 0's, by which all predict alike. If a rank is lost now, each keeps its own."""
        ctx = self.recipe.ctx
        if self._gossip:
            return
        try:
            broadcast_tensors(ctx, dict(self.model.named_buffers()))
        except LOST:
            if not ctx.elastic:
                raise


class _OwnLoss:
    """A callback: the mean loss of this rank's samples in each epoch."""

    def __init__(self, on_epoch: Callable[[EpochEnd], None]) -> None:
        self._on_epoch = on_epoch
        self._sum, self._num = 0.0, 0

    def add(self, loss: float, num_samples: int) -> None:
        self._sum += loss * num_samples
        self._num += num_samples

    def on_epoch_end(self, epoch: int, loss: float) -> None:
        local = self._sum / self._num if self._num else math.nan
        self._on_epoch(EpochEnd(epoch, loss, local, self._num))
        self._sum, self._num = 0.0, 0
