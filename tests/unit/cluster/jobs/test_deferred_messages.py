"""Orders that come before the view of whoever gives them: all of it, or that node is cut off."""

from __future__ import annotations

import pytest

from potluck._core.cluster.jobs.permissions import MAX_BYTES, OF_ONE_NODE, DeferredMessages
from potluck._core.wire import jobs, worker_link
from potluck.errors import ProtocolError

BIG = jobs.JobList(tuple(f"{number:0256d}" for number in range(jobs.MAX_JOBS)))


def flood(early: DeferredMessages, node: str, count: int) -> None:
    for _ in range(count):
        early.keep_orders(node, BIG)
        assert early.nbytes <= MAX_BYTES


def test_orders_are_given_back_in_the_order_in_which_they_came() -> None:
    early = DeferredMessages()
    sent = [
        ("ada", jobs.JobList(("a",))),
        ("bob", jobs.StartWorker("b", "0", 0)),
        ("ada", jobs.SendToWorkers("a", ("0",), worker_link.Stop("over"))),
    ]
    for node, order in sent:
        early.keep_orders(node, order)
    assert early.take() == sent
    assert early.take() == []


def test_a_node_that_orders_more_than_is_kept_is_cut_off_and_the_others_lose_nothing() -> None:
    early = DeferredMessages()
    early.keep_orders("ada", jobs.JobList(("a",)))
    with pytest.raises(ProtocolError, match=r"does not lead the cluster.* 4\.0 MiB after 0\.0 of"):
        flood(early, "eve", OF_ONE_NODE)
    assert early.take() == [("ada", jobs.JobList(("a",)))], "and nothing of hers stays"


def test_all_nodes_together_are_bounded_too() -> None:
    early = DeferredMessages()
    of_each = OF_ONE_NODE // 2 // 17_000
    for number in range(8):
        flood(early, f"node {number}", of_each)
    with pytest.raises(ProtocolError, match=r"after 15\.\d of others"):
        flood(early, "the ninth", of_each)
    flood(early, "node 0", 1)


def test_what_is_held_during_a_pause_is_bounded_in_bytes() -> None:
    held = DeferredMessages()
    for number in range(400):
        held.keep_newest("b", jobs.Output("job", "0", "stdout", f"{number} " + "x" * 65_000))
        assert held.nbytes <= MAX_BYTES
    taken = held.take()
    assert len(taken) > 200
    last = taken[-1][1]
    assert isinstance(last, jobs.Output)
    assert last.text.startswith("399 "), "the newest are kept"
