"""The metrics that a script reports by itself: named numbers with labels, checked by Prometheus'
rules.

Prometheus, "Metric names and labels" (the data model), names and labels as in its text format.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

_log = logging.getLogger(__name__)

MAX_SERIES = 1000
"""Of one context. A scrape carries all of them."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,99}")
_MAX_TEXT = 200
_OWN = "potluck_"

Labels = tuple[tuple[str, str], ...]


class Reported:
    """The newest value of each series: a name with the values of its labels. Not thread-safe.

    Beyond ``MAX_SERIES`` the series that was reported longest ago is dropped, with one warning: a
    training must not end because of a label that counts its epochs.
    """

    def __init__(self, own_labels: Mapping[str, str]) -> None:
        self._own_labels = frozenset(own_labels)
        self._values: dict[tuple[str, Labels], float] = {}
        self._has_warned = False

    def set(self, name: Any, value: Any, labels: Mapping[str, Any] | None) -> None:
        """Set a series. TypeError or ValueError for a name, a value or labels that are none."""
        number, texts = _number(name, value), self._labels(name, labels or {})
        names = [label for label, _ in texts]
        before = [label for label, _ in next((ls for n, ls in self._values if n == name), texts)]
        if before != names:
            raise ValueError(
                f"{name} has the labels {names}, and had {before} before: all series of a name "
                "have the same"
            )
        self._values.pop(key := (name, texts), None)  # it is the newest from now on
        self._values[key] = number
        if len(self._values) > MAX_SERIES:
            oldest = next(iter(self._values))
            del self._values[oldest]
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "more than %d series were reported: the oldest ones are dropped, first of %s. "
                    "A label is for a few values (a phase, a layer), not for one that rises",
                    *(MAX_SERIES, oldest[0]),
                )

    def copy(self) -> dict[tuple[str, Labels], float]:
        """The values by name and labels."""
        return dict(self._values)

    def _labels(self, name: str, labels: Any) -> Labels:
        if not isinstance(labels, Mapping):
            raise TypeError(f"the labels of {name} are a dict of names to values, not {labels!r}")
        for label, value in labels.items():
            if not isinstance(label, str) or not _LABEL.fullmatch(label):
                raise ValueError(
                    f"{label!r} can't be the name of a label of {name}: letters, digits and _, no "
                    "digit and no __ at first"
                )
            if label in self._own_labels:
                raise ValueError(f"the label {label!r} of {name} is potluck's own: choose another")
            if not isinstance(value, str | Real):
                raise TypeError(f"label {label!r} of {name} is {value!r:.60}: a text or a number")
        return tuple((label, str(labels[label])[:_MAX_TEXT]) for label in sorted(labels))


def _number(name: Any, value: Any) -> float:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r:.80} can't be the name of a metric: letters, digits, _ and :, no digit at "
            "first, such as training_loss"
        )
    if name.startswith(_OWN):
        raise ValueError(f"{name}: names that begin with {_OWN} are its own metrics'")
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        value = getattr(value, "detach", lambda: value)()  # a loss in torch's graph
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"the value of {name} is {value!r:.60}; it must be a number") from None
