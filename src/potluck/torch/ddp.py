"""Data parallelism: every rank holds the whole model and computes on its share of the batch.

The idea and the name are torch's (Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", VLDB 2020); ``reducer.py`` averages the gradients during backward. Unlike
torch's, this DDP needs no process group, weights ranks by their samples, and survives lost peers.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from potluck import hints
from potluck.context import DistributedContext, init
from potluck.torch.compression import Choice, Compression
from potluck.torch.reducer import Reducer
from potluck.training.strategies import DataParallel

_PIECE_BYTES = 25 << 20


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

    ``compression`` sends gradients in fewer bytes: a strategy such as ``TopK(0.01)``, or a function
    of a parameter's name and the parameter that returns one, or None for those not to compress.
    Parameters with fewer than ``dense_below`` elements are not compressed, nor is any in the first
    ``warmup_steps`` steps. With ``error_feedback`` each rank keeps what was lost, float32 numbers
    as many as the parameters have, and adds it to its next gradients. After a step that does not
    count these are as before it. Compressed gradients are summed as float32, those of float64
    parameters as float64 where the strategy has no codec.

    Ranks compare how they compress before the first backward of a group: Desync if it differs.

    Parameters may have any float dtype, may be shared between modules, and may be unused on some
    ranks.

    ``forward`` and ``backward()`` raise PeerLost and other GroupErrors. Then parameters are
    unchanged, gradients are this rank's own, and the same module works in the next group.
    ValueError if no parameter requires a gradient, TypeError for parameters that are no floats.
    Cost of a backward: one all_reduce of all gradients.
    """

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
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of the module requires a gradient")
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not parameter.is_floating_point():
                raise TypeError(f"{name} is {parameter.dtype}; only floats can be averaged")
            if parameter.is_meta:
                raise ValueError(
                    f"{name} is on the meta device and has no data; give it memory first, "
                    "for example module.to_empty(device='cpu'), and values"
                )
        if not 0 < bucket_size_mb < math.inf:
            raise ValueError(f"bucket_size_mb is {bucket_size_mb}; it must be positive and finite")
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.ctx = ctx if ctx is not None else init()
        self._bucket_size_mb = bucket_size_mb
        self._algorithm: str | None = None
        self._how: dict[str, Any] = {
            "error_feedback": error_feedback,
            "dense_below": dense_below,
            "warmup_steps": warmup_steps,
        }
        self.compress(compression)
        self.synchronized = False
        """Whether this rank's parameters and buffers are known to be equal to the group's."""
        if not self.ctx.elastic:
            self.synchronize()

    def compress(self, compression: Choice) -> None:
        """Compress later gradients by ``compression``, on every rank between the same two steps,
        with the constructor's ``error_feedback``, ``dense_below`` and ``warmup_steps``. Residuals
        start from zero."""
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._choice = compression
        self.compression = Compression(trained, compression, **self._how)
        """The residuals, by parameter name."""
        self._reducer = Reducer(
            *(list(trained.values()), self.ctx, self._bucket_size_mb, self.compression),
            algorithm=self._algorithm,
        )

    def follow(self, strategy: DataParallel) -> None:
        """Reduce later gradients as ``strategy`` says, on every rank between the same two steps.
        What it leaves open stays as it is."""
        if strategy == DataParallel():
            return
        self._bucket_size_mb = strategy.bucket_size_mb or self._bucket_size_mb
        self._algorithm = strategy.algorithm or self._algorithm
        self.compress(strategy.compression or self._choice)

    @property
    def weight(self) -> float | None:
        """This rank's weight in the mean, None for equal weights."""
        return self._reducer.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self._reducer.weight = weight

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before ``backward()``, 1 if nothing was said.

        Residuals are kept in units of it. An ElasticLoop sets it to that of its GradScaler; set it
        before ``backward()`` in a loop of your own: ``model.loss_scale = scaler.factor``.
        """
        return self.compression.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.compression.scale = scale

    @property
    def num_nonfinite(self) -> Counter[str]:
        """By parameter: how many elements of its gradients were inf or NaN on this rank; where none
        of a bucket were, in the sum over the ranks. Nothing is counted without ``compression``."""
        return self.compression.num_nonfinite

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces gradients; False inside ``no_sync()``, and in an ElasticLoop
        with a strategy of rounds."""
        return self._reducer.enabled

    @reduces.setter
    def reduces(self, reduces: bool) -> None:
        self._reducer.enabled = reduces

    def synchronize(self) -> None:
        """Broadcast parameters and buffers from rank 0. A collective call."""
        broadcast_tensors(self.ctx, [*self.module.parameters(), *self.module.buffers()])
        self.synchronized = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            self._reducer.forget()  # the last backward may have raised
        if not self.synchronized:
            self.synchronize()
        elif self.broadcast_buffers and self.training and self._reducer.enabled:
            broadcast_tensors(self.ctx, self.module.buffers())
        return self.module(*args, **kwargs)

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


@torch.no_grad()
def broadcast_tensors(ctx: DistributedContext, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Overwrite ``tensors`` (any dtypes and devices) with those of rank ``root``. A collective
    call.

    They are sent as bytes, in broadcasts of up to 25 MiB. Desync if ranks have tensors of different
    sizes.
    """
    if ctx.world_size == 1:
        return
    piece: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if piece and num_bytes + tensor.nbytes > _PIECE_BYTES:
            _broadcast_piece(ctx, piece, root)
            piece, num_bytes = [], 0
        piece.append(tensor)
        num_bytes += tensor.nbytes
    if piece:
        _broadcast_piece(ctx, piece, root)


def _broadcast_piece(ctx: DistributedContext, tensors: list[Tensor], root: int) -> None:
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for t in tensors]
    flat = ctx.broadcast(torch.cat(raw), root=root)
    if ctx.rank == root:
        return
    parts = flat.split([part.numel() for part in raw])
    for tensor, part in zip(tensors, parts, strict=True):
        # torch.cat does not align parts, so each is copied before it is viewed as its dtype.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
