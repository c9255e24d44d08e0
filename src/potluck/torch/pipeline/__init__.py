"""An automatic split of a sequential model into stages for ``torch.distributed.pipelining``.

``survey`` measures the layers and the nodes, ``split_sequential`` splits the model accordingly::

    layers, nodes = survey(model, micro_batch)
    stages = split_sequential(model, layers, nodes)
    stage = PipelineStage(stages[rank], rank, world_size, device)
"""

from potluck.torch.pipeline.measure import measure_layers, survey
from potluck.torch.pipeline.plan import Layer, Node, StagePlan, plan_stages, split_sequential

__all__ = [
    "Layer",
    "Node",
    "StagePlan",
    "measure_layers",
    "plan_stages",
    "split_sequential",
    "survey",
]
