"""The common base of the trainers: one small interface over loops and estimators."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from potluck._core import hints
from potluck._core.context import check_whole
from potluck._core.context.structure import compare
from potluck._core.types import AnyCase
from potluck.training.callbacks import Callbacks
from potluck.training.means import average

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

Parameters = dict[str, NDArray[Any]]

_METHODS = dict.fromkeys(("mean", "average", "avg", "synchronous"), "mean") | {"sum": "sum"}


class TrainingStrategy(enum.Enum, metaclass=AnyCase):
    """How the ranks of a trainer share the work. Each member names one implementation, which a
    script may also use by itself; ``strategy=`` of an ElasticLoop takes other objects."""

    DATA_PARALLEL = "data_parallel"
    """Every rank has the whole model and a part of the samples; they agree in every step:
    ``potluck.torch.ElasticLoop`` with ``DataParallel()``. For other models than networks a sum over
    all ranks in every iteration (``potluck.estimators``)."""
    MODEL_PARALLEL = "model_parallel"
    """Every rank has some layers of a dense network, cut by the trainer itself."""
    PARAMETER_SERVER = "parameter_server"
    """A server keeps the model; workers push gradients and pull parameters:
    ``potluck.ParameterServer`` and ``potluck.torch.ServerOptimizer``."""
    DECENTRALIZED = "decentralized"
    """Ranks average with their neighbours only: ``potluck.torch.ElasticLoop`` with ``Gossip()``."""
    FEDERATED = "federated"
    """Ranks have samples of their own, which stay there. They take the mean of their parameters
    after each epoch, which is one step of a ``potluck.training.ElasticLoop``. Rounds of clients
    that may be late, with a server, are ``potluck.federated``."""


class DistributedTrainer(ABC):
    """The base of the trainers. Which strategies a class has is in ``strategies``.

    ``callbacks`` are as those of the elastic loop: objects with methods such as
    ``on_epoch_end(epoch, loss)``, or functions ``f(epoch, loss)``. Use a trainer in a ``with``
    block, or call ``close``. Methods that begin with ``get_``, and ``predict``, are local: one rank
    may call them alone. ValueError for another strategy.
    """

    strategies: ClassVar[frozenset[TrainingStrategy]] = frozenset({TrainingStrategy.DATA_PARALLEL})
    _words: ClassVar[Mapping[str, str]] = hints.TRAINER

    def __init__(
        self,
        ctx: DistributedContext,
        strategy: TrainingStrategy = TrainingStrategy.DATA_PARALLEL,
    ) -> None:
        check_whole(ctx, f"a {type(self).__name__}")
        if not isinstance(strategy, TrainingStrategy):
            members = ", ".join(TrainingStrategy.__members__)
            raise TypeError(
                f"strategy is {strategy!r:.80}: pass a potluck.TrainingStrategy, such as "
                f"TrainingStrategy.DATA_PARALLEL; there are {members}"
            )
        if strategy not in self.strategies:
            raise ValueError(
                f"{type(self).__name__} has TrainingStrategy.DATA_PARALLEL, not {strategy.name}: "
                "its model comes from sums over all ranks. DistributedNeuralNetTrainer has all "
                "strategies"
            )
        self.ctx = ctx
        self.strategy = strategy
        self.epochs = 0
        """The number of epochs trained so far."""
        self.callbacks: list[object] = []
        self._local_loss = self._global_loss = math.nan

    @abstractmethod
    def train_epoch(self, X: Any, y: Any = None) -> float:
        """Train once on the samples of all ranks, of which this rank passes its own; returns the
        global loss. A collective call."""

    @abstractmethod
    def get_parameters(self) -> Parameters:
        """Copies of the model's parameters by name."""

    @abstractmethod
    def set_parameters(self, parameters: Mapping[str, NDArray[Any]] | ArrayLike) -> None:
        """Set the model to ``parameters`` on this rank: a result of ``get_parameters``, or all its
        arrays behind each other as one flat vector."""

    @abstractmethod
    def predict(self, X: Any) -> NDArray[Any]:
        """The predictions of the model for the samples ``X``. Local."""

    def register_callback(self, callback: object) -> None:
        """Call ``callback`` in later epochs, too."""
        Callbacks([*self.callbacks, callback])  # checks it
        self.callbacks.append(callback)

    @hints.arguments({}, same={"local_gradient": "gradients"})
    def aggregate_gradients(
        self, gradients: Mapping[str, NDArray[Any]] | ArrayLike, method: Any = "mean"
    ) -> Any:
        """The ``"mean"`` or ``"sum"`` of all ranks' gradients: by name, or of one array.

        A collective call with equal names, shapes and dtypes on all ranks, else Desync on all: one
        all_reduce for each, and one all_gather of 24 bytes. ``AggregationMethod.SYNCHRONOUS`` is
        the mean, and members of ``ReduceOp`` are taken; ValueError for the other methods, which do
        not wait for all ranks.
        """
        given = getattr(method, "name", method)  # AggregationMethod's, which is not known here
        method = _METHODS.get(str(given).lower())
        if method is None:
            raise ValueError(
                f"method is {given!r}; it must be 'mean' or 'sum': all ranks meet in this call. "
                "Those that need not are potluck.ParameterServer(ctx, AggregationMethod...)"
            )
        if not isinstance(gradients, Mapping):
            return self.ctx.all_reduce(np.array(gradients), method)
        arrays = {name: np.array(gradients[name]) for name in sorted(gradients)}
        self._compare("the dict of gradients", arrays)
        return {name: self.ctx.all_reduce(each, method) for name, each in arrays.items()}

    @hints.arguments({}, same=hints.ROOTED)
    def synchronize_model(self, root: int = 0) -> None:
        """Give every rank the parameters of rank ``root``. A collective call.

        Ranks need parameters of equal names, shapes and dtypes, else Desync on all. Training keeps
        them equal by itself.
        """
        parameters = self.get_parameters()
        self._compare("the model", parameters)
        for name in sorted(parameters):
            self.ctx.broadcast(parameters[name], root=root)
        self.set_parameters(parameters)

    def get_local_loss(self) -> float:
        """The mean loss of this rank's samples in the last epoch; NaN before."""
        return self._local_loss

    def get_global_loss(self) -> float:
        """The mean loss of all ranks' samples in the last epoch; NaN before. Local: the end of the
        epoch has reduced it."""
        return self._global_loss

    if not TYPE_CHECKING:  # else a type checker would find every attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(hints.of_object(self, name, self._words), name=name, obj=self)

    def close(self) -> None:  # noqa: B027 (most trainers run nothing)
        """End what the trainer runs beside the script. Idempotent. The model stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()

    def _compare(self, what: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        items = {n: f"{arrays[n].dtype} of shape {arrays[n].shape}" for n in sorted(arrays)}
        compare(self.ctx, what, items, "pass the same names, shapes and dtypes on all ranks")

    def _end_epoch(self, local_loss: float, num_samples: int) -> float:
        """Note the losses of an epoch, call the callbacks; returns the global loss. Collective."""
        found = average(self.ctx, {"loss": local_loss}, weight=float(num_samples))
        self._local_loss, self._global_loss = local_loss, found["loss"]
        loss = self._global_loss
        Callbacks(self.callbacks).call("on_epoch_end", self.epochs, loss)
        self.epochs += 1
        return loss


def by_name(
    parameters: Mapping[str, NDArray[Any]] | ArrayLike,
    shapes: Mapping[str, tuple[int, ...]],
    needed: Iterable[str],
) -> Mapping[str, NDArray[Any]]:
    """``parameters`` by name, cut from a flat vector by ``shapes``; TypeError or ValueError for
    what are none, or without the ``needed``."""
    if isinstance(parameters, Mapping):
        if not parameters.keys() >= {*needed}:
            there = sorted(map(str, parameters))
            raise ValueError(f"parameters are {there!s:.200}; {sorted(needed)} are needed")
        return parameters
    flat, sizes = np.asarray(parameters), [math.prod(shape) for shape in shapes.values()]
    if not shapes or flat.dtype.kind not in "fiu":
        raise TypeError(
            f"parameters are a dict by name, of get_parameters ({', '.join(needed):.80}), not "
            f"{parameters!r:.80}"
        )
    if flat.shape != (sum(sizes),):
        raise ValueError(
            f"the parameters have shape {flat.shape}; as one vector they are {sum(sizes)} numbers, "
            "in the order of get_parameters"
        )
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return {n: part.reshape(shapes[n]) for n, part in zip(shapes, parts, strict=True)}
