"""Compression of a DDP's gradients: which parameters, by which compressor, with which residuals."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from potluck._core.codecs.codec import LARGEST
from potluck._core.context.compressed import start_compressed, start_low_rank
from potluck._core.context.structure import compare
from potluck.compressors import Compressor, PowerSGD, options
from potluck.compressors.base import Array, text_of
from potluck.compressors.encoded import Encoded
from potluck.compressors.low_rank import Matrix
from potluck.compressors.powersgd import LowRankSum, as_matrix
from potluck.errors import CheckpointError
from potluck.torch.encoding import Encoder
from potluck.training.buckets import Bucket

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

Choice = Compressor | Callable[[str, Any], Compressor | None] | None
"""One compressor, or a function that chooses for each parameter; None: not compressed."""


_JUST_BELOW = 1 - 2.0**-20
_TORCH = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


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
        owner = "DistributedDataParallel"
        dense_below = options.integer(owner, "dense_below", dense_below)
        warmup_steps = options.integer(owner, "warmup_steps", warmup_steps)
        if dense_below < 0 or warmup_steps < 0:
            raise ValueError(
                f"dense_below is {dense_below} and warmup_steps {warmup_steps}; neither may be "
                "negative"
            )
        is_class = isinstance(choice, type)  # callable, too, but of other arguments
        if is_class or not (choice is None or isinstance(choice, Compressor) or callable(choice)):
            raise TypeError(
                f"compression is {choice!r}; it must be a compressor such as TopK(0.01), or a "
                "function of a parameter's name and the parameter that returns one or None"
            )
        self.names = list(parameters)
        self.compressors = [
            None if p.numel() < dense_below else chosen(choice, name, p)
            for name, p in parameters.items()
        ]
        """By parameter; None: not compressed."""
        self.is_used = any(self.compressors)
        """Whether any parameter is compressed."""
        self.num_nonfinite: Counter[str] = Counter()
        self._with_nonfinite: set[int] = set()
        """The buckets of this backward in which this rank's own gradients have inf or NaN."""
        self._error_feedback = error_feedback
        self._warmup_steps = warmup_steps
        self._agreed_in = -1  # the epoch of the group in which all ranks compress alike
        self._shapes = [tuple(parameter.shape) for parameter in parameters.values()]
        self._dtypes = [parameter.dtype for parameter in parameters.values()]
        self._buckets: tuple[Bucket, ...] = ()
        self._residuals: dict[int, Array] = {}  # by bucket, of its gradients
        self._before: dict[int, Array] = {}
        self._qs: dict[str, Matrix] = {}  # of PowerSGD, by name; equal on all ranks
        self._qs_before: dict[str, Matrix] = {}
        # PowerSGD's matrices of this backward, which are summed together at its end.
        self._sums: dict[tuple[PowerSGD, np.dtype[Any]], LowRankSum] = {}
        self._ends: list[tuple[LowRankSum, dict[str, Matrix], Callable[[], None]]] = []
        self._scale = 1.0
        self.encoder = Encoder()
        """Runs ``start`` beside backward, where the CPU encodes."""
        self._step = self._num_backwards = 0
        self._is_open = self._is_in_backward = False

    def lay_out(self, buckets: tuple[Bucket, ...]) -> None:
        """Say which parameters are reduced together. Those of a bucket have one compressor."""
        self._buckets = buckets

    def compressor(self, number: int) -> Compressor | None:
        """The compressor of a bucket in this step; None: not compressed."""
        compressor = self.compressors[self._buckets[number].parameters[0]]
        if compressor is None or self._step < max(self._warmup_steps, compressor.start_step):
            return None
        return compressor

    @property
    def scale(self) -> float:
        """What gradients, and thus residuals, are multiplied with: the loss scale."""
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        if not 0 < scale < math.inf:
            raise ValueError(f"the loss scale is {scale}; it must be positive and finite")
        if scale != self._scale:
            factor = scale / self._scale
            self._residuals = {number: each * factor for number, each in self._residuals.items()}
            self._scale = scale

    @property
    def is_beside(self) -> bool:
        """Whether buckets of this step are encoded by the ``encoder``. (A codec works inside the
        reduction.)"""
        chosen = [self.compressor(number) for number in range(len(self._buckets))]
        return any(not (each is None or isinstance(each, Encoded)) for each in chosen)

    def agree(self, ctx: DistributedContext) -> None:
        """Compare how ranks compress, once in each group. Desync on all ranks if it differs:
        unlike seeds or error feedback would give wrong sums of payloads that fit. A collective
        call; nothing where this rank compresses nothing, for its calls differ then."""
        if ctx.epoch == self._agreed_in or not self.is_used:
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
        self._before, self._qs_before = {}, self._qs

    def undo(self) -> None:
        """Return the residuals, and PowerSGD's Q, to those at the begin of the step."""
        self.encoder.drop()
        # Other arrays, not other values: an operation that failed may still write to the old ones.
        self._residuals |= self._before
        self._before, self._qs = {}, self._qs_before

    def begin_backward(self) -> None:
        """Called before the first bucket of a backward."""
        if self._is_in_backward and not self._is_open:
            self.undo()  # the last one has raised, and its gradients were not reduced
        self._is_in_backward = True
        self._sums, self._ends = {}, []
        self._with_nonfinite.clear()
        if not self._is_open:
            self._before, self._qs_before = {}, self._qs

    def end_backward(self, *, failed: bool) -> None:
        """Called when all buckets of a backward are reduced, or when it has failed."""
        with contextlib.suppress(Exception):  # of what is undone below
            # Not dropped: ranks of unlike speed that meet one error would have made unlike calls.
            self.encoder.drain()
        self._is_in_backward = False
        if not self._is_open and failed:
            self.undo()
        elif not self._is_open:
            self._step += 1
        else:
            self._num_backwards += 1

    def watch(self, number: int, host: Tensor) -> None:
        """Count what is inf, NaN or beyond the codec's range in this rank's flat gradients of a
        bucket, if any are compressed: before they are, for a block of a coded sum has the NaN of
        any element. Under a loss scale, what is beyond the range becomes inf, by which scalers know
        that the scale is too large."""
        if not self.is_used:
            return
        limit = limit_of(self.compressor(number))
        if is_within(host, limit):
            return
        if self._count_nonfinite(number, host, "on this rank", limit):
            self._with_nonfinite.add(number)
        if self._scale != 1:
            _show_beyond(host, limit)

    def watch_alone(self, gradients: Mapping[int, Tensor | None]) -> None:
        """The same, by parameter, for a rank alone, which compresses nothing."""
        for index, gradient in gradients.items():
            if gradient is None or gradient.layout != torch.strided or gradient.sum().isfinite():
                continue
            self._note_nonfinite(self.names[index], gradient, "on this rank")

    def start(self, ctx: DistributedContext, number: int, host: Tensor) -> Callable[[], None]:
        """Start the sum of a bucket's flat gradients over all ranks; returns the function that
        waits for the result, which is then in ``host``, and notes what is not finite.

        The matrices of PowerSGD start with ``start_matrices``, in one reduction of all buckets.
        """
        compressor = self.compressor(number)
        assert compressor is not None
        dtype = self._dtype(number)
        wide = host if host.dtype == _TORCH[dtype] else host.to(_TORCH[dtype])
        array: Array = wide.numpy()
        residual = self._residual(number)

        def finish() -> None:
            limit = saturated_from(compressor)
            if wide is not host:
                limit = min(limit, torch.finfo(host.dtype).max * _JUST_BELOW)
                copy_saturated(host, wide)
            if is_within(wide, limit):
                return
            if number not in self._with_nonfinite:
                self._count_nonfinite(number, wide, "in the sum over the ranks", limit)
            if self._scale != 1:
                _show_beyond(host, limit)

        if isinstance(compressor, PowerSGD):
            self._add_matrices(number, compressor, array, residual, finish)
            return lambda: None
        call = self._step << 16 | self._num_backwards
        wait = start_compressed(ctx, array, compressor, residual, call)

        def wait_and_finish() -> None:
            wait()
            finish()

        return wait_and_finish

    def start_matrices(self, ctx: DistributedContext) -> Callable[[], None] | None:
        """Start PowerSGD's sum of all buckets that ``start`` was called for; returns the function
        that waits, as that of ``start``, or None if there is nothing to sum."""
        if not self._sums:
            return None
        sums = list(self._sums.values())
        wait = start_low_rank(ctx, sums, error_feedback=self._error_feedback)

        def finish() -> None:
            wait()
            for one in sums:
                self._qs = self._qs | one.qs()
            for one, targets, end in self._ends:
                for name, target in targets.items():
                    one.decode(name, target)
                end()

        return finish

    def capture(self) -> dict[str, Array]:
        """The residuals by parameter name, copies; of gradients that are not scaled."""
        return {
            name: self._residuals[number][part] / self._scale
            for number in self._residuals
            for name, part in self._parts(number)
        }

    def capture_shared(self) -> dict[str, Matrix]:
        """What is equal on all ranks: PowerSGD's Q by parameter name, copies."""
        return {name: each.copy() for name, each in self._qs.items()}

    def restore_shared(self, state: Mapping[str, Any]) -> None:
        """Set what is equal on all ranks. A Q of another rank or shape is ignored: its parameter
        starts from random numbers again."""
        self._qs = {name: np.array(each) for name, each in state.items() if name in self.names}
        self._qs_before = self._qs

    def restore(self, states: Sequence[Mapping[str, Array]]) -> set[str]:
        """Set the residuals to the sum of ``states``, results of ``capture``. Returns the names of
        the parameters that have one now; what others owed is dropped.

        A residual is what a rank owes to the sum over all ranks, so those of several ranks add up,
        and any compressor with error feedback can pay it. CheckpointError for one of another shape.
        """
        self._residuals, self._before = {}, {}
        kept: set[str] = set()
        if not self._error_feedback:
            return kept
        for number in range(len(self._buckets)):
            for name, part in self._parts(number):
                for state in states:
                    if name not in state or not self.compressors[self.names.index(name)]:
                        continue
                    owed, mine = np.asarray(state[name]), self._made(number)[part]
                    if owed.shape != mine.shape:
                        raise CheckpointError(
                            f"the state has a residual {name!r} of {owed.size} elements, this "
                            f"model's parameter has {mine.size}: it is of another model"
                        )
                    mine += owed * self._scale
                    kept.add(name)
        return kept

    # ------------------------------------------------------------ inside

    def _residual(self, number: int) -> Array | None:
        if not self._error_feedback:
            return None
        residual = self._made(number)
        if number not in self._before:
            self._before[number] = residual.copy()
        return residual

    def _made(self, number: int) -> Array:
        if number not in self._residuals:
            numel, dtype = self._buckets[number].numel, self._dtype(number)
            self._residuals[number] = np.zeros(numel, dtype)
        return self._residuals[number]

    def _dtype(self, number: int) -> np.dtype[Any]:
        """What a bucket's gradients are summed as, and its residual kept as."""
        first = self._buckets[number].parameters[0]
        is_coded = isinstance(self.compressors[first], Encoded)  # codecs encode float32
        is_wide = self._dtypes[first] == torch.float64 and not is_coded
        return np.dtype(np.float64 if is_wide else np.float32)

    def _add_matrices(
        self,
        number: int,
        compressor: PowerSGD,
        array: Array,
        residual: Array | None,
        finish: Callable[[], None],
    ) -> None:
        if residual is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                residual += array
        key = compressor, array.dtype
        one = self._sums.setdefault(key, LowRankSum(compressor, self._qs, self._step))
        source, targets = array if residual is None else residual, {}
        for name, part in self._parts(number):
            shape = self._shapes[self.names.index(name)]
            targets[name] = as_matrix(array[part].reshape(shape))
            one.add(name, as_matrix(source[part].reshape(shape)))
        self._ends.append((one, targets, finish))

    def _parts(self, number: int) -> Iterator[tuple[str, slice]]:
        """The names of a bucket's parameters, and where each lies in the bucket."""
        bucket = self._buckets[number]
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            yield self.names[index], slice(offset, offset + math.prod(self._shapes[index]))

    def _count_nonfinite(self, number: int, flat: Tensor, where: str, limit: float) -> bool:
        """Whether a magnitude in a bucket is NaN or at least ``limit``: a sum of smaller ones may
        be."""
        parts = self._parts(number)
        found = [self._note_nonfinite(name, flat[part], where, limit) for name, part in parts]
        return any(found)

    def _note_nonfinite(
        self, name: str, gradient: Tensor, where: str, limit: float = math.inf
    ) -> bool:
        num, what = num_beyond(gradient, limit)
        if num:
            self.num_nonfinite[name] += num
            _log.warning(
                "the gradient of %s: %d of %d elements are %s at step %d, %s",
                *(name, num, gradient.numel(), what, self._step, where),
            )
        return num > 0


