"""Training a module with a parameter server, in place of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.parameter_server import ParameterServer


class ServerOptimizer:
    """Takes the place of the optimizer in a training loop: the update is made on the server.

        ps = potluck.ParameterServer(ctx, Asynchronous(), optimizer=SGD(0.1))
        optimizer = potluck.torch.ServerOptimizer(model, ps)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ps.close()

    The constructor gives the server the parameters of ``model``, unless it has them, and pulls
    them. ``step`` pushes the gradients and pulls the newest parameters into the model. Every worker
    draws samples of its own. Buffers, such as a BatchNorm's averages, stay on each worker.

    With ``ElasticAveraging(of="parameters")`` each worker trains by its own ``optimizer``, and
    every ``every`` steps its parameters and the server's move towards each other.

    ``name`` is the model's on the server. TypeError or ValueError for arguments that do not fit the
    server's mode, or a model without parameters to train.
    """

    def __init__(
        self,
        model: nn.Module,
        ps: ParameterServer,
        *,
        name: str = "model",
        optimizer: Optimizer | None = None,
        every: int = 10,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {model!r:.200}; it must be a module, not its parameters")
        if not isinstance(ps, ParameterServer):
            raise TypeError(f"ps is {ps!r}; it must be a potluck.ParameterServer")
        averages = ps.mode.of == "parameters"
        if averages and not isinstance(optimizer, Optimizer):
            raise ValueError(
                'with ElasticAveraging(of="parameters") each worker needs an optimizer of its own: '
                "pass optimizer=torch.optim.SGD(model.parameters(), ...)"
            )
        if optimizer is not None and not averages:
            raise ValueError(
                "the update is made on the server: pass optimizer=SGD(...) or Adam(...) of "
                "potluck.parameter_server to ParameterServer"
            )
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1")
        self.ps = ps
        self._name = name
        self._optimizer = optimizer
        self._every = every
        self._num_steps = 0
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ValueError("no parameter of the model requires a gradient")
        self.version = 0
        """The version of the parameters that the model has, or last averaged with."""
        ps.set_parameters(name, {n: each.detach() for n, each in self._trained.items()})
        self.pull()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as an optimizer does."""
        for each in self._trained.values():
            if set_to_none:
                each.grad = None
            elif each.grad is not None:
                each.grad.zero_()

    def step(self) -> bool:
        """Push the gradients, and pull the newest parameters into the model. Whether the gradients
        count: see ``ParameterServer.accumulate_gradient``. A parameter without a gradient counts as
        one with zeros."""
        if self._optimizer is not None:
            self._optimizer.step()
            self._num_steps += 1
            if self._num_steps % self._every == 0:
                mine = {name: each.detach() for name, each in self._trained.items()}
                self._fill(self.ps.average_parameters(self._name, mine))
            return True
        counted = self.push()
        self.pull()
        return counted

    def push(self) -> bool:
        """Push the gradients; the next call is ``pull``. Whether they count."""
        gradients = {name: _gradient(each) for name, each in self._trained.items()}
        return self.ps.accumulate_gradient(self._name, gradients)

    def finish(self) -> bool | None:
        """Go on with a ``push`` that was interrupted: whether its gradients count. None if none
        was."""
        return self.ps.finish_gradient(self._name)

    @property
    def counted(self) -> dict[str, int]:
        """By worker, how many of its pushes are in the parameters of the model."""
        return self.ps.counted(self._name)

    def pull(self) -> None:
        """Pull the newest parameters into the model, before the first step and after each."""
        parameters, self.version = self.ps.get_parameters(self._name)
        self._fill(parameters)

    def look(self) -> None:
        """Take the newest parameters into the model at once, for evaluation: no gradient of them
        may follow."""
        parameters, self.version = self.ps.get_parameters(self._name, wait=False)
        self._fill(parameters)

    def replace(self) -> None:
        """Give the server the parameters of the model as the next version."""
        mine = {name: each.detach() for name, each in self._trained.items()}
        self.ps.set_parameters(self._name, mine, replace=True)

    def _fill(self, parameters: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, each in self._trained.items():
                kept, mine = parameters[name].dtype.name, str(each.dtype).removeprefix("torch.")
                if kept != mine:
                    raise ValueError(
                        f"parameter {name!r} is {mine} here and {kept} on the server: every worker "
                        "trains a model of the same dtypes"
                    )
                data = torch.from_numpy(parameters[name].reshape(-1).view(np.uint8))
                each.copy_(data.view(each.dtype).reshape(each.shape))


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return gradient.to_dense() if gradient.is_sparse else gradient
