"""An automatic split of a sequential model into stages for ``torch.distributed.pipelining``.

``survey`` measures the layers and the nodes, ``split_sequential`` splits the model accordingly::

    layers, nodes = survey(model, micro_batch)
    stages = split_sequential(model, layers, nodes)
    stage = PipelineStage(stages[rank], rank, world_size, device)

A pipeline is as slow as its slowest stage. A stage is a run of neighbouring layers, one per node in
the nodes' order, and must fit into its node's memory. This is the partition of a chain over
processors of different speeds; dynamic programming over (stage, last layer) finds the optimum:

    best[s][j] = min over i of max(best[s - 1][i], time of layers i..j-1 on node s)

in O(stages * layers^2) steps (Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D
partitioning", 2004, section 2; PipeDream, Harlap et al. 2018, section 3.2, adds replication).
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from potluck.torch.structure import synchronize

__all__ = [
    "Layer",
    "Node",
    "StagePlan",
    "measure_layers",
    "plan_stages",
    "split_sequential",
    "survey",
]


@dataclass(frozen=True, slots=True)
class Layer:
    """The cost of a layer: ``seconds`` of forward and backward of one micro-batch on a node of
    speed 1; ``state_bytes`` of parameters, gradients and optimizer state; ``activation_bytes`` kept
    between forward and backward of one micro-batch."""

    seconds: float
    state_bytes: float = 0
    activation_bytes: float = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A node that runs a stage. A node of speed 2 takes half the seconds of a node of speed 1."""

    speed: float = 1.0
    memory_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class StagePlan:
    """For each stage the indices of its layers, its seconds per micro-batch, and its memory."""

    stages: tuple[range, ...]
    seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]


def plan_stages(
    layers: Sequence[Layer],
    nodes: Sequence[Node],
    *,
    in_flight: Sequence[int] | None = None,
) -> StagePlan:
    """The split whose slowest stage is fastest. Stage ``s`` runs on ``nodes[s]`` and has at least
    one layer.

    ``in_flight[s]`` is the number of micro-batches whose activations stage ``s`` keeps, by default
    ``len(nodes) - s``, as in 1F1B. (GPipe keeps all micro-batches of a batch on every stage.)
    ValueError for fewer layers than nodes, for figures that are negative or not finite, and if no
    split fits into the nodes' memory.
    """
    _check(layers, nodes)
    num_layers, num_stages = len(layers), len(nodes)
    kept = list(range(num_stages, 0, -1)) if in_flight is None else list(in_flight)
    if len(kept) != num_stages or min(kept) < 1:
        raise ValueError(f"in_flight needs {num_stages} numbers of 1 or more, got {kept}")
    seconds = list(accumulate((layer.seconds for layer in layers), initial=0.0))
    state = list(accumulate((layer.state_bytes for layer in layers), initial=0.0))
    active = list(accumulate((layer.activation_bytes for layer in layers), initial=0.0))

    def time(stage: int, first: int, end: int) -> float:
        return (seconds[end] - seconds[first]) / nodes[stage].speed

    def room(stage: int, first: int, end: int) -> float:
        return state[end] - state[first] + kept[stage] * (active[end] - active[first])

    best = [0.0] + [math.inf] * num_layers
    cuts: list[list[int]] = []
    for stage, node in enumerate(nodes):
        after = [math.inf] * (num_layers + 1)
        cut = [-1] * (num_layers + 1)
        for end in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            # From the right: while the stage grows, its time and its size never shrink.
            for first in range(end - 1, stage - 1, -1):
                own = time(stage, first, end)
                if room(stage, first, end) > node.memory_bytes or own >= after[end]:
                    break
                if (slowest := max(best[first], own)) < after[end]:
                    after[end], cut[end] = slowest, first
        best = after
        cuts.append(cut)
    if best[num_layers] == math.inf:
        raise ValueError(_too_large(layers, nodes, kept))
    ends = [num_layers]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.reverse()
    stages = tuple(range(ends[s], ends[s + 1]) for s in range(num_stages))
    return StagePlan(
        stages,
        tuple(time(s, run.start, run.stop) for s, run in enumerate(stages)),
        tuple(room(s, run.start, run.stop) for s, run in enumerate(stages)),
    )


def _check(layers: Sequence[Layer], nodes: Sequence[Node]) -> None:
    if not nodes:
        raise ValueError("a pipeline needs at least one node")
    if len(layers) < len(nodes):
        raise ValueError(
            f"{len(layers)} layers can't be split into {len(nodes)} stages: each needs at least one"
        )
    for index, layer in enumerate(layers):
        figures = (layer.seconds, layer.state_bytes, layer.activation_bytes)
        if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
            raise ValueError(f"layer {index} has a figure that is negative or not finite: {layer}")
    for index, node in enumerate(nodes):
        if not (0 < node.speed < math.inf) or not node.memory_bytes >= 0:
            raise ValueError(f"node {index} needs a speed above 0 and a memory size: {node}")


def _too_large(layers: Sequence[Layer], nodes: Sequence[Node], kept: Sequence[int]) -> str:
    needed = sum(layer.state_bytes + layer.activation_bytes for layer in layers)
    sizes = ", ".join(f"{node.memory_bytes:.3g}" for node in nodes)
    return (
        f"no split of the {len(layers)} layers fits: they need at least {needed:.3g} bytes and "
        f"the nodes have {sizes} (stages keep the activations of {', '.join(map(str, kept))} "
        "micro-batches); use smaller micro-batches, activation checkpointing or more nodes"
    )


def split_sequential(
    model: nn.Sequential,
    layers: Sequence[Layer],
    nodes: Sequence[Node],
    *,
    rounds: int = 1,
    in_flight: Sequence[int] | None = None,
) -> list[nn.Sequential]:
    """Split ``model`` into ``rounds * len(nodes)`` stages, by ``plan_stages``.

    Stage ``s`` belongs on rank ``s % len(nodes)``, as torch's interleaved schedules require; with
    more than one round each stage may use an equal part of its node's memory. The stages share the
    model's layers and their names, so the state dicts of all stages together are the model's.
    ``in_flight`` and ValueError are as of ``plan_stages``, with a number per stage.
    """
    if len(layers) != len(model):
        raise ValueError(f"the model has {len(model)} layers, but {len(layers)} were measured")
    if rounds < 1:
        raise ValueError(f"a model can't be split into {rounds} rounds of stages")
    shared = [replace(node, memory_bytes=node.memory_bytes / rounds) for node in nodes]
    plan = plan_stages(layers, shared * rounds, in_flight=in_flight)
    children = list(model.named_children())
    return [nn.Sequential(OrderedDict(children[run.start : run.stop])) for run in plan.stages]


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
