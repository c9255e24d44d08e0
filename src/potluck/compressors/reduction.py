"""What compression keeps from step to step, and the sums of one step over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from potluck.compressors.base import Array, Collectives, Compressor, Pending, Shape
from potluck.compressors.powersgd import LowRankSum

Sizes = Mapping[Any, int]
"""Numbers of elements by key: a name, or a parameter."""


class Residuals:
    """What compression has lost and not yet sent, by key, in flat arrays of several keys each.

    ``fork`` begins a trial: the result shares all arrays, and copies one before it is written to.
    So a step that does not count is taken back by dropping the fork, also while an operation that
    failed still writes to its arrays. Residuals are kept in units of ``scale``, and saved and
    loaded without it.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self.qs: dict[Any, Array] = {}
        """What sums of matrices have left for the next step, equal on all ranks."""
        self._flats: dict[Hashable, tuple[Sizes, Array]] = {}
        self._own: set[Hashable] = set()  # of these: not shared with another object
        self._loose: dict[Any, Array] = {}  # those of no flat array yet

    def fork(self) -> Residuals:
        """A copy that shares the arrays until it writes to them. This object must not be written to
        before the copy is dropped."""
        made = Residuals()
        made.scale, made.qs = self.scale, self.qs
        made._flats, made._loose = dict(self._flats), dict(self._loose)
        return made

    def rescale(self, scale: float) -> None:
        """Change the unit: a loss scale, with which gradients are multiplied."""
        if scale != self.scale:
            factor = scale / self.scale
            self._flats = {g: (sizes, each * factor) for g, (sizes, each) in self._flats.items()}
            self._loose = {key: each * factor for key, each in self._loose.items()}
            self._own = set(self._flats)
            self.scale = scale

    def flat(self, group: Hashable, sizes: Sizes, dtype: np.dtype[Any]) -> Array:
        """The residuals of the keys of ``sizes``, one after the other, to be changed in place.

        ``group`` names this array. The first call for a group collects what there is of its keys,
        also from other groups, which end with that; zeros stand for the rest.
        """
        if group not in self._flats:
            self._regroup(group, sizes, dtype)
        elif group not in self._own:
            self._flats[group] = (sizes, self._flats[group][1].copy())
        self._own.add(group)
        return self._flats[group][1]

    def _regroup(self, group: Hashable, sizes: Sizes, dtype: np.dtype[Any]) -> None:
        for other in [g for g, (known, _) in self._flats.items() if known.keys() & sizes.keys()]:
            self._loose |= dict(_parts(*self._flats.pop(other)))
        array = np.zeros(sum(sizes.values()), dtype)
        for key, part in _parts(sizes, array):
            if key in self._loose:
                part[:] = self._loose.pop(key)
        self._flats[group] = (sizes, array)

    def capture(self) -> dict[Any, Array]:
        """By key: flat copies, of gradients that are not scaled."""
        found = {key: each for flat in self._flats.values() for key, each in _parts(*flat)}
        return {key: each / self.scale for key, each in (found | self._loose).items()}

    def restore(self, states: Iterable[Mapping[Any, Any]], dtypes: Mapping[Any, Any]) -> set[Any]:
        """Set the residuals to the sum of ``states``, results of ``capture``, for the keys of
        ``dtypes``. Returns the keys that have one now; others are dropped.

        A residual is what a rank owes to the sum over all ranks, so those of several ranks add up,
        and any compressor with error feedback can pay it. The caller checks that arrays of one key
        have one number of elements.
        """
        self._flats, self._own, self._loose = {}, set(), {}
        for state in states:
            for key in state.keys() & dtypes.keys():
                owed = np.asarray(state[key]).reshape(-1)
                kept = self._loose.setdefault(key, np.zeros(owed.size, dtypes[key]))
                kept += owed * self.scale
        return set(self._loose)


@dataclass(eq=False, repr=False)
class Sums:
    """The sums over all ranks of what one step has made, an array at a time.

    A compressor that needs matrices gets those of all arrays at the ``end``; others start at once.
    With ``error_feedback`` what an array has lost before is added to it.
    ``numbered``: a matrix draws its first random numbers by its place in the step, not by its key.
    """

    comm: Collectives
    residuals: Residuals
    step: int
    _: KW_ONLY
    error_feedback: bool
    numbered: bool = False

    def __post_init__(self) -> None:
        self._matrices: dict[tuple[Compressor, np.dtype[Any]], LowRankSum] = {}
        self._ends: list[Callable[[], object]] = []

    def start(
        self,
        compressor: Compressor,
        array: Array,
        group: Hashable,
        shapes: Mapping[Any, Shape],
        call: int,
        finish: Callable[[], object],
    ) -> Pending | None:
        """Start the sum of a flat ``array``, in place, with the tensors of ``shapes`` one after the
        other, whose residuals are those of ``group``; ``call`` is the number of this call in the
        training. ``finish()``, called when the sum is there, gives the result. None if the ``end``
        sums it."""
        residual = None
        if self.error_feedback:
            sizes = {key: math.prod(shape) for key, shape in shapes.items()}
            residual = self.residuals.flat(group, sizes, array.dtype)
        if not compressor.needs_matrices:
            return compressor.exchange(self.comm, array, residual, call).then(lambda _: finish())
        if residual is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                residual += array
        key = compressor, array.dtype
        if key not in self._matrices:
            self._matrices[key] = compressor.matrices(self.residuals.qs, self.step)
        self._matrices[key].add_all(array, residual, shapes, numbered=self.numbered)
        self._ends.append(finish)
        return None

    def end(self) -> Callable[[], None] | None:
        """Start the sums of matrices, if there are any; returns the function that waits for them.

        Cost: two all_reduces for each compressor and dtype, the second while the residuals are
        computed. Ranks must wait in the same place of their order of calls, where the second
        starts.
        """
        every = list(self._matrices.values())
        first = [self.comm.all_reduce(each.begin()) for each in every]

        def finish() -> None:
            second = []
            for each, pending in zip(every, first, strict=True):
                pending.wait()
                second.append(self.comm.all_reduce(each.turn()))
            for each in every:
                each.lose_all()
            for pending in second:
                pending.wait()
            for each in every:
                self.residuals.qs = self.residuals.qs | each.qs()
                each.decode_all(self.comm)
            for follow in self._ends:
                follow()

        return finish if every else None


def _parts(sizes: Sizes, array: Array) -> Sequence[tuple[Any, Array]]:
    """By key, the views of a flat array."""
    found, at = [], 0
    for key, size in sizes.items():
        found.append((key, array[at : at + size]))
        at += size
    return found
