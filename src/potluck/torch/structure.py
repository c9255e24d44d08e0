"""The structure of a model: which parameters and buffers it has, in which order; their broadcast;
its device, and how that rounds.

Tensors of any dtypes are broadcast as one sequence of bytes, which shows only its length. So ranks
compare their structures (``context/structure.py``) when they begin, and with every sequence comes
its hash.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from potluck._core.context.structure import hash_of
from potluck._core.system import processor_name, software_name
from potluck._core.wire.tensors import check_plain
from potluck.errors import Desync

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

SAME_MODEL = "give every rank the same model"

_PIECE_BYTES = 25 << 20
_COMPILED = "_orig_mod."
"""What torch.compile puts before names, on the ranks that compile."""


def check_module(module: nn.Module) -> None:
    """ValueError or TypeError, by the parameter's name, if ``module`` can't be trained by DDP."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("no parameter of the module requires a gradient")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"{name} is uninitialized: its shape comes from the first input; call the module "
                "once before it is wrapped"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise TypeError(f"{name} is {parameter.dtype}; only floats can be averaged")
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no data; give it memory first, "
                "for example module.to_empty(device='cpu'), and values"
            )
    for name, tensor in tensors_of(module).items():
        try:
            check_plain(tensor)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    check_dense(module)


def check_dense(module: nn.Module) -> None:
    """TypeError for a layer whose gradients are sparse, by its name."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            kind = type(layer).__name__
            where = f"{name}.weight" if name else "weight"
            if layer.weight.requires_grad:
                raise TypeError(
                    f"{where} gets sparse gradients, which can't be reduced here: make the {kind} "
                    "with sparse=False"
                )


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``module`` by name, each tensor once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def structure_of(module: nn.Module, trained: Collection[str]) -> dict[str, str]:
    """Descriptions of parameters and buffers by name, in order. ``trained`` are the names of the
    parameters that get gradients."""
    found = {
        name: f"{describe(each)}, requires_grad={name in trained}"
        for name, each in module.named_parameters()
    }
    found |= {name: f"buffer, {describe(each)}" for name, each in module.named_buffers()}
    return {name.replace(_COMPILED, ""): text for name, text in found.items()}


def describe(tensor: Tensor) -> str:
    """Dtype and shape of ``tensor``."""
    return _described(tensor.dtype, tensor.shape)


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


@lru_cache(maxsize=16)
def _hash_of(kinds: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    """Kept, for buffers are broadcast before each forward, and seldom change their kinds."""
    return hash_of({name: _described(dtype, shape) for name, dtype, shape in kinds})


@torch.no_grad()
def broadcast_tensors(
    ctx: DistributedContext, tensors: Mapping[str, Tensor], root: int = 0
) -> None:
    """Overwrite ``tensors`` (by name; any dtypes and devices) with those of rank ``root``. A
    collective call.

    They are sent as bytes, in broadcasts of up to 25 MiB. Values that are equal already are not
    written, and writing does not change a tensor's version counter: autograd may have saved it.
    A rank that has other names, dtypes or shapes than ``root`` raises Desync, and so do the others.
    """
    if ctx.world_size == 1 or not tensors:
        return
    kinds = tuple((name, each.dtype, each.shape) for name, each in tensors.items())
    mark: Tensor | None = torch.tensor([_hash_of(kinds)])
    piece: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors.values():
        if piece and num_bytes + tensor.nbytes > _PIECE_BYTES:
            _broadcast_piece(ctx, piece, root, mark)
            piece, num_bytes, mark = [], 0, None
        piece.append(tensor)
        num_bytes += tensor.nbytes
    _broadcast_piece(ctx, piece, root, mark)


def _broadcast_piece(
    ctx: DistributedContext, tensors: list[Tensor], root: int, mark: Tensor | None
) -> None:
    """Broadcast ``tensors``, after the ``mark`` by which ranks know that theirs are alike."""
    raw = [_bytes_of(each) for each in (tensors if mark is None else [mark, *tensors])]
    flat = ctx.broadcast(torch.cat(raw), root=root)
    if ctx.rank == root:
        return
    parts = list(flat.split([part.numel() for part in raw]))
    if mark is not None and not torch.equal(parts.pop(0), raw.pop(0)):
        error = Desync(
            f"the buffers of {ctx.group.describe(ctx.rank)} have other names, dtypes or shapes "
            f"than those of {ctx.group.describe(root)}, since one of them was changed: "
            f"{SAME_MODEL}",
            rank=ctx.rank,
            epoch=ctx.epoch,
            operation="broadcast",
        )
        ctx.communicator.abort(error)
        raise error
    for tensor, own, part in zip(tensors, raw, parts, strict=True):
        if not torch.equal(own, part):
            # torch.cat does not align parts, so each is copied before it is viewed as its dtype.
            overwrite(tensor, part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values`` into ``tensor`` without a change of its version counter, as Gloo and NCCL do:
    a graph that has saved the tensor still runs backward."""
    tensor.data.copy_(values)


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter of ``model``; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has computed what was queued on it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def arithmetic(device: torch.device) -> str:
    """How updates are rounded on ``device`` of this machine, in words.

    Machines with equal texts apply the same updates with equal bits. What decides is PyTorch's
    version, the system's mathematical library (a schedule of learning rates calls it, also where
    the model is on a GPU), the device, and of a processor also the number of threads, by which sums
    are split.
    """
    software = f"torch {torch.__version__}, {software_name()}"
    if device.type == "cuda":
        return f"{software}, {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return f"{software}, {device.type}, {platform.machine()}"
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"{software}, {processor_name()}, {capability}, threads: {threads}"
