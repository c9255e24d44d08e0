"""What one step shows of the gradient's noise: this rank's gradient against that of all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from potluck.torch.intercept import Capture, GradientInterceptor
from potluck.training.noise import unbiased
from potluck.training.sampler import Batch, Share


class NoiseProbe:
    """Takes the squared lengths of local and reduced gradients at each backward through ``model``.

    Costs two norms per parameter and backward; nothing is communicated.
    """

    def __init__(self, model: nn.Module) -> None:
        self._interceptor = GradientInterceptor(model, keep=_squared)

    def close(self) -> None:
        """Measure no more."""
        self._interceptor.close()

    def take(self, share: Share, batch: Batch, factor: float) -> tuple[float, float] | None:
        """Unbiased |G|^2 and tr(Sigma) of the step whose backward came last (training/noise.py).

        ``factor`` is the loss scale it ran under. None where nothing can be said: this rank had
        no samples, or all of them, or gradients were not reduced.
        """
        capture, self._interceptor.last = self._interceptor.last, None
        if capture is None:
            return None
        local, reduced = _sum(capture, "local"), _sum(capture, "reduced")
        if local is None or reduced is None:
            return None
        scale = factor * factor
        return unbiased(local / scale, share.num_samples, reduced / scale, batch.size)


def _squared(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


def _sum(capture: Capture, which: str) -> float | None:
    kept = [getattr(gradient, which) for gradient in capture.gradients.values()]
    if not kept or any(value is None for value in kept):
        return None
    return float(torch.stack([value.cpu() for value in kept]).sum())
