"""A communication hook for torch's DDP: gradients are sent compressed, with error feedback.

    model.register_comm_hook(CompressionState(Quantize(bits=8)), compression_hook)

All ranks end with the same bits. The codecs (FP16, BF16, Quantize) work inside the reduction, which
needs the backend "potluck"; other compressors run on any backend.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from potluck._core.context.structure import compare
from potluck._core.forks import Uncopied
from potluck.compressors import Compressor, options
from potluck.compressors.base import Array, Coded, text_of
from potluck.compressors.reduction import Residuals, Sums
from potluck.torch import compression
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.torch.structure import check_dense, describe

# Its name before torch 2.13, which warns of it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Pending:
    """A work of torch, as compressors take it (``compressors.base.Pending``)."""

    def __init__(self, work: Any, result: Callable[[], Any]) -> None:
        self._work = work
        self._result = result

    def then(self, finish: Callable[[Any], Any]) -> "_Pending":
        return _Pending(self._work, lambda: finish(self._result()))

    def wait(self) -> Any:
        self._work.wait()
        return self._result()

    def future(self) -> torch.futures.Future[Any]:
        """A future of the result."""

        def end(done: torch.futures.Future[Any]) -> Any:
            done.value()  # raises what the work has raised
            return self._result()

        future: torch.futures.Future[Any] = self._work.get_future().then(end)
        return future


class OverGroup:
    """The collectives of a process group, as compressors take them
    (``compressors.base.Collectives``). Arrays are sent from ``device``; sums are divided, for DDP
    wants the mean."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.world_size = self.divisor = group.size()
        self._group = group
        self._device = device

    def all_reduce(self, array: Array) -> _Pending:
        sent = torch.from_numpy(array).to(self._device)

        def received() -> Array:
            if self._device.type != "cpu":
                array[:] = sent.cpu().numpy()
            return array

        return _Pending(dist.all_reduce(sent, group=self._group, async_op=True), received)

    def all_reduce_encoded(
        self, array: Array, compressor: Coded, residual: Array | None
    ) -> _Pending:
        group, codec = own_group(self._group, compressor), compressor.codec.name
        kept = None if residual is None else torch.from_numpy(residual)
        return _Pending(
            group.all_reduce_encoded(torch.from_numpy(array), codec, kept), lambda: array
        )

    def all_gather(self, payload: Array) -> _Pending:
        sent = torch.from_numpy(payload).to(self._device)
        rows = sent.new_empty(self.world_size * sent.numel())
        work = _all_gather(rows, sent, group=self._group, async_op=True)
        return _Pending(work, lambda: rows.cpu().numpy())


class _Ranks:
    """The ranks of a process group, of any backend, as ``compare`` takes them."""

    epoch = -1

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = self
        self.world_size = group.size()
        self._comm = OverGroup(group, device)

    def describe(self, rank: int) -> str:
        return f"rank {rank}"

    def all_gather(self, array: Array) -> Array:
        found: Array = self._comm.all_gather(array.view(np.uint8)).wait().view(array.dtype)
        return found


class _Piece(NamedTuple):
    """The gradients of a bucket that are sent in one way."""

    compressor: Compressor | None
    bucket: int
    parameters: list[Tensor]
    flat: Tensor
    """The bucket's buffer, or a copy of its parts."""
    parts: list[Tensor]
    """Where a copy goes in the buffer."""


