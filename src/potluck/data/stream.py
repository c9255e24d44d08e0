"""``Stream``: reads items from a source without a length, and goes to a counted position of it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from itertools import islice
from typing import Any

from potluck.errors import DataError

_END = object()


class Stream:
    """The items of ``source``, by epoch and position. Every rank reads the same stream, and holds
    all items of the next steps, also those of other ranks: so a step can be dealt anew after a
    loss.

    A source is one of these:

    * an iterable, such as a torch ``IterableDataset``, or a function without arguments that returns
      one: each iteration is an epoch;
    * a function ``items(position)`` that returns the items from that position on. It can *seek*;
    * an iterable with ``state_dict`` and ``load_state_dict``, such as the streams of Hugging Face
      ``datasets``. It can seek to where a state was taken;
    * an iterator, such as a generator. It is read once and can't begin again.

    A source with ``set_epoch`` is told its epoch, from 0. If a source can't seek to a position, the
    items before it are read and left out, and ``tell`` is called with a text that says so.
    ``ahead`` is the number of batches that are held beyond the next.
    """

    def __init__(self, source: Any, *, ahead: int = 1) -> None:
        self.ahead = ahead
        self.tell: Callable[[str], None] = lambda text: None
        self._source = source
        self._has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._is_once = hasattr(source, "__next__") and not self._has_state
        self._opened: Any = None  # the source, or the copy of it that is read
        self._reading: Iterator[Any] | None = None
        self._epoch, self._first = 0, 0
        self._items: deque[Any] = deque()  # from position _first on
        self._has_ended = False
        self._marks: list[tuple[int, int, Any]] = []  # epoch, position, the source's state there

    def expect(self, epoch: int, start: int, size: int) -> tuple[int, bool]:
        """Hold the items of the next batch of ``size``, from position ``start``, and of the batches
        ahead; forget those before. Returns how many there are, and whether no item of the epoch
        follows them. DataError if there are none, or the source raises."""
        is_open = self._reading is not None and epoch == self._epoch
        if not is_open or not self._first <= start <= self._end:
            self._go_to(epoch, start)
        for _ in range(start - self._first):
            self._items.popleft()
        self._first = start
        while len(self._marks) > 1 and self._marks[1][:2] <= (epoch, start):
            self._marks.pop(0)
        # One item more than the batches, to know whether the last of them ends the epoch.
        while len(self._items) <= (1 + self.ahead) * size and not self._has_ended:
            if self._has_state and self._items and len(self._items) % size == 0:
                state = copy.deepcopy(self._opened.state_dict())
                self._marks.append((epoch, self._end, state))
            item = self._next()
            if item is _END:
                self._has_ended = True
            else:
                self._items.append(item)
        if not self._items:
            raise DataError(
                f"the stream has no item {start} in epoch {epoch}: it is empty, has fewer items "
                "than before, or is an iterator, which can't begin again (pass a function that "
                "returns an iterator, or epochs=1)"
            )
        return len(self._items), self._has_ended

    def take(self, positions: Sequence[int]) -> list[Any]:
        """The items at ``positions``, which are held."""
        return [self._items[each - self._first] for each in positions]

    def capture(self) -> Any:
        """Where a source with states can go on: the epoch, the position, the state there."""
        return list(self._marks[0]) if self._marks else None

    def restore(self, state: Any) -> None:
        """Let the source go on from ``state``, a result of ``capture`` on this or another rank."""
        self._marks = [(state[0], state[1], state[2])] if state and self._has_state else []

    @property
    def _end(self) -> int:
        return self._first + len(self._items)

    def _go_to(self, epoch: int, start: int) -> None:
        """Make the item at ``start`` the next that is read."""
        at = self._end if self._is_once and epoch == self._epoch else 0
        self._marks = [each for each in self._marks if each[:2] <= (epoch, start)]
        self._reading = self._items_from(epoch, start, at)
        self._items.clear()
        self._epoch, self._first, self._has_ended = epoch, start, False

    def _next(self) -> Any:
        assert self._reading is not None
        try:
            return next(self._reading, _END)
        except Exception as error:
            self._reading = None
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"item {self._end} of the stream can't be read: {reason}") from error

    def _items_from(self, epoch: int, start: int, at: int) -> Iterator[Any]:
        """The items from ``start`` on. ``at`` is the next one of an iterator."""
        # Another epoch begins with the source as it was.
        source = self._opened = copy.copy(self._source) if self._has_state else self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        if self._marks and self._marks[-1][0] == epoch:
            _, at, state = self._marks[-1]
            source.load_state_dict(copy.deepcopy(state))
        if hasattr(source, "__iter__"):
            items = source
        elif any(each.default is each.empty for each in signature(source).parameters.values()):
            items, at = source(start), start
        else:
            items = source()
        if at > start:
            raise ValueError("it is an iterator at a later item: pass a function that returns one")
        if start and not at:
            self.tell(
                f"the stream can't seek, so its first {start} items are read and left out. If it "
                "does not give the same ones in the same order as before, items count more than "
                "once, or never. A function items(position) can seek, and what has state_dict "
                "and load_state_dict"
            )
        yield from islice(items, start - at, None)
