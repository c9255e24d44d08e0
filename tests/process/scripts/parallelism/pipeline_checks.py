"""torch.distributed.pipelining: every schedule, and stages that are cut automatically."""

from __future__ import annotations

import copy

import torch
from harness import adam, batches, check, close, mlp, same_bits
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F

from potluck.torch.pipeline import Layer, Node, split_sequential, survey

MICRO_BATCHES = 8


def by_hand(model: nn.Sequential, num_stages: int) -> list[nn.Sequential]:
    """Cut into stages of equal numbers of layers."""
    layers = [Layer(1.0)] * len(model)
    return split_sequential(model, layers, [Node()] * num_stages)


def deep() -> nn.Sequential:
    return mlp(depth=8)


def train(run, stages: list[nn.Sequential], schedule: type, model: nn.Sequential) -> None:
    """The ranks' stages, trained by ``schedule``, become what ``model`` becomes alone."""
    rank, size = run.rank, run.world_size
    reference = copy.deepcopy(model)
    if schedule is pipelining.ScheduleZBVZeroBubble:  # rank r has stage r from either end
        numbers = [rank, len(stages) - 1 - rank]
    else:
        numbers = list(range(rank, len(stages), size))
    own = [copy.deepcopy(stages[number]) for number in numbers]
    seats = [
        pipelining.PipelineStage(part, number, len(stages), torch.device("cpu"))
        for part, number in zip(own, numbers, strict=True)
    ]
    single = issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
    runner = schedule(
        seats[0] if single else seats, n_microbatches=MICRO_BATCHES, loss_fn=F.cross_entropy
    )
    # A stage of one Tanh has nothing to optimize.
    optimizers = [adam(part) for part in own if list(part.parameters())]
    reference_optimizer = adam(reference)
    for x, y in batches():
        losses: list[torch.Tensor] = []
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = (x,) if 0 in numbers else ()
        if len(stages) - 1 in numbers:
            output = runner.step(*inputs, target=y, losses=losses)
        else:
            runner.step(*inputs)
        for optimizer in optimizers:
            optimizer.step()
        reference_optimizer.zero_grad()
        expected = reference(x)
        loss = F.cross_entropy(expected, y)
        loss.backward()
        reference_optimizer.step()
        if len(stages) - 1 in numbers:
            close(torch.stack(losses).mean().detach(), loss.detach())
            close(output.detach(), expected.detach())
    wanted = reference.state_dict()
    for part in own:
        for name, tensor in part.state_dict().items():
            close(tensor, wanted[name])
            assert "weight" not in name or not torch.equal(tensor, model.state_dict()[name])


@check(4)
def pipeline_gpipe(run):
    train(run, by_hand(deep(), run.world_size), pipelining.ScheduleGPipe, deep())


@check(4)
def pipeline_1f1b(run):
    train(run, by_hand(deep(), run.world_size), pipelining.Schedule1F1B, deep())


@check(4)
def pipeline_interleaved_1f1b(run):
    stages = by_hand(deep(), 2 * run.world_size)
    train(run, stages, pipelining.ScheduleInterleaved1F1B, deep())


@check(2)
def pipeline_looped_breadth_first(run):
    train(run, by_hand(deep(), 2 * run.world_size), pipelining.ScheduleLoopedBFS, deep())


@check(2)
def pipeline_interleaved_zero_bubble(run):
    stages = by_hand(deep(), 2 * run.world_size)
    train(run, stages, pipelining.ScheduleInterleavedZeroBubble, deep())


@check(2)
def pipeline_zero_bubble_v(run):
    train(run, by_hand(deep(), 2 * run.world_size), pipelining.ScheduleZBVZeroBubble, deep())


@check(2)
def pipeline_cut_by_torchs_own_tracer(run):
    """``pipeline()`` exports the model and finds the split points in it."""
    model = mlp(depth=3)
    points = {"4": pipelining.SplitPoint.BEGINNING}
    x, y = batches()[0]
    traced = pipelining.pipeline(copy.deepcopy(model), mb_args=(x[:4],), split_spec=points)
    assert traced.num_stages == 2
    stage = traced.build_stage(run.rank, torch.device("cpu"))
    runner = pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy)
    output = runner.step(*(() if run.rank else (x,)), **({"target": y} if run.rank else {}))
    expected = model(x)
    F.cross_entropy(expected, y).backward()
    if run.rank:
        close(output.detach(), expected.detach())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    own = dict(stage.submod.named_parameters())
    assert own
    for name, parameter in own.items():
        close(parameter.grad, gradients[name])


@check(4)
def pipeline_split_for_nodes_of_unequal_speed_and_memory(run):
    """Node 0 is three times as fast; of the others, the last can hold only two layers."""
    model = deep()
    layers = [Layer(1.0, state_bytes=10)] * len(model)
    nodes = [Node(speed=3.0), *[Node()] * (run.world_size - 2), Node(memory_bytes=20)]
    stages = split_sequential(model, layers, nodes)
    assert len(stages[0]) > len(stages[-1])
    assert len(stages[-1]) <= 2
    train(run, stages, pipelining.Schedule1F1B, model)


@check(2)
def pipeline_split_by_what_was_measured(run):
    """All ranks come to the same cut, of layers whose costs differ a hundredfold."""
    torch.manual_seed(6)
    model = nn.Sequential(
        *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
        *(nn.Linear(8, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 4)),
    )
    layers, nodes = survey(model, batches()[0][0][:2], repeats=3)
    assert len(nodes) == run.world_size
    assert max(range(len(layers)), key=lambda index: layers[index].seconds) == 8
    stages = split_sequential(model, layers, nodes)
    # The large matrix alone is most of the time: one node has it, the other nearly all the rest.
    number = torch.tensor([len(stage) for stage in stages])
    same_bits(number)
    train(run, stages, pipelining.ScheduleGPipe, model)
