"""What the ways of training have in common."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from potluck.checkpoint.state import State
from potluck.torch.amp import GradScaler
from potluck.torch.loading import schedule_of
from potluck.torch.structure import structure_of
from potluck.torch.ways.samples import TrainerSamples
from potluck.training.elastic import ElasticLoop
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Recipe:
    """How a network is trained: equal for all strategies. ``samples``: "own" or "all"."""

    ctx: DistributedContext
    network: nn.Module
    loss: Loss
    learning_rate: float
    batch_size: int
    seed: int
    samples: str
    device: torch.device
    scaler: GradScaler
    sizes: tuple[int, int] | None = None
    """Inputs and outputs of a dense network; None for one of the user's own."""
    autocast: torch.dtype | None = None

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The block in which forward and loss are computed."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def structure(self) -> dict[str, str]:
        """What must be equal on all ranks of the network."""
        trained = {name for name, each in self.network.named_parameters() if each.requires_grad}
        return structure_of(self.network, trained)

    def optimizer(self, network: nn.Module) -> Optimizer:
        """A new optimizer of the parameters of ``network`` that are trained."""
        trained = [each for each in network.parameters() if each.requires_grad]
        return torch.optim.Adam(trained, lr=self.learning_rate)

    def check_loss(self, loss: float, where: str) -> None:
        """ValueError for a loss that is NaN or inf."""
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of rank {self.ctx.rank} is {loss} in {where}: look at its samples, or "
                "take a smaller learning_rate"
            )


@dataclass(slots=True)
class EpochEnd:
    """What is known when an epoch has ended: its number in this call of ``train``, and the mean
    losses of all samples and of this rank's."""

    epoch: int
    global_loss: float
    local_loss: float
    num_samples: int


class Way(ABC):
    """One strategy. ``model`` is the module that is called in training."""

    model: nn.Module
    optimizer: Optimizer | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def train(
        self,
        samples: TrainerSamples,
        epochs: int,
        first: int,
        on_epoch: Callable[[EpochEnd], None],
        callbacks: list[object],
    ) -> None:
        """Train for ``epochs`` passes, ``first`` after this trainer's earlier ones. ``on_epoch`` is
        called at the end of each, before ``callbacks``, which are the user's."""

    def check_open(self) -> None:  # noqa: B027 (most ways run nothing)
        """RuntimeError after ``close``, where nothing can be trained then."""

    def close(self) -> None:  # noqa: B027
        """End what runs beside the script."""

    def note_set(self) -> None:  # noqa: B027
        """The script has set the parameters of the network on this rank."""


def default_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy for integer targets, else the mean squared error."""
    if wanted.is_floating_point():
        return F.mse_loss(found.reshape(wanted.shape), wanted)
    return F.cross_entropy(found, wanted.long())


WHOLE = 1 << 62
"""A batch size by which a step is a whole epoch."""


def epoch_loop(
    recipe: Recipe,
    samples: TrainerSamples,
    epochs: int,
    first: int,
    callbacks: Sequence[object],
    *,
    is_kept: Callable[[], bool] = lambda: False,
) -> ElasticLoop:
    """A loop of ``epochs`` steps, ``first`` after this trainer's earlier ones. Its state are the
    parameters and buffers of the network, which must be equal on all ranks at each commit. Those of
    a rank where ``is_kept()`` are not replaced by another's."""

    def capture() -> State:
        return dict(recipe.network.state_dict())

    def restore(state: Any) -> None:
        if not is_kept():
            recipe.network.load_state_dict(state)

    seed = recipe.seed + first
    schedule = schedule_of(samples.dataset, WHOLE, epochs, seed, True, recipe.samples)
    replica = StateReplica(capture, restore, str(recipe.device), describe=recipe.structure)
    return ElasticLoop(recipe.ctx, schedule, replica, callbacks=callbacks)


def part_of_epoch(schedule: Schedule, number: int, num_parts: int) -> tuple[int, int]:
    """The positions of the part ``number`` of ``num_parts`` of an epoch."""
    num = schedule.num_samples
    return num * number // num_parts, num * (number + 1) // num_parts
