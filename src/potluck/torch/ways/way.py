"""What the ways of training have in common, and the samples that a trainer was given."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset, default_collate

from potluck.checkpoint.state import State
from potluck.data.shards import ShardedDataset
from potluck.torch.amp import GradScaler
from potluck.torch.loading import Loader, schedule_of
from potluck.torch.structure import structure_of
from potluck.training.elastic import ElasticLoop
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule, Share

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

Part = tuple[int, NDArray[np.int64]]
"""Samples of an epoch, by their indices."""

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


@dataclass(frozen=True)
class TrainCall:
    """One call of a trainer's ``train``: ``epochs`` passes over ``samples``, ``first`` after its
    earlier ones. ``on_epoch`` is called at the end of each, before ``callbacks``, which are the
    user's."""

    samples: TrainerSamples
    epochs: int
    first: int
    on_epoch: Callable[[EpochEnd], None]
    callbacks: Sequence[object]


class Way(ABC):
    """One strategy. ``model`` is the module that is called in training."""

    model: nn.Module
    optimizer: Optimizer | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def train(self, call: TrainCall) -> None:
        """Do what ``call`` asks for. A collective call."""

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
    recipe: Recipe, call: TrainCall, *, is_kept: Callable[[], bool] = lambda: False
) -> ElasticLoop:
    """A loop with one step for each epoch of ``call``. Its state are the parameters and buffers of
    the network, which must be equal on all ranks at each commit. Those of a rank where
    ``is_kept()`` are not replaced by another's."""

    def capture() -> State:
        return dict(recipe.network.state_dict())

    def restore(state: Any) -> None:
        if not is_kept():
            recipe.network.load_state_dict(state)

    seed = recipe.seed + call.first
    schedule = schedule_of(call.samples.dataset, WHOLE, call.epochs, seed, True, recipe.samples)
    replica = StateReplica(capture, restore, str(recipe.device), describe=recipe.structure)
    return ElasticLoop(recipe.ctx, schedule, replica, callbacks=call.callbacks)


def part_of_epoch(schedule: Schedule, number: int, num_parts: int) -> tuple[int, int]:
    """The positions of the part ``number`` of ``num_parts`` of an epoch."""
    num = schedule.num_samples
    return num * number // num_parts, num * (number + 1) // num_parts


