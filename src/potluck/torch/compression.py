"""Compression of a DDP's gradients: which parameters, by which strategy, with which residuals."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from potluck.codecs.codec import Floats
from potluck.compressors import Strategy
from potluck.context.compressed import start_compressed
from potluck.torch.buckets import Bucket

if TYPE_CHECKING:
    from potluck.context import DistributedContext

_log = logging.getLogger(__name__)

Choice = Strategy | Callable[[str, Parameter], Strategy | None] | None
"""One strategy, or a function that chooses for each parameter; None: not compressed."""


class Compression:
    """What a Reducer knows about compression. Parameters are known by name, so residuals survive
    other buckets, checkpoints and other worlds.

    A *step* may have several backwards. ``begin`` starts a step that ``undo`` can take back: it
    returns the residuals to what they were. Without ``begin`` each backward is a step by itself.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        choice: Choice,
        *,
        error_feedback: bool,
        dense_below: int,
        warmup_steps: int,
    ) -> None:
        if dense_below < 0 or warmup_steps < 0:
            raise ValueError(
                f"dense_below is {dense_below} and warmup_steps {warmup_steps}; neither may be "
                "negative"
            )
        if not (choice is None or isinstance(choice, Strategy) or callable(choice)):
            raise TypeError(
                f"compression is {choice!r}; it must be a strategy such as TopK(0.01), or a "
                "function of a parameter's name and the parameter that returns one or None"
            )
        self.names = list(parameters)
        self.strategies = [
            None if p.numel() < dense_below else _chosen(choice, name, p)
            for name, p in parameters.items()
        ]
        """By parameter; None: not compressed."""
        self.num_nonfinite: Counter[str] = Counter()
        self._error_feedback = error_feedback
        self._warmup_steps = warmup_steps
        self._numels = [parameter.numel() for parameter in parameters.values()]
        self._buckets: tuple[Bucket, ...] = ()
        self._residuals: dict[int, Floats] = {}  # by bucket, of its gradients
        self._before: dict[int, Floats] = {}
        self._step = self._num_backwards = 0
        self._is_open = False

    def lay_out(self, buckets: tuple[Bucket, ...]) -> None:
        """Say which parameters are reduced together. Those of a bucket have one strategy."""
        self._buckets = buckets

    def strategy(self, number: int) -> Strategy | None:
        """The strategy of a bucket in this step; None: not compressed."""
        if self._step < self._warmup_steps:
            return None
        return self.strategies[self._buckets[number].parameters[0]]

    def begin(self, step: int) -> None:
        """Begin training step ``step``, equal on all ranks."""
        self._is_open = True
        self._step, self._num_backwards = step, 0
        self._before = {}

    def undo(self) -> None:
        """Return the residuals to those at the begin of the step."""
        # Other arrays, not other values: an operation that failed may still write to the old ones.
        self._residuals |= self._before
        self._before = {}

    def begin_backward(self) -> None:
        """Called before the first bucket of a backward."""
        if not self._is_open:
            self._before = {}

    def end_backward(self, *, failed: bool) -> None:
        """Called when all buckets of a backward are reduced, or when it has failed."""
        if not self._is_open and failed:
            self.undo()
        elif not self._is_open:
            self._step += 1
        else:
            self._num_backwards += 1

    def start(self, ctx: DistributedContext, number: int, host: Tensor) -> Callable[[], None]:
        """Start the sum of a bucket's flat gradients over all ranks; returns the function that
        waits for the result, which is then in ``host``, and notes what is not finite."""
        strategy = self.strategy(number)
        assert strategy is not None
        wide = host if host.dtype == torch.float32 else host.float()
        array: Floats = wide.numpy()
        call = self._step << 16 | self._num_backwards
        wait = start_compressed(ctx, array, strategy, self._residual(number), call)

        def finish() -> None:
            wait()
            if wide is not host:
                host.copy_(wide)
            with np.errstate(over="ignore", invalid="ignore"):
                is_finite = np.isfinite(array.sum())
            if not is_finite:
                self._count_nonfinite(number, array)

        return finish

    def capture(self) -> dict[str, Floats]:
        """The residuals by parameter name, copies."""
        return {
            name: self._residuals[number][part].copy()
            for number in self._residuals
            for name, part in self._parts(number)
        }

    def restore(self, states: Sequence[Mapping[str, Floats]]) -> None:
        """Set the residuals to the sum of ``states``, results of ``capture``.

        A residual is what a rank owes to the sum over all ranks, so those of several ranks add up,
        and any strategy with error feedback can pay it.
        """
        self._residuals, self._before = {}, {}
        if not self._error_feedback:
            return
        for number in range(len(self._buckets)):
            for name, part in self._parts(number):
                for state in states:
                    if name in state and self.strategies[self.names.index(name)]:
                        self._made(number)[part] += np.asarray(state[name])

    # ------------------------------------------------------------ inside

    def _residual(self, number: int) -> Floats | None:
        if not self._error_feedback:
            return None
        residual = self._made(number)
        if number not in self._before:
            self._before[number] = residual.copy()
        return residual

    def _made(self, number: int) -> Floats:
        if number not in self._residuals:
            self._residuals[number] = np.zeros(self._buckets[number].numel, np.float32)
        return self._residuals[number]

    def _parts(self, number: int) -> Iterator[tuple[str, slice]]:
        """The names of a bucket's parameters, and where each lies in the bucket."""
        bucket = self._buckets[number]
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            yield self.names[index], slice(offset, offset + self._numels[index])

    def _count_nonfinite(self, number: int, array: Floats) -> None:
        for name, part in self._parts(number):
            num = int(np.count_nonzero(~np.isfinite(array[part])))
            if num:
                self.num_nonfinite[name] += num
                _log.warning(
                    "the gradient of %s: %d of %d elements are inf or NaN at step %d, on a rank or "
                    "in the sum", name, num, array[part].size, self._step,
                )  # fmt: skip


def _chosen(choice: Choice, name: str, parameter: Parameter) -> Strategy | None:
    if choice is None or isinstance(choice, Strategy):
        return choice
    chosen = choice(name, parameter)
    if not (chosen is None or isinstance(chosen, Strategy)):
        raise TypeError(f"compression chose {chosen!r} for {name}; it must be a strategy or None")
    return chosen
