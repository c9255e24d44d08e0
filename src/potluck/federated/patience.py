"""How long a round waits for its clients: enough of them, or a deadline. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from potluck._core.checks import checked_seconds

_WINDOW = 256
_LATE = 2.0
_EXCHANGE = 0.25
_LEAST_MAD = 0.1
_NONE = object()


@dataclass(frozen=True, slots=True)
class Patience:
    """When a round begins, when it ends, and what follows if too few clients have answered.

    A round begins when ``min_clients`` are there, or after ``start_s`` seconds. It ends when
    ``wait_for`` of the asked clients have answered (a fraction, or a number of clients as int; the
    other answers are dropped), when no answer is outstanding, or at its deadline. If fewer than
    ``min_updates`` (default: half of the asked clients) have come, the parameters stay as they are:
    with ``too_few="skip"`` the next round begins, with ``"stop"`` FederationError ends the run.

    ``deadline`` is in seconds from the start of the round. ``"adaptive"``: median + ``spread``
    times the median absolute deviation of the last 256 answer times, where a client that missed
    its deadline counts with twice that deadline; the deviation counts with at least a tenth of the
    median, and the deadline is at least ``least_s``, as Wi-Fi may stop for seconds. Until a first
    client has answered it is ``first_deadline_s``. With secure aggregation each of the two
    exchanges before the training has a quarter of the deadline at most, and the exchange after it,
    when the masks are opened, a quarter more.
    """

    min_clients: int = 2
    wait_for: float | int = 1.0
    deadline: float | Literal["adaptive"] = "adaptive"
    too_few: Literal["skip", "stop"] = "skip"
    min_updates: int | None = None
    start_s: float = 60.0
    first_deadline_s: float = 600.0
    least_s: float = 5.0
    spread: float = 5.0

    def __post_init__(self) -> None:
        if self.min_clients < 1:
            raise ValueError(f"min_clients is {self.min_clients}; 1 or more are needed")
        if self.min_updates is not None and self.min_updates < 1:
            raise ValueError(f"min_updates is {self.min_updates}; 1 or more are needed")
        is_number = isinstance(self.wait_for, int) and not isinstance(self.wait_for, bool)
        if not (self.wait_for >= 1 if is_number else 0 < self.wait_for <= 1):
            raise ValueError(
                f"wait_for is {self.wait_for!r}; it is a fraction of the asked clients, above 0 "
                "and at most 1.0, or a number of clients as int"
            )
        for name in ("start_s", "first_deadline_s", "least_s", "deadline"):
            if not isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, checked_seconds(given, name, at_least=0))
        if self.deadline != "adaptive" and not (
            isinstance(self.deadline, int | float) and 0 < self.deadline < math.inf
        ):
            raise ValueError(f"deadline is {self.deadline!r}; seconds or 'adaptive' are needed")
        if self.too_few not in ("skip", "stop"):
            raise ValueError(f"too_few is {self.too_few!r}; it is 'skip' or 'stop'")
        for name in ("start_s", "first_deadline_s", "least_s", "spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}; a finite number is needed")

    def enough(self, num_asked: int) -> int:
        """After how many answers a round of ``num_asked`` clients ends."""
        if isinstance(self.wait_for, int):
            return min(self.wait_for, num_asked)
        return math.ceil(self.wait_for * num_asked - 1e-9)

    def fewest(self, num_asked: int, least: int = 1) -> int:
        """How many answers a round of ``num_asked`` clients needs, at least ``least``."""
        half = math.ceil(num_asked / 2)
        return max(1, half if self.min_updates is None else self.min_updates, least)


class Deadlines:
    """The deadlines of a run's rounds, from the answer times so far."""

    def __init__(self, patience: Patience, *, is_fixed: bool = False) -> None:
        """``is_fixed``: an adaptive deadline stays the first one, whatever the times."""
        self._patience = patience
        self._is_fixed = is_fixed
        self.seconds: deque[float] = deque(maxlen=_WINDOW)
        """The last answer times."""

    def next_s(self) -> float:
        """The next round's deadline, in seconds from its start."""
        patience = self._patience
        if patience.deadline != "adaptive":
            return float(patience.deadline)
        if not self.seconds or self._is_fixed:
            return patience.first_deadline_s
        median = statistics.median(self.seconds)
        deviation = statistics.median(abs(each - median) for each in self.seconds)
        margin = patience.spread * max(deviation, _LEAST_MAD * median)
        return max(patience.least_s, median + margin)

    def note(self, seconds: Iterable[float], num_late: int, deadline_s: float) -> None:
        """Add a round: the answer times of its clients, and how many missed ``deadline_s``."""
        self.seconds.extend(seconds)
        self.seconds.extend([_LATE * deadline_s] * num_late)


def exchange_s(phase: str, deadline_s: float, elapsed_s: float) -> float:
    """The deadline in seconds of an exchange of secure aggregation, ``elapsed_s`` after the start
    of a round with ``deadline_s``; its ``phase`` is ``"before"``, ``"training"`` or ``"after"``."""
    if phase == "training":
        return max(0.0, deadline_s - elapsed_s)
    return _EXCHANGE * deadline_s


class Gathering:
    """The answers of several clients to one call; ``enough`` of them end it.

    ``answers`` are in the order of ``asked``; ``missing`` is the reason of each other client;
    ``times`` are the seconds until each answer; ``num_late`` clients missed the deadline.
    """

    def __init__(self, asked: Iterable[str], enough: int) -> None:
        self.missing: dict[str, str] = {}
        self.times: list[float] = []
        self.num_late = 0
        self._enough = enough
        self._outstanding = dict.fromkeys(asked)
        self._answers: dict[str, Any] = dict.fromkeys(self._outstanding, _NONE)

    @property
    def answers(self) -> dict[str, Any]:
        return {client: each for client, each in self._answers.items() if each is not _NONE}

    @property
    def is_enough(self) -> bool:
        return len(self.times) >= self._enough

    @property
    def is_over(self) -> bool:
        """Whether nothing is gained by waiting on."""
        return not self._outstanding or self.is_enough

    def answered(self, client: str, answer: Any, seconds: float, reason: str = "") -> None:
        """``client`` has answered after ``seconds``, or can't for this ``reason``. The answer of an
        unknown client does not count, nor does a second one."""
        if client not in self._outstanding:
            return
        del self._outstanding[client]
        if reason:
            self.missing[client] = reason
        else:
            self._answers[client] = answer
            self.times.append(seconds)

    def end(self, deadline_s: float) -> None:
        """Stop waiting: the outstanding clients are missing."""
        reason = "enough others came first"
        if not self.is_enough:
            reason = f"no answer within {deadline_s:.1f} s"
            self.num_late = len(self._outstanding)
        self.missing |= dict.fromkeys(self._outstanding, reason)
        self._outstanding.clear()
