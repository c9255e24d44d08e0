"""Sources without a length: what is read, what is held, and how a position is reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from potluck.data.stream import Ahead, Stream
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


class ByIterator(Again):
    """Its iterators have the state."""

    def __iter__(self) -> Iterator[int]:
        found = Stateful()
        found.given = self.given
        return _Iterator(found)


class _Iterator:
    def __init__(self, source: Stateful) -> None:
        self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict
        self._items = iter(source)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._items)


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


def opened(source: Any, *, ahead: int = 1) -> Stream:
    """A stream that knows its items by themselves."""
    stream = Stream(source, ahead=ahead)
    stream.hashed = lambda item: item
    return stream


def told(stream: Stream) -> list[str]:
    texts: list[str] = []
    stream.tell = texts.append
    return texts


def epoch_of(stream: Stream, epoch: int, size: int) -> list[int]:
    """All items of an epoch, in batches."""
    found: list[int] = []
    while True:
        ahead = stream.expect(epoch, len(found), size)
        num = min(size, ahead.num)
        found += stream.take(range(len(found), len(found) + num))
        if ahead.has_ended and num == ahead.num:
            return found


@pytest.mark.parametrize("size", [1, 3, 5, NUM, NUM + 7])
@pytest.mark.parametrize(
    "make", [Again, Stateful, ByIterator, lambda: function, lambda: range(NUM)]
)
def test_each_epoch_has_all_items_once(make: Any, size: int) -> None:
    stream = opened(make())
    assert [epoch_of(stream, epoch, size) for epoch in range(3)] == [list(range(NUM))] * 3


def test_it_reads_the_batches_ahead_and_one_item() -> None:
    source = Again()
    stream = opened(source, ahead=2)
    assert stream.expect(0, 0, 4) == Ahead(13, has_ended=False, first=0)
    assert source.given == list(range(13))
    assert stream.expect(0, 4, 4) == Ahead(13, has_ended=False, first=4)
    assert stream.expect(0, 8, 4) == Ahead(12, has_ended=True, first=8)
    assert source.given == list(range(NUM))


@pytest.mark.parametrize("make", [Stateful, ByIterator])
def test_a_source_with_states_goes_on_where_another_was(make: Any) -> None:
    """It reads again at most what the batch has before the position."""
    first = opened(make())
    first.expect(0, 0, 4)
    first.expect(0, 4, 4)
    first.expect(0, 8, 4)
    source = make()
    second = opened(source)
    texts = told(second)
    second.restore(first.capture())
    assert second.expect(0, 8, 4).first == 8
    assert second.take([8, 11]) == [8, 11]
    assert source.given[0] == 8
    assert not texts
    assert epoch_of(second, 1, 4) == list(range(NUM))  # begins again as it was at first
    second.restore(first.capture())
    assert second.expect(0, 10, 3).first == 10


@pytest.mark.parametrize("make", [Stateful, ByIterator])
def test_a_source_with_states_goes_back(make: Any) -> None:
    stream = opened(make())
    stream.expect(0, 0, 4)
    stream.expect(0, 4, 4)
    assert stream.expect(0, 8, 4).first == 8
    assert stream.expect(0, 2, 4).first == 2
    assert [stream.expect(0, at, 3).first for at in (2, 5, 8)] == [2, 5, 8]


def test_a_state_that_leads_to_another_item_is_named() -> None:
    class Late(Stateful):
        """Its state after an item is that before it."""

        def __iter__(self) -> Iterator[int]:
            while self.at < NUM:
                yield self.at
                self.at += 1

    first = opened(Late())
    first.expect(0, 0, 4)
    first.expect(0, 4, 4)
    second = opened(Late())
    texts = told(second)
    second.restore(first.capture())
    second.expect(0, 6, 4)
    assert len(texts) == 1
    assert "the stream's state leads to another item than before at 4" in texts[0]


def test_a_function_of_the_position_is_called_with_it() -> None:
    source = FromPosition()
    stream = opened(source)
    texts = told(stream)
    assert stream.expect(0, 15, 3) == Ahead(5, has_ended=True, first=15)
    assert source.given == list(range(15, NUM))
    assert not texts


def test_a_source_that_can_not_seek_begins_again_and_says_so() -> None:
    source = Again()
    stream = opened(source)
    texts = told(stream)
    assert stream.expect(0, 6, 2).first == 6
    assert source.given[:7] == list(range(7))
    assert len(texts) == 1
    assert "the stream can't seek, so its first 6 items are read and left out" in texts[0]
    assert stream.expect(0, 15, 2).first == 15  # reads on
    assert len(texts) == 1
    assert source.given == list(range(NUM))


def test_an_iterator_goes_on_and_not_back() -> None:
    stream = opened(iter(range(NUM)))
    assert stream.expect(0, 0, 2).first == 0
    assert stream.expect(0, 9, 2).first == 9
    with pytest.raises(DataError, match=r"can't go back from item 14 to item 3: pass a function"):
        stream.expect(0, 3, 2)
    assert opened(iter(())).expect(0, 0, 2) == Ahead(0, has_ended=True, first=0)


def test_a_source_that_has_become_shorter_is_an_error() -> None:
    with pytest.raises(DataError, match=r"ends at item 20, but 25 items were counted before"):
        opened(Again()).expect(0, 25, 2)


def test_a_source_that_raises_is_named_once_its_item_is_needed() -> None:
    def torn() -> Iterator[int]:
        yield from range(5)
        raise OSError("connection reset")

    stream = opened(torn)
    assert stream.expect(0, 0, 3).num == 5
    with pytest.raises(
        DataError, match="item 5 of the stream can't be read: OSError: connection reset"
    ):
        stream.expect(0, 3, 3)
    with pytest.raises(DataError, match="item 5 of the stream"):
        opened(torn).expect(0, 8, 3)


def test_a_source_that_can_not_be_opened_is_named() -> None:
    def absent(position: int) -> Iterator[int]:
        raise FileNotFoundError("train.jsonl")

    why = r"the stream can't be opened at item 7: FileNotFoundError: train.jsonl"
    with pytest.raises(DataError, match=why):
        opened(absent).expect(0, 7, 2)


def test_a_source_is_told_its_epoch() -> None:
    class Shuffled(Again):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 3)

    stream = opened(Shuffled())
    assert [epoch_of(stream, epoch, 2) for epoch in range(2)] == [[0] * 3, [1] * 3]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (3, "3 is no stream: pass an iterable, or a function that returns one"),
        (Again, "Again'> is no stream: pass an iterable"),
        (lambda a, b: (), "this one needs a, b"),
    ],
)
def test_what_is_no_stream(source: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        opened(source)
