"""The planner: predictions of steps, and what is chosen by them."""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from potluck.training.planner import (
    CANDIDATES,
    METHODS,
    Basis,
    Candidate,
    Measured,
    Rehearsed,
    choose,
    decode,
    encode,
    in_other_buckets,
    make_plan,
    named,
    parts,
    predict,
    to_rehearse,
)
from potluck.training.planner.measured import last
from potluck.training.planner.model import times_of
from potluck.training.strategies import DataParallel, Gossip

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
    crowded = {"hierarchical", "gossip"}  # for several workers on a machine, and for many machines
    assert names == [each.name for each in CANDIDATES if each.name not in crowded]
    chosen = names.index(plan.choice.name)
    assert all(each.efficiency < 0.95 for each in plan.predictions[:chosen])
    assert plan.predictions[chosen].efficiency >= 0.95
    assert "computation is" in plan.reason


def test_a_machine_that_makes_the_step_slower_is_named_and_still_takes_part() -> None:
    slow_one = group(3, mbit=1000, compute_s=0.2)
    slow_one = msgspec.structs.replace(slow_one, compute_s=(0.2, 0.2, 2.0))
    plan = make_plan(slow_one)
    assert plan.without == ("machine 2",)
    assert plan.chosen is not None
    assert plan.without_s < plan.chosen.step_s
    # The two others compute its samples, too.
    assert plan.without_s >= 0.2 * 3 / 2
    assert make_plan(group(3, mbit=1000)).without == ()


def test_a_machine_is_left_out_with_all_its_workers() -> None:
    """Of its two workers only one is slow: the other one's machine is the same."""
    pairs = msgspec.structs.replace(
        group(6, mbit=10_000, nodes=("attic", "attic", "desk", "desk", "sofa", "sofa")),
        compute_s=(0.2, 0.2, 0.2, 2.0, 0.2, 0.2),
    )
    plan = make_plan(pairs)
    assert plan.without == ("desk",)
    assert plan.without_s == predict(pairs, plan.choice, (0, 1, 4, 5)).step_s
    assert plan.without_s >= 0.2 * 6 / 4, "the others compute the samples of both"


def test_the_workers_of_the_last_machine_share_its_memory() -> None:
    """The measured links are not between them."""
    narrow = group(4, mbit=100, nodes=("attic", "attic", "desk", "desk"))
    plain = make_plan(narrow, (named("plain"),))
    assert plain.chosen is not None
    assert plain.chosen.step_s > 2
    assert len(plain.without) == 1
    assert 0.4 <= plain.without_s < 0.5
    for each in CANDIDATES:
        assert 0.4 <= predict(narrow, each, (0, 1)).step_s < 0.6, each.name


def test_several_machines_are_left_out_one_after_the_other() -> None:
    slow = msgspec.structs.replace(
        group(4, mbit=10_000, nodes=("attic", "desk", "desk", "sofa")),
        compute_s=(0.2, 0.3, 3.0, 2.0),
    )
    plan = make_plan(slow, (named("plain"),))
    assert set(plan.without) == {"desk", "sofa"}
    assert plan.without_s == pytest.approx(0.8), "one worker alone, with all samples"
    by_speed = msgspec.structs.replace(slow, shares="proportional")
    assert make_plan(by_speed, (named("plain"),)).without == ()
    # Without one of two slow machines the other one has more to compute, and nothing is gained.
    both = msgspec.structs.replace(
        group(6, mbit=10_000, nodes=("attic", "desk", "desk", "sofa", "cellar", "cellar")),
        compute_s=(0.2, 0.2, 2.0, 1.5, 0.2, 0.2),
    )
    assert predict(both, named("plain"), (0, 3, 4, 5)).step_s > predict(both, named("plain")).step_s
    assert make_plan(both, (named("plain"),)).without == ("desk", "sofa")


