"""A trainer of dense neural networks, by each of the strategies."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from potluck.parameter_server import Adam, ParameterServer
from potluck.torch.amp import GradScaler
from potluck.torch.ddp import DistributedDataParallel
from potluck.torch.layer_pipeline import LayerPipeline
from potluck.torch.loop import ElasticLoop
from potluck.torch.parameter_server import ParameterServerStrategy
from potluck.training import elastic
from potluck.training.agreement import telling_others
from potluck.training.noise import NoiseBatching
from potluck.training.policy import Policy
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule
from potluck.training.scaling import LossScale
from potluck.training.strategies import Gossip
from potluck.training.trainer import DistributedTrainer, Parameters, TrainingStrategy, by_name
from potluck.training.transfer import gather_states
from potluck.uncopied import Uncopied

if TYPE_CHECKING:
    from potluck.context import DistributedContext

_numbers: WeakKeyDictionary[DistributedContext, itertools.count[int]] = WeakKeyDictionary()
"""Of the parameter servers of trainers, by context: equal on all ranks."""


class DistributedNeuralNetTrainer(DistributedTrainer, Uncopied):
    """A dense network with ReLU, trained with Adam, on the CPU.

    | strategy | samples given to ``train`` | what a rank does | a lost worker |
    |---|---|---|---|
    | DATA_PARALLEL | all, on every rank | its share of each step | costs a repeated step |
    | DECENTRALIZED | all, on every rank | the same, then a mean with neighbours | costs no step |
    | FEDERATED | its own | an epoch; then a mean by samples | costs a repeated epoch |
    | PARAMETER_SERVER | all, on every rank | its share; worker 0 makes the update | an error |
    | MODEL_PARALLEL | all, on every rank | some of the layers | an error |

    The first two are an [ElasticLoop][potluck.torch.ElasticLoop]. ``batch_size`` counts the samples
    of all ranks together. Integer targets are classes (cross entropy), others are values (mean
    squared error). All ranks begin with rank 0's weights, which ``seed`` determines.

    ``mixed_precision`` is the dtype to compute in, torch.bfloat16 or torch.float16
    (torch.autocast); parameters stay in float32. float16 scales the loss by ``loss_scaling``
    (``LossScale()`` if None), which PARAMETER_SERVER and MODEL_PARALLEL do not have. With
    ``dynamic_batching`` the batch size follows the gradient noise from ``batch_size`` on; for
    DATA_PARALLEL.

    ``model`` is the DistributedDataParallel model; with MODEL_PARALLEL it has this rank's layers,
    ``get_parameters`` and ``predict`` are collective calls, and only the last rank has a local
    loss (NaN elsewhere). With PARAMETER_SERVER ``close`` ends the server: use the trainer in a
    ``with`` block. ValueError for more ranks than layers, for numbers that can't be meant, or
    options that a strategy does not have; TypeError for options of another type.
    """

    strategies = frozenset(TrainingStrategy)
    take_instead = "take its parameters, get_parameters(), or copy its model, trainer.model.module"

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
        mixed_precision: torch.dtype | None = None,
        loss_scaling: LossScale | None = None,
        dynamic_batching: NoiseBatching | None = None,
    ) -> None:
        super().__init__(ctx, strategy)
        _check_numbers(batch_size, learning_rate)
        is_scaled = loss_scaling is not None or mixed_precision is torch.float16
        _check_options(strategy, mixed_precision, is_scaled, dynamic_batching)
        self._sizes = sizes = [input_dim, *hidden_dims, output_dim]
        if min(sizes) < 1:
            raise ValueError(f"the layers have {sizes} units; every layer needs at least 1")
        layers: list[nn.Module] = []
        random = torch.Generator().manual_seed(seed)
        for before, after in itertools.pairwise(sizes):
            layers += [_linear(before, after, random), nn.ReLU()]
        network = nn.Sequential(*layers[:-1])
        self._pipeline: LayerPipeline | None = None
        self._server: ParameterServerStrategy | None = None
        self._is_set = False  # by set_parameters, since the server was told
        self._network = network
        self.model: nn.Module
        if strategy is TrainingStrategy.MODEL_PARALLEL:
            self._pipeline = LayerPipeline(ctx, network)
            self.model = self._network = self._pipeline.part
        else:
            self.model = DistributedDataParallel(network, ctx=ctx)
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.Adam(self._network.parameters(), lr=learning_rate)
        self.batch_size, self.seed = batch_size, seed
        self._autocast = mixed_precision
        self._scaler = GradScaler(loss_scaling, enabled=is_scaled)
        self._policy = Policy(batching=dynamic_batching)
        for callback in callbacks:
            self.register_callback(callback)

    def train_epoch(self, X: Any, y: Any = None) -> float:
        """One pass over the samples; returns the global loss. As ``train`` with one epoch."""
        return self.train(X, y)

    def train(self, X: Any, y: Any, epochs: int = 1) -> float:
        """Train for ``epochs`` passes; returns the global loss of the last. A collective call.

        ``X``, of shape (n, input_dim), and ``y`` are *all* samples, the same on every rank; with
        FEDERATED they are this rank's own. ValueError for samples that do not fit the network, or
        with NaN: with PARAMETER_SERVER and MODEL_PARALLEL on all ranks, which may go on; else on
        the rank that has them, and as RemoteError, which names it, on the others. In this second
        way also ValueError for a loss that is NaN or inf, with its step (FEDERATED: its epoch); but
        with PARAMETER_SERVER it is the rank's own, whose gradient the server refuses.

        Where workers come and go pass all epochs to one call: a worker that joins goes on with the
        epoch of the others.
        """
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; 1 or more are needed")
        targets = torch.as_tensor(y)
        is_classes = not targets.is_floating_point()
        data = (torch.as_tensor(X, dtype=torch.float32), targets if is_classes else targets.float())
        has_loop = self.strategy in (TrainingStrategy.DATA_PARALLEL, TrainingStrategy.DECENTRALIZED)
        if has_loop:
            self._train_in_loop(data, is_classes, epochs)
        elif self.strategy is TrainingStrategy.FEDERATED:
            self._train_at_home(data, is_classes, epochs)
        else:
            self._check_together(data, is_classes)
            way = self._train_in_layers if self._pipeline is not None else self._train_by_server
            for _ in range(epochs):
                self._end_epoch(*way(data, is_classes))
        return self.get_global_loss()

    def _check_together(self, data: tuple[Tensor, Tensor], is_classes: bool) -> None:
        """As ``_check``, but the ValueError of the first rank that has one is raised on all: no
        strategy with its own exchange could go on without a rank. Two small all_gathers."""
        if self.ctx.world_size == 1:
            return self._check(data, is_classes)
        reason = ""
        try:
            self._check(data, is_classes)
        except ValueError as error:
            reason = str(error)
        for rank, each in enumerate(gather_states(self.ctx, {"reason": reason})):
            if each["reason"]:
                name = self.ctx.group.describe(rank)
                raise ValueError(f"the samples of {name}: {each['reason']}")

    def _check(self, data: tuple[Tensor, Tensor], is_classes: bool) -> None:
        """ValueError for samples that do not fit the network, or have NaN."""
        X, y = data
        if not len(X) and not len(y):
            return  # a rank without samples
        if X.dim() != 2 or X.shape[1] != self._sizes[0]:
            raise ValueError(
                f"X has shape {tuple(X.shape)}; with input_dim={self._sizes[0]} it must be "
                f"(n, {self._sizes[0]})"
            )
        if len(y) != len(X):
            raise ValueError(f"there are {len(X)} samples in X, and {len(y)} targets in y")
        for name, tensor in (("X", X), ("y", y)):
            if not tensor.isfinite().all():
                raise ValueError(f"{name} of rank {self.ctx.rank} has NaN or infinite numbers")
        width = self._sizes[-1]
        if not is_classes and y[:1].numel() not in (0, width):
            raise ValueError(
                f"y has shape {tuple(y.shape)} and dtype {y.dtype}: floats are values, {width} "
                "(output_dim) for each sample; give classes as integers"
            )
        if is_classes and (y.dim() != 1 or (len(y) and not 0 <= y.min() <= y.max() < width)):
            raise ValueError(
                f"integer targets are classes, of shape (n,) and from 0 to {width - 1} "
                f"(output_dim - 1); y has shape {tuple(y.shape)}"
                + (f" and values from {y.min()} to {y.max()}" if len(y) else "")
            )

    def _train_in_loop(self, data: tuple[Tensor, Tensor], is_classes: bool, epochs: int) -> None:
        """DATA_PARALLEL and DECENTRALIZED."""
        mine = _EpochLoss()
        job = ElasticLoop(
            self.model,
            self.optimizer,
            data,
            batch_size=self.batch_size,
            epochs=epochs,
            seed=self.seed + self.epochs,
            also={"scaler": self._scaler},
            policy=self._policy,
            callbacks=[mine, *(_Shifted(self, each) for each in self.callbacks)],
            ctx=self.ctx,
            strategy=Gossip() if self.strategy is TrainingStrategy.DECENTRALIZED else None,
        )
        is_checked = False
        for inputs, wanted in job:
            with job.step():
                if not is_checked:  # here, so that the other ranks hear of it
                    self._check(data, is_classes)
                    is_checked = True
                self.optimizer.zero_grad()
                with self._precision():
                    loss = _loss(self.model(inputs), wanted, is_classes)
                if len(inputs) and not self._scaler.enabled:
                    self._check_loss(loss.item(), job.step_number)
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                job.log(loss=loss)
                self._scaler.step(self.optimizer)
                self._scaler.update()
                mine.add(loss.item(), len(inputs))
        self.epochs += epochs
        self._local_loss, self._num_samples = mine.last

    def _train_at_home(self, data: tuple[Tensor, Tensor], is_classes: bool, epochs: int) -> None:
        """FEDERATED: each step of the loop is one epoch of every rank, and a weighted mean
        (McMahan et al., "Communication-efficient learning of deep networks from decentralized
        data", 2017, algorithm 1)."""
        replica = StateReplica(self.get_parameters, self.set_parameters)
        callbacks = [_Shifted(self, each) for each in self.callbacks]
        schedule = Schedule(1, 1, epochs=epochs, shuffle=False)
        job = elastic.ElasticLoop(self.ctx, schedule, replica, callbacks=callbacks)
        num = len(data[0])
        for _ in job:
            with job.step():
                self._check(data, is_classes)  # here, so that the other ranks hear of it
                model = copy.deepcopy(self._network)
                local = self._train_alone(model, data, is_classes)
                moved = parameters_to_vector(model.parameters()).detach().double()
                sums = torch.tensor([local, num], dtype=torch.float64)
                total = torch.cat([moved * num, sums])
                if not total.isfinite().all():
                    raise ValueError(
                        f"rank {self.ctx.rank} has NaN or inf after an epoch on its own samples: "
                        "look at them, or take a smaller learning_rate"
                    )
                self.ctx.all_reduce(total)
                if not total[-1]:
                    raise ValueError("no worker has a sample")
                mean = total / total[-1]
                job.commit(loss=mean[-2].item())
                vector_to_parameters(mean[:-2].float(), self._network.parameters())
                self.epochs += 1
                self._local_loss, self._num_samples = local / num if num else math.nan, num

    def _train_alone(
        self, model: nn.Module, data: tuple[Tensor, Tensor], is_classes: bool
    ) -> float:
        """One epoch of ``model`` on this rank's own samples; the sum of their losses."""
        num, total = len(data[0]), 0.0
        if not num:
            return total
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        order = _shuffled(num, self.seed + self.epochs + 1000 * self.ctx.rank)
        for chosen in torch.split(order, max(1, self.batch_size // self.ctx.world_size)):
            optimizer.zero_grad()
            with self._precision():
                loss = _loss(model(data[0][chosen]), data[1][chosen], is_classes)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._scaler.step(optimizer)
            self._scaler.update()
            total += loss.item() * len(chosen)
        return total

    def _train_by_server(self, data: tuple[Tensor, Tensor], is_classes: bool) -> tuple[float, int]:
        """PARAMETER_SERVER: this rank's loss in one epoch, and the number of its samples."""
        ctx, num = self.ctx, len(data[0])
        if num < ctx.world_size:
            raise ValueError(f"{num} samples are too few for {ctx.world_size} workers")
        # Parameters that a rank has set since the last epoch become all ranks' before any computes;
        # of several such ranks the first counts.
        ranks = np.flatnonzero(ctx.all_gather(np.array([self._is_set], np.float64)))
        if len(ranks):
            self.synchronize_model(root=int(ranks[0]))
        if self._server is None:
            number = next(_numbers.setdefault(ctx, itertools.count()))
            ps = ParameterServer(ctx, optimizer=Adam(self.learning_rate), name=f"trainer {number}")
            self._server = ParameterServerStrategy(self._network, ps)
        elif len(ranks):
            if ctx.rank == 0:
                self._server.ps.set_parameters("model", self.get_parameters(), replace=True)
            ctx.barrier()
            self._server.pull()
        self._is_set = False
        # Every rank takes equally many steps, so that the server never waits for one.
        num_steps = min(-(-num // self.batch_size), num // ctx.world_size)
        mine = _shuffled(num, self.seed + self.epochs)[ctx.rank :: ctx.world_size]
        total = 0.0
        for chosen in mine.tensor_split(num_steps):
            self._server.zero_grad()
            with self._precision():
                loss = _loss(self._network(data[0][chosen]), data[1][chosen], is_classes)
            loss.backward()  # type: ignore[no-untyped-call]
            self._server.step()
            total += loss.item() * len(chosen)
        return total / len(mine), len(mine)

    def _train_in_layers(self, data: tuple[Tensor, Tensor], is_classes: bool) -> tuple[float, int]:
        """MODEL_PARALLEL: the loss of one epoch, which the last rank has, and its samples."""
        assert self._pipeline is not None
        total, num = 0.0, 0
        order = _shuffled(len(data[0]), self.seed + self.epochs)
        for step, chosen in enumerate(torch.split(order, self.batch_size)):
            self.optimizer.zero_grad()
            with self._precision():
                loss = self._pipeline.step(
                    data[0][chosen],
                    data[1][chosen],
                    lambda found, wanted: _loss(found, wanted, is_classes),
                )
            self.optimizer.step()
            if loss is not None:
                with telling_others(self.ctx):
                    self._check_loss(loss, step)
                total, num = total + loss * len(chosen), num + len(chosen)
        return (total / num, num) if num else (math.nan, 0)

    def _check_loss(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of rank {self.ctx.rank} is {loss} in step {step}: look at its samples, "
                "or take a smaller learning_rate"
            )

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", self._autocast, enabled=self._autocast is not None)

    def get_parameters(self) -> Parameters:
        if self._pipeline is not None:
            return dict(self._pipeline.gather())
        state = self._network.state_dict()
        return {name: value.detach().numpy().copy() for name, value in state.items()}

    def set_parameters(self, parameters: Mapping[str, NDArray[Any]] | ArrayLike) -> None:
        """Set the model to ``parameters``, a result of ``get_parameters``, or all its numbers as a
        flat vector, on this rank. With
        PARAMETER_SERVER they are the server's when the next epoch begins; of several ranks that
        have set them the first counts."""
        if self._pipeline is not None:
            return self._pipeline.load(parameters)
        shapes = {name: tuple(each.shape) for name, each in self._network.state_dict().items()}
        named = by_name(parameters, shapes)
        state = {name: torch.from_numpy(np.array(value)) for name, value in named.items()}
        self._network.load_state_dict(state)
        self._is_set = True

    def close(self) -> None:
        """With PARAMETER_SERVER: end the server that the first epoch made. On worker 0 it waits
        until the other workers have closed their trainers, too. Idempotent."""
        if self._server is not None:
            self._server.ps.close()

    def predict(self, X: Any) -> NDArray[Any]:
        """The outputs of the network: float32, of shape (n, output_dim). For classes take the
        argmax of each row. Local, but with MODEL_PARALLEL a collective call."""
        inputs = torch.as_tensor(X, dtype=torch.float32)
        if self._pipeline is not None:
            return self._pipeline.predict(inputs).numpy()
        with torch.no_grad():
            found: Tensor = self._network(inputs)
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


def _check_numbers(batch_size: object, learning_rate: object) -> None:
    is_whole = isinstance(batch_size, Integral) and not isinstance(batch_size, bool)
    if not is_whole or batch_size < 1:  # type: ignore[operator]
        raise ValueError(f"batch_size is {batch_size!r}; it must be a whole number of at least 1")
    is_number = isinstance(learning_rate, Real) and not isinstance(learning_rate, bool)
    if not is_number or not 0 < learning_rate < math.inf:  # type: ignore[operator]
        raise ValueError(f"learning_rate is {learning_rate!r}; it must be a number above 0")


def _check_options(
    strategy: TrainingStrategy,
    mixed_precision: object,
    is_scaled: bool,
    dynamic_batching: object,
) -> None:
    if mixed_precision not in (None, torch.bfloat16, torch.float16):
        raise TypeError(
            f"mixed_precision is {mixed_precision!r}: pass torch.bfloat16 or torch.float16"
        )
    exchanges = (TrainingStrategy.PARAMETER_SERVER, TrainingStrategy.MODEL_PARALLEL)
    if is_scaled and strategy in exchanges:
        raise ValueError(
            f"{strategy.name} has no loss scaling, which float16 needs: take torch.bfloat16, which "
            "needs none, or another strategy"
        )
    if dynamic_batching is not None and strategy is not TrainingStrategy.DATA_PARALLEL:
        raise ValueError(
            f"{strategy.name} has no dynamic batching: take DATA_PARALLEL, or leave it out"
        )


def _linear(before: int, after: int, random: torch.Generator) -> nn.Linear:
    """A layer with torch's own first weights, from random numbers of its own."""
    layer = nn.Linear(before, after, device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(before)
    nn.init.uniform_(layer.weight, -bound, bound, generator=random)
    nn.init.uniform_(layer.bias, -bound, bound, generator=random)
    return layer


def _shuffled(num: int, seed: int) -> Tensor:
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def _loss(found: Tensor, wanted: Tensor, is_classes: bool) -> Tensor:
    if is_classes:
        return F.cross_entropy(found, wanted.long())
    return F.mse_loss(found.reshape(wanted.shape), wanted)