class TrainerSamples:
    """The samples of one call of ``train``.

    ``dataset`` is a TensorDataset of inputs and targets, or a source of ``potluck.data``. What are
    no samples is found by ``check``, so that all ranks can hear of it.
    """

    def __init__(
        self, X: Any, y: Any, *, input_dim: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``input_dim``: of a dense network, whose inputs become ``dtype``; None for another one,
        of whose inputs and targets only floats do."""
        self._is_dense = input_dim is not None
        self._dtype = dtype
        self._device = device
        self._loader: Loader | None = None
        self._problem: ValueError | TypeError | None = None
        self.dataset: Any
        try:
            self.dataset = self._dataset(X, y, input_dim)
        except (ValueError, TypeError) as error:
            self.dataset, self._problem = [b""], error  # a sample in place of those

    def _dataset(self, X: Any, y: Any, input_dim: int | None) -> TensorDataset | ShardedDataset:
        if isinstance(X, ShardedDataset):
            if y is not None:
                raise ValueError(
                    "a source of potluck.data has the targets, too, as a column: leave y out"
                )
            return X
        if y is None:
            raise ValueError(
                "y is missing: pass the targets, or a source of potluck.data that has inputs and "
                "targets"
            )
        inputs, targets = self._inputs(X), self._targets(_tensor(y))
        if input_dim is not None and not inputs.numel():
            inputs = inputs.reshape(0, input_dim)
        for name, tensor in (("X", inputs), ("y", targets)):
            if not tensor.dim():
                raise ValueError(f"{name} is a single number; samples are along the first axis")
        if len(inputs) != len(targets):
            raise ValueError(
                f"there are {len(inputs)} samples in X, and {len(targets)} targets in y"
            )
        return TensorDataset(inputs, targets)

    def check(self, sizes: tuple[int, int] | None, rank: int) -> None:
        """ValueError or TypeError for what are no samples. Of those in memory also ValueError for
        NaN, and for such as do not fit a dense network of ``sizes``, its inputs and outputs."""
        if self._problem is not None:
            raise self._problem
        if not isinstance(self.dataset, TensorDataset) or not len(self.dataset):
            return
        inputs, targets = self.dataset.tensors
        for name, tensor in (("X", inputs), ("y", targets)):
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise ValueError(f"{name} of rank {rank} has NaN or infinite numbers")
        if sizes is not None:
            _check_dense(inputs, targets, *sizes)

    def pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a batch, on the device. ValueError for a batch that has others.

        Of a dict the columns ``x`` and ``y``, or its only two, in this order.
        """
        found = batch
        if isinstance(batch, dict):
            found = [batch["x"], batch["y"]] if {"x", "y"} <= batch.keys() else [*batch.values()]
        if not isinstance(found, list | tuple) or len(found) != 2:
            what = f"the columns {', '.join(map(str, batch))}"
            raise ValueError(
                f"a batch of the source is {what if isinstance(batch, dict) else type(batch)}, not "
                "inputs and targets: name two columns=, inputs first, or x and y, or pass a "
                "transform= that returns (inputs, target)"
            )
        inputs, targets = found
        return (
            self._inputs(inputs).to(self._device),
            self._targets(_tensor(targets)).to(self._device),
        )

    def load(
        self,
        indices: NDArray[np.int64],
        epoch: int,
        upcoming: Callable[[], Iterator[Part]] = lambda: iter(()),
    ) -> tuple[Tensor, Tensor]:
        """The inputs and targets of some samples, at least one. ``upcoming()`` are those after
        them, epoch and indices, which are read ahead; empty ones are left out. DataError if they
        can't be read."""
        if self._loader is None:
            self._loader = Loader(self.dataset, default_collate, num_workers=0, prefetch=1, seed=0)

        def ahead() -> Iterator[Share]:
            return (Share(epoch, each, 1.0) for epoch, each in upcoming() if len(each))

        return self.pair(self._loader.load(Share(epoch, indices, 1.0), ahead))

    def empty(self) -> list[Tensor] | None:
        """Inputs and targets of no samples, with the shapes and dtypes of this rank's; None if it
        has none."""
        if not len(self.dataset):
            return None
        return [each[:0].cpu() for each in self.load(np.zeros(1, np.int64), 0)]

    def close(self) -> None:
        """End what reads."""
        if self._loader is not None:
            self._loader.close()

    def _inputs(self, found: Any) -> Tensor:
        return inputs_of(found, self._dtype, is_dense=self._is_dense)

    def _targets(self, found: Tensor) -> Tensor:
        return found.to(self._dtype) if found.is_floating_point() else found


def inputs_of(given: Any, dtype: torch.dtype, *, is_dense: bool) -> Tensor:
    """Inputs as a tensor of ``dtype``; integers stay as they are but for a dense network."""
    found = _tensor(given)
    return found.to(dtype) if is_dense or found.is_floating_point() else found


def _tensor(given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given
    array = np.asarray(given)
    if array.dtype.kind not in "fiubc":
        raise TypeError(
            f"samples are numbers, not {array.dtype}; targets that are text become numbers by "
            "np.searchsorted(classes, y), with the sorted classes of all ranks"
        )
    return torch.as_tensor(array)


def _check_dense(inputs: Tensor, targets: Tensor, width_in: int, width: int) -> None:
    if inputs.dim() != 2 or inputs.shape[1] != width_in:
        raise ValueError(
            f"X has shape {tuple(inputs.shape)}; with input_dim={width_in} it must be "
            f"(n, {width_in})"
        )
    if targets.is_floating_point():
        if targets[:1].numel() != width:
            raise ValueError(
                f"y has shape {tuple(targets.shape)} and dtype {targets.dtype}: floats are values, "
                f"{width} (output_dim) for each sample; give classes as integers"
            )
    elif targets.dim() != 1 or not 0 <= targets.min() <= targets.max() < width:
        raise ValueError(
            f"integer targets are classes, of shape (n,) and from 0 to {width - 1} "
            f"(output_dim - 1); y has shape {tuple(targets.shape)} and values from "
            f"{targets.min()} to {targets.max()}"
        )
