"""A communication hook for torch's DDP: gradients are sent compressed, with error feedback.

    model.register_comm_hook(CompressionState(Int(bits=8)), compression_hook)

All ranks end with the same bits. A codec's compressor (FP16, BF16, Int) works inside the reduction,
which needs the backend "potluck"; the others run on any backend.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from potluck._core.context.compressed import sum_payloads
from potluck._core.context.structure import compare
from potluck._core.uncopied import Uncopied
from potluck.compressors import Compressor, PowerSGD, Random, options
from potluck.compressors.base import Array, compress_any, text_of
from potluck.compressors.encoded import Encoded
from potluck.compressors.low_rank import Matrix
from potluck.compressors.powersgd import LowRankSum, as_matrix
from potluck.torch.compression import (
    Choice,
    chosen,
    copy_saturated,
    is_within,
    limit_of,
    num_beyond,
    saturated_from,
    tell_dropped,
)
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.torch.structure import check_dense, describe

_log = logging.getLogger(__name__)
# Its name before torch 2.13, which warns of it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Piece(NamedTuple):
    """The gradients of a bucket that are sent in one way."""

    compressor: Compressor | None
    bucket: int
    parameters: list[Tensor]
    flat: Tensor
    """The bucket's buffer, or a copy of its parts."""
    parts: list[Tensor]
    """Where a copy goes in the buffer."""


class _Ranks:
    """The ranks of a process group, of any backend, as ``compare`` takes them."""

    epoch = -1

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = self
        self.world_size = group.size()
        self._group = group
        self._device = device

    def describe(self, rank: int) -> str:
        return f"rank {rank}"

    def all_gather(self, array: Array) -> Array:
        mine = torch.from_numpy(array.view(np.uint8)).to(self._device)
        rows = mine.new_empty(self.world_size * mine.numel())
        _all_gather(rows, mine, group=self._group)
        found: Array = rows.cpu().numpy().view(array.dtype)
        return found


class _Bucket(NamedTuple):
    """A piece of PowerSGD, until those of all buckets of a backward are reduced together."""

    piece: _Piece
    host: Tensor
    parts: list[tuple[Tensor, Array, Array]]
    """For each parameter: itself, its gradient in ``host``, and the same or its residual with the
    gradient added."""
    future: torch.futures.Future[Tensor]


