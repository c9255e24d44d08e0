from __future__ import annotations

import numpy as np

from potluck.services.channel import SMALLEST, Blocks


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_once_no_view_is_left() -> None:
    blocks = Blocks()
    first = blocks.take(2 * SMALLEST)
    view = first.view(np.float32).reshape(2, -1)[1:]
    where = address(first)
    del first
    other = blocks.take(2 * SMALLEST)
    assert address(other) != where
    del view
    again = blocks.take(2 * SMALLEST - 8)
    assert address(again) == where
    assert again.nbytes == 2 * SMALLEST - 8


def test_no_more_memory_is_kept_than_was_agreed() -> None:
    blocks = Blocks(keep_bytes=3 * SMALLEST)
    held = [blocks.take(2 * SMALLEST) for _ in range(3)]
    wheres = {address(each) for each in held}
    held.clear()
    assert len(blocks._kept) == 1
    assert address(blocks.take(2 * SMALLEST)) in wheres


def test_small_memory_is_not_kept() -> None:
    blocks = Blocks()
    blocks.take(8)
    assert blocks._kept == []
    assert blocks.take(0).size == 0
