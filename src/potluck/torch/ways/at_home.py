"""FEDERATED: each rank trains on its own samples for an epoch, then all take the mean."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck.torch.ddp import DistributedDataParallel
from potluck.torch.ways import way
from potluck.training.sampler import Schedule, Share


class AtHome(way.Way):
    """Each step of the loop is one epoch of every rank, and a mean weighted by samples (McMahan et
    al., "Communication-efficient learning of deep networks from decentralized data", 2017,
    algorithm 1)."""

    def __init__(self, recipe: way.Recipe) -> None:
        super().__init__(recipe)
        self.model = DistributedDataParallel(recipe.network, ctx=recipe.ctx)
        self.optimizer = recipe.optimizer(recipe.network)

    def train(self, call: way.TrainCall) -> None:
        recipe, samples = self.recipe, call.samples
        ctx, network = recipe.ctx, recipe.network
        job = way.epoch_loop(recipe, call)
        for share in job:
            with job.step():
                samples.check(recipe.sizes, ctx.rank)  # here, so that the other ranks hear of it
                model = copy.deepcopy(network)
                loss = self._train_alone(model, samples, share, job.schedule)
                moved = _flat(model) * share.weight
                total = torch.cat([moved, torch.tensor([loss * share.weight], dtype=moved.dtype)])
                if share.num_samples and not total.isfinite().all():
                    raise ValueError(
                        f"rank {ctx.rank} has NaN or inf after an epoch on its own samples: look "
                        "at them, or take a smaller learning_rate"
                    )
                if not share.num_samples:
                    total.zero_()
                ctx.all_reduce(total)
                job.commit(loss=loss)
                _set_flat(network, total[:-1])
                local = loss if share.num_samples else math.nan
                call.on_epoch(way.EpochEnd(share.epoch, float(total[-1]), local, share.num_samples))

    def _train_alone(
        self, model: nn.Module, samples: way.TrainerSamples, share: Share, schedule: Schedule
    ) -> float:
        """One epoch of ``model`` on this rank's own samples; the mean of their losses."""
        recipe, scaler, num = self.recipe, self.recipe.scaler, share.num_samples
        if not num:
            return 0.0
        optimizer = recipe.optimizer(model)
        model.train()
        size = max(1, recipe.batch_size // recipe.ctx.world_size)

        def parts(epoch: int) -> Iterator[NDArray[np.int64]]:
            return schedule.epoch_parts(epoch, recipe.ctx.rank, recipe.ctx.world_size, size)

        def after(number: int) -> Iterator[way.Part]:
            yield from ((share.epoch, each) for each in islice(parts(share.epoch), number, None))
            for epoch in range(share.epoch + 1, schedule.epochs):
                yield from ((epoch, each) for each in parts(epoch))

        total = 0.0
        for number, part in enumerate(parts(share.epoch), 1):
            inputs, targets = samples.load(part, share.epoch, partial(after, number))
            optimizer.zero_grad()
            with recipe.precision():
                loss = recipe.loss(model(inputs), targets)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            total += loss.item() * len(inputs)
        return total / num


def _flat(model: nn.Module) -> Tensor:
    """Parameters and buffers, float64 on the CPU."""
    state = model.state_dict().values()
    return torch.cat([each.detach().cpu().reshape(-1).double() for each in state])


@torch.no_grad()
def _set_flat(model: nn.Module, flat: Tensor) -> None:
    state = list(model.state_dict().values())
    for each, part in zip(state, torch.split(flat, [t.numel() for t in state]), strict=True):
        # A counter, such as that of a BatchNorm's steps, is the mean rounded.
        found = part if each.is_floating_point() else part.round()
        each.copy_(found.reshape(each.shape).to(each.dtype))  # here: not every device has float64
