"""Parts of a state: everything once, nearly equal bytes."""

from __future__ import annotations

import random

import pytest

from potluck.checkpoint.store import assign


def test_everything_is_in_exactly_one_part_and_parts_are_balanced(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        sizes = {f"t{i}": chance.randint(0, 100) for i in range(chance.randint(0, 30))}
        num_parts = chance.randint(1, 6)
        parts = assign(sizes, num_parts)
        assert len(parts) == num_parts
        assert sorted(name for part in parts for name in part) == sorted(sizes)
        loads = [sum(sizes[name] for name in part) for part in parts]
        assert max(loads) <= sum(sizes.values()) / num_parts + max(sizes.values(), default=0)


def test_it_does_not_depend_on_the_order_of_names() -> None:
    assert assign({"a": 3, "b": 3, "c": 1}, 2) == assign({"c": 1, "b": 3, "a": 3}, 2)


def test_no_part_is_no_checkpoint() -> None:
    with pytest.raises(ValueError, match="num_parts is 0"):
        assign({}, 0)
