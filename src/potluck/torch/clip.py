"""Gradient clipping by global norm, also of sharded gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from potluck.torch.ddp import DistributedDataParallel


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm, as a single vector, is at most ``max_norm``.

    Returns the norm before scaling, a tensor of shape (). Call it between ``backward()`` and
    ``optimizer.step()``: then the gradients of a DistributedDataParallel are reduced and
    bit-identical on all ranks, so all ranks compute the same norm without communication (on
    machines that round differently, norms that may differ in their last bits). Sharded gradients
    (DTensors, as FSDP2 has) cost one all_reduce of one number per mesh dimension. With a GradScaler
    call ``scaler.unscale_(optimizer)`` first. Gradients whose norm is small enough are not written.

    RuntimeError inside ``no_sync()``, where gradients are not reduced; with ``error_if_nonfinite``
    also for a norm that is inf or NaN. ValueError unless ``max_norm`` is positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive")
    chosen: Any = parameters
    if isinstance(parameters, nn.Module):
        if isinstance(parameters, DistributedDataParallel) and not parameters.reduces:
            raise RuntimeError(
                "inside no_sync() gradients are each rank's own: clip after the backward outside"
            )
        chosen = parameters.parameters()
    tensors = [chosen] if isinstance(chosen, Tensor) else list(chosen)
    gradients = [each.grad for each in tensors if each.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
    whole: Tensor = norm.full_tensor() if is_sharded(norm) else norm
    if not max_norm / (whole + 1e-6) >= 1:  # as torch: else the gradients would be multiplied by 1
        torch.nn.utils.clip_grads_with_norm_(tensors, max_norm, norm)
    return whole


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def groups_of(tensors: Iterable[Any]) -> list[Any]:
    """The process groups of the DTensors' meshes, each once, in the same order on all ranks."""
    groups = {
        group.group_name: group
        for tensor in tensors
        for group in tensor.device_mesh.get_all_groups()
    }
    return [groups[name] for name in sorted(groups)]
