"""Compression of a DDP's gradients: which parameters, by which compressor, with which residuals."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from potluck._core.codecs.codec import LARGEST
from potluck._core.context.compressed import OverContext
from potluck._core.context.structure import compare
from potluck.compressors import Compressor
from potluck.compressors.base import Array, text_of
from potluck.compressors.encoded import checked
from potluck.compressors.reduction import Residuals, Sums
from potluck.errors import CheckpointError
from potluck.torch.encoding import Encoder
from potluck.training.buckets import Bucket

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

Choice = Compressor | Callable[[str, Any], Compressor | None] | None
"""One compressor, or a function that chooses for each parameter; None: not compressed."""

Parts = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns the names and gradients of the parameters in a flat array."""

_JUST_BELOW = 1 - 2.0**-20
TORCH_DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


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
        if choice is not None:
            check_choice("compression", choice)
        self.names = list(parameters)
        self.compressors = [
            None if p.numel() < dense_below else chosen(choice, name, p)
            for name, p in parameters.items()
        ]
        """By parameter; None: not compressed."""
        self.residuals = Residuals()
        self._before = self.residuals
        """What ``undo`` returns to."""
        self.is_beside = False
        """Whether buckets of this backward are encoded by the ``encoder``."""
        self.encoder = Encoder()
        """Runs ``start`` beside backward, where the CPU encodes."""
        self._watch = Watch("sum")
        self._error_feedback = error_feedback
        self._warmup_steps = warmup_steps
        self._agreed_in = -1  # the epoch of the group in which all ranks compress alike
        self._shapes = [tuple(parameter.shape) for parameter in parameters.values()]
        self._is_double = [p.dtype == torch.float64 for p in parameters.values()]
        self._buckets: tuple[Bucket, ...] = ()
        self._now: list[Compressor | None] = []  # by bucket, in this backward
        self._sums: Sums | None = None  # of this backward
        self._scale = 1.0
        self._step = self._num_backwards = 0
        self._is_open = self._is_in_backward = False

    @property
    def num_nonfinite(self) -> Counter[str]:
        """By parameter: how many elements were inf, NaN or beyond the range."""
        return self._watch.num_nonfinite

    def lay_out(self, buckets: tuple[Bucket, ...]) -> None:
        """Say which parameters are reduced together. Those of a bucket have one compressor."""
        self._buckets = buckets

    def compressor(self, number: int) -> Compressor | None:
        """The compressor of a bucket in this step; None: not compressed."""
        compressor = self.compressors[self._buckets[number].parameters[0]]
        if compressor is None or self._step < max(self._warmup_steps, compressor.start_step):
            return None
        return compressor

    def is_compressed(self, number: int) -> bool:
        """Whether a bucket is compressed in this backward."""
        return self._now[number] is not None

    @property
    def scale(self) -> float:
        """What gradients, and thus residuals, are multiplied with: the loss scale."""
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scale = scale
        self._watch.is_scaled = scale != 1
        self.residuals.rescale(scale)

    def agree(self, ctx: DistributedContext) -> None:
        """Compare how ranks compress, once in each group. Desync on all ranks if it differs:
        unlike seeds or error feedback would give wrong sums of payloads that fit. A collective
        call; a rank that compresses nothing does not make it, for its calls differ then."""
        if ctx.epoch == self._agreed_in:
            return
        items = {
            name: "not compressed" if each is None else text_of(each)
            for name, each in zip(self.names, self.compressors, strict=True)
        }
        items |= {
            "error_feedback": str(self._error_feedback),
            "warmup_steps": str(self._warmup_steps),
        }
        remedy = (
            "pass the same compression, error_feedback, dense_below and warmup_steps on all ranks"
        )
        compare(ctx, "the compression of gradients", items, remedy, operation="backward")
        self._agreed_in = ctx.epoch

    def begin(self, step: int) -> None:
        """Begin training step ``step``, equal on all ranks."""
        self._is_open = True
        self._step, self._num_backwards = step, 0
        self._keep()

    def undo(self) -> None:
        """Return the residuals, and what matrices have left, to those at the begin of the step."""
        self.encoder.drop()
        # Other arrays, not other values: an operation that failed may still write to the old ones.
        self.residuals = self._before.fork()
        self.residuals.rescale(self._scale)

    def _keep(self) -> None:
        self._before = self.residuals
        self.residuals = self._before.fork()

    def begin_backward(self, ctx: DistributedContext) -> None:
        """Called before the first bucket of a backward."""
        if self._is_in_backward and not self._is_open:
            self.undo()  # the last one has raised, and its gradients were not reduced
        self._is_in_backward = True
        if not self._is_open:
            self._keep()
        self._sums = Sums(
            *(OverContext(ctx), self.residuals, self._step), error_feedback=self._error_feedback
        )
        self._now = [self.compressor(number) for number in range(len(self._buckets))]
        self.is_beside = any(each is not None and each.encodes_first for each in self._now)

    def end_backward(self, *, failed: bool) -> None:
        """Called when all buckets of a backward are reduced, or when it has failed."""
        with contextlib.suppress(Exception):  # of what is undone below
            # Not dropped: ranks of unlike speed that meet one error would have made unlike calls.
            self.encoder.drain()
        self._sums = None
        self._is_in_backward = False
        if not self._is_open and failed:
            self.undo()
        elif not self._is_open:
            self._step += 1
        else:
            self._num_backwards += 1

    def watch(self, number: int, host: Tensor) -> None:
        """Count what is inf, NaN or beyond the range in this rank's flat gradients of a bucket:
        before they are compressed, for a block of a coded sum has the NaN of any element."""
        parts = self._parts(number, host)
        self._watch.own(number, host, parts, self._now[number], self._step)

    def watch_alone(self, gradients: Mapping[int, Tensor | None]) -> None:
        """The same, by parameter, for a rank alone, which compresses nothing."""
        for index, gradient in gradients.items():
            if gradient is not None and gradient.layout == torch.strided:
                parts = lambda i=index, g=gradient: [(self.names[i], g)]  # noqa: E731
                self._watch.own(index, gradient, parts, None, self._step)

    def start(self, number: int, host: Tensor) -> Callable[[], object]:
        """Start the sum of a bucket's flat gradients over all ranks; returns the function that
        waits for the result, which is then in ``host``, and notes what is not finite. Of a
        compressor that needs matrices the function of ``end`` does."""
        compressor, bucket = self._now[number], self._buckets[number]
        assert compressor is not None
        assert self._sums is not None
        wide = widened(host, compressor)
        shapes = {self.names[index]: self._shapes[index] for index in bucket.parameters}

        def finish() -> None:
            parts = self._parts(number, wide)
            self._watch.reduced(number, host, wide, parts, compressor, self._step)

        call = self._step << 16 | self._num_backwards
        pending = self._sums.start(compressor, wide.numpy(), number, shapes, call, finish)
        return (lambda: None) if pending is None else pending.wait

    def end(self) -> Callable[[], None] | None:
        """Start the sums of matrices of all buckets that ``start`` was called for; returns the
        function that waits, as that of ``start``, or None if there is nothing to sum."""
        assert self._sums is not None
        sums, self._sums = self._sums, None  # which refers to this object
        return sums.end()

    def capture(self) -> dict[str, Array]:
        """The residuals by parameter name, copies; of gradients that are not scaled."""
        return self.residuals.capture()

    def capture_shared(self) -> dict[str, Array]:
        """What is equal on all ranks: PowerSGD's Q by parameter name, copies."""
        return {name: each.copy() for name, each in self.residuals.qs.items()}

    def restore_shared(self, state: Mapping[str, Any]) -> None:
        """Set what is equal on all ranks. A Q of another rank or shape is ignored: its parameter
        starts from random numbers again."""
        self.residuals.qs = {n: np.array(each) for n, each in state.items() if n in self.names}
        self._keep()

    def restore(self, states: Sequence[Mapping[str, Array]]) -> set[str]:
        """Set the residuals to the sum of ``states``, results of ``capture``. Returns the names of
        the parameters that have one now; what others owed is dropped. CheckpointError for one of
        another shape."""
        dtypes = {}
        for place, (name, compressor) in enumerate(zip(self.names, self.compressors, strict=True)):
            if compressor is not None and self._error_feedback:
                dtypes[name] = compressor.sum_dtype(is_double=self._is_double[place])
                size = math.prod(self._shapes[place])
                check_sizes(name, size, states)
        kept = self.residuals.restore(states, dtypes)
        self._keep()
        return kept

    def _parts(self, number: int, flat: Tensor) -> Parts:
        """A function that returns the names and gradients of a bucket's parameters."""
        bucket = self._buckets[number]

        def parts() -> Iterator[tuple[str, Tensor]]:
            for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                yield self.names[index], flat[offset : offset + math.prod(self._shapes[index])]

        return parts


