"""The compressor ``PowerSGD``: a matrix as the product of two narrow ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from potluck._core import native
from potluck._core.codecs.codec import Bytes, Floats
from potluck._core.wire.dtypes import code_of
from potluck.compressors import options
from potluck.compressors.base import Array, Collectives, Compressor, Cost, Shape, divide

Matrix = NDArray[Any]
"""Two dimensions, float32 or float64."""

_LANES = 128
_BLOCK = 1 << 15
"""Elements of one piece of a product: two such pieces fit into the L2 cache."""
_NOTHING_LEFT = 2.0**-40
"""Below this share of its squared length, what is left of a float32 column is rounding."""

_ITERATIONS = 2
_ROWS = 256
"""Of one piece of a product that is taken from a matrix."""


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Each matrix of n rows and m columns as P Q^T of a ``rank``: rank * (n + m) numbers of n * m.

    One step of a power iteration for each reduction, which starts from the Q of the last one:
    P = the orthonormal basis of the ranks' sum of M Q, then Q = the sum of M^T P. Ranks send two
    small arrays, by ordinary all_reduces whose cost does not grow with the number of ranks, and all
    have the same P Q^T, the projection of the sum of their matrices. (Vogels et al., "PowerSGD:
    Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.)

    A tensor's first dimension are the rows, all others the columns. Tensors of fewer than two
    dimensions, and those for which ``(n + m) * rank * min_rate < n * m`` is not true, are sent as
    they are; so are all tensors in the first ``start_step`` steps of a training, whose gradients
    say most. The first Q follows from ``seed`` and the name of the tensor.

    The residual of a rank is its matrix minus its projection, M - P P^T M. It differs from that of
    the paper, M minus the mean of the projections, by parts whose sum over all ranks is zero: so
    the sum is the same, and a rank that is lost takes less with it.

    ValueError unless ``rank`` is a positive int, ``min_rate`` at least 1, and ``start_step`` and
    ``seed`` are not negative; TypeError for options that are no numbers.
    """

    needs_matrices: ClassVar[bool] = True

    rank: int
    start_step: int = 2
    min_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        options.put(
            self,
            rank=options.integer("PowerSGD", "rank", self.rank),
            start_step=options.integer("PowerSGD", "start_step", self.start_step),
            min_rate=options.number("PowerSGD", "min_rate", self.min_rate),
            seed=options.seed("PowerSGD", self.seed),
        )
        if self.rank < 1:
            raise ValueError(f"PowerSGD(rank={self.rank}): rank must be a positive int")
        if self.start_step < 0:
            raise ValueError(
                f"PowerSGD(start_step={self.start_step}): start_step is a number of steps, 0 or "
                "more"
            )
        if not 1 <= self.min_rate < math.inf:
            raise ValueError(
                f"PowerSGD(min_rate={self.min_rate}): min_rate must be at least 1 and finite"
            )

    def applies_to(self, shape: Shape) -> bool:
        if len(shape) < 2:
            return False
        n, m = _rows_and_columns(shape)
        return (n + m) * self.rank_of(shape) * self.min_rate < n * m

    def rank_of(self, shape: Shape) -> int:
        """The rank for a tensor of this shape: no more than it can have."""
        return min(self.rank, *_rows_and_columns(shape))

    def payload_bytes(self, shape: Shape) -> int:
        """The bytes that stand for a float32 tensor of this shape."""
        if not self.applies_to(shape):
            return 4 * math.prod(shape)
        return 4 * sum(_rows_and_columns(shape)) * self.rank_of(shape)

    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        """Without a network: P and Q after two iterations from a Q that follows from ``step``, so
        that nothing but the residual is kept from call to call."""
        matrix = source
        if residual is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                residual += source
            matrix = residual
        if not self.applies_to(source.shape):
            payload = matrix.reshape(-1).view(np.uint8).copy()
            if residual is not None:
                residual[...] = 0
            return payload
        rank = self.rank_of(source.shape)
        qs: dict[str, Matrix] = {}
        for _ in range(_ITERATIONS):
            one = LowRankSum(self, qs, step)
            one.add("", as_matrix(matrix))
            left = one.begin()
            right = one.turn()
            qs = {"": right.reshape(-1, rank)}
        payload = np.concatenate([left, right]).view(np.uint8)
        if residual is not None:
            one.lose()
        return payload

    def decompress(self, payload: Bytes, shape: Shape, step: int) -> Floats:
        numbers = payload.view(np.float32)
        if not self.applies_to(shape):
            return numbers.reshape(shape).copy()
        target = np.empty(_rows_and_columns(shape), np.float32)
        rank = self.rank_of(shape)
        at = rank * target.shape[0]
        product_into(target, numbers[:at].reshape(-1, rank), numbers[at:].reshape(-1, rank))
        return target.reshape(shape)

    def matrices(self, qs: Mapping[Any, Array], step: int) -> LowRankSum:
        return LowRankSum(self, qs, step)

    def cost(self, shapes: Sequence[Shape]) -> Cost:
        # The gradients are added to the residual first.
        return Cost(reduced_bytes=sum(map(self.payload_bytes, shapes)), passes=2)

    def halves(
        self, source: Array, residual: Array, target: Array
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """One iteration, as in a step, between the sums over the ranks."""
        sums: list[LowRankSum] = []

        def begin() -> None:
            sums[:] = [self.matrices({}, 0)]
            sums[0].add("sample", source)
            sums[0].begin()

        def end() -> None:
            sums[0].turn()
            sums[0].lose()
            sums[0].decode("sample", target)

        return begin, end

    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        return bool(np.isfinite(payload.view(np.float32)).all())


class LowRankSum:
    """The sum over all ranks of several matrices of one dtype, by two sums of small arrays.

        one = LowRankSum(compressor, qs, step)
        one.add(key, matrix)                  # for each matrix, in one order on all ranks
        all_reduce(one.begin())               # the P of all matrices, one flat array
        all_reduce(one.turn())                # the Q of all matrices
        one.decode(key, target)               # equal on all ranks, bit by bit
        qs = one.qs()                         # for the next step

    The matrices have the residuals added already; ``lose`` turns them into residuals, at any time
    after ``turn``. ``qs`` are those of the step before; a key without one, or with one of another
    shape, starts from random numbers, which follow from ``name``, by default the key.

    ``add_all`` takes the flat array of several tensors, and ``decode_all`` sets it to the sum. Of
    these, tensors that are no matrices are summed as they are, with the P.
    """

    def __init__(self, compressor: PowerSGD, qs: Mapping[Any, Matrix], step: int) -> None:
        self._compressor = compressor
        self._before = qs
        self._step = step
        self._matrices: dict[Any, Matrix] = {}
        self._ps: dict[Any, Matrix] = {}
        self._qs: dict[Any, Matrix] = {}
        self._own: dict[Any, Matrix] = {}
        self._whole: dict[Any, Array] = {}
        self._summed: dict[Any, Array] = {}
        self._targets: dict[Any, Array] = {}
        self._has_residuals = False

    def add_all(
        self, array: Array, residual: Array | None, shapes: Mapping[Any, Shape], *, numbered: bool
    ) -> None:
        """Add the tensors of ``shapes``, which lie one after the other in ``array``, or with a
        residual, to which they were added, there. ``numbered``: names are places in the order."""
        self._has_residuals = residual is not None
        source = array if residual is None else residual
        at = 0
        for key, shape in shapes.items():
            part = slice(at, at + math.prod(shape))
            at = part.stop
            if self._compressor.applies_to(shape):
                name = str(len(self._targets)) if numbered else key
                self.add(key, as_matrix(source[part].reshape(shape)), name)
                self._targets[key] = as_matrix(array[part].reshape(shape))
            else:
                self._whole[key], self._targets[key] = source[part], array[part]

    def decode_all(self, comm: Collectives) -> None:
        """After both sums: the sums of the tensors of ``add_all``, divided as ``comm`` says."""
        for key, target in self._targets.items():
            if key in self._matrices:
                self.decode(key, target)
            else:
                target[:] = self._summed[key]
                if self._has_residuals:
                    self._whole[key][:] = 0
            divide(target, comm)

    def add(self, key: Any, matrix: Matrix, name: str | None = None) -> None:
        """Add a matrix; what it costs on this rank is done here."""
        shape = matrix.shape[1], self._compressor.rank_of(matrix.shape)
        name = str(key) if name is None else name
        start = _basis(self._compressor, name, shape, self._before.get(key), self._step)
        with np.errstate(over="ignore", invalid="ignore"):
            self._ps[key] = matrix @ start.astype(matrix.dtype)
        self._matrices[key] = matrix

    def begin(self) -> Matrix:
        """The P of all matrices, and the tensors that are none: a flat array to be summed."""
        flat, self._summed = _together(self._ps | self._whole)
        self._ps = {key: self._summed[key] for key in self._ps}
        return flat

    def turn(self) -> Matrix:
        """After ``begin``'s array was summed: the Q of all matrices, a flat array to be summed."""
        with np.errstate(over="ignore", invalid="ignore"):
            for name, matrix in self._matrices.items():
                self._ps[name][:] = orthonormal(self._ps[name])
                self._own[name] = matrix.T @ self._ps[name]
        # A copy: `lose` reads the own ones, and may run while the others' are added to these.
        flat, self._qs = _together(self._own)
        return flat

    def lose_all(self) -> None:
        """``lose``, if the matrices are residuals."""
        if self._has_residuals:
            self.lose()

    def lose(self) -> None:
        """Turn the matrices into what their projections have lost, zero where not finite."""
        for name, matrix in self._matrices.items():
            p, across = self._ps[name], self._own[name].T
            is_finite = bool(np.isfinite(p).all() and np.isfinite(across).all())
            if is_finite:
                for begin in range(0, len(matrix), _ROWS):
                    matrix[begin : begin + _ROWS] -= p[begin : begin + _ROWS] @ across
            else:  # what the sum has not taken stays, but for what spoilt it
                matrix[~np.isfinite(matrix)] = 0

    def decode(self, key: Any, target: Matrix) -> None:
        """After ``turn``'s array was summed: set ``target`` to the sum of the matrices ``key``.

        All NaN if a rank's matrix, or the sum, was not finite.
        """
        product_into(target, self._ps[key], self._qs[key])
        if not (np.isfinite(self._ps[key]).all() and np.isfinite(self._qs[key]).all()):
            target[:] = np.nan

    def qs(self) -> dict[Any, Matrix]:
        """By key, the Q to start the next step from, copies; that of before where the sum was not
        finite."""
        kept = {name: q for name, q in self._before.items() if name in self._qs}
        return kept | {n: q.copy() for n, q in self._qs.items() if np.isfinite(q).all()}


def as_matrix(array: Matrix) -> Matrix:
    """A view of a tensor: its first dimension are the rows, all others the columns."""
    return array.reshape(_rows_and_columns(array.shape))


def _together(parts: Mapping[Any, Matrix]) -> tuple[Matrix, dict[Any, Matrix]]:
    """All parts in one flat array, and by key the views of it."""
    # The empty array only stands for no parts at all.
    flat = np.concatenate([np.empty(0, np.float32), *(each.reshape(-1) for each in parts.values())])
    views, at = {}, 0
    for name, each in parts.items():
        views[name] = flat[at : at + each.size].reshape(each.shape)
        at += each.size
    return flat, views


def _rows_and_columns(shape: Shape) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _basis(
    compressor: PowerSGD, name: str, shape: tuple[int, ...], q: Matrix | None, step: int
) -> Matrix:
    """An orthonormal Q to start from. A column that has become zero, or depends on others, would
    stay so for ever, and is drawn anew."""
    rows, rank = shape
    if q is None or q.shape != shape:
        return orthonormal(uniform(rows, rank, compressor.seed, name, step))
    made = orthonormal(q)
    lost = ~made.any(axis=0)
    if lost.any():
        made[:, lost] = uniform(rows, rank, compressor.seed, name, step)[:, lost]
        made = orthonormal(made)
    return made


# ------------------------------------------------------------ arithmetic, equal on all machines
#
# Ranks have the same sums P and Q, and each computes an orthonormal basis and the product P Q^T of
# them by itself. A matrix library's sums differ in their last bits between processors. So these
# functions use only operations that IEEE 754 defines exactly, in a fixed order, and no fused
# multiply-add.


def uniform(rows: int, columns: int, seed: int, name: str, step: int) -> NDArray[np.float64]:
    """Random numbers between -1 and 1, the same on all machines; other ones for each name and
    step."""
    words = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    stream = np.random.PCG64(np.random.SeedSequence([seed, words, step]))
    raw = stream.random_raw(rows * columns).astype(np.uint64) >> np.uint64(11)
    return (raw.astype(np.float64) * 2.0**-52 - 1).reshape(rows, columns)


def orthonormal(matrix: Matrix) -> NDArray[np.float64]:
    """The columns made orthonormal from left to right; zero where a column depends on those before.

    Gram-Schmidt in float64, each column twice ("twice is enough": Giraud et al., 2005). NaN and
    inf stay visible.
    """
    rows, rank = matrix.shape
    columns = np.zeros((rank, -(-rows // _LANES) * _LANES))
    columns[:, :rows] = matrix.T
    with np.errstate(over="ignore", invalid="ignore"):
        for index, column in enumerate(columns):
            before = float(_sums(column[None] * column)[0])
            for _ in range(2 if index else 0):
                done = columns[:index]
                for share, other in zip(_sums(done * column), done, strict=True):
                    column -= share * other
            left = float(_sums(column[None] * column)[0])
            if left <= before * _NOTHING_LEFT or left < 2.0**-1000:
                column[:] = 0
            else:
                column /= math.sqrt(left)
    return np.ascontiguousarray(columns[:, :rows].T)


def product_into(target: Matrix, left: Matrix, right: Matrix) -> None:
    """target = left right^T, for matrices of few columns, n x r and m x r, of one dtype."""
    across = np.ascontiguousarray(right.T)
    if not (native.available and target.flags.c_contiguous):
        return product_in_python(target, left, across)
    down = np.ascontiguousarray(left)
    native.core.multiply(code_of(target.dtype), target, down, across, left.shape[1])


def product_in_python(target: Matrix, left: Matrix, across: Matrix) -> None:
    """The twin of the native kernel, target = left across."""
    rows = max(1, _BLOCK // max(1, target.shape[1]))
    part = np.empty((rows, target.shape[1]), target.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, target.shape[0], rows):
            block = target[begin : begin + rows]
            down, scratch = left[begin : begin + rows], part[: len(block)]
            np.multiply(down[:, :1], across[0], out=block)
            for index in range(1, left.shape[1]):
                np.multiply(down[:, index : index + 1], across[index], out=scratch)
                block += scratch


def _sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of each row, of a multiple of 128 elements, in an order that is always the same."""
    lanes = np.add.reduce(rows.reshape(len(rows), -1, _LANES), axis=1)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums: NDArray[np.float64] = lanes[:, 0]
    return sums
