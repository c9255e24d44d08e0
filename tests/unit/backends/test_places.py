"""Messages name the machine of a missing rank where a launcher's variables tell it."""

from __future__ import annotations

import pytest

from potluck._core.backends.launchers import listed, placed


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([2, 0, 1], "0 to 2"), ([1, 2, 5, 7, 8, 9], "1, 2, 5, 7 to 9")],
)
def test_runs_of_ranks_are_cut_short(ranks: list[int], text: str) -> None:
    assert listed(ranks) == text


def test_potluck_run_names_the_node_of_each_rank() -> None:
    nodes = {"POTLUCK_NODES": "ada,ada,bob,bob,carl", "LOCAL_WORLD_SIZE": "2"}
    assert placed([1, 2, 3, 4], nodes) == "rank 1 on ada, rank 2, 3 on bob, rank 4 on carl"


def test_under_torchrun_ranks_in_a_row_share_a_node() -> None:
    torchrun = {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    assert placed([3, 4, 5, 6, 7], torchrun) == (
        "rank 3 on torchrun's node 0, rank 4 to 7 on torchrun's node 1"
    )


def test_elsewhere_ranks_stand_alone() -> None:
    assert placed([1, 3], {"LOCAL_WORLD_SIZE": "2"}) == "rank 1, 3"