class Watch:
    """Counts and reports what is inf, NaN or beyond the range in gradients, by parameter: in a
    rank's own, and in their ``total``, a sum or mean, where its own were within the range.

    ``is_scaled``: there is a loss scale. Then what is beyond the range becomes inf, by which
    scalers know that the scale is too large.
    """

    def __init__(self, total: str) -> None:
        self.num_nonfinite: Counter[str] = Counter()
        self.is_scaled = False
        self._total = total
        self._with_nonfinite: set[Hashable] = set()

    def own(
        self, key: Hashable, flat: Tensor, parts: Parts, compressor: Compressor | None, step: int
    ) -> None:
        """Look at this rank's own gradients, called ``key`` in this step."""
        self._with_nonfinite.discard(key)
        limit = math.inf if compressor is None else compressor.limit
        if not is_within(flat, limit):
            if self._count(parts, limit, step, "on this rank"):
                self._with_nonfinite.add(key)
            self._show_beyond(flat, limit)

    def reduced(
        self,
        key: Hashable,
        flat: Tensor,
        wide: Tensor,
        parts: Parts,
        compressor: Compressor,
        step: int,
    ) -> None:
        """Put the reduced gradients ``wide``, of which ``parts`` are the parameters', into
        ``flat``, saturated, and look at them."""
        # Just below the largest number, for integers decode to its rounding.
        limit = compressor.largest * _JUST_BELOW
        if flat.dtype != wide.dtype:
            limit = min(limit, torch.finfo(flat.dtype).max * _JUST_BELOW)
        copy_saturated(flat, wide)
        if not is_within(wide, limit):
            if key not in self._with_nonfinite:
                self._count(parts, limit, step, f"in the {self._total} over the ranks")
            self._show_beyond(flat, limit)

    def _show_beyond(self, flat: Tensor, limit: float) -> None:
        if self.is_scaled and limit < math.inf:
            infinite = torch.full_like(flat, math.inf).copysign_(flat)
            flat.copy_(torch.where(flat.abs() >= limit, infinite, flat))

    def _count(self, parts: Parts, limit: float, step: int, where: str) -> bool:
        """Whether a magnitude is NaN or at least ``limit``: a sum of smaller ones may be."""
        found = False
        for name, gradient in parts():
            num, what = num_beyond(gradient, limit)
            if num:
                found = True
                self.num_nonfinite[name] += num
                _log.warning(
                    "the gradient of %s: %d of %d elements are %s at step %d, %s",
                    *(name, num, gradient.numel(), what, step, where),
                )
        return found


