"""What ``strategy="auto"`` finds beside a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck._core.types import Member
from potluck.compressors import Quantize
from potluck.torch import DDP, DataParallel, ElasticLoop, LocalSGD, planning

X = torch.ones(8, 3)


@pytest.fixture
def ctx() -> Iterator[DistributedContext]:
    with DistributedContext(LocalBackend()) as made:
        yield made


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plan file of the running script, which is in a folder of its own."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(tmp_path / "train.py"), raising=False)
    return tmp_path / "train.plan.json"


def test_a_plan_is_taken_by_its_name_for_a_strategy(ctx: DistributedContext, plan: Path) -> None:
    plan.write_text('{"choice": "local-sgd"}')
    assert planning.Planned(ctx, nn.Linear(3, 1)).strategy == LocalSGD(every=8)
    model = DDP(nn.Linear(3, 1), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ElasticLoop(model, optimizer, (X,), batch_size=1, strategy="auto")
    for (x,) in job:
        with job.step():
            optimizer.zero_grad()
            torch.autograd.backward(model(x).sum())
            optimizer.step()
    assert len(job.losses) == 1  # one round of 8 steps


def test_a_plan_says_how_large_buckets_are_or_how_long_rounds(
    ctx: DistributedContext, plan: Path
) -> None:
    plan.write_text('{"choice": "local-sgd", "every": 32}')
    assert planning.Planned(ctx, nn.Linear(3, 1)).strategy == LocalSGD(every=32)
    plan.write_text('{"choice": "int4", "bucket_size_mb": 100}')
    assert planning.Planned(ctx, nn.Linear(3, 1)).strategy == DataParallel(
        Quantize(4), bucket_size_mb=100
    )


def test_a_plan_of_other_machines_or_of_another_model_is_taken_with_a_warning(
    ctx: DistributedContext, plan: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured = {"nodes": ["attic"], "shapes": [[1, 3], [1]]}
    plan.write_text(json.dumps({"choice": "plain", "measured": measured}))
    assert planning.Planned(ctx, nn.Linear(3, 1)).strategy == DataParallel()
    assert caplog.text == ""
    assert planning.Planned(ctx, nn.Linear(4, 1)).strategy == DataParallel()
    assert "train.plan.json is of another model: make it anew with `potluck plan`" in caplog.text
    of = planning.Of(nodes=("attic", "attic"), shapes=((1, 3), (1,)))
    assert planning.doubt_of(of, {"desk"}, of.shapes) is None
    said = planning.doubt_of(of, {"attic", "desk", "sofa"}, of.shapes)
    assert said == "was made on one machine, where no strategy is compared; this training has 3"
    both = planning.Of(nodes=("attic", "desk"), shapes=of.shapes)
    assert planning.doubt_of(both, {"desk", "attic"}, of.shapes) is None
    assert planning.doubt_of(both, {"attic"}, of.shapes) is None
    assert planning.doubt_of(both, {"desk", "sofa"}, of.shapes) == "was made on other machines"
    said = planning.doubt_of(both, {"attic", "desk", "sofa"}, of.shapes)
    assert said == "was made on 2 machines; this training has 3"


def test_without_a_plan_auto_is_data_parallelism_where_nothing_is_sent(
    ctx: DistributedContext, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not plan.exists()
    assert planning.Planned(ctx, nn.Linear(3, 1)).strategy == DataParallel()
    monkeypatch.setattr(LocalBackend, "elastic", True)  # others may join
    with pytest.raises(ValueError, match=r"make one with `potluck plan train\.py`"):
        planning.Planned(ctx, nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field `choice`"),
        (
            '{"choice": "zip"}',
            "no strategy is called 'zip'; a plan knows plain, ",
        ),
        ('{"choice": ["plain"]}', "Expected `str`, got `array`"),
        ('{"choice": "int4", "every": 8}', "int4 exchanges gradients in every step"),
        ('{"choice": "diloco", "every": 0}', "a round has at least 1 step"),
        ('{"choice": "int4", "bucket_size_mb": -1}', "it must be positive and finite"),
    ],
)
def test_a_plan_that_is_none(ctx: DistributedContext, plan: Path, text: str, said: str) -> None:
    plan.write_text(text)
    with pytest.raises(ValueError, match=r"train\.plan\.json is no plan") as raised:
        planning.Planned(ctx, nn.Linear(3, 1))
    assert said in str(raised.value)
    assert "make it anew with `potluck plan`" in str(raised.value)


def test_another_word_than_auto(ctx: DistributedContext) -> None:
    model = DDP(nn.Linear(3, 1), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="'fast': pass DataParallel"):
        ElasticLoop(model, optimizer, (X,), batch_size=1, strategy="fast")


class Workers:
    """What is asked of a context: rank 0, or another one, of workers on these machines."""

    def __init__(self, *nodes: str, rank: int = 0) -> None:
        self.rank = rank
        self.meet(*nodes)

    def report(self, **facts: object) -> None:
        """Nobody looks."""

    def meet(self, *nodes: str) -> None:
        self.members = tuple(Member(str(rank), node) for rank, node in enumerate(nodes))


def test_machines_that_join_later_are_held_against_the_plan_too(
    plan: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured = {"nodes": ["attic", "desk"], "shapes": [[1, 3], [1]]}
    plan.write_text(json.dumps({"choice": "int4", "measured": measured}))
    group, other = Workers("attic"), Workers("attic", rank=1)
    both: list[tuple[Any, planning.Planned]] = [
        (each, planning.Planned(each, nn.Linear(3, 1))) for each in (group, other)
    ]

    def said_with(*nodes: str) -> list[str]:
        caplog.clear()
        for workers, planned in both:
            workers.meet(*nodes)
            planned.begin()
            assert planned.strategy == DataParallel(Quantize(4))
        return caplog.messages

    assert said_with("attic", "desk") == []
    [said] = said_with("attic", "desk", "sofa")
    assert said.startswith("train.plan.json was made on 2 machines; this training has 3: make it")
    assert said_with("attic", "desk", "sofa", "sofa") == []
    assert said_with("attic", "sofa") == [], "one that has left may come back"
    assert said_with("attic", "desk", "sofa") == []
    assert said_with("attic", "cellar", "sofa") == [], "the same was said before"
    [said] = said_with("attic", "garage")
    assert said.startswith("train.plan.json was made on other machines")


def warnings_after(
    caplog: pytest.LogCaptureFixture, ctx: Any, step_s: float, waited_s: float, steps: int = 20
) -> list[str]:
    caplog.clear()
    suggestion = planning.Suggestion(ctx)
    for _ in range(steps):
        suggestion.timed(step_s, waited_s)
    return [record.getMessage() for record in caplog.records]


def test_waiting_for_other_machines_suggests_a_plan_once(caplog: pytest.LogCaptureFixture) -> None:
    apart, together = Workers("one", "other"), Workers("one", "one")
    [said] = warnings_after(caplog, apart, 2.0, 1.5)
    assert said.startswith("a step takes 2.0 s, and 75% of that is waiting for other machines")
    assert "`potluck plan`" in said
    assert warnings_after(caplog, apart, 2.0, 1.5, steps=4) == []
    assert warnings_after(caplog, apart, 2.0, 0.9) == []
    assert warnings_after(caplog, apart, 0.1, 0.09) == []
    assert warnings_after(caplog, together, 2.0, 1.5) == []


def test_machines_that_join_later_may_make_steps_slow(caplog: pytest.LogCaptureFixture) -> None:
    group: Any = Workers("one")
    suggestion = planning.Suggestion(group)

    def said_after(steps: int, *nodes: str) -> int:
        group.meet(*nodes)
        for _ in range(steps):
            suggestion.timed(2.0, 1.5)
        return len(caplog.messages)

    assert said_after(20, "one") == 0
    assert said_after(4, "one", "other") == 0
    assert said_after(1, "one", "other") == 1
    assert said_after(20, "one", "other", "third") == 1, "once is enough"
