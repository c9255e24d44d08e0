"""Data parallelism: every rank holds the whole model and computes on its share of the batch.

The idea and the name are torch's (Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", VLDB 2020); ``reducer.py`` averages the gradients during backward. Unlike
torch's, this DDP needs no process group, weights ranks by their samples, and survives lost peers.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from potluck._core import hints
from potluck._core.context import DistributedContext, init
from potluck._core.context.structure import compare
from potluck.compressors.options import thresholds
from potluck.torch.compression import Choice, Compression
from potluck.torch.reducer import Reducer
from potluck.torch.structure import (
    SAME_MODEL,
    broadcast_tensors,
    check_module,
    structure_of,
    tensors_of,
)
from potluck.training.strategies import DataParallel, Strategy


class DistributedDataParallel(nn.Module):
    """A wrapper of ``module`` whose gradients are averaged over all ranks when ``backward()``
    returns.

    Parameters and buffers start equal to rank 0's. They are broadcast by the constructor; in an
    elastic context (``ctx.elastic``) before the first forward, or by the ElasticLoop. With
    ``broadcast_buffers`` rank 0's buffers are broadcast before every forward in training mode.
    Outside of an ElasticLoop the parameters of machines that round differently drift apart by what
    each rounds of the updates: call ``synchronize()`` now and then.

    ``ctx`` is the context, ``potluck.init()`` if None. ``weight`` is this rank's weight in the
    mean: its samples divided by those of all ranks (the ElasticLoop sets it), or None for equal
    weights. Gradients are reduced in buckets of ``bucket_size_mb`` MiB while backward runs; those
    on other devices than the CPU are copied through host memory.

    ``compression`` sends gradients in fewer bytes: a compressor such as ``TopK(0.01)``, or a
    function of a parameter's name and the parameter that returns one, or None for those not to
    compress.
    Parameters with fewer than ``dense_below`` elements are not compressed, nor is any in the first
    ``warmup_steps`` steps. With ``error_feedback`` each rank keeps what was lost, float32 numbers
    as many as the parameters have, and adds it to its next gradients. After a step that does not
    count these are as before it. Compressed gradients are summed as float32, those of float64
    parameters as float64 where the compressor has no codec.

    Ranks compare names, shapes, dtypes and ``requires_grad`` of parameters and buffers before these
    are broadcast, and how they compress before the first backward of a group: Desync on all ranks,
    which names the first difference. Where the constructor refuses a model on one rank, it raises
    Desync on the others. ``ctx`` may be a sub-group of ``ctx.new_group``.

    ``copy.deepcopy``, pickle and ``torch.save`` of the wrapper give the wrapped module, without the
    wrapper: so ``AveragedModel(model)`` works.

    Parameters may have any float dtype, may be shared between modules, and may be unused on some
    ranks.

    ``forward`` and ``backward()`` raise PeerLost and other GroupErrors. Then parameters are
    unchanged, gradients are this rank's own, and the same module works in the next group.
    ValueError if no parameter requires a gradient, TypeError for parameters that are no floats.
    Cost of a backward: one all_reduce of all gradients.
    """

    builder = hints.Absent("potluck.torch.DDP(model, ctx, bucket_size_mb=25)")

    @hints.arguments(hints.DDP)
    def __init__(
        self,
        module: nn.Module,
        ctx: DistributedContext | None = None,
        *,
        bucket_size_mb: float = 25,
        broadcast_buffers: bool = True,
        compression: Choice = None,
        error_feedback: bool = True,
        dense_below: int = 4096,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__()
        if ctx is not None and not hasattr(ctx, "all_reduce"):
            raise TypeError(f"DDP takes the module and a context, potluck.init(), not {ctx!r}")
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.ctx = ctx if ctx is not None else init()
        self._bucket_size_mb = bucket_size_mb
        self._algorithm: str | None = None
        self._loss_scale = 1.0
        self.synchronized = False
        """Whether this rank's parameters and buffers are known to be equal to the group's."""
        try:
            check_module(module)
            if not 0 < bucket_size_mb < math.inf:
                raise ValueError(
                    f"bucket_size_mb is {bucket_size_mb}; it must be positive and finite"
                )
            owner = "DistributedDataParallel"
            dense_below, warmup_steps = thresholds(owner, dense_below, warmup_steps)
            self._how: dict[str, Any] = {
                "error_feedback": error_feedback,
                "dense_below": dense_below,
                "warmup_steps": warmup_steps,
            }
            self.compress(compression)
        except Exception as error:
            if not self.ctx.elastic:  # the other ranks wait in ``synchronize``
                compare(self.ctx, "the model", {}, "", refused=error)
            raise
        if not self.ctx.elastic:
            self.synchronize()

    def compress(self, compression: Choice) -> None:
        """Compress later gradients by ``compression``, on every rank between the same two steps,
        with the constructor's ``error_feedback``, ``dense_below`` and ``warmup_steps``. Residuals
        start from zero."""
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._choice, self._reduced = compression, list(trained)
        self.compression: Compression | None = None
        if compression is not None:
            made = Compression(trained, compression, **self._how)
            self.compression = made if any(made.compressors) else None
        """The residuals, by parameter name; None where no parameter is compressed."""
        self.loss_scale = self._loss_scale
        self._reducer = Reducer(
            *(trained, self.ctx, self._bucket_size_mb, self.compression),
            algorithm=self._algorithm,
        )

    def follow(self, strategy: Strategy) -> None:
        """Reduce later gradients as ``strategy`` says, on every rank between the same two steps.
        What it leaves open stays as it is."""
        if strategy == DataParallel():
            return
        self._bucket_size_mb = strategy.bucket_size_mb or self._bucket_size_mb
        self._algorithm = strategy.algorithm or self._algorithm
        self.compress(strategy.compression or self._choice)

    def structure(self) -> dict[str, str]:
        """Descriptions of what must be equal on all ranks, by name: parameters and buffers in
        order, the names of the reduced parameters, and the size of buckets."""
        options = {
            "bucket_size_mb": f"{self._bucket_size_mb:g}",
            "broadcast_buffers": str(self.broadcast_buffers),
        }
        return options | structure_of(self.module, self._reduced)

    @property
    def weight(self) -> float | None:
        """This rank's weight in the mean, None for equal weights."""
        return self._reducer.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self._reducer.weight = weight

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before ``backward()``, 1 by default.

        Residuals are kept in units of it. An ElasticLoop sets it to that of its GradScaler; set it
        before ``backward()`` in a loop of your own: ``model.loss_scale = scaler.factor``.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if not 0 < scale < math.inf:
            raise ValueError(f"the loss scale is {scale}; it must be positive and finite")
        self._loss_scale = scale
        if self.compression is not None:
            self.compression.scale = scale

    @property
    def num_nonfinite(self) -> Counter[str]:
        """By parameter: how many elements of its gradients were inf, NaN or beyond the range of the
        codec on this rank; where none of a bucket were, in the sum over the ranks. Nothing is
        counted without ``compression``."""
        return Counter() if self.compression is None else self.compression.num_nonfinite

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces gradients; False inside ``no_sync()``, and in an ElasticLoop
        with a strategy of rounds."""
        return self._reducer.enabled

    @reduces.setter
    def reduces(self, reduces: bool) -> None:
        self._reducer.enabled = reduces

    def begin_part(self, *, is_first: bool = True, is_last: bool = True) -> None:
        """A part of a step begins, for an ElasticLoop whose batch does not fit into memory at once.
        Gradients of all parts but the last are kept, and reduced with those of the last one."""
        self._reducer.begin_part(is_first=is_first, is_last=is_last)

    def synchronize(self) -> None:
        """Broadcast parameters and buffers from rank 0. A collective call. Desync on all ranks,
        which names the first difference, if their models differ."""
        if self.ctx.world_size > 1:
            compare(self.ctx, "the model", self.structure(), SAME_MODEL, operation="synchronize")
        broadcast_tensors(self.ctx, tensors_of(self.module))
        self.synchronized = True

    def zero_loss(self) -> Tensor:
        """A loss of 0 that depends on every parameter, for a rank without samples in a step: in
        place of a forward, so that its backward takes part in the reduction."""
        self._begin_forward()
        trained = [each for each in self.module.parameters() if each.requires_grad]
        return torch.stack([(each * 0).sum().float() for each in trained]).sum()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_forward()
        return self.module(*args, **kwargs)

    def _begin_forward(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._reducer.forget()  # the last backward may have raised
        if not self.synchronized:
            self.synchronize()
        elif (
            self.broadcast_buffers
            and self.training
            and self._reducer.enabled
            and not self._reducer.has_parts  # other ranks may compute the step in fewer parts
        ):
            broadcast_tensors(self.ctx, dict(self.module.named_buffers()))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the wrapped module, as an average of weights needs; it communicates nothing."""
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.module,)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this block; the next backward after it reduces them."""
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the wrapped module, without a prefix in its names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of the wrapped module, or of torch's DDP (with the prefix "module.")."""
        if state_dict and all(name.startswith("module.") for name in state_dict):
            own = self.module.state_dict().keys()
            if not own & state_dict.keys():
                state_dict = {k.removeprefix("module."): v for k, v in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


DDP = DistributedDataParallel


def _itself(module: nn.Module) -> nn.Module:
    """What a pickled wrapper becomes."""
    return module