def limit_of(compressor: Compressor | None) -> float:
    """The magnitude from which on a gradient is beyond the range of what encodes it."""
    return compressor.codec.limit if isinstance(compressor, Encoded) else math.inf


def saturated_from(compressor: Compressor | None) -> float:
    """The magnitude from which on what is decoded stands for something beyond the range: just below
    the largest number, for integers decode to its rounding."""
    return compressor.codec.largest * _JUST_BELOW if isinstance(compressor, Encoded) else math.inf


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


def _show_beyond(flat: Tensor, limit: float) -> None:
    """Set elements of at least ``limit`` to inf of their sign."""
    infinite = torch.full_like(flat, math.inf).copysign_(flat)
    flat.copy_(torch.where(flat.abs() >= limit, infinite, flat))


def tell_dropped(residuals: Iterable[Mapping[str, Any]], kept: Collection[str]) -> None:
    """Warn of the parameters of which something is owed in ``residuals`` that are not ``kept``."""
    owed = {name for each in residuals for name, value in each.items() if (value != 0).any()}
    if dropped := sorted(owed - set(kept)):
        _log.warning(
            "the saved residuals of %s are dropped: no error feedback keeps them",
            f"{dropped[0]} and {len(dropped) - 1} others" if dropped[1:] else dropped[0],
        )


def chosen(choice: Choice, name: str, parameter: Tensor) -> Compressor | None:
    """The compressor of a parameter, None where it does not apply; TypeError for what is none."""
    made = choice if choice is None or isinstance(choice, Compressor) else choice(name, parameter)
    if not (made is None or isinstance(made, Compressor)):
        raise TypeError(f"compression chose {made!r} for {name}; it must be a compressor or None")
    applies = made is not None and made.applies_to(tuple(parameter.shape))
    return made if applies else None
