"""Measuring the layers of a model (time, memory) and the speed of each rank's node."""

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
from potluck.torch.structure import synchronize


def measure_layers(
    model: nn.Sequential,
    example: Tensor,
    *,
    repeats: int = 5,
    optimizer_copies: int = 2,
) -> list[Layer]:
    """Measure each layer of ``model`` in forward and backward passes on one micro-batch,
    ``example``.

    Times are medians of ``repeats`` runs. ``optimizer_copies`` is the number of values that the
    optimizer keeps per parameter (Adam 2, plain SGD 0). Each layer runs as a copy, so the model is
    unchanged. Cost: ``repeats + 1`` training steps, and memory for a copy of one layer.
    """
    layers = []
    for original in model:
        layer = copy.deepcopy(original)
        layer.zero_grad()
        seconds = []
        for repeat in range(repeats + 1):
            taken, output, kept = _step(layer, example)
            if repeat:  # the first run is a warm-up
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
    """Measure the layers and every rank's node. A collective call; all ranks get the same result.

    Each rank measures the layers. The result has the layers' costs on rank 0, and as a rank's speed
    rank 0's total time divided by its own. ``memory_bytes`` is the memory that this rank may use,
    by default the machine's available memory divided by its local ranks. Cost: ``measure_layers``,
    and one all_gather of ``3 * layers + 1`` float64.
    """
    own = measure_layers(model, example, repeats=repeats, optimizer_copies=optimizer_copies)
    if memory_bytes is None:
        memory_bytes = _own_memory(example.device)
    facts = [memory_bytes]
    for layer in own:
        facts += [layer.seconds, layer.state_bytes, layer.activation_bytes]
    flat = torch.tensor(facts, dtype=torch.float64)
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, flat, group=group)
    tables = [each[1:].view(-1, 3) for each in gathered]
    layers = [Layer(*row) for row in tables[0].tolist()]
    totals = [float(table[:, 0].sum()) for table in tables]
    nodes = [
        Node(totals[0] / total, float(each[0]))
        for total, each in zip(totals, gathered, strict=True)
    ]
    return layers, nodes


def _step(layer: nn.Module, example: Tensor) -> tuple[float, Tensor, int]:
    """Seconds of one forward and backward pass, the output, and the bytes kept for backward."""
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
    synchronize(x.device)
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
    synchronize(x.device)
    seconds = time.perf_counter() - start
    layer.zero_grad()
    return seconds, output.detach(), sum(kept.values())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _own_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    available = float(psutil.virtual_memory().available)
    return available / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