def test_advice_on_many_machines_is_not_waited_for() -> None:
    """The slowest of 40 machines with two workers each: found without trying all of them."""
    names = tuple(f"machine {rank // 2}" for rank in range(80))
    many = group(80, mbit=10_000, nodes=names)
    many = msgspec.structs.replace(many, compute_s=(0.2,) * 50 + (1.0,) + (0.2,) * 29)
    with mock.patch.object(choose, "predict", side_effect=predict) as calls:
        plan = make_plan(many, (named("topk"),))
    assert plan.without == ("machine 25",)
    assert calls.call_count < 25, "of 40 machines"


@pytest.mark.costly
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_without_a_machine_that_is_not_tried_a_step_is_no_faster(data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.sampled_from("abcd"), min_size=3, max_size=6))
    assume(len(set(nodes)) > 1)
    of_ranks = st.lists(st.integers(1, 8), min_size=len(nodes), max_size=len(nodes))
    rates = tuple(each * 50 * MBIT for each in data.draw(of_ranks))
    crossing = tuple(each * 50 * MBIT for each in data.draw(of_ranks))
    some = msgspec.structs.replace(
        group(len(nodes), nodes=tuple(nodes)),
        compute_s=tuple(each / 10 for each in data.draw(of_ranks)),
        bytes_per_s=rates, crossing_bytes_per_s=crossing,
        shares=data.draw(st.sampled_from(["equal", "proportional"])),
    )  # fmt: skip
    candidate = named(data.draw(st.sampled_from(["plain", "int8", "topk"])))

    def without_s(node: str) -> float:
        ranks = tuple(rank for rank, each in enumerate(nodes) if each != node)
        return predict(some, candidate, ranks).step_s

    least_s = min(map(without_s, choose._worst(some)))
    assert least_s <= min(map(without_s, set(nodes))) * 1.05


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


# ---------------------------------------------------------------- rehearsals


def rehearsal(
    name: str, elements: int, own_s: float, way_s: float = 0.0, *, mib: float = 25.0
) -> Rehearsed:
    return Rehearsed(name=name, bucket_size_mb=mib, elements=elements, own_s=own_s, way_s=way_s)


def rehearsed(measured: Measured, *found: Rehearsed) -> Measured:
    return msgspec.structs.replace(measured, rehearsed=found)


def test_a_rehearsal_of_the_whole_model_is_taken_as_it_is() -> None:
    alone = group(2, compute_s=0.2)
    tried = rehearsed(alone, rehearsal("int8", alone.num_elements, 0.31))
    found = predict(tried, named("int8"))
    assert (found.step_s, found.basis) == (pytest.approx(0.51), Basis.REHEARSED)
    assert found.bytes_per_step == predict(alone, named("int8")).bytes_per_step
    other = predict(tried, named("int4"))
    assert (other.step_s, other.basis) == (step_s(alone, "int4"), Basis.MODELLED)


def test_a_line_through_two_parts_leads_to_the_whole() -> None:
    """Both parts have 50 ms that do not grow: a latency, or what a burst let pass."""
    alone = group(2, compute_s=0.2)
    total = alone.num_elements
    found = [rehearsal("plain", part, 0.05 + part * 1e-7) for part in (10**5, 3 * 10**5)]
    made = predict(rehearsed(alone, *found), named("plain"))
    assert made.step_s == pytest.approx(0.2 + 0.05 + total * 1e-7)
    assert made.basis is Basis.EXTENDED
    # Parts in the wrong order of times: the network was uneven, and the whole takes no less.
    odd = [rehearsal("plain", 10**5, 0.4), rehearsal("plain", 3 * 10**5, 0.3)]
    assert predict(rehearsed(alone, *odd), named("plain")).step_s == pytest.approx(0.5)


def test_an_exchange_on_its_way_is_hidden_by_the_steps_of_its_delay() -> None:
    alone = group(2, compute_s=0.1)
    diloco = named("diloco")  # rounds of 25 steps, a quarter of the parameters, 5 steps late
    whole = alone.num_elements // 4
    for way_s, seen_s in ((0.4, 0.0), (0.75, 0.25)):
        found = predict(rehearsed(alone, rehearsal("diloco", whole, 0.05, way_s)), diloco)
        assert found.step_s == pytest.approx(0.1 + (0.05 + seen_s) / 25)


