"""Splitting a sequential model into the stages of a plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from potluck.torch.pipeline.plan import Layer, Node, plan_stages


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
