"""A trainer of dense neural networks: an elastic loop over a small model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.torch.amp import GradScaler
from potluck.torch.ddp import DistributedDataParallel
from potluck.torch.loop import ElasticLoop
from potluck.training.noise import NoiseBatching
from potluck.training.policy import Policy
from potluck.training.scaling import LossScale
from potluck.training.trainer import DistributedTrainer, Parameters, TrainingStrategy

if TYPE_CHECKING:
    from potluck.context import DistributedContext


class DistributedNeuralNetTrainer(DistributedTrainer):
    """A dense network with ReLU, trained with Adam by an
    [ElasticLoop][potluck.torch.ElasticLoop], on the CPU.

    ``model`` is the DistributedDataParallel model, ``optimizer`` its Adam. ``batch_size`` counts
    the samples of all ranks together. Integer targets are classes (cross entropy), others are
    values (mean squared error). All ranks begin with rank 0's weights, which ``seed`` determines.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        strategy: TrainingStrategy = TrainingStrategy.DATA_PARALLEL,
        *,
        input_dim: int,
        hidden_dims: Sequence[int],
        output_dim: int,
        learning_rate: float = 0.01,
        batch_size: int = 64,
        seed: int = 0,
        callbacks: Sequence[object] = (),
    ) -> None:
        super().__init__(ctx, strategy)
        sizes = [input_dim, *hidden_dims, output_dim]
        if min(sizes) < 1:
            raise ValueError(f"the layers have {sizes} units; every layer needs at least 1")
        layers: list[nn.Module] = []
        random = torch.Generator().manual_seed(seed)
        for before, after in itertools.pairwise(sizes):
            layers += [_linear(before, after, random), nn.ReLU()]
        self.model = DistributedDataParallel(nn.Sequential(*layers[:-1]), ctx=ctx)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self.batch_size, self.seed = batch_size, seed
        self._autocast: torch.dtype | None = None
        self._scaler = GradScaler(enabled=False)
        self._batching: NoiseBatching | None = None
        for callback in callbacks:
            self.register_callback(callback)

    def train_epoch(self, X: Any, y: Any = None) -> float:
        """One pass over the samples; returns the global loss. As ``train`` with one epoch."""
        return self.train(X, y)

    def train(self, X: Any, y: Any, epochs: int = 1) -> float:
        """Train for ``epochs`` passes; returns the global loss of the last. A collective call.

        ``X``, of shape (n, input_dim), and ``y`` are *all* samples, the same on every rank: each
        rank computes on its share of every mini-batch. A worker that is lost costs one repeated
        step; a worker that joins goes on with the epoch of the others, so pass all epochs to one
        call where workers come and go.
        """
        targets = torch.as_tensor(y)
        is_classes = not targets.is_floating_point()
        data = (torch.as_tensor(X, dtype=torch.float32), targets if is_classes else targets.float())
        mine = _EpochLoss()
        job = ElasticLoop(
            self.model,
            self.optimizer,
            data,
            batch_size=self.batch_size,
            epochs=epochs,
            seed=self.seed + self.epochs,
            also={"scaler": self._scaler},
            policy=Policy(batching=self._batching),
            callbacks=[mine, *(_Shifted(self, each) for each in self.callbacks)],
            ctx=self.ctx,
        )
        for inputs, wanted in job:
            with job.step():
                self.optimizer.zero_grad()
                with torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
                    loss = _loss(self.model(inputs), wanted, is_classes)
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                job.log(loss=loss)
                self._scaler.step(self.optimizer)
                self._scaler.update()
                mine.add(loss.item(), len(inputs))
        self.epochs += epochs
        self._local_loss, self._num_samples = mine.last
        return self.get_global_loss()

    def set_mixed_precision(self, enabled: bool = True) -> None:
        """Compute in bfloat16 in later epochs (torch.autocast); parameters stay in float32."""
        self._autocast = torch.bfloat16 if enabled else None

    def set_loss_scaling(self, rule: LossScale | None) -> None:
        """Scale the loss by ``rule`` in later epochs, for gradients in float16; None: do not."""
        self._scaler = GradScaler(rule, enabled=rule is not None)

    def enable_dynamic_batching(self, batching: NoiseBatching) -> None:
        """Let the batch size follow the gradient noise in later epochs."""
        self._batching = batching

    def get_parameters(self) -> Parameters:
        state = self.model.module.state_dict()
        return {name: value.detach().numpy().copy() for name, value in state.items()}

    def set_parameters(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        state = {name: torch.from_numpy(np.array(value)) for name, value in parameters.items()}
        self.model.module.load_state_dict(state)

    def predict(self, X: Any) -> NDArray[Any]:
        """The outputs of the network: float32, of shape (n, output_dim). For classes take the
        argmax of each row."""
        with torch.no_grad():
            found: Tensor = self.model.module(torch.as_tensor(X, dtype=torch.float32))
        return found.numpy()


class _EpochLoss:
    """The mean loss of this rank's samples in the last whole epoch, and their number."""

    def __init__(self) -> None:
        self.last = (math.nan, 0)
        self._sum, self._num = 0.0, 0

    def add(self, loss: float, num_samples: int) -> None:
        self._sum += loss * num_samples
        self._num += num_samples

    def on_epoch_end(self, epoch: int, loss: float) -> None:
        self.last = (self._sum / self._num if self._num else math.nan, self._num)
        self._sum, self._num = 0.0, 0


class _Shifted:
    """A callback whose epochs count from the trainer's first, not from the loop's."""

    def __init__(self, trainer: DistributedTrainer, callback: Any) -> None:
        self._first, self._callback = trainer.epochs, callback

    def on_epoch_end(self, epoch: int, loss: float) -> None:
        if hasattr(self._callback, "on_epoch_end"):
            self._callback.on_epoch_end(self._first + epoch, loss)
        elif callable(self._callback):
            self._callback(self._first + epoch, loss)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)


def _linear(before: int, after: int, random: torch.Generator) -> nn.Linear:
    """A layer with torch's own first weights, from random numbers of its own."""
    layer = nn.Linear(before, after, device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(before)
    nn.init.uniform_(layer.weight, -bound, bound, generator=random)
    nn.init.uniform_(layer.bias, -bound, bound, generator=random)
    return layer


def _loss(found: Tensor, wanted: Tensor, is_classes: bool) -> Tensor:
    if is_classes:
        return F.cross_entropy(found, wanted.long())
    return F.mse_loss(found.reshape(wanted.shape), wanted)
