"""Measuring gradient noise in a step: the norm of this rank's gradient and of the reduced one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from potluck.torch.intercept import Capture, GradientInterceptor
from potluck.training.noise import unbiased
from potluck.training.sampler import Batch, Share


class NoiseProbe:
    """Records the squared norms of local and reduced gradients at each backward through ``model``.

    Cost: two norms per parameter and backward, no communication.
    """

    def __init__(self, model: nn.Module) -> None:
        self._interceptor = GradientInterceptor(model, keep=_squared)

    def close(self) -> None:
        """Stop measuring."""
        self._interceptor.close()

    def take(self, share: Share, batch: Batch, factor: float) -> tuple[float, float] | None:
        """Unbiased |G|^2 and tr(Sigma) from the last backward, as ``training/noise.py`` defines
        them.

        ``factor`` is the loss scale of that backward. None if there is no estimate: this rank had
        no samples or all samples, or gradients were not reduced.
        """
        capture, self._interceptor.last = self._interceptor.last, None
        if capture is None:
            return None
        local, reduced = _sum(capture, "local"), _sum(capture, "reduced")
        if local is None or reduced is None:
            return None
        scale = factor * factor
        num = round(share.num_samples / share.weight) if share.weight else batch.size
        return unbiased(local / scale, share.num_samples, reduced / scale, num)


def _squared(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


def _sum(capture: Capture, which: str) -> float | None:
    kept = [getattr(gradient, which) for gradient in capture.gradients.values()]
    if not kept or any(value is None for value in kept):
        return None
    return float(torch.stack([value.cpu() for value in kept]).sum())
