"""``Stream``: reads items from a source without a length, and goes to a counted position of it."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.errors import DataError

_END = object()


@dataclass(frozen=True, slots=True)
class Ahead:
    """The items that a stream holds from a position on: their number, and a hash of the ``first``,
    0 without one. ``has_ended``: no item of the epoch follows them."""

    num: int
    has_ended: bool
    first: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """The ``state`` of a source before the item at ``position``, and a hash of that item."""

    epoch: int
    position: int
    state: Any
    item: int

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.position


class Stream:
    """The items of ``source``, by epoch and position. Every rank reads the same stream, and holds
    all items of the next steps, also those of other ranks: so a step can be dealt anew after a
    loss.

    A source is one of these:

    * an iterable, such as a torch ``IterableDataset``, or a function without arguments that returns
      one: each iteration is an epoch;
    * a function ``items(position)`` that returns the items from that position on. It can *seek*;
    * an iterable with ``state_dict`` and ``load_state_dict``, or whose iterators have them, such as
      the streams of Hugging Face ``datasets``. It can seek to where a state was taken;
    * an iterator, such as a generator. It is read once and can't begin again.

    A source with ``set_epoch`` is told its epoch, from 0. If a source can't seek to a position, the
    items before it are read and left out. Then, and if a state leads to another item than before
    (by ``hashed``), items may not count exactly once, and ``tell`` is called with a text that says
    so. ``ahead`` is the number of batches that are held beyond the next. TypeError for another
    source.
    """

    def __init__(self, source: Any, *, ahead: int = 1) -> None:
        self.ahead = ahead
        self.tell: Callable[[str], None] = lambda text: None
        self.hashed: Callable[[Any], int] = lambda item: 0
        self._source = source
        self._is_function = callable(source) and not hasattr(source, "__iter__")
        self._takes_position = self._is_function and _takes_position(source)
        if isinstance(source, type) or not (self._is_function or hasattr(source, "__iter__")):
            raise TypeError(
                f"{source!r:.80} is no stream: pass an iterable, or a function that returns one"
            )
        self._is_once = hasattr(source, "__next__") and not _has_state(source)
        self._reading: Iterator[Any] | None = None
        self._stateful: Any = None  # the source (a copy) or its iterator, whichever has state_dict
        self._epoch, self._first = 0, 0
        self._items: deque[Any] = deque()  # from position _first on
        self._has_ended = False
        self._error: DataError | None = None  # of the item after those
        self._marks: list[_Mark] = []  # in the order of their places
        self._used: _Mark | None = None  # by which the source was opened; the next item is its

    def expect(self, epoch: int, start: int, size: int) -> Ahead:
        """Hold the items of the next batch of ``size``, from position ``start``, and of the batches
        ahead; forget those before. DataError if the source raises, or has fewer items than before.
        """
        is_open = self._reading is not None and epoch == self._epoch
        if not is_open or not self._first <= start <= self._end:
            self._go_to(epoch, start, is_open=is_open)
        for _ in range(start - self._first):
            self._items.popleft()
        self._first = start
        while len(self._marks) > 1 and self._marks[1].place <= (epoch, start):
            self._marks.pop(0)
        # One item more than the batches, to know whether the last of them ends the epoch.
        while len(self._items) <= (1 + self.ahead) * size and not (self._has_ended or self._error):
            is_due = self._stateful is not None and self._end and len(self._items) % size == 0
            if is_due and not (self._marks and self._marks[-1].place == (epoch, self._end)):
                state = copy.deepcopy(self._stateful.state_dict())
            else:
                state = None
            try:
                item = self._next(self._end)
            except DataError as error:
                self._error = error
                break
            if item is _END:
                self._has_ended = True
                break
            if state is not None:
                self._marks.append(_Mark(epoch, self._end, state, self.hashed(item)))
            self._items.append(item)
        if self._error is not None and len(self._items) <= size:
            raise self._error
        first = self.hashed(self._items[0]) if self._items else 0
        return Ahead(len(self._items), self._has_ended, first)

    def take(self, positions: Sequence[int]) -> list[Any]:
        """The items at ``positions``, which are held."""
        return [self._items[each - self._first] for each in positions]

    def capture(self) -> Any:
        """Where a source with states can go on; None without any."""
        if not self._marks:
            return None
        mark = self._marks[0]
        return [mark.epoch, mark.position, mark.state, mark.item]

    def restore(self, state: Any) -> None:
        """Let the source go on from ``state``, a result of ``capture`` on this or another rank."""
        self._marks = [_Mark(*state)] if state else []

    @property
    def _end(self) -> int:
        return self._first + len(self._items)

    def _go_to(self, epoch: int, start: int, *, is_open: bool) -> None:
        """Make the item at ``start`` the next that is read."""
        self._marks = [each for each in self._marks if each.place <= (epoch, start)]
        can_seek = self._takes_position or self._stateful is not None
        if is_open and not can_seek and start >= self._end:
            at = self._end
        elif is_open and self._is_once:
            raise DataError(
                f"the stream is an iterator, which can't go back from item {self._end} to item "
                f"{start}: pass a function that returns an iterator"
            )
        else:
            try:
                at = self._open(epoch, start)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise DataError(f"the stream can't be opened at item {start}: {reason}") from error
        self._items.clear()
        self._epoch, self._first, self._has_ended, self._error = epoch, start, False, None
        for position in range(at, start):
            if self._next(position) is _END:
                raise DataError(
                    f"the stream ends at item {position}, but {start} items were counted before: "
                    "it must give the same items again, in the same order"
                )

    def _open(self, epoch: int, start: int) -> int:
        """Begin the epoch, at ``start`` if the source can seek; returns the next item's
        position."""
        source, self._stateful = self._source, None
        if self._takes_position:
            self._reading = iter(source(start))
            return start
        if _has_state(source):
            source = copy.copy(source)  # another epoch begins with the source as it was
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        marks = [each for each in self._marks if each.epoch == epoch]
        if marks and _has_state(source):
            source.load_state_dict(copy.deepcopy(marks[-1].state))
        self._reading = iter(source() if self._is_function else source)
        self._stateful = source if _has_state(source) else None
        if self._stateful is None and _has_state(self._reading):
            self._stateful = self._reading
            if marks:
                self._stateful.load_state_dict(copy.deepcopy(marks[-1].state))
        if marks and self._stateful is not None:
            self._used = marks[-1]
            return self._used.position
        if start:
            self.tell(
                f"the stream can't seek, so its first {start} items are read and left out. If it "
                "does not give the same ones in the same order as before, items count more than "
                "once, or never. A function items(position) can seek, and what has state_dict "
                "and load_state_dict"
            )
        return 0

    def _next(self, position: int) -> Any:
        assert self._reading is not None
        try:
            item = next(self._reading, _END)
        except Exception as error:
            raise DataError(
                f"item {position} of the stream can't be read: {type(error).__name__}: {error}"
            ) from error
        mark, self._used = self._used, None
        if mark is not None and (item is _END or self.hashed(item) != mark.item):
            self.tell(
                f"the stream's state leads to another item than before at {position} (a shuffle "
                "buffer, for example, is in no state), so items may count more than once, or "
                "never. A function without arguments that returns the stream is read from its "
                "begin instead"
            )
        return item


def _has_state(found: Any) -> bool:
    return hasattr(found, "state_dict") and hasattr(found, "load_state_dict")


def _takes_position(function: Callable[..., Any]) -> bool:
    """Whether a function needs one argument, the position. TypeError if it needs more."""
    needed = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if len(needed) > 1:
        raise TypeError(
            f"a stream is a function without arguments, or of the position to begin from; "
            f"this one needs {', '.join(needed)}"
        )
    return bool(needed)
