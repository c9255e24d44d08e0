"""A trainer of neural networks, by each of the strategies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from potluck._core import hints
from potluck._core.checks import checked_whole
from potluck._core.forks import Uncopied
from potluck.parameter_server import AggregationMethod, Synchronous
from potluck.parameter_server.model import Mode, mode_of
from potluck.torch.amp import GradScaler, LossScale
from potluck.torch.loading import check_samples
from potluck.torch.structure import device_of
from potluck.torch.ways import way
from potluck.torch.ways.at_home import AtHome
from potluck.torch.ways.by_server import ByServer
from potluck.torch.ways.in_layers import InLayers
from potluck.torch.ways.in_steps import InSteps
from potluck.training.callbacks import Callbacks
from potluck.training.policy import NoiseBatching, Policy
from potluck.training.trainer import DistributedTrainer, Parameters, TrainingStrategy, by_name

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_PREDICTED_AT_ONCE = 4096


class DistributedNeuralNetTrainer(DistributedTrainer, Uncopied):
    """A neural network, trained with Adam: a dense one with ReLU, or a ``model`` of your own.

    | strategy | what a rank does with its samples | a lost worker |
    |---|---|---|
    | DATA_PARALLEL | its part of each step; the mean gradient of all | costs a repeated step |
    | DECENTRALIZED | the same; then a mean of parameters with neighbours | costs no step |
    | FEDERATED | an epoch; then a mean of parameters, by samples | costs a repeated epoch |
    | PARAMETER_SERVER | pushes gradients to worker 0, which makes the update | the others go on |
    | MODEL_PARALLEL | gives them to the ranks with the first and last layers | an error on all |

    With ``samples="own"`` every rank passes its own part of the samples to ``train``, of any size,
    maybe none. Ranks take equal fractions of theirs in each step, so each sample counts once per
    epoch, and the gradient of a step is the mean over the samples of all ranks in it. A lost
    worker's samples leave with it, which is logged. With ``"all"`` every rank passes the same
    samples, and the trainer cuts them anew for each group. ``batch_size`` counts the samples of all
    ranks together.

    The dense network has layers of ``input_dim``, ``hidden_dims`` and ``output_dim`` units, and
    ``seed`` determines its first weights. ``model`` is a torch.nn.Module in their place, whose
    weights on rank 0 count (not for MODEL_PARALLEL, which cuts the dense one). ``loss(outputs,
    targets)`` is the mean loss of some samples; if None, the cross entropy for integer targets,
    else the mean squared error. ``device`` is where the network computes, such as "cuda" or "mps"
    (the CPU, or where ``model`` is, if None).

    ``aggregation`` is for PARAMETER_SERVER: ``AggregationMethod.SYNCHRONOUS``, ``ASYNCHRONOUS`` or
    ``ELASTIC_AVERAGING``, or a mode of ``potluck.parameter_server`` with options.

    ``mixed_precision`` is the dtype to compute in, torch.bfloat16 or torch.float16
    (torch.autocast); parameters stay as they are. float16 scales the loss by ``loss_scaling``
    (``LossScale()`` if None), which PARAMETER_SERVER and MODEL_PARALLEL do not have. With
    ``dynamic_batching`` the batch size follows the gradient noise from ``batch_size`` on; for
    DATA_PARALLEL.

    ``model`` is, as an attribute, the module that is called in training: a DistributedDataParallel,
    or this rank's layers, which may be none. With PARAMETER_SERVER ``close`` ends the server: use
    the trainer in a ``with`` block. ValueError for numbers that can't be meant, or options that a
    strategy does not have; TypeError for options of another type.
    """

    strategies = frozenset(TrainingStrategy)
    take_instead = "take its parameters, get_parameters(), or copy its model, trainer.model.module"
    _words = hints.TRAINER | hints.NETWORK

    @hints.arguments(hints.NETWORK_OPTIONS, hints.NETWORK_FIRST, same=hints.NETWORK_SAME)
    def __init__(
        self,
        ctx: DistributedContext,
        strategy: TrainingStrategy = TrainingStrategy.DATA_PARALLEL,
        input_dim: int | None = None,
        hidden_dims: Sequence[int] | None = None,
        output_dim: int | None = None,
        learning_rate: float = 0.01,
        *,
        model: nn.Module | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        samples: Literal["own", "all"] = "own",
        device: str | torch.device | None = None,
        batch_size: int = 64,
        seed: int = 0,
        callbacks: Sequence[object] = (),
        aggregation: AggregationMethod | Mode | None = None,
        mixed_precision: torch.dtype | None = None,
        loss_scaling: LossScale | None = None,
        dynamic_batching: NoiseBatching | None = None,
    ) -> None:
        super().__init__(ctx, strategy)
        _check_numbers(batch_size, seed, learning_rate)
        check_samples(samples)
        is_scaled = loss_scaling is not None or mixed_precision is torch.float16
        _check_options(strategy, mixed_precision, loss_scaling, is_scaled, dynamic_batching)
        if not (loss is None or callable(loss)):
            raise TypeError(f"loss is {loss!r}; it must be a function f(outputs, targets)")
        mode = _mode_of(strategy, aggregation)
        sizes = _sizes_of(input_dim, hidden_dims, output_dim, model)
        if model is not None and strategy is TrainingStrategy.MODEL_PARALLEL:
            raise ValueError(
                "MODEL_PARALLEL cuts the trainer's own dense network: for a model of your own see "
                "potluck.torch's pipeline, or take another strategy"
            )
        network = _on(_dense(sizes, seed) if model is None else model, device)
        self.learning_rate = learning_rate
        self.batch_size, self.seed, self.samples = batch_size, seed, samples
        self._input_dim = sizes[0] if model is None else None
        self._network = network
        self._recipe = way.Recipe(
            ctx,
            network,
            way.default_loss if loss is None else loss,
            learning_rate,
            batch_size,
            seed,
            samples,
            device_of(network),
            GradScaler(loss_scaling, enabled=is_scaled),
            sizes=(sizes[0], sizes[-1]) if model is None else None,
            autocast=mixed_precision,
        )
        self._way: way.Way
        if strategy is TrainingStrategy.MODEL_PARALLEL:
            self._way = InLayers(self._recipe)
        elif strategy is TrainingStrategy.PARAMETER_SERVER:
            self._way = ByServer(self._recipe, mode)
        elif strategy is TrainingStrategy.FEDERATED:
            self._way = AtHome(self._recipe)
        else:
            gossip = strategy is TrainingStrategy.DECENTRALIZED
            self._way = InSteps(self._recipe, Policy(batching=dynamic_batching), gossip=gossip)
        self.model = self._way.model
        self.optimizer = self._way.optimizer
        Callbacks(callbacks)  # checks them
        self.callbacks += callbacks

    @hints.arguments({"epochs": "train(X, y, epochs)"}, same=hints.SAMPLES)
    def train_epoch(self, X: Any, y: Any = None) -> float:
        """One pass over the samples; returns the global loss. As ``train`` with one epoch."""
        return self.train(X, y)

    @hints.arguments({"batch_size": "batch_size= where the trainer is made"}, same=hints.SAMPLES)
    def train(self, X: Any, y: Any = None, epochs: int = 1) -> float:
        """Train for ``epochs`` passes; returns the global loss of the last. A collective call.

        ``X``, of shape (n, input_dim), and ``y`` are this rank's own samples, with
        ``samples="all"`` all of them. Integer targets are classes, floats values. In place of both
        a source of ``potluck.data``, such as ``NumpyFiles``, reads samples from this rank's files:
        of two columns, inputs first, or named ``x`` and ``y``.

        ValueError for samples that do not fit the network or each other, or with NaN: with
        PARAMETER_SERVER and MODEL_PARALLEL on all ranks, which may go on; else on the rank that has
        them, and as RemoteError, which names it, on the others. In this second way also TypeError
        for what are no samples, and ValueError for a loss that is NaN or inf, with its step
        (FEDERATED: its epoch). UserWarning if all ranks pass the same samples as their own.

        Where workers come and go pass all epochs to one call: a worker that joins goes on with the
        epoch of the others.
        """
        epochs = checked_whole("epochs", epochs, at_least=1)
        self._way.check_open()
        samples = way.TrainerSamples(
            X,
            y,
            input_dim=self._input_dim,
            dtype=_dtype_of(self._network),
            device=self._recipe.device,
        )
        callbacks: list[object] = [_Shifted(self, each) for each in self.callbacks]
        first = self.epochs

        def on_epoch(end: way.EpochEnd) -> None:
            self.epochs = first + end.epoch + 1
            self._local_loss, self._global_loss = end.local_loss, end.global_loss

        try:
            self._way.train(way.TrainCall(samples, epochs, first, on_epoch, callbacks))
        finally:
            samples.close()
        return self.get_global_loss()

    def get_parameters(self) -> Parameters:
        state = self._network.state_dict()
        return {name: value.detach().cpu().numpy().copy() for name, value in state.items()}

    def set_parameters(self, parameters: Mapping[str, NDArray[Any]] | ArrayLike) -> None:
        """Set the model to ``parameters``, a result of ``get_parameters``, or all its numbers as a
        flat vector, on this rank. With PARAMETER_SERVER they are the server's when the next epoch
        begins; of several ranks that have set them the first counts. ValueError for missing or
        unknown names."""
        shapes = {name: tuple(each.shape) for name, each in self._network.state_dict().items()}
        named = by_name(parameters, shapes, shapes)
        if unknown := sorted(named.keys() - shapes.keys()):
            raise ValueError(f"parameters have {unknown}; the model's are {sorted(shapes)}")
        state = {name: torch.from_numpy(np.array(value)) for name, value in named.items()}
        self._network.load_state_dict(state)
        self._way.note_set()

    def close(self) -> None:
        """With PARAMETER_SERVER: end the server that the first epoch made. On its worker it waits
        until the other workers have closed their trainers, too. Idempotent."""
        self._way.close()

    def predict(self, X: Any) -> NDArray[Any]:
        """The outputs of the network, of a dense one float32 of shape (n, output_dim), as it is
        after the last ``train``. For classes take the argmax of each row. Local."""
        inputs = way.inputs_of(X, _dtype_of(self._network), is_dense=self._input_dim is not None)
        width = self._input_dim
        if width is not None and (not inputs.dim() or inputs.shape[-1] != width):
            raise ValueError(
                f"X has shape {tuple(inputs.shape)}; with input_dim={width} it must be "
                f"(n, {width}), or ({width},) for one sample"
            )
        was_training = self._network.training
        self._network.eval()
        try:
            with torch.no_grad():
                parts = [
                    self._network(part.to(self._recipe.device)).cpu()
                    for part in torch.split(inputs, _PREDICTED_AT_ONCE)
                ]
        finally:
            self._network.train(was_training)
        return torch.cat(parts).numpy()


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


def _dtype_of(network: nn.Module) -> torch.dtype:
    """The dtype of the first parameter of floats; float32 without any."""
    kinds = (each.dtype for each in network.parameters() if each.is_floating_point())
    return next(kinds, torch.float32)


def _sizes_of(
    input_dim: int | None,
    hidden_dims: Sequence[int] | None,
    output_dim: int | None,
    model: nn.Module | None,
) -> list[int]:
    """The units of the layers of the dense network; empty for a model of the user's own."""
    if model is not None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {model!r:.200}; it must be a torch.nn.Module")
        if (input_dim, hidden_dims, output_dim) != (None, None, None):
            raise ValueError("pass model=, or input_dim, hidden_dims and output_dim, not both")
        return []
    if input_dim is None or hidden_dims is None or output_dim is None:
        raise TypeError(
            "pass input_dim=, hidden_dims= and output_dim= for a dense network, or model= for one "
            "of your own"
        )
    if isinstance(hidden_dims, Integral | str):
        raise TypeError(f"hidden_dims is {hidden_dims!r}; it must be a list, such as [128, 64]")
    sizes = [
        checked_whole("input_dim", input_dim, at_least=0),
        *(checked_whole("a number of hidden_dims", each, at_least=0) for each in hidden_dims),
        checked_whole("output_dim", output_dim, at_least=0),
    ]
    if min(sizes) < 1:
        raise ValueError(f"the layers have {sizes} units; every layer needs at least 1")
    return sizes