class CompressionState(Uncopied):
    """The state of the hook: for each parameter the residual, the error of its last compression.

    The residual is added before the gradients of the next step are compressed (error feedback); it
    takes as much memory as float32 gradients (of float64 gradients float64's, unless the compressor
    is a codec's). ``process_group`` is that of the model, by default the group of all ranks.
    Gradients with inf or NaN are counted and reported in a warning, by the names of ``model``, if
    it is given, else by number and shape.

    ``compressor`` may be a function of a parameter's name and the parameter that returns one, or
    None for those not to compress; it needs the ``model``. Parameters with fewer than
    ``dense_below`` elements are not compressed, nor is any in the first ``warmup_steps`` backwards.
    Cost: a bucket with parameters that are sent in several ways is copied, and is as many
    collectives.

    Ranks compare how they compress, and the parameters of the first bucket (of the ``model``, if it
    is given), in the first backward: Desync on all ranks, which names the first difference.
    TypeError for what is no compressor, for a function without a model, and for parameters with
    complex or sparse gradients, here if the ``model`` is given, else in the first backward;
    ValueError for negative numbers.
    """

    take_instead = "take its state_dict(model) into a new one"

    def __init__(
        self,
        compressor: Choice,
        *,
        error_feedback: bool = True,
        dense_below: int = 0,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        model: nn.Module | None = None,
    ) -> None:
        owner = "CompressionState"
        self._dense_below = options.integer(owner, "dense_below", dense_below)
        self._warmup_steps = options.integer(owner, "warmup_steps", warmup_steps)
        if dense_below < 0 or warmup_steps < 0:
            raise ValueError(
                f"dense_below is {dense_below} and warmup_steps {warmup_steps}; neither may be "
                "negative"
            )
        if isinstance(compressor, type) or not (
            isinstance(compressor, Compressor) or callable(compressor)
        ):
            raise TypeError(
                f"compressor is {compressor!r}; it must be one such as TopK(0.01) or Int(bits=8), "
                "or a function of a parameter's name and the parameter"
            )
        self._chosen: dict[Tensor, Compressor | None] = {}
        if not isinstance(compressor, Compressor):
            if model is None:
                raise TypeError("a function chooses by the names of parameters: pass model=")
            self._chosen = {p: chosen(compressor, n, p) for n, p in _parameters(model).items()}
        self.compressor = compressor
        self.model = model
        self.error_feedback = error_feedback
        self._has_agreed = False
        self.process_group = process_group
        self.step = 0
        """The number of backwards so far."""
        self.num_nonfinite: Counter[str] = Counter()
        """By parameter: how many elements of its gradients were inf, NaN or beyond the range of the
        codec."""
        self._with_nonfinite: set[tuple[int, Compressor | None]] = set()
        """The pieces of this backward, by bucket and compressor, in which this rank's own gradients
        have inf or NaN."""
        self._names = {} if model is None else {p: n for n, p in _parameters(model).items()}
        # By bucket and compressor, of their parameters.
        self._flats: dict[tuple[int, Compressor | None], tuple[list[Tensor], Tensor]] = {}
        self._residuals: dict[Tensor, Tensor] = {}  # by parameter, parts of these or loaded
        self._qs: dict[Tensor, Matrix] = {}  # of PowerSGD, equal on all ranks
        self._waiting: dict[PowerSGD, list[_Bucket]] = {}
        if model is not None:
            check_dense(model)
            refused = self._refusal((p, n) for n, p in _parameters(model).items())
            if refused is not None:
                raise refused

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """This rank's residuals by parameter name, with the step and PowerSGD's matrices, copies.

        ``model`` is the DDP or the module in it. Every rank has residuals of its own to save.
        """
        names = {parameter: name for name, parameter in _parameters(model).items()}
        return {
            "step": self.step,
            "residuals": {
                names[p]: each.reshape(p.shape).clone()
                for p, each in self._residuals.items()
                if p in names
            },
            "qs": {names[p]: torch.tensor(q) for p, q in self._qs.items() if p in names},
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Continue from a ``state_dict`` of this rank, or of any rank of another world.

        Residuals fit any compressor. Those of parameters that are not compressed here, or without
        error feedback, are dropped, and a warning names them. ValueError for what is no such state,
        or for a parameter that ``model`` does not have in this shape; then nothing is changed.
        """
        missing = {"step", "residuals", "qs"} - state.keys()
        if missing:
            raise ValueError(f"not the state of a CompressionState: it has no {min(missing)!r}")
        parameters = _parameters(model)
        for name, each in state["residuals"].items():
            own = parameters.get(name)
            if own is None or own.shape != each.shape:
                has = "no such parameter" if own is None else f"it of shape {tuple(own.shape)}"
                raise ValueError(
                    f"the state has a residual {name!r} of shape {tuple(each.shape)}; the model "
                    f"has {has}: load the state of the same model"
                )
        self.step = int(state["step"])
        self._flats = {}
        kept = {
            name: each
            for name, each in state["residuals"].items()
            if self.error_feedback and self._compresses(name, parameters[name])
        }
        tell_dropped([state["residuals"]], kept)
        self._residuals = {parameters[n]: each.reshape(-1).clone() for n, each in kept.items()}
        self._qs = {
            parameters[name]: np.array(q) for name, q in state["qs"].items() if name in parameters
        }

    def pieces(self, bucket: GradBucket) -> list[_Piece]:
        """The gradients of a bucket, by the way in which they are sent in this step."""
        ways: dict[Compressor | None, list[tuple[Tensor, Tensor]]] = {}
        views = zip(bucket.parameters(), bucket.gradients(), strict=True)
        for parameter, gradient in views:
            ways.setdefault(self._way(parameter), []).append((parameter, gradient))
        if len(ways) == 1:
            way = next(iter(ways))
            return [_Piece(way, bucket.index(), bucket.parameters(), bucket.buffer(), [])]
        pieces = []
        for way, pairs in ways.items():
            flat = torch.cat([gradient.reshape(-1) for _, gradient in pairs])
            parameters, parts = [p for p, _ in pairs], [gradient for _, gradient in pairs]
            pieces.append(_Piece(way, bucket.index(), parameters, flat, parts))
        return pieces

    def _way(self, parameter: Tensor) -> Compressor | None:
        given = self.compressor
        way = given if isinstance(given, Compressor) else self._chosen[parameter]
        if way is None or parameter.numel() < self._dense_below:
            return None
        return way if self.step >= max(self._warmup_steps, way.start_step) else None

    def _compresses(self, name: str, parameter: Tensor) -> bool:
        """Whether a parameter is compressed, in some step."""
        given = self.compressor
        way = given if isinstance(given, Compressor) else chosen(given, name, parameter)
        return way is not None and parameter.numel() >= self._dense_below

    def agree(self, device: torch.device, parameters: Sequence[Tensor] = ()) -> None:
        """Compare how ranks compress, and the ``parameters`` of the first bucket, in the first
        backward. Desync on all ranks, with the first difference; TypeError for a parameter that
        can't be compressed."""
        if self._has_agreed:
            return
        names = {p: self._names.get(p, f"parameter {i}") for i, p in enumerate(parameters)}
        known = names if self.model is None else {p: n for n, p in _parameters(self.model).items()}
        items = {"error_feedback": str(self.error_feedback)}
        items |= {"dense_below": str(self._dense_below), "warmup_steps": str(self._warmup_steps)}
        if isinstance(self.compressor, Compressor):
            items["compressor"] = text_of(self.compressor)
        for parameter, name in (known | names).items():
            way = self._chosen.get(parameter)
            items[name] = f"{describe(parameter)}, requires_grad={parameter.requires_grad}"
            items[name] += f", {text_of(way)}" if way is not None else ""
        refused = self._refusal(names.items())
        ranks = _Ranks(self.group(), device)
        remedy = "make model and CompressionState alike on all ranks"
        what = "the compression of gradients"
        compare(ranks, what, items, remedy, refused=refused, operation="backward")
        self._has_agreed = True

    def _refusal(self, parameters: Iterable[tuple[Tensor, str]]) -> TypeError | None:
        for parameter, name in parameters:
            if parameter.is_complex() and self._compresses(name, parameter):
                return TypeError(
                    f"{name} is {parameter.dtype}, and only real gradients can be compressed: pass "
                    "a function as the compressor that returns None for this parameter"
                )
        return None

    def look(self, piece: _Piece) -> None:
        """Count what is inf, NaN or beyond the codec's range in this rank's gradients of a piece:
        before they are compressed, for a block of a coded sum has the NaN of any element."""
        key, limit = (piece.bucket, piece.compressor), limit_of(piece.compressor)
        self._with_nonfinite.discard(key)
        if not is_within(piece.flat, limit) and self._count(
            piece, piece.flat, limit, "on this rank"
        ):
            self._with_nonfinite.add(key)

    def watch(self, piece: _Piece, flat: Tensor) -> Tensor:
        """The same in the reduced gradients of a piece, if this rank's own were within the range;
        returns them."""
        is_own = (piece.bucket, piece.compressor) in self._with_nonfinite
        limit = saturated_from(piece.compressor)
        if not is_own and not is_within(flat, limit):
            self._count(piece, flat, limit, "in the mean over the ranks")
        return flat

    def _count(self, piece: _Piece, flat: Tensor, limit: float, where: str) -> bool:
        """Whether a magnitude is NaN or at least ``limit``: a sum of smaller ones may be."""
        found = False
        sizes = [each.numel() << each.is_complex() for each in piece.parameters]  # of real numbers
        parts = torch.split(flat, sizes)
        for place, (parameter, part) in enumerate(zip(piece.parameters, parts, strict=True)):
            num, what = num_beyond(part, limit)
            if num:
                shape = tuple(parameter.shape)
                number = f"parameter {place} of bucket {piece.bucket}, of shape {shape}"
                name = self._names.get(parameter, number)
                found = True
                self.num_nonfinite[name] += num
                _log.warning(
                    "the gradient of %s: %d of %d elements are %s at step %d, %s",
                    *(name, num, part.numel(), what, self.step, where),
                )
        return found

    def group(self) -> dist.ProcessGroup:
        """The group to reduce over."""
        group = self.process_group or dist.group.WORLD
        assert group is not None
        return group

    def own_group(self, compressor: Compressor) -> PotluckProcessGroup:
        """The group, for codecs; TypeError if it is not potluck's."""
        group = self.group()
        if not isinstance(group, PotluckProcessGroup):
            raise TypeError(
                f"{compressor!r} needs a process group of backend 'potluck', and this group has "
                f"{dist.get_backend(group)!r}: call init_process_group('potluck')"
            )
        return group

    def residual(self, piece: _Piece, dtype: torch.dtype) -> Tensor | None:
        """The residual of a piece, flat; parameters keep theirs when DDP builds new buckets."""
        if not self.error_feedback:
            return None
        index, parameters = (piece.bucket, piece.compressor), piece.parameters
        kept = self._flats.get(index)
        if kept is None or [id(each) for each in kept[0]] != [id(each) for each in parameters]:
            flat = torch.zeros(piece.flat.numel(), dtype=dtype)
            sizes = [each.numel() for each in parameters]
            for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
                if parameter in self._residuals:
                    part.copy_(self._residuals[parameter])
                self._residuals[parameter] = part
            kept = self._flats[index] = (parameters, flat)
        return kept[1]


def compression_hook(
    state: CompressionState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:  # torch checks these annotations
    """Average a bucket of gradients over the ranks, sent compressed by the state's compressor."""
    buffer = bucket.buffer()
    state.agree(buffer.device, bucket.parameters())
    pieces = state.pieces(bucket)
    step, call = state.step, state.step << 16 | bucket.index()
    if bucket.is_last():
        state.step += 1
    futures = [_start(state, piece, call) for piece in pieces]
    if bucket.is_last():
        waiting, state._waiting = state._waiting, {}
        for compressor, buckets in waiting.items():
            _reduce_matrices(state, compressor, buckets, step)
    if len(pieces) == 1:
        return futures[0]

    def put_back(done: torch.futures.Future[Any]) -> torch.Tensor:
        for piece, future in zip(pieces, done.value(), strict=True):
            flat = future.value()
            sizes = [part.numel() for part in piece.parts]
            for part, reduced in zip(piece.parts, torch.split(flat, sizes), strict=True):
                part.copy_(reduced.view(part.shape))
        return buffer

    together: torch.futures.Future[Tensor] = torch.futures.collect_all(futures).then(put_back)
    return together


def _start(state: CompressionState, piece: _Piece, call: int) -> torch.futures.Future[Tensor]:
    """Start the mean of a piece over the ranks; the future has it in the piece's array."""
    flat, compressor, group = piece.flat, piece.compressor, state.group()
    state.look(piece)
    if compressor is None:
        dense = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)
        assert dense is not None
        summed: torch.futures.Future[Tensor] = dense.get_future().then(lambda done: done.value()[0])
        return summed
    is_wide = flat.dtype == torch.float64 and not isinstance(compressor, Encoded)
    dtype = torch.float64 if is_wide else torch.float32
    residual = state.residual(piece, dtype)
    wide = flat if flat.dtype == dtype else flat.to(dtype)
    if isinstance(compressor, Encoded):
        own = state.own_group(compressor)
        coded = own.all_reduce_encoded(wide, compressor.codec.name, residual)
        return coded.get_future().then(
            lambda done: state.watch(piece, copy_saturated(flat, done.value()[0]))
        )
    host = wide.cpu()
    array: Array = host.numpy()
    kept: Array | None = None if residual is None else residual.numpy()
    if isinstance(compressor, PowerSGD):
        waiting = _bucket(piece, host, array, kept)
        state._waiting.setdefault(compressor, []).append(waiting)
        return waiting.future
    if isinstance(compressor, Random):
        sent = torch.from_numpy(compressor.take(array, kept, call)).to(flat.device)
    else:
        payload, _ = compress_any(compressor, array, kept, call)
        sent = torch.from_numpy(payload).to(flat.device)

    def end(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        future.value()
        if isinstance(compressor, Random):
            compressor.put(array, sent.cpu().numpy(), call)
        else:
            sum_payloads(array, received.cpu().numpy(), compressor, call)
        np.divide(array, array.dtype.type(group.size()), out=array)
        return state.watch(piece, copy_saturated(flat, host))

    if isinstance(compressor, Random):
        work = dist.all_reduce(sent, group=group, async_op=True)
    else:
        received = sent.new_empty(group.size(), sent.numel())
        work = _all_gather(received.view(-1), sent, group=group, async_op=True)
    assert work is not None
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
    return done


def _bucket(piece: _Piece, host: Tensor, array: Array, residual: Array | None) -> _Bucket:
    if residual is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            residual += array
    parts, at = [], 0
    for parameter in piece.parameters:
        part, shape = slice(at, at + parameter.numel()), tuple(parameter.shape)
        target = array[part].reshape(shape)
        source = target if residual is None else residual[part].reshape(shape)
        parts.append((parameter, target, source))
        at = part.stop
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    return _Bucket(piece, host, parts, future)


def _reduce_matrices(
    state: CompressionState, compressor: PowerSGD, buckets: list[_Bucket], step: int
) -> None:
    """Reduce all buckets of a backward together: the tensors that are sent as they are with the P
    of the others, then Q. Here, and not in a callback of a future: callbacks run in another order
    on each rank, and so would start their collectives in another order."""
    group, size = state.group(), np.float32(state.group().size())
    parts = [part for each in buckets for part in each.parts]
    for dtype in sorted({target.dtype for _, target, _ in parts}, key=str):
        mine = [part for part in parts if part[1].dtype == dtype]
        dense = [part for part in mine if not compressor.applies_to(part[1].shape)]
        named = {
            str(i): part for i, part in enumerate(mine) if compressor.applies_to(part[1].shape)
        }
        before = {name: state._qs[p] for name, (p, _, _) in named.items() if p in state._qs}
        one = LowRankSum(compressor, before, step)
        for name, (_, _, source) in named.items():
            one.add(name, as_matrix(source))
        left = one.begin()
        together = np.concatenate([left, *(source.reshape(-1) for _, _, source in dense)])
        _sum(together, buckets[0].piece.flat.device, group)
        left[:] = together[: left.size]
        at = left.size
        for _, target, source in dense:
            target[...] = together[at : at + target.size].reshape(target.shape) / size
            if source is not target:
                source[...] = 0
            at += target.size
        right = one.turn()
        if state.error_feedback:
            one.lose()
        _sum(right, buckets[0].piece.flat.device, group)
        qs = one.qs()
        for name, (parameter, target, _) in named.items():
            one.decode(name, as_matrix(target))
            target /= size
            if name in qs:
                state._qs[parameter] = qs[name]
    for each in buckets:
        each.future.set_result(state.watch(each.piece, copy_saturated(each.piece.flat, each.host)))


def _sum(array: Array, device: torch.device, group: dist.ProcessGroup) -> None:
    """The sum of ``array`` over all ranks, in place."""
    sent = torch.from_numpy(array).to(device)
    dist.all_reduce(sent, group=group)
    if device.type != "cpu":
        array[:] = sent.cpu().numpy()


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}
