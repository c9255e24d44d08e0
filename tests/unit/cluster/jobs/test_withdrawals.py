"""A node that its owner takes out of a job, and gives again."""

from __future__ import annotations

from potluck._core.cluster.jobs.placement import Withdrawals
from potluck._core.wire.jobs import NodeReport, ProcessState


class Job:
    def __init__(self) -> None:
        self.refusals: dict[str, str] = {}
        self.left: list[tuple[str, str]] = []
        self.asked: list[str] = []
        self.withdrawals = Withdrawals(
            lambda node: self.refusals.get(node, ""),
            leave=lambda node, refusal: self.left.append((node, refusal)),
            ask=self.asked.append,
        )

    def look(self) -> None:
        self.withdrawals.look(("ada", "bob"))


def test_a_node_leaves_once_and_is_asked_for_a_report_when_it_is_given_again() -> None:
    job = Job()
    job.look()
    assert job.left == []
    job.refusals["bob"] = "paused"
    job.look()
    job.look()
    assert job.left == [("bob", "paused")]
    assert "bob" in job.withdrawals
    assert "ada" not in job.withdrawals
    job.refusals.clear()
    job.look()
    assert job.asked == ["bob"]
    assert "bob" in job.withdrawals, "until it has reported"


def test_a_node_is_back_when_its_old_workers_have_ended() -> None:
    job = Job()
    job.refusals["bob"] = "paused"
    job.look()
    idle = NodeReport("job", (ProcessState("1", 0, 0, False),))
    busy = NodeReport("job", (ProcessState("1", 0, 0, True),))
    assert job.withdrawals.is_out("bob", idle), "its owner did not give it again"
    job.refusals.clear()
    assert job.withdrawals.is_out("bob", busy)
    assert job.withdrawals.is_out("bob", NodeReport("job", error="it is paused")), "an old report"
    assert not job.withdrawals.is_out("bob", idle)
    assert "bob" not in job.withdrawals
