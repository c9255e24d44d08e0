"""``Uncopied``: objects that neither copy nor pickle, and say what to take instead.

A group's links, threads and hooks belong to one object in one process. Without this base class a
copy would fail in the middle, on a lock ("cannot pickle '_thread.RLock' object"), or would lack
half of what it needs.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex


class Uncopied:
    """A base class. ``copy.copy``, ``copy.deepcopy`` and pickle of an instance raise TypeError,
    which says what to do: ``take_instead``."""

    take_instead: ClassVar[str]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        article = "an" if kind[0] in "AEIOU" else "a"
        raise TypeError(f"{article} {kind} can't be copied or pickled: {self.take_instead}")
