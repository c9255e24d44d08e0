"""The planner: predictions of steps, and what is chosen by them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.training.planner import (
    CANDIDATES,
    METHODS,
    Measured,
    decode,
    encode,
    make_plan,
    named,
    predict,
)

SHAPES = ((1024, 1024),) * 8
MBIT = 1e6 / 8


def group(
    world_size: int = 2,
    *,
    mbit: float = 100.0,
    compute_s: float = 0.2,
    latency_s: float = 1e-3,
    **changed: object,
) -> Measured:
    """Ranks on machines of their own, with equal links."""
    measured = Measured(
        compute_s=(compute_s,) * world_size,
        bytes_per_s=(mbit * MBIT,) * world_size,
        crossing_bytes_per_s=(mbit * MBIT,) * world_size,
        latency_s=latency_s,
        nodes=tuple(f"machine {rank}" for rank in range(world_size)),
        shapes=SHAPES,
        encode_s=dict.fromkeys(METHODS, 1e-9),
        decode_s=dict.fromkeys(METHODS, 1e-10),
        copy_s=3e-10,
        hash_s=0.0,
        processors=1.0,
    )
    return msgspec.structs.replace(measured, **changed)


def test_a_plain_step_takes_the_transfer_that_backward_does_not_hide() -> None:
    measured = group(2, mbit=100, compute_s=0.2, latency_s=0.0, copy_s=0.0)
    [plain, *_] = CANDIDATES
    found = predict(measured, plain)
    transfer_s = 4 * measured.num_elements / (100 * MBIT)  # of two ranks each sends all once
    first_bucket_s = 0.2 * (1 / 3 + 2 / 3 / len(SHAPES))  # one matrix
    assert found.step_s == pytest.approx(first_bucket_s + transfer_s, rel=0.02)
    assert found.bytes_per_step == 4 * measured.num_elements
    assert found.efficiency == 0.2 / found.step_s


def test_a_fast_network_changes_nothing_and_a_slow_one_takes_rounds() -> None:
    assert make_plan(group(mbit=100_000, latency_s=1e-5, copy_s=0)).choice.name == "plain"
    slow = make_plan(group(mbit=20, latency_s=0.05))
    assert slow.choice.name in ("diloco", "sparse")
    assert slow.chosen is not None
    assert slow.chosen.efficiency > 0.8
    assert slow.chosen.step_s < slow.predictions[0].step_s / 20


def step_s(measured: Measured, name: str) -> float:
    return predict(measured, named(name)).step_s


def test_payloads_that_all_gather_are_decoded_once_for_each_rank() -> None:
    quick = dict.fromkeys(METHODS, 0.0)
    slow = quick | {"topk": 1e-9}
    for count in (2, 4):
        times = []
        for decode_s in (quick, slow):
            measured = group(count, mbit=1e6, latency_s=0.0, decode_s=decode_s)
            times.append(step_s(measured, "topk"))
        # A little of it falls into waiting for the next bucket.
        assert times[1] - times[0] == pytest.approx(count * measured.num_elements * 1e-9, rel=0.05)


def test_comparing_the_parameters_is_divided_among_the_steps_between() -> None:
    elements = group().num_elements
    for each in CANDIDATES:
        more_s = step_s(group(hash_s=1e-8), each.name) - step_s(group(), each.name)
        assert more_s == pytest.approx(elements * 1e-8 / 50, rel=1e-3)


def test_where_all_send_to_all_their_own_rate_counts() -> None:
    even = group(4, mbit=100)
    crowded = msgspec.structs.replace(even, crossing_bytes_per_s=(80 * MBIT,) * 4)
    # A codec's sum sends to all; the plain sum goes around the ring.
    assert step_s(crowded, "int8") > 1.15 * step_s(even, "int8")
    assert step_s(crowded, "plain") == pytest.approx(step_s(even, "plain"), rel=0.01)


def test_copies_take_time_in_every_strategy() -> None:
    for each in CANDIDATES:
        quick, slow = (step_s(group(copy_s=copy_s), each.name) for copy_s in (0.0, 1e-9))
        assert slow > quick


def test_of_strategies_that_are_fast_enough_the_mildest_is_chosen() -> None:
    plan = make_plan(group(mbit=500, latency_s=1e-5, compute_s=1.0))
    names = [each.candidate.name for each in plan.predictions]
    assert names == [each.name for each in CANDIDATES]
    chosen = names.index(plan.choice.name)
    assert all(each.efficiency < 0.95 for each in plan.predictions[:chosen])
    assert plan.predictions[chosen].efficiency >= 0.95
    assert "computation is" in plan.reason


def test_a_machine_that_makes_the_step_slower_is_named_and_still_takes_part() -> None:
    slow_one = group(3, mbit=1000, compute_s=0.2)
    slow_one = msgspec.structs.replace(slow_one, compute_s=(0.2, 0.2, 2.0))
    plan = make_plan(slow_one)
    assert plan.without == (2,)
    assert plan.chosen is not None
    assert plan.without_s < plan.chosen.step_s
    # The two others compute its samples, too.
    assert plan.without_s >= 0.2 * 3 / 2
    assert make_plan(group(3, mbit=1000)).without == ()


def test_nothing_is_predicted_where_nothing_goes_over_a_network() -> None:
    alone = group(1, bytes_per_s=())
    assert make_plan(alone).choice.name == "plain"
    assert "sends nothing" in make_plan(alone).reason
    assert predict(alone, CANDIDATES[0]).efficiency == 1.0
    together = group(2, nodes=("one", "one"))
    assert make_plan(together).predictions == ()
    assert "one machine" in make_plan(together).reason


def test_measurements_come_back_from_json_and_others_are_refused() -> None:
    measured = group(3)
    assert decode(encode(measured)) == measured
    with pytest.raises(ValueError, match="not the measurements of a plan"):
        decode("{}")
    with pytest.raises(ValueError, match="not the measurements of a plan"):
        decode(encode(measured).replace("0.2", "-1", 1))
    with pytest.raises(ValueError, match="3 ranks have 1 rates"):
        decode(encode(msgspec.structs.replace(measured, bytes_per_s=(1.0,))))
    with pytest.raises(ValueError, match="'zip'; a plan knows plain, "):
        named("zip")


@settings(max_examples=25, deadline=None)
@given(
    world_size=st.integers(2, 5),
    mbit=st.floats(5, 20_000),
    compute_s=st.floats(0.01, 5),
    latency_s=st.floats(1e-5, 0.1),
    factor=st.floats(1.5, 10),
)
def test_predictions_follow_the_network(
    world_size: int, mbit: float, compute_s: float, latency_s: float, factor: float
) -> None:
    slow = group(world_size, mbit=mbit, compute_s=compute_s, latency_s=latency_s)
    fast = msgspec.structs.replace(slow, bytes_per_s=tuple(r * factor for r in slow.bytes_per_s))
    for candidate in CANDIDATES:
        on_slow, on_fast = predict(slow, candidate), predict(fast, candidate)
        assert on_slow.step_s >= compute_s
        assert 0 < on_slow.efficiency <= 1
        # The simulated wire takes segments as they are ready: a faster one may take them in another
        # order, and end a little later.
        assert on_fast.step_s <= on_slow.step_s * 1.05
        assert on_fast.bytes_per_step == on_slow.bytes_per_step > 0
    plan = make_plan(slow)
    assert plan.chosen is not None
    fastest = min(each.step_s for each in plan.predictions)
    assert plan.chosen.step_s <= fastest / 0.95