def test_rounds_are_as_long_as_the_network_asks_for_and_no_longer() -> None:
    alone = group(2, compute_s=0.1)
    diloco = named("diloco")
    for way_s, every in ((0.4, 100), (0.7, 200), (1.0, 400), (9.0, 400)):
        there = rehearsed(alone, rehearsal("diloco", alone.num_elements // 4, 0.05, way_s))
        [found] = make_plan(there, (diloco,)).predictions
        assert found.candidate.every == every
        assert f"DiLoCo(every={every}, " in found.candidate.code
        assert f"what changed in {every} steps" in found.candidate.changes
        assert found.bytes_per_step == pytest.approx(
            predict(there, diloco).bytes_per_step * 100 / every
        )
    assert diloco.in_rounds_of(100) is diloco
    assert diloco.in_rounds_of(None) is diloco
    assert named("gossip").in_rounds_of(3).code == 'Gossip("exponential", every=3)'
    for each in CANDIDATES:
        assert each.forms[0] is each
    with pytest.raises(ValueError, match="int4 exchanges gradients in every step, and has no"):
        named("int4").in_rounds_of(8)


def test_without_a_rank_a_rehearsal_is_carried_over_by_the_model() -> None:
    alone = group(3, mbit=100, compute_s=0.2)
    tried = rehearsed(alone, rehearsal("plain", alone.num_elements, 9.0))
    pair = alone.of((0, 1))
    share = times_of(pair, named("plain")).own_s / times_of(alone, named("plain")).own_s
    found = predict(tried, named("plain"), (0, 1))
    assert found.step_s == pytest.approx(0.3 + 9.0 * share)
    assert predict(tried, named("plain"), (1,)).step_s == pytest.approx(0.6)
    assert tried.of((0, 1)).rehearsed == ()


def test_other_buckets_are_rehearsed_where_the_model_takes_them_for_faster() -> None:
    """Eight matrices of 4 MiB: in buckets of 25 MiB the last of them waits for all others."""
    alone = group(2, mbit=1500, latency_s=1e-5, compute_s=0.4, copy_s=0.0)
    usual = rehearsal("plain", alone.num_elements, times_of(alone, named("plain")).own_s)
    [small] = in_other_buckets(rehearsed(alone, usual))
    assert small.name == "plain"
    assert small.code == "DataParallel(bucket_size_mb=5)"
    assert small.strategy == DataParallel(bucket_size_mb=5)
    assert small.bucket_size_mb == 5
    # It is chosen only if it was as fast as that.
    fast = rehearsal("plain", alone.num_elements, usual.own_s / 2, mib=5)
    slow = rehearsal("plain", alone.num_elements, usual.own_s * 2, mib=5)
    assert make_plan(rehearsed(alone, usual, fast), (named("plain"),)).choice == small
    again = make_plan(rehearsed(alone, usual, slow), (named("plain"),)).choice
    assert again.bucket_size_mb in (25, 100)
    # Parts only: the network bounds the step, whatever the buckets.
    some = [rehearsal("plain", part, part * 1e-7) for part in (10**5, 3 * 10**5)]
    assert in_other_buckets(rehearsed(alone, *some)) == ()


def test_a_name_with_other_buckets_is_a_strategy_that_a_script_may_take() -> None:
    int4 = named("int4").in_buckets(100)
    assert int4.code == "DataParallel(compression=Quantize(4), bucket_size_mb=100)"
    assert int4.in_buckets(25) is int4
    assert named("int4").in_buckets(25) is named("int4")
    assert named("diloco").in_buckets(5) is named("diloco")


def test_what_takes_long_is_rehearsed_in_two_parts() -> None:
    fast, slow = group(2, mbit=10_000), group(2, mbit=20)
    total = fast.num_elements
    assert parts(fast, named("plain")) == (total,)
    assert parts(fast, named("diloco")) == (total // 4,)
    small, large = parts(slow, named("plain"))
    assert small == large // 4
    assert large < total / 5
    took_s = times_of(slow, named("plain"), large).own_s + slow.part(large).step_compute_s
    assert 1.0 < took_s < 2.0
    assert parts(slow, named("topk")) == (total,)
    # A computation of minutes is not waited for either.
    assert parts(group(2, mbit=1000, compute_s=200.0), named("plain"))[-1] < total / 50
    # A large model would need the memory of a training once more.
    large = group(2, mbit=10**6, latency_s=0.0, shapes=((1 << 14, 1 << 12),) * 4, copy_s=0.0)
    quick = dict.fromkeys(METHODS, 0.0)
    large = msgspec.structs.replace(large, encode_s=quick, decode_s=quick)
    assert parts(large, named("bf16")) == (1 << 23, 1 << 25)
    assert to_rehearse(group(2, nodes=("one", "one"))) == ()


def test_a_part_of_a_model_is_its_last_parameters() -> None:
    shapes = ((100, 10), (7,), (20, 5))
    assert last(shapes, 100) == ((20, 5),)
    assert last(shapes, 107) == ((7,), (20, 5))
    assert last(shapes, 50) == ((10, 5),)
    assert last(shapes, 118) == ((2, 10), (7,), (20, 5))
    assert last(shapes, 10**6) == shapes
    assert last(((),), 1) == ((),)
    half = group(2, compute_s=0.2).part(4 * 1024 * 1024)
    assert (half.step_compute_s, half.num_elements) == (0.1, 4 * 1024 * 1024)


def names_of(measured: Measured) -> list[str]:
    return [each.name for each in to_rehearse(measured)]


def test_which_strategies_make_sense_depends_on_the_machines() -> None:
    pair, four = group(2), group(4)
    assert not {"hierarchical", "gossip"} & set(names_of(pair))
    assert "gossip" in names_of(four)
    assert "hierarchical" not in names_of(four)
    shared = group(4, nodes=("one", "one", "other", "other"))
    assert {"hierarchical", "gossip"} <= set(names_of(shared))


def test_workers_of_a_machine_that_add_up_first_send_less_between_machines() -> None:
    """Two machines with four workers each: in a ring each machine's wire carries every worker's
    bytes, by nodes those of one worker."""
    shared = group(8, mbit=100, nodes=("one",) * 4 + ("other",) * 4)
    by_nodes = times_of(shared, named("hierarchical")).own_s
    direct = Candidate("direct", "", DataParallel(algorithm="direct"), "")
    assert by_nodes < times_of(shared, direct).own_s / 1.5
    # Without an algorithm the faster one is taken anyway.
    assert times_of(shared, named("plain")).own_s <= by_nodes


def test_gossip_sends_the_parameters_to_each_neighbour() -> None:
    four = group(4, mbit=100, copy_s=0.0, latency_s=0.0)
    gossip = named("gossip")
    assert isinstance(gossip.strategy, Gossip)
    [graph] = gossip.strategy.graphs(4)
    num_out = len(graph.out_neighbors(0))
    found = predict(four, gossip)
    assert found.bytes_per_step == 4 * four.num_elements * num_out / gossip.strategy.every
    wire_s = found.bytes_per_step / (100 * MBIT)
    assert found.step_s == pytest.approx(0.2 + wire_s, rel=0.01)


# ---------------------------------------------------------------- unlike machines


def test_shares_by_speed_end_together() -> None:
    """A rank that is twice as slow computes half as much."""
    equal = msgspec.structs.replace(group(3, mbit=10_000), compute_s=(0.2, 0.2, 0.4))
    by_speed = msgspec.structs.replace(equal, shares="proportional")
    assert equal.step_compute_s == 0.4
    assert by_speed.step_compute_s == pytest.approx(3 / (5 + 5 + 2.5))
    assert by_speed.compute_s_of(2) == by_speed.step_compute_s
    assert equal.compute_s_of(0) == 0.2
    plan, better = make_plan(equal), make_plan(by_speed)
    assert plan.chosen is not None
    assert better.chosen is not None
    assert better.chosen.step_s < plan.chosen.step_s
    assert plan.proportional_s == pytest.approx(predict(by_speed, plan.choice).step_s)
    assert better.proportional_s == 0.0
    assert make_plan(group(3)).proportional_s == 0.0
    # A slow rank that computes its part does no harm; with equal shares it holds all up.
    assert better.without == ()


@pytest.mark.costly
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
