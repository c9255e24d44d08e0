"""The elastic training loop for PyTorch: training/elastic.py with modules and optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset, default_collate

from potluck.checkpoint.state import State, fingerprint
from potluck.checkpoint.store import CheckpointStore
from potluck.context import DistributedContext, init
from potluck.torch.ddp import DistributedDataParallel
from potluck.training import elastic
from potluck.training.elastic import Policy
from potluck.training.sampler import Schedule, Share


class ElasticLoop:
    """Mini-batches of ``dataset``, and steps that count on all ranks or on none.

    ::

        job = ElasticLoop(model, optimizer, dataset, batch_size=64, epochs=10)
        for x, y in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                job.log(loss=loss)
                optimizer.step()

    The loop yields this rank's share of the next ``batch_size`` samples (of all ranks together).
    The first ``optimizer.step()`` of a block first asks all ranks: only when every one has come
    this far is it carried out. When a worker is lost before that, the block ends early, buffers
    and random state go back, and the same samples come again in the new group. A block in which no
    optimizer stepped is committed at its end. Gradients belong to one block: those of an
    interrupted one are dropped. After ``optimizer.step()`` a block must not communicate.

    ``dataset`` is a map-style data set or a tuple of tensors or arrays with samples along their
    first axis. ``optimizer`` may be several; their ``step`` takes no closure. ``also`` names other
    objects with state_dict and load_state_dict (schedulers) that belong to the state. Newcomers
    receive that state; ``checkpoint`` (a directory) also keeps it on the leader's disk, and a
    training of which nobody is left goes on from there.

    The context is the model's own, if it is a DistributedDataParallel, else ``ctx`` or
    ``potluck.init()``.

    ``losses``, ``recoveries``, ``num_reruns``, ``step_number`` and ``epoch`` are those of
    training.elastic.ElasticLoop.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        dataset: Any,
        *,
        batch_size: int,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        checkpoint: str | os.PathLike[str] | CheckpointStore | None = None,
        also: Mapping[str, Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        policy: Policy | None = None,
        ctx: DistributedContext | None = None,
    ) -> None:
        if ctx is None:
            ctx = model.ctx if isinstance(model, DistributedDataParallel) else init()
        self.ctx = ctx
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if isinstance(dataset, tuple):
            dataset = TensorDataset(*map(torch.as_tensor, dataset))
        if checkpoint is not None and not isinstance(checkpoint, CheckpointStore):
            checkpoint = CheckpointStore(checkpoint)
        self._model = model
        self._dataset = dataset
        self._collate = collate
        schedule = Schedule(len(dataset), batch_size, epochs, seed, shuffle)
        replica = TorchReplica(model, optimizers, also or {})
        self._core = elastic.ElasticLoop(
            self.ctx, schedule, replica, checkpoint=checkpoint, policy=policy
        )
        for each in optimizers:
            each.register_step_pre_hook(self._before_optimizer_step)

    def __iter__(self) -> Iterator[Any]:
        for share in self._core:
            if self.ctx.world_size > 1 and not isinstance(self._model, DistributedDataParallel):
                raise ValueError(
                    f"{self.ctx.world_size} workers train {type(self._model).__name__}, but its "
                    "gradients stay apart: wrap it in potluck.torch.DistributedDataParallel"
                )
            try:
                samples = self._fetch(share)
            except Exception as error:
                self.ctx.abort(error)
                raise
            yield samples

    def step(self) -> AbstractContextManager[None]:
        """The block of one step; see the class."""
        return self._core.step()

    def log(self, **facts: Any) -> None:
        """Tell whoever watches; ``loss``, before ``optimizer.step()``, becomes the global loss.

        Outside of a step the facts are those of the whole training: ``test_accuracy=0.98``.
        """
        self._core.log(**{k: v.detach() if isinstance(v, Tensor) else v for k, v in facts.items()})

    def commit(self, *, loss: float | None = None, ok: bool = True) -> None:
        """What ``optimizer.step()`` does first, for blocks that apply something else."""
        self._core.commit(loss=loss, ok=ok)

    @property
    def losses(self) -> list[float]:
        return self._core.losses

    @property
    def last_loss(self) -> float:
        return self._core.last_loss

    @property
    def recoveries(self) -> list[float]:
        return self._core.recoveries

    @property
    def num_reruns(self) -> int:
        return self._core.num_reruns

    @property
    def step_number(self) -> int:
        return self._core.step_number

    @property
    def epoch(self) -> int:
        return self._core.epoch

    def parameter_hash(self) -> str:
        """Hex SHA3-256 of the model's parameters: equal on all ranks, bit by bit."""
        return _hash(self._model)

    def _fetch(self, share: Share) -> Any:
        if isinstance(self._dataset, TensorDataset):
            return self._dataset[torch.from_numpy(np.array(share.indices))]
        indices = share.indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])

    def _before_optimizer_step(self, _: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._core.in_step:
            return
        # args begins with the optimizer itself.
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ValueError("an optimizer that takes a closure can't step on all ranks or on none")
        self._core.commit()


class TorchReplica:
    """A model and its optimizers as a training.replica.Replica."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], also: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self._also = dict(also)
        self._buffers: list[Tensor] = []
        self._random: list[Tensor] = []
        self.device = _device_name(model)

    def capture(self) -> State:
        return {
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "also": {name: each.state_dict() for name, each in self._also.items()},
        }

    def restore(self, state: State) -> None:
        self._model.load_state_dict(state["model"])
        for optimizer, each in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        for name, each in self._also.items():
            each.load_state_dict(state["also"][name])

    def fingerprint(self) -> str:
        return _hash(self._model)

    def remember(self) -> None:
        self._buffers = [buffer.detach().clone() for buffer in self._model.buffers()]
        self._random = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._random += torch.cuda.get_rng_state_all()

    @torch.no_grad()
    def undo(self) -> None:
        for buffer, before in zip(self._model.buffers(), self._buffers, strict=True):
            buffer.copy_(before)
        for parameter in self._model.parameters():
            parameter.grad = None
        torch.set_rng_state(self._random[0])
        if len(self._random) > 1:
            torch.cuda.set_rng_state_all(self._random[1:])

    def weigh(self, weight: float) -> None:
        if isinstance(self._model, DistributedDataParallel):
            self._model.weight = weight
            # The loop has seen to it that all ranks have the same state.
            self._model.synchronized = True


def _hash(model: nn.Module) -> str:
    return fingerprint(list(model.parameters()))


def _device_name(model: nn.Module) -> str:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
