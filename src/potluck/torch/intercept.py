"""Gradients as backward makes them: what each parameter got, before and after the reduction."""

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
    """One parameter's gradient in one backward: what was kept of it.

    ``local`` is this rank's own, ``reduced`` that of all ranks: the mean that the optimizer will
    see. ``reduced`` is None where this backward reduced nothing (inside ``no_sync()``).
    """

    name: str
    local: Any
    reduced: Any


@dataclass(frozen=True, slots=True)
class Capture:
    """One backward of this process, counted from 0; ``gradients`` by parameter name.

    Parameters that this backward did not reach on this rank are not in it.
    """

    number: int
    gradients: dict[str, Gradient]


def clone(gradient: Tensor) -> Tensor:
    """A copy that later steps do not change."""
    return gradient.detach().clone()


class GradientInterceptor:
    """Keeps what every backward through ``module`` leaves in its parameters' ``.grad``.

        with GradientInterceptor(model) as gradients:
            loss.backward()
            gradients.last.gradients["0.weight"].local

    ``module`` may be a DistributedDataParallel (ours or torch's) or any other; names are those of
    the module inside. ``keep`` makes of a gradient what is kept of it: a copy, or something
    smaller, as ``keep=torch.linalg.vector_norm``. ``on_capture`` gets each Capture when its
    backward is complete, before ``backward()`` returns. ``last`` is the newest one, None at first.
    ``local`` includes what earlier backwards have accumulated in ``.grad``.

    What ``keep`` raises comes out of ``backward()`` as a RuntimeError that names the parameter.
    Nothing is communicated. It works, and lives, as long as the module, or until ``close``.
    ValueError for a module in which nothing requires a gradient.
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
        self._graph = -1  # autograd's number of the backward under way
        self._local: dict[str, Any] = {}
        inner = module.module if isinstance(module, DistributedDataParallel | TorchDDP) else module
        self._parameters = {n: p for n, p in inner.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError(f"no parameter of {type(inner).__name__} requires a gradient")
        self._handles: list[RemovableHandle] = []
        for name, parameter in self._parameters.items():
            self._handles.append(_register(parameter, partial(self._on_gradient, name)))

    def close(self) -> None:
        """Take the hooks away; ``last`` stays."""
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
        # Reducers have queued their own end during backward; what is queued now comes after it.
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
    """Whether ``.grad`` is that of all ranks once backward has ended."""
    if isinstance(module, DistributedDataParallel):
        return module.reduces
    return bool(getattr(module, "require_backward_grad_sync", True))


def _when_backward_ends(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _register(parameter: Any, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle
