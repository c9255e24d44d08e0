"""Conversion of torch's options (reduction, timeout, URL) to potluck's."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch import Tensor
from torch.distributed import ReduceOp as TorchOp

from potluck._core.types import ReduceOp
from potluck.torch.process_group.buffers import can_reduce

_KINDS = {
    TorchOp.SUM: ReduceOp.SUM,
    TorchOp.AVG: ReduceOp.MEAN,
    TorchOp.MIN: ReduceOp.MIN,
    TorchOp.MAX: ReduceOp.MAX,
    TorchOp.PRODUCT: ReduceOp.PRODUCT,
    TorchOp.BAND: ReduceOp.BAND,
    TorchOp.BOR: ReduceOp.BOR,
    TorchOp.BXOR: ReduceOp.BXOR,
    TorchOp.PREMUL_SUM: ReduceOp.SUM,
}


def reduction(opts: Any) -> tuple[ReduceOp, float | Tensor | None]:
    """The reduction in ``opts`` (options, a torch ReduceOp, or None for SUM) and its factor.

    The factor is that of PREMUL_SUM, by which every contribution is multiplied; None for others.
    """
    if opts is None:
        return ReduceOp.SUM, None
    op = getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)
    try:
        chosen = _KINDS[kind]
    except (KeyError, TypeError):
        raise ValueError(
            f"the reduction {op!r} is unknown to potluck; use SUM, AVG, PREMUL_SUM, PRODUCT, MIN, "
            "MAX, BAND, BOR or BXOR of torch.distributed.ReduceOp"
        ) from None
    if kind == TorchOp.PREMUL_SUM:
        return chosen, op.__getstate__()[1]
    return chosen, None


def seconds(opts: Any, default: float) -> float:
    """The timeout in ``opts`` in seconds, or ``default`` without one (torch marks that as below
    0)."""
    timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    if timeout is None or timeout.days < 0:
        return default
    return timeout.total_seconds() or default


def given(url: str, name: str, variable: str = "") -> int:
    """A number that ``init_process_group`` was given, which torch puts into ``url``; else that of
    the environment ``variable``; -1 without either."""
    text = parse_qs(urlsplit(url).query).get(name, [os.environ.get(variable, "")])[0]
    return int(text) if text.isdigit() else -1


def check_reduction(op: ReduceOp, factor: float | Tensor | None, dtype: torch.dtype) -> None:
    """TypeError, with torch's text, if ``op`` is impossible or meaningless for ``dtype``."""
    if not can_reduce(dtype) or (dtype is torch.complex32 and op is ReduceOp.PRODUCT):
        raise TypeError(
            f"Invalid scalar type: {dtype} can be moved but not combined by {op.name}; convert the "
            "tensor to a wider dtype first, for example tensor.float()"
        )
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and (
        dtype.is_floating_point or dtype.is_complex
    ):
        raise TypeError(
            f"Cannot use ReduceOp.{op.name} with non-integral dtype {dtype}; it combines bits"
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise TypeError(
            f"ReduceOp.{op.name} of {dtype} has no meaning, complex numbers have no order; "
            "use it on tensor.abs() or on torch.view_as_real(tensor)"
        )
    if op is ReduceOp.MEAN and dtype is torch.bool:
        raise TypeError("ReduceOp.AVG of torch.bool has no meaning; convert it to a float tensor")
    if factor is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"ReduceOp.PREMUL_SUM of {dtype} would cut its factor to an integer; convert the "
            "tensor to floats, or sum it and multiply afterwards"
        )