def _dense(sizes: Sequence[int], seed: int) -> nn.Module:
    layers: list[nn.Module] = []
    random = torch.Generator().manual_seed(seed)
    for before, after in itertools.pairwise(sizes):
        layers += [_linear(before, after, random), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _on(network: nn.Module, device: str | torch.device | None) -> nn.Module:
    if device is None:
        return network
    try:
        return network.to(torch.device(device))
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device={device!r} can't be used on this machine: {error}") from error


def _mode_of(strategy: TrainingStrategy, aggregation: object) -> Mode:
    if aggregation is None:
        return Synchronous()
    if strategy is not TrainingStrategy.PARAMETER_SERVER:
        raise ValueError(f"aggregation is for PARAMETER_SERVER: {strategy.name} has its own")
    found = mode_of(aggregation, "aggregation")
    if found.is_by_hand:
        raise ValueError("the trainer makes no updates by hand: leave automatic=False out")
    return found


def _check_numbers(batch_size: object, seed: object, learning_rate: object) -> None:
    is_whole = isinstance(batch_size, Integral) and not isinstance(batch_size, bool)
    if not is_whole or batch_size < 1:  # type: ignore[operator]
        raise ValueError(f"batch_size is {batch_size!r}; it must be a whole number of at least 1")
    checked_whole("seed", seed, at_least=0)
    is_number = isinstance(learning_rate, Real) and not isinstance(learning_rate, bool)
    if not is_number or not 0 < learning_rate < math.inf:  # type: ignore[operator]
        raise ValueError(f"learning_rate is {learning_rate!r}; it must be a number above 0")


def _check_options(
    strategy: TrainingStrategy,
    mixed_precision: object,
    loss_scaling: object,
    is_scaled: bool,
    dynamic_batching: object,
) -> None:
    if mixed_precision not in (None, torch.bfloat16, torch.float16):
        raise TypeError(
            f"mixed_precision is {mixed_precision!r}: pass torch.bfloat16 or torch.float16"
        )
    if not isinstance(loss_scaling, LossScale | None):
        raise TypeError(
            f"loss_scaling is {loss_scaling!r}: pass potluck.torch.LossScale(scale=1024.0)"
        )
    if not isinstance(dynamic_batching, NoiseBatching | None):
        raise TypeError(
            f"dynamic_batching is {dynamic_batching!r}: pass a NoiseBatching of potluck.torch, "
            "such as NoiseBatching(min_batch=32, max_batch=512)"
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