class CompressionState(Uncopied):
    """The state of the hook: for each parameter the residual, the error of its last compression.

    The residual is added before the gradients of the next step are compressed (error feedback); it
    takes as much memory as float32 gradients (of float64 gradients float64's, unless the compressor
    is a codec). ``process_group`` is that of the model, by default the group of all ranks.
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
        compressor: compression.Choice,
        *,
        error_feedback: bool = True,
        dense_below: int = 0,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        model: nn.Module | None = None,
    ) -> None:
        owner = "CompressionState"
        self._dense_below, self._warmup_steps = options.thresholds(owner, dense_below, warmup_steps)
        compression.check_choice("compressor", compressor)
        self._names = {} if model is None else {p: n for n, p in _parameters(model).items()}
        self._chosen: dict[Tensor, Compressor | None] = {}
        if callable(compressor):
            if model is None:
                raise TypeError("a function chooses by the names of parameters: pass model=")
            self._chosen = {p: compression.chosen(compressor, n, p) for p, n in self._names.items()}
        self.compressor = compressor
        self.model = model
        self.error_feedback = error_feedback
        self._has_agreed = False
        self.process_group = process_group
        self.step = 0
        """The number of backwards so far."""
        self._watch = compression.Watch("mean")
        self.residuals = Residuals()
        """By parameter; parameters keep theirs when DDP builds new buckets."""
        self._sums: Sums | None = None  # of this backward
        if model is not None:
            check_dense(model)
            refused = self._refusal(self._names.items())
            if refused is not None:
                raise refused

    @property
    def num_nonfinite(self) -> Counter[str]:
        """By parameter: how many elements of its gradients were inf, NaN or beyond the range of the
        codec."""
        return self._watch.num_nonfinite

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """This rank's residuals by parameter name, with the step and PowerSGD's matrices, copies.

        ``model`` is the DDP or the module in it. Every rank has residuals of its own to save.
        """
        names = {parameter: name for name, parameter in _parameters(model).items()}
        return {
            "step": self.step,
            "residuals": {
                names[p]: torch.from_numpy(each.reshape(p.shape))
                for p, each in self.residuals.capture().items()
                if p in names
            },
            "qs": {names[p]: torch.tensor(q) for p, q in self.residuals.qs.items() if p in names},
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
        kept = {
            name: each.numpy()
            for name, each in state["residuals"].items()
            if self.error_feedback and self._way(name, parameters[name]) is not None
        }
        compression.tell_dropped([state["residuals"]], kept)
        owed = {parameters[name]: each for name, each in kept.items()}
        self.residuals.restore([owed], {p: each.dtype for p, each in owed.items()})
        self.residuals.qs = {
            parameters[name]: np.array(q) for name, q in state["qs"].items() if name in parameters
        }

    def pieces(self, bucket: GradBucket) -> list[_Piece]:
        """The gradients of a bucket, by the way in which they are sent in this step."""
        ways: dict[Compressor | None, list[tuple[Tensor, Tensor]]] = {}
        views = zip(bucket.parameters(), bucket.gradients(), strict=True)
        for parameter, gradient in views:
            way = self._way("", parameter)
            if way is not None and self.step < max(self._warmup_steps, way.start_step):
                way = None
            ways.setdefault(way, []).append((parameter, gradient))
        if len(ways) == 1:
            way = next(iter(ways))
            return [_Piece(way, bucket.index(), bucket.parameters(), bucket.buffer(), [])]
        pieces = []
        for way, pairs in ways.items():
            flat = torch.cat([gradient.reshape(-1) for _, gradient in pairs])
            parameters, parts = [p for p, _ in pairs], [gradient for _, gradient in pairs]
            pieces.append(_Piece(way, bucket.index(), parameters, flat, parts))
        return pieces

    def _way(self, name: str, parameter: Tensor) -> Compressor | None:
        """The compressor of a parameter in the steps in which it is compressed."""
        given = self.compressor
        if parameter.numel() < self._dense_below:
            return None
        if not callable(given):
            return given
        known = parameter in self._chosen
        return self._chosen[parameter] if known else compression.chosen(given, name, parameter)

    def agree(self, device: torch.device, parameters: Sequence[Tensor] = ()) -> None:
        """Compare how ranks compress, and the ``parameters`` of the first bucket, in the first
        backward. Desync on all ranks, with the first difference; TypeError for a parameter that
        can't be compressed."""
        if self._has_agreed:
            return
        names = {p: self._names.get(p, f"parameter {i}") for i, p in enumerate(parameters)}
        items = {"error_feedback": str(self.error_feedback)}
        items |= {"dense_below": str(self._dense_below), "warmup_steps": str(self._warmup_steps)}
        if self.compressor is not None and not callable(self.compressor):
            items["compressor"] = text_of(self.compressor)
        for parameter, name in (self._names | names).items():
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
            if parameter.is_complex() and self._way(name, parameter) is not None:
                return TypeError(
                    f"{name} is {parameter.dtype}, and only real gradients can be compressed: pass "
                    "a function as the compressor that returns None for this parameter"
                )
        return None

    def group(self) -> dist.ProcessGroup:
        """The group to reduce over."""
        group = self.process_group or dist.group.WORLD
        assert group is not None
        return group

    def begin(self) -> None:
        """Forget the matrices of a backward that has raised."""
        self._sums = None

    def start(self, piece: _Piece, call: int) -> torch.futures.Future[Tensor]:
        """Start the mean of a piece over the ranks; the future has it in the piece's array."""
        flat, compressor, step = piece.flat, piece.compressor, self.step
        key = (piece.bucket, compressor)
        # Before gradients are compressed, for a block of a coded sum has the NaN of any element.
        self._watch.own(key, flat, self._parts(piece, flat), compressor, step)
        if compressor is None:
            group = self.group()
            dense = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)
            assert dense is not None
            summed: torch.futures.Future[Tensor] = dense.get_future().then(
                lambda done: done.value()[0]
            )
            return summed
        wide = compression.widened(flat, compressor)
        shapes = {each: tuple(each.shape) for each in piece.parameters}
        if self._sums is None:
            comm, feedback = OverGroup(self.group(), flat.device), self.error_feedback
            self._sums = Sums(comm, self.residuals, step, error_feedback=feedback, numbered=True)
        named = tuple(map(id, shapes))
        at_end: torch.futures.Future[Tensor] = torch.futures.Future()

        def finish() -> Tensor:
            self._watch.reduced(key, flat, wide, self._parts(piece, wide), compressor, step)
            at_end.set_result(flat)
            return flat

        pending = self._sums.start(compressor, wide.numpy(), named, shapes, call, finish)
        return pending.future() if isinstance(pending, _Pending) else at_end

    def end(self) -> None:
        """Sum the matrices of all buckets of a backward. Here, and not in a callback of a future:
        callbacks run in another order on each rank, and so would start their collectives in another
        order."""
        sums, self._sums = self._sums, None
        wait = None if sums is None else sums.end()
        if wait is not None:
            wait()

    def _parts(self, piece: _Piece, flat: Tensor) -> compression.Parts:
        """A function that returns the names and gradients of a piece's parameters."""

        def parts() -> Iterator[tuple[str, Tensor]]:
            sizes = [p.numel() << p.is_complex() for p in piece.parameters]  # of real numbers
            pairs = zip(piece.parameters, torch.split(flat, sizes), strict=True)
            for place, (parameter, part) in enumerate(pairs):
                shape = tuple(parameter.shape)
                number = f"parameter {place} of bucket {piece.bucket}, of shape {shape}"
                yield self._names.get(parameter, number), part

        return parts


def own_group(group: dist.ProcessGroup, compressor: Coded) -> PotluckProcessGroup:
    """The group, for codecs; TypeError if it is not potluck's."""
    if not isinstance(group, PotluckProcessGroup):
        raise TypeError(
            f"{compressor!r} needs a process group of backend 'potluck', and this group has "
            f"{dist.get_backend(group)!r}: call init_process_group('potluck')"
        )
    return group


def compression_hook(
    state: CompressionState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:  # torch checks these annotations
    """Average a bucket of gradients over the ranks, sent compressed by the state's compressor."""
    buffer = bucket.buffer()
    if bucket.index() == 0:
        state.begin()
    state.agree(buffer.device, bucket.parameters())
    pieces = state.pieces(bucket)
    call = state.step << 16 | bucket.index()
    futures = [state.start(piece, call) for piece in pieces]
    if bucket.is_last():
        state.step += 1
        state.end()
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


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}
