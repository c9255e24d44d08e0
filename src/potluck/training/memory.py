"""Memory as a resource of a training: what does not fit, and what follows. Pure.

A rank that runs out of memory in a step computes fewer samples at once from then on: its *cap*. The
step is run again by the protocol of a lost worker, in a group of the same members, which learn the
caps of all ranks when it forms. Each repeat lowers a cap, so there are at most as many as that
takes: a cap is halved, or becomes the largest number that has fitted.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field

from potluck.training.sampler import Share

_TEXTS = (
    "can't allocate memory",  # torch on a CPU, of Linux; and torch on Windows:
    "not enough memory",
    "out of memory",  # CUDA, MPS, MLX
    "bad_alloc",
    "alloc_failed",  # cuBLAS and cuDNN
    "resource_exhausted",  # XLA
)
"""Parts of the texts of RuntimeErrors, in lower case."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, says that no memory was left: a MemoryError,
    torch.OutOfMemoryError, or a RuntimeError of torch, XLA or MLX that says so."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError):
            return True
        text = str(current).lower()
        if isinstance(current, RuntimeError) and any(part in text for part in _TEXTS):
            return True
        current = current.__cause__
    return False


def in_words(num_samples: int) -> str:
    """``1 sample``, ``12 samples``."""
    return f"{num_samples} sample{'' if num_samples == 1 else 's'}"


def release(error: BaseException) -> None:
    """Clear the variables of the calls that ended with ``error``, and with what it was raised
    from: they hold what was computed until then."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__context__


@dataclass(slots=True)
class Cap:
    """How many samples this rank computes at once: at most ``most``, 0 while there is no bound.
    ``fitted`` is the largest number with which a step was committed since memory last ran out."""

    most: int = 0
    fitted: int = 0

    def fits(self, num_samples: int) -> None:
        """A step was committed in which so many were computed at once."""
        self.fitted = max(self.fitted, num_samples)

    def ran_out(self, num_samples: int, predicted: int = 0) -> bool:
        """Lower the cap, as so many samples at once did not fit, to what is ``predicted`` to fit
        (0: that is unknown). False if one is too many."""
        if num_samples < 2:
            return False
        half = max(1, num_samples // 2)
        if 0 < predicted < num_samples:
            self.most = predicted
        else:
            self.most = max(half, self.fitted) if self.fitted < num_samples else half
        self.fitted = 0
        return True


@dataclass(slots=True)
class Parts:
    """The parts in which a rank computes its ``share`` of a step, one after the other, and what is
    known of their losses and metrics. A step of most ranks has one."""

    share: Share
    most: int = 0
    ok: bool = True
    number: int = -1
    parts: list[Share] = field(init=False)
    evaluated: list[dict[str, float]] = field(default_factory=list)
    """The results of evaluations in the first part, in their order."""
    _num_again: int = 0
    _figures: dict[str, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = self.share.parts(self.most)

    def __iter__(self) -> Iterator[Share]:
        for number, part in enumerate(self.parts):
            self.number, self._num_again = number, 0
            yield part

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == len(self.parts) - 1

    @property
    def at_once(self) -> int:
        """The samples of the largest part."""
        return max(len(part.indices) for part in self.parts)

    def evaluated_again(self) -> dict[str, float]:
        """What the evaluation returned that was called at the same place of the first part."""
        self._num_again += 1
        return self.evaluated[self._num_again - 1]

    def mean(self, name: str, value: float) -> float:
        """The mean of the figure ``name`` over the samples of the parts so far, of which the
        present one has ``value``; NaN is left out."""
        values = self._figures.setdefault(name, {})
        values[self.number] = value
        if len(self.parts) == 1:
            return value
        known = [
            (len(self.parts[number].indices), each)
            for number, each in values.items()
            if not math.isnan(each)
        ]
        total = sum(num for num, _ in known)
        return math.fsum(num * each for num, each in known) / total if total else math.nan