def widened(flat: Tensor, compressor: Compressor) -> Tensor:
    """``flat`` on the host, in the dtype in which ``compressor`` sums: itself where it is that."""
    dtype = compressor.sum_dtype(is_double=flat.dtype == torch.float64)
    return flat.to("cpu", TORCH_DTYPES[dtype])


def is_within(flat: Tensor, limit: float) -> bool:
    """Whether all magnitudes are below ``limit``, and none is NaN. May be False for others."""
    if limit >= min(LARGEST, torch.finfo(flat.dtype).max):
        return bool(flat.sum().isfinite())  # the cheaper test
    return not flat.numel() or bool(flat.abs().max() < limit)


def num_beyond(flat: Tensor, limit: float) -> tuple[int, str]:
    """How many elements are inf, NaN or of a magnitude of at least ``limit``, and which of that."""
    is_bad = flat.isfinite().logical_not()
    what = "inf or NaN" if is_bad.any() else "beyond the range of the codec"
    if limit <= torch.finfo(flat.dtype).max:  # else no number of this dtype reaches it
        is_bad.logical_or_(flat.abs() >= limit)
    return int(is_bad.sum()), what


def copy_saturated(target: Tensor, source: Tensor) -> Tensor:
    """``target`` with the values of ``source``: where these are finite and beyond its dtype, with
    the largest number of that."""
    if target.dtype == source.dtype:
        return target.copy_(source)
    most = min(torch.finfo(target.dtype).max, torch.finfo(source.dtype).max)
    return target.copy_(torch.where(source.isfinite(), source.clamp(-most, most), source))


def tell_dropped(residuals: Iterable[Mapping[str, Any]], kept: Collection[str]) -> None:
    """Warn of the parameters of which something is owed in ``residuals`` that are not ``kept``."""
    owed = {name for each in residuals for name, value in each.items() if (value != 0).any()}
    if dropped := sorted(owed - set(kept)):
        _log.warning(
            "the saved residuals of %s are dropped: no error feedback keeps them",
            f"{dropped[0]} and {len(dropped) - 1} others" if dropped[1:] else dropped[0],
        )


def check_sizes(name: str, size: int, states: Iterable[Mapping[str, Any]]) -> None:
    """CheckpointError for a residual of a parameter that has another number of elements."""
    for state in states:
        if name in state and state[name].shape != (size,):
            raise CheckpointError(
                f"the state has a residual {name!r} of {state[name].size} elements, this model's "
                f"parameter has {size}: it is of another model"
            )


def check_choice(what: str, choice: Any) -> None:
    """TypeError for what is neither a compressor nor a function that chooses one."""
    if isinstance(choice, type) or not callable(choice):  # a class is callable with other arguments
        also = ", or a function of a parameter's name and the parameter that returns one or None"
        checked(choice, f"{what} is {choice!r}", also)


def chosen(choice: Choice, name: str, parameter: Tensor) -> Compressor | None:
    """The compressor of a parameter, None where it does not apply; TypeError for what is none."""
    made = choice(name, parameter) if callable(choice) else choice
    if made is None:
        return None
    compressor = checked(made, f"compression chose {made!r} for {name}")
    return compressor if compressor.applies_to(tuple(parameter.shape)) else None
