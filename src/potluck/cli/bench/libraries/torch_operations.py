"""What compressors do, in operations of torch on one thread, for comparison."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray


def operations(source: NDArray[np.float32]) -> dict[str, Callable[[], object]]:
    """Functions by name, each for the flat array ``source``; what they give is thrown away."""
    torch.set_num_threads(1)
    x = torch.from_numpy(source)
    k = max(1, len(source) // 100)
    whole = x[: len(source) // 4096 * 4096].view(-1, 4096)
    residual = torch.zeros_like(x)

    sent, work = torch.empty_like(x), torch.empty_like(x)

    def integers(bits: int) -> Callable[[], object]:
        levels = (1 << (bits - 1)) - 1
        count = len(source) // 256 * 256
        blocks, places = sent[:count].view(-1, 256), work[:count].view(-1, 256)
        codes = torch.empty(places.shape, dtype=torch.int8)

        def encode() -> object:  # in memory that is there, as few passes as operations allow
            torch.add(x, residual, out=sent)
            scale = torch.abs(blocks, out=places).amax(1, keepdim=True) / levels
            codes.copy_(torch.div(blocks, scale, out=places).round_())
            return torch.addcmul(
                blocks, places, scale, value=-1, out=residual[:count].view(-1, 256)
            )

        return encode

    return {
        "fp16": lambda: x.to(torch.float16),
        "bf16": lambda: x.to(torch.bfloat16),
        "int8": integers(8),
        "int4": integers(4),
        "int2": integers(2),
        "topk": lambda: torch.topk(x.abs(), k, sorted=False),
        "chunked": lambda: torch.topk(whole.abs(), 41, dim=1, sorted=False),
    }
