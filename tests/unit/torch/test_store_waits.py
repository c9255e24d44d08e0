"""The rank that has the store says who waits for a key that nobody sets."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from potluck.torch.process_group.store_waits import StoreWaits


class Story:
    """Waits whose clock is moved; the lines that were said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.values: set[str] = set()
        self.lines: list[str] = []
        self.waits = StoreWaits(
            self.values.__contains__, say=self.lines.append, clock=lambda: self.now
        )

    def at(self, now: float) -> float | None:
        self.now = now
        return self.waits.tick()


def test_ranks_that_wait_for_one_key_are_named_in_one_line() -> None:
    story = Story()
    for rank in (3, 1, 2):
        story.waits.begin(rank, ["weights"], 60.0)
    assert story.at(0.5) == 2.5
    assert story.at(3.0) == 10.0
    assert story.lines == [
        "no rank has set the key 'weights' in the store, which rank 1 to 3 asked for; has every "
        "rank reached the line that sets it? (3 s so far)"
    ]


def test_of_several_keys_one_that_is_not_set_is_named() -> None:
    story = Story()
    story.waits.begin(0, ["a", "b", "c"], 60.0)
    story.values.add("a")
    story.at(3.0)
    assert "the key 'b' (and 1 more) in the store, which rank 0 asked for" in story.lines[0]


def test_many_short_waits_say_nothing() -> None:
    story = Story()
    for second in range(20):
        story.waits.begin(second % 2, [f"key {second}"], 60.0)
        story.at(float(second))
        story.waits.end((second + 1) % 2)
    assert story.lines == []


def test_a_wait_that_was_given_up_is_over() -> None:
    story = Story()
    story.waits.begin(1, ["weights"], 2.0)
    assert story.at(3.0) is None
    story.waits.begin(1, ["weights"], 60.0)
    assert story.at(4.0) == 2.0
    story.waits.end(1)
    assert story.at(6.0) is None
    assert story.lines == []
