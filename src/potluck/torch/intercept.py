"""Interception of gradients: each parameter's gradient before and after the reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.hooks import RemovableHandle

from potluck.torch.ddp import DistributedDataParallel

Keep = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one parameter in one backward, as ``keep`` returned it.

    ``local`` is this rank's gradient, ``reduced`` the mean over all ranks that the optimizer uses;
    None if this backward did not reduce (inside ``no_sync()``).
    """

    name: str
    local: Any
    reduced: Any


@dataclass(frozen=True, slots=True)
class Capture:
    """The gradients of one backward by parameter name; ``number`` counts backwards from 0.

    Parameters that got no gradient on this rank are not in it.
    """

    number: int
    gradients: dict[str, Gradient]


def clone(gradient: Tensor) -> Tensor:
    """A copy of ``gradient``."""
    return gradient.detach().clone()


class GradientInterceptor:
    """Captures the gradients of every backward through ``module``.

        with GradientInterceptor(model) as gradients:
            loss.backward()
            gradients.last.gradients["0.weight"].local

    ``module`` may be a DistributedDataParallel (of potluck or torch) or any other module; names are
    those of the module inside. ``keep(gradient)`` returns the value to keep: a copy by default, or
    something smaller, as ``keep=torch.linalg.vector_norm``. ``on_capture(capture)`` is called when
    a backward is complete, before ``backward()`` returns. ``last`` is the newest Capture, or None.
    ``local`` includes gradients that earlier backwards accumulated in ``.grad``.

    If ``keep`` raises, ``backward()`` raises a RuntimeError that names the parameter. ValueError if
    no parameter of the module requires a gradient. No communication. Active until ``close``.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        keep: Keep = clone,
        on_capture: Callable[[Capture], None] | None = None,
    ) -> None:
        self.last: Capture | None = None
        self._module = module
        self._keep = keep
        self._on_capture = on_capture
        self._number = 0
        self._graph = -1  # autograd's number of the present backward
        self._local: dict[str, Any] = {}
        inner = module.module if isinstance(module, DistributedDataParallel | TorchDDP) else module
        self._parameters = {n: p for n, p in inner.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError(f"no parameter of {type(inner).__name__} requires a gradient")
        self._handles: list[RemovableHandle] = []
        for name, parameter in self._parameters.items():
            self._handles.append(_register(parameter, partial(self._on_gradient, name)))

    def close(self) -> None:
        """Remove the hooks; ``last`` stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> GradientInterceptor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph, self._local = graph, {}
            _when_backward_ends(self._reductions_come_first)
        self._local[name] = self._kept(name, parameter)

    def _reductions_come_first(self) -> None:
        # Reducers queued their end during backward; a callback queued now runs after it.
        _when_backward_ends(self._complete)

    def _complete(self) -> None:
        reduces = _reduces(self._module)
        self.last = Capture(
            self._number,
            {
                name: Gradient(
                    name, kept, self._kept(name, self._parameters[name]) if reduces else None
                )
                for name, kept in self._local.items()
            },
        )
        self._number += 1
        self._graph, self._local = -1, {}
        if self._on_capture is not None:
            self._on_capture(self.last)

    def _kept(self, name: str, parameter: Tensor) -> Any:
        assert parameter.grad is not None
        try:
            with torch.no_grad():
                return self._keep(parameter.grad)
        except Exception as error:
            raise RuntimeError(
                f"keep of a GradientInterceptor raised at the gradient of {name}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _reduces(module: nn.Module) -> bool:
    """Whether ``.grad`` is reduced when backward has ended."""
    if isinstance(module, DistributedDataParallel):
        return module.reduces
    return bool(getattr(module, "require_backward_grad_sync", True))


def _when_backward_ends(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _register(parameter: Any, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle
