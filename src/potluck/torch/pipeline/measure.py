"""How long each layer takes here, what it keeps, and how fast each rank's node is."""

from __future__ import annotations

import copy
import os
import statistics
import time

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from potluck.torch.pipeline.plan import Layer, Node


def measure_layers(
    model: nn.Sequential,
    example: Tensor,
    *,
    repeats: int = 5,
    optimizer_copies: int = 2,
) -> list[Layer]:
    """Run each layer of ``model`` forward and backward, on ``example`` (one micro-batch) and what
    the layers before make of it; a median of ``repeats`` runs per layer.

    ``optimizer_copies``: numbers that the optimizer keeps per parameter (Adam 2, plain SGD 0).
    Works on a copy of one layer at a time: the model's parameters, gradients and buffers stay as
    they are. Cost: ``repeats + 1`` training steps and memory for one layer.
    """
    layers = []
    for original in model:
        layer = copy.deepcopy(original)
        layer.zero_grad()
        seconds = []
        for repeat in range(repeats + 1):
            taken, output, kept = _step(layer, example)
            if repeat:  # the first one warms up
                seconds.append(taken)
        trained = sum(_nbytes(p) for p in layer.parameters() if p.requires_grad)
        held = sum(_nbytes(t) for t in (*layer.parameters(), *layer.buffers()))
        state = held + trained * (1 + optimizer_copies)
        layers.append(Layer(statistics.median(seconds), state, kept))
        example = output
    return layers


def survey(
    model: nn.Sequential,
    example: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    memory_bytes: float | None = None,
    repeats: int = 5,
    optimizer_copies: int = 2,
) -> tuple[list[Layer], list[Node]]:
    """The layers' costs and every rank's node, the same on all ranks; all ranks call it.

    Each rank measures the layers itself. Layers cost what they cost on rank 0, and a rank's speed
    is rank 0's time over its own. ``memory_bytes`` is what this rank may use; by default this
    machine's available memory, shared by its local ranks. One all_gather of ``3 layers + 1``
    float64.
    """
    own = measure_layers(model, example, repeats=repeats, optimizer_copies=optimizer_copies)
    if memory_bytes is None:
        memory_bytes = _own_memory(example.device)
    facts = [memory_bytes]
    for layer in own:
        facts += [layer.seconds, layer.state_bytes, layer.activation_bytes]
    flat = torch.tensor(facts, dtype=torch.float64)
    everybodys = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybodys, flat, group=group)
    tables = [each[1:].view(-1, 3) for each in everybodys]
    layers = [Layer(*row) for row in tables[0].tolist()]
    totals = [float(table[:, 0].sum()) for table in tables]
    nodes = [
        Node(totals[0] / total, float(each[0]))
        for total, each in zip(totals, everybodys, strict=True)
    ]
    return layers, nodes


def _step(layer: nn.Module, example: Tensor) -> tuple[float, Tensor, int]:
    """Seconds of one forward and backward pass, the output, and the bytes kept in between."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = example.detach()
    if x.is_floating_point():
        x.requires_grad_()
    _synchronize(x.device)
    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layer(x)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{type(layer).__name__} returns {type(output).__name__}; each layer of a sequential "
            "model must return one tensor"
        )
    if output.requires_grad:
        torch.autograd.backward(output, torch.ones_like(output))
    _synchronize(x.device)
    seconds = time.perf_counter() - start
    layer.zero_grad()
    return seconds, output.detach(), sum(kept.values())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _own_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    available = float(psutil.virtual_memory().available)
    return available / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
