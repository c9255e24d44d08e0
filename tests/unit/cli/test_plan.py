"""What `potluck plan` prints: the table, the choice, and advice on machines that slow others."""

from __future__ import annotations

from pathlib import Path

import msgspec

from potluck.cli import plan
from potluck.training.planner import METHODS, Basis, Measured, make_plan


def printed(measured: Measured) -> list[str]:
    return list(plan._lines(measured, make_plan(measured), Path("train.plan.json")))


def measured(*compute_s: float, mbit: float = 100.0) -> Measured:
    """Ranks on machines of their own, with equal links."""
    count, rate = len(compute_s), mbit * 1e6 / 8
    return Measured(
        compute_s=compute_s,
        bytes_per_s=(rate,) * count,
        crossing_bytes_per_s=(rate,) * count,
        latency_s=1e-3,
        nodes=tuple(f"node{rank}-of-the-cluster" for rank in range(count)),
        shapes=((1024, 1024),) * 8,
        encode_s=dict.fromkeys(METHODS, 1e-9),
        decode_s=dict.fromkeys(METHODS, 1e-10),
        copy_s=3e-10,
        hash_s=0.0,
    )


def test_the_table_has_a_row_for_each_strategy_and_marks_the_choice() -> None:
    made = make_plan(measured(0.2, 0.2))
    head, link, columns, *rest = printed(measured(0.2, 0.2))
    assert head == ("\n2 workers, gradients of 33.6 MB; the computation of a step takes 200 ms"), (
        head
    )
    assert link == "slowest link: 100 Mbit/s, 1 ms one way"
    assert columns.split() == ["predicted", "efficiency", "MB", "a", "step", "strategy"]
    rows, changes = rest[: 2 * len(made.predictions) : 2], rest[1 : 2 * len(made.predictions) : 2]
    for row, change, each in zip(rows, changes, made.predictions, strict=True):
        assert row.startswith("*") == (each.candidate is made.choice)
        assert ("~" in row) == (each.basis is not Basis.REHEARSED), "nothing was rehearsed"
        assert f"{each.efficiency:.0%}" in row
        assert row.endswith(each.candidate.code)
        assert change.strip() == f"changes: {each.candidate.changes}"
    assert f"\nchoice: {made.choice.code}: {made.reason}" in rest
    assert (
        rest[-1] == '\nkept in train.plan.json, for scripts with ElasticLoop(..., strategy="auto")'
    )


def test_a_machine_that_slows_the_others_is_named_with_what_to_type() -> None:
    text = "\n".join(printed(measured(0.2, 0.2, 2.0, mbit=10_000.0)))
    assert "Without machine node2-of (worker 2) a step would take" in text
    assert "It takes part unless you leave a machine out: name the others with --on, here" in text
    assert "with policy=Policy(shares=ProportionalShares()) a step would take" in text


def test_a_machine_is_named_with_all_its_workers() -> None:
    nodes = ("attic", "desk-with-two", "desk-with-two", "sofa", "cellar", "cellar")
    slow = msgspec.structs.replace(measured(0.2, 0.2, 2.0, 1.5, 0.2, 0.2, mbit=1e4), nodes=nodes)
    text = "\n".join(printed(slow))
    assert "Without machine desk-wit (workers 1, 2) and machine sofa (worker 3) a step" in text
    assert "They take part unless you leave a machine out" in text


def test_equal_machines_get_no_advice() -> None:
    text = "\n".join(printed(measured(0.2, 0.2, 0.2)))
    assert "Without machine" not in text
    assert "unlike" not in text
