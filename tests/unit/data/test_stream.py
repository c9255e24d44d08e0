"""Sources without a length: what is read, what is held, and how a position is reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from potluck.data.stream import Stream
from potluck.errors import DataError

NUM = 20


class Again:
    """Begins again, and can't seek. Notes what it gives."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for item in range(NUM):
            self.given.append(item)
            yield item


class Stateful(Again):
    """Has its state in itself, as data sets for torchdata's loader have."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < NUM:
            self.given.append(self.at)
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class FromPosition:
    """A function of the position."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, position: int, scale: int = 1) -> Iterator[int]:
        for item in range(position, NUM):
            self.given.append(item)
            yield item * scale


def function() -> Iterator[int]:
    return iter(range(NUM))


def first_at(stream: Stream, epoch: int, start: int, size: int) -> int:
    """The first item of the batch there."""
    stream.expect(epoch, start, size)
    (found,) = stream.take([start])
    assert isinstance(found, int)
    return found


def told(stream: Stream) -> list[str]:
    texts: list[str] = []
    stream.tell = texts.append
    return texts


def epoch_of(stream: Stream, epoch: int, size: int) -> list[int]:
    """All items of an epoch, in batches."""
    found: list[int] = []
    while True:
        held, has_ended = stream.expect(epoch, len(found), size)
        num = min(size, held)
        found += stream.take(range(len(found), len(found) + num))
        if has_ended and num == held:
            return found


@pytest.mark.parametrize("size", [1, 3, 5, NUM, NUM + 7])
@pytest.mark.parametrize("make", [Again, Stateful, lambda: function, lambda: range(NUM)])
def test_each_epoch_has_all_items_once(make: Any, size: int) -> None:
    stream = Stream(make())
    assert [epoch_of(stream, epoch, size) for epoch in range(3)] == [list(range(NUM))] * 3


def test_it_reads_the_batches_ahead_and_one_item() -> None:
    source = Again()
    stream = Stream(source, ahead=2)
    assert stream.expect(0, 0, 4) == (13, False)
    assert source.given == list(range(13))
    assert stream.expect(0, 4, 4) == (13, False)
    assert stream.expect(0, 8, 4) == (12, True)
    assert source.given == list(range(NUM))


def test_a_source_with_states_goes_on_where_another_was() -> None:
    """It reads again at most what the batch has before the position."""
    first = Stream(Stateful())
    first.expect(0, 0, 4)
    first.expect(0, 4, 4)
    first.expect(0, 8, 4)
    source = Stateful()
    second = Stream(source)
    texts = told(second)
    second.restore(first.capture())
    assert first_at(second, 0, 8, 4) == 8
    assert second.take([8, 11]) == [8, 11]
    assert source.given[0] == 8
    assert not texts
    assert epoch_of(second, 1, 4) == list(range(NUM))  # begins again as it was at first
    second.restore(first.capture())
    assert first_at(second, 0, 10, 3) == 10


def test_a_source_with_states_goes_back() -> None:
    stream = Stream(Stateful())
    stream.expect(0, 0, 4)
    stream.expect(0, 4, 4)
    assert first_at(stream, 0, 8, 4) == 8
    assert first_at(stream, 0, 2, 4) == 2
    assert [first_at(stream, 0, at, 3) for at in (2, 5, 8)] == [2, 5, 8]


def test_a_function_of_the_position_is_called_with_it() -> None:
    source = FromPosition()
    stream = Stream(source)
    texts = told(stream)
    assert stream.expect(0, 15, 3) == (5, True)
    assert source.given == list(range(15, NUM))
    assert not texts


def test_a_source_that_can_not_seek_begins_again_and_says_so() -> None:
    source = Again()
    stream = Stream(source)
    texts = told(stream)
    assert first_at(stream, 0, 6, 2) == 6
    assert source.given[:7] == list(range(7))
    assert len(texts) == 1
    assert "the stream can't seek, so its first 6 items are read and left out" in texts[0]
    assert first_at(stream, 0, 15, 2) == 15
    assert len(texts) == 2


def test_an_iterator_goes_on_and_not_back() -> None:
    stream = Stream(iter(range(NUM)))
    assert first_at(stream, 0, 0, 2) == 0
    assert first_at(stream, 0, 9, 2) == 9
    with pytest.raises(DataError, match=r"it is an iterator at a later item: pass a function"):
        stream.expect(0, 3, 2)


@pytest.mark.parametrize(("source", "start"), [(iter(()), 0), (Again(), NUM), (Again(), 25)])
def test_a_source_without_the_item_is_an_error(source: Any, start: int) -> None:
    with pytest.raises(DataError, match=rf"the stream has no item {start} in epoch 0: it is empty"):
        Stream(source).expect(0, start, 2)


def test_a_source_that_raises_is_named() -> None:
    def torn() -> Iterator[int]:
        yield from range(5)
        raise OSError("connection reset")

    why = "item 5 of the stream can't be read: OSError: connection reset"
    stream = Stream(torn)
    for _ in range(2):
        with pytest.raises(DataError, match=why):
            stream.expect(0, 0, 3)


def test_a_source_that_can_not_be_opened_is_named() -> None:
    def absent(position: int) -> Iterator[int]:
        raise FileNotFoundError("train.jsonl")

    why = r"item 7 of the stream can't be read: FileNotFoundError: train.jsonl"
    with pytest.raises(DataError, match=why):
        Stream(absent).expect(0, 7, 2)
    with pytest.raises(DataError, match="missing 1 required positional argument: 'b'"):
        Stream(lambda a, b: ()).expect(0, 0, 2)


def test_a_source_is_told_its_epoch() -> None:
    class Shuffled(Again):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 3)

    stream = Stream(Shuffled())
    assert [epoch_of(stream, epoch, 2) for epoch in range(2)] == [[0] * 3, [1] * 3]
