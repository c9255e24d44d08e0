"""Measured layers and the stages that a model is cut into."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from potluck.torch import pipeline
from potluck.torch.pipeline import Layer, Node, measure_layers, split_sequential


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(5, 16), nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 16), nn.BatchNorm1d(16)
    )


TOKENS = torch.tensor([0, 1, 2, 4])


def test_layers_are_measured_and_the_model_stays_as_it_was() -> None:
    network = model()
    before = copy.deepcopy(network.state_dict())
    layers = measure_layers(network, TOKENS, repeats=2, optimizer_copies=2)
    assert all(layer.seconds > 0 for layer in layers)
    # Parameters, gradients and the two moments of Adam, in float32.
    assert layers[1].state_bytes == 4 * (16 * 512 + 512) * 4
    assert layers[2].state_bytes == 0
    # A linear layer keeps its input, a ReLU its output.
    assert layers[1].activation_bytes == 4 * 16 * 4
    assert layers[2].activation_bytes == 4 * 512 * 4
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in network.parameters())


class Clock:
    """A clock that layers move on: times do not depend on what else the machine does."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class TimedLinear(nn.Module):
    """A linear layer whose passes take the given seconds of ``clock``, one after the other."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.clock, self.seconds = clock, iter(seconds)

    def __deepcopy__(self, memo: dict[int, object]) -> TimedLinear:
        return self  # the clock is shared, and so are the seconds that are left

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now_s += next(self.seconds)
        return self.linear(x)


def test_the_time_of_a_layer_is_the_median_of_its_passes_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(pipeline, "time", clock)
    # The first pass warms up; one of the others is held up by something else on the machine.
    network = nn.Sequential(
        TimedLinear(clock, 50.0, 1.0, 1.0, 9.0), TimedLinear(clock, 50.0, 2.0, 30.0, 2.0), nn.ReLU()
    )
    layers = measure_layers(network, torch.randn(32, 8), repeats=3)
    assert [layer.seconds for layer in layers] == [1.0, 2.0, 0.0]


def test_a_frozen_layer_needs_no_gradient_and_no_optimizer_state() -> None:
    network = nn.Sequential(nn.Linear(4, 4, bias=False).requires_grad_(False))
    [layer] = measure_layers(network, torch.randn(2, 4), repeats=1)
    assert layer.state_bytes == 4 * 4 * 4


def test_a_layer_that_returns_a_tuple_is_named() -> None:
    with pytest.raises(TypeError, match="GRU returns tuple"):
        measure_layers(nn.Sequential(nn.GRU(4, 4)), torch.randn(2, 4))


def test_stages_together_are_the_model() -> None:
    network = model().eval()
    layers = [Layer(1)] * 5
    stages = split_sequential(network, layers, [Node(speed=1), Node(speed=4)])
    assert [len(stage) for stage in stages] == [1, 4]
    x = TOKENS
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, network(TOKENS))
    merged = {}
    for stage in stages:
        merged |= stage.state_dict()
    assert list(merged) == list(network.state_dict())


def test_two_rounds_give_each_node_two_stages_within_its_memory() -> None:
    network = nn.Sequential(*(nn.Identity() for _ in range(8)))
    layers = [Layer(1, state_bytes=10)] * 8
    stages = split_sequential(network, layers, [Node(1, 60), Node(1, 20)], rounds=2)
    assert [len(stage) for stage in stages] == [3, 1, 3, 1]


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="has 5 layers, but 2 were measured"):
        split_sequential(model(), [Layer(1)] * 2, [Node()])
    with pytest.raises(ValueError, match="into 0 rounds"):
        split_sequential(model(), [Layer(1)] * 5, [Node()], rounds=0)
