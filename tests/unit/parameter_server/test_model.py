"""One model and its modes, as stories, without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from potluck.parameter_server import SGD, Asynchronous, ElasticAveraging, Synchronous
from potluck.parameter_server.layout import Placement, Tensors, layout_of
from potluck.parameter_server.log import Entry
from potluck.parameter_server.model import LIFE_BITS, Gradient, Mode, Model, Outcome
from potluck.parameter_server.table import Table

TWO = ["0", "1"]
THREE = ["0", "1", "2"]
NEVER = 1e9


class Served:
    """A model and its tensors on one server, which carries out every decision at once."""

    def __init__(self, mode: Mode, rate: float = 1.0) -> None:
        here = Placement(("0",), 1, ("0",))
        self.model = Model("m", mode, SGD(rate), here, self.carry_out)
        tensors = {"w": np.zeros(2), "b": np.zeros(1)}
        layout = layout_of(tensors)
        assert self.model.stage(Gradient("0", 0, 0, 0), tensors, "it", layout, has_room=True)
        self.model.set("0", 0, layout)

    def push(self, pushed: tuple[Gradient, Tensors], workers: list[str]) -> None:
        gradient, tensors = pushed
        if not self.model.knows(gradient.worker, gradient.push):
            what = gradient.of("m")
            assert self.model.stage(gradient, tensors, what, None, has_room=False)
            self.model.push(gradient, workers)

    def progress(self, workers: list[str]) -> bool:
        return self.model.progress(workers)

    def apply(self, step: int, rate: float | None, workers: list[str]) -> None:
        self.model.apply(step, rate, workers)

    def clear(self, step: int) -> None:
        self.model.clear(step)

    def carry_out(self, entry: Entry) -> None:
        self.model.follow(entry)

    @property
    def tensors(self) -> Tensors:
        return self.model.table.tensors

    @property
    def version(self) -> int:
        return self.model.version

    @property
    def counts(self) -> dict[str, int]:
        return self.model.counts

    def outcome(self, worker: str, push: int) -> Outcome | None:
        return self.model.outcome(worker, push)


model = Served


def gradient(
    worker: int, push: int, step: int, value: float = 1.0, **tensors: Any
) -> tuple[Gradient, Tensors]:
    given = tensors or {"w": np.full(2, value), "b": np.full(1, value)}
    return Gradient(str(worker), worker, push, step), given


def test_the_mean_of_all_is_applied_when_the_last_has_come() -> None:
    it = model(Synchronous())
    before = it.tensors
    it.push(gradient(1, 10, 0, 2.0), TWO)
    assert it.version == 0
    assert it.model.waits_for(TWO) == "a gradient of step 0 of worker 0"
    it.push(gradient(0, 11, 0, 4.0), TWO)
    assert it.version == 1
    assert it.tensors["w"].tolist() == [-3.0, -3.0]
    assert before["w"].tolist() == [0.0, 0.0]  # a version never changes
    with pytest.raises(ValueError, match="read-only"):
        it.tensors["w"][0] = 1


def test_a_repeat_of_one_push_counts_once_and_gets_the_same_answer() -> None:
    it = model(Synchronous())
    for _ in range(3):
        it.push(gradient(0, 10, 0), TWO)
    it.push(gradient(1, 11, 0), TWO)
    it.push(gradient(0, 10, 0), TWO)
    assert it.version == 1
    assert it.outcome("0", 10) == it.outcome("1", 11)


def test_a_worker_that_was_killed_pushes_the_same_step_in_its_next_life() -> None:
    it = model(Synchronous())
    it.push(gradient(0, 10, 0, 50.0), TWO)
    it.push(gradient(0, (1 << LIFE_BITS) + 10, 0, 2.0), TWO)
    it.push(gradient(1, 11, 0, 4.0), TWO)
    assert it.tensors["w"].tolist() == [-3.0, -3.0]
    assert it.counts == {"counted": 2, "restarted": 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            gradient(0, 1, 3),
            "step 3 of worker 0 for 'm' is of a later step: the model is at step 1",
        ),
        (gradient(0, 1, 0), "is of an earlier step: the model is at step 1; pull first"),
        (gradient(1, 99, 1), "worker 1 for 'm' is its second one in that step"),
        (gradient(0, 1, 1, w=np.ones(2)), "lacks 'b'"),
        (
            gradient(0, 1, 1, w=np.ones(2), b=np.ones(1), c=np.ones(1)),
            "has 'c', which the model has not; it has 'b', 'w'",
        ),
        (
            gradient(0, 1, 1, w=np.ones(3), b=np.ones(1)),
            r"shape \(3,\) in 'w', whose shape is \(2,\)",
        ),
        (gradient(0, 1, 1, float("nan")), "NaN or infinite numbers in 'w'"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_and_nothing_is_lost(
    wrong: tuple[Gradient, Tensors], message: str
) -> None:
    it = model(Synchronous())
    it.push(gradient(0, 10, 0), TWO)
    it.push(gradient(1, 11, 0), TWO)
    it.push(gradient(1, 12, 1), TWO)
    with pytest.raises(ValueError, match=message):
        it.push(wrong, TWO)
    it.push(gradient(0, 13, 1), TWO)
    assert it.version == 2
    assert it.tensors["w"].tolist() == [-2.0, -2.0]


def test_with_backup_workers_the_first_count_and_late_ones_are_dropped_and_counted() -> None:
    it = model(Synchronous(backup_workers=1))
    it.push(gradient(2, 10, 0, 3.0), THREE)
    it.push(gradient(0, 11, 0, 1.0), THREE)
    assert it.version == 1
    it.push(gradient(1, 12, 0, 100.0), THREE)
    outcome = it.outcome("1", 12)
    assert outcome is not None
    assert (outcome.counted, outcome.reason) == (False, "late")
    assert it.tensors["w"].tolist() == [-2.0, -2.0]
    assert it.counts == {"counted": 2, "late": 1}


def test_when_a_worker_leaves_the_group_the_others_are_enough() -> None:
    it = model(Synchronous())
    it.push(gradient(0, 10, 0), TWO)
    assert not it.progress(TWO)
    assert it.progress(["0"])
    assert it.version == 1


def test_gradients_of_workers_that_left_do_not_stand_for_those_to_come() -> None:
    it = model(Synchronous())
    it.push(gradient(0, 10, 0), THREE)
    it.push(gradient(1, 11, 0), THREE)
    assert not it.progress(["2"])
    it.push(gradient(2, 12, 0, 4.0), ["2"])
    assert it.tensors["w"].tolist() == [-2.0, -2.0]


def test_by_hand_one_worker_makes_the_update_and_the_others_find_it_made() -> None:
    it = model(Synchronous(automatic=False))
    it.push(gradient(0, 10, 0), TWO)
    with pytest.raises(ValueError, match=r"1 gradients of step 0 .* waits for .* worker 1"):
        it.apply(0, None, TWO)
    it.push(gradient(1, 11, 0), TWO)
    assert it.model.is_ready(TWO)
    assert it.version == 0
    for _ in range(2):
        it.apply(0, 0.5, TWO)
        it.clear(0)
    assert it.version == 1
    assert it.tensors["w"].tolist() == [-0.5, -0.5]
    it.push(gradient(0, 12, 1), TWO)
    it.clear(1)
    it.push(gradient(0, 13, 1, 2.0), TWO)
    it.push(gradient(1, 14, 1, 2.0), TWO)
    it.apply(1, None, TWO)
    assert it.tensors["w"].tolist() == [-2.5, -2.5]


def test_an_asynchronous_gradient_is_applied_at_once_at_a_rate_by_its_staleness() -> None:
    it = model(Asynchronous(max_staleness=4))
    for worker in THREE:
        assert it.model.may_pull(worker, THREE, NEVER)
    for worker, expected in ((0, -1.0), (1, -2.0), (2, -2.5)):
        it.push(gradient(worker, 10 + worker, 0), THREE)
        assert it.tensors["w"][0] == expected
    assert it.counts == {"counted": 3, "max staleness": 2}
    with pytest.raises(ValueError, match="apply_gradients is for Synchronous"):
        it.apply(0, None, THREE)


def test_a_gradient_without_a_pull_or_after_too_long_a_time_is_dropped_and_counted() -> None:
    it = model(Asynchronous())
    it.push(gradient(0, 10, 0), TWO)
    assert it.model.may_pull("1", TWO, 5.0)
    assert it.model.expire(5.0, NEVER) == ["1"]
    it.push(gradient(1, 11, 0), TWO)
    assert it.version == 0
    assert it.counts == {"expired": 2}


def test_elastic_gradients_are_mixed_with_those_before() -> None:
    it = model(ElasticAveraging(alpha=0.25))
    it.push(gradient(0, 10, 0, 4.0), TWO)
    assert it.tensors["w"][0] == -4.0
    it.push(gradient(1, 11, 0, 8.0), TWO)
    assert it.tensors["w"][0] == -4.0 - (0.25 * 8 + 0.75 * 4)


def test_a_checkpoint_has_all_but_what_waits() -> None:
    it = model(Synchronous())
    it.push(gradient(0, 10, 0), TWO)
    it.push(gradient(1, 11, 0), TWO)
    it.push(gradient(1, 12, 1), TWO)
    again = Served(Synchronous())
    again.model.load(it.model.state())
    again.model.table = Table({}, SGD(1.0))
    again.model.install(it.model.table.state())
    assert again.version == 1
    again.push(gradient(0, 10, 0), TWO)  # a repeat is known after a restart, too
    for worker, push in ((1, 13), (0, 14)):
        again.push(gradient(worker, push, 1), TWO)
    assert again.version == 2
    np.testing.assert_array_equal(again.tensors["w"], [-2.0, -2.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Synchronous(backup_workers=-1), "backup_workers is -1"),
        (lambda: Asynchronous(max_staleness=-1), "max_staleness is -1"),
        (lambda: ElasticAveraging(alpha=0), "alpha is 0"),
        (lambda: ElasticAveraging(of="both"), "of is 'both'"),
        (lambda: SGD(-1.0), "learning_rate is -1.0"),
        (lambda: SGD(0.1, momentum=1.0), "momentum is 1.0"),
        (lambda: SGD(0.1, nesterov=True), "needs a momentum"),
    ],
)
def test_options_that_cannot_be_meant_are_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
