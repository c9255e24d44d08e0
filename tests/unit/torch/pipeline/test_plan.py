"""Plans of stages: as good as the best of all splits, and within everybody's memory."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.torch.pipeline import Layer, Node, plan_stages

FIGURES = st.one_of(st.integers(0, 20), st.floats(0, 20, allow_nan=False, allow_subnormal=False))
LAYERS = st.lists(st.builds(Layer, FIGURES, st.integers(0, 8), st.integers(0, 4)), max_size=8)
NODES = st.lists(
    st.builds(Node, st.sampled_from([0.25, 0.5, 1, 2, 3.5]), st.integers(0, 60)),
    min_size=1,
    max_size=4,
)


def every_split(num_layers: int, num_stages: int):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield [range(*pair) for pair in pairwise([0, *cuts, num_layers])]


def slowest(split, layers, nodes, kept):
    """Seconds of the slowest stage; infinite if a stage does not fit."""
    worst = 0.0
    for stage, (run, node) in enumerate(zip(split, nodes, strict=True)):
        own = [layers[index] for index in run]
        room = sum(x.state_bytes + kept[stage] * x.activation_bytes for x in own)
        if room > node.memory_bytes:
            return math.inf
        worst = max(worst, sum(x.seconds for x in own) / node.speed)
    return worst


@given(LAYERS, NODES)
def test_no_split_is_faster_than_the_plan(layers, nodes) -> None:
    kept = list(range(len(nodes), 0, -1))
    splits = every_split(len(layers), len(nodes)) if len(layers) >= len(nodes) else ()
    best = min((slowest(split, layers, nodes, kept) for split in splits), default=math.inf)
    if best == math.inf:
        with pytest.raises(ValueError, match=r"can't be split|no split"):
            plan_stages(layers, nodes)
        return
    plan = plan_stages(layers, nodes)
    assert [index for run in plan.stages for index in run] == list(range(len(layers)))
    assert all(plan.stages)
    assert slowest(plan.stages, layers, nodes, kept) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert max(plan.seconds) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_a_node_of_three_times_the_speed_gets_three_times_the_layers() -> None:
    plan = plan_stages([Layer(1)] * 8, [Node(3), Node(1)])
    assert plan.stages == (range(6), range(6, 8))
    assert plan.seconds == (2, 2)


def test_a_fast_node_with_little_memory_gets_what_fits() -> None:
    layers = [Layer(1, state_bytes=10)] * 8
    plan = plan_stages(layers, [Node(speed=10, memory_bytes=30), Node()])
    assert plan.stages == (range(3), range(3, 8))
    assert plan.memory_bytes == (30, 50)


def test_activations_count_as_often_as_the_schedule_keeps_them() -> None:
    layers = [Layer(1, activation_bytes=10)] * 4
    nodes = [Node(memory_bytes=40), Node(memory_bytes=40)]
    assert plan_stages(layers, nodes).stages == (range(2), range(2, 4))
    with pytest.raises(ValueError, match="smaller micro-batches"):
        plan_stages(layers, nodes, in_flight=[4, 4])


@pytest.mark.parametrize(
    ("layers", "nodes", "message"),
    [
        ([Layer(1)], [], "at least one node"),
        ([Layer(1)], [Node(), Node()], "1 layers can't be split into 2 stages"),
        ([Layer(-1)], [Node()], "layer 0 has a figure that is negative"),
        ([Layer(math.nan)], [Node()], "not finite"),
        ([Layer(1)], [Node(speed=0)], "node 0 needs a speed above 0"),
        ([Layer(1)], [Node(memory_bytes=math.nan)], "a memory size"),
        ([Layer(1, 10), Layer(1, 10)], [Node(1, 5), Node(1, 100)], "at least 20 bytes"),
    ],
)
def test_figures_that_make_no_plan_are_refused(layers, nodes, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan_stages(layers, nodes)


def test_a_wrong_number_of_micro_batches_in_flight_is_refused() -> None:
    with pytest.raises(ValueError, match="in_flight needs 2 numbers"):
        plan_stages([Layer(1)] * 2, [Node()] * 2, in_flight=[1])


def test_a_thousand_layers_on_sixteen_nodes_are_even() -> None:
    plan = plan_stages([Layer(1)] * 1024, [Node()] * 16)
    assert {len(run) for run in plan.stages} == {64}
