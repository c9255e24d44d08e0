"""A communication hook for torch's DDP: gradients are sent compressed, with error feedback.

    model.register_comm_hook(CompressionState(Int(bits=8)), compression_hook)

All ranks end with the same bits. A codec's strategy (FP16, BF16, Int) works inside the reduction,
which needs the backend "potluck"; the others run on any backend.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from potluck.compressors import PowerSGD, Random, Strategy
from potluck.compressors.encoded import Encoded
from potluck.compressors.low_rank import Matrix
from potluck.compressors.powersgd import LowRankSum, as_matrix
from potluck.compressors.wide import Array, compress_any
from potluck.context.compressed import sum_payloads
from potluck.torch.process_group.group import PotluckProcessGroup

_log = logging.getLogger(__name__)


class _Bucket(NamedTuple):
    """A bucket of PowerSGD, until all buckets of a backward are reduced together."""

    number: int
    buffer: Tensor
    host: Tensor
    parts: list[tuple[Tensor, Array, Array]]
    """For each parameter: itself, its gradient in ``host``, and the same or its residual with the
    gradient added."""
    future: torch.futures.Future[Tensor]


class CompressionState:
    """The state of the hook: for each parameter the residual, the error of its last compression.

    The residual is added before the gradients of the next step are compressed (error feedback); it
    takes as much memory as float32 gradients (of float64 gradients float64's, unless the strategy
    is a codec's). ``process_group`` is that of the model, by default the group of all ranks.
    Gradients with inf or NaN are counted and reported in a warning, by the names of ``model``, if
    it is given, else by number and shape. TypeError for what is no strategy.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        error_feedback: bool = True,
        process_group: dist.ProcessGroup | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategy is {strategy!r}; it must be one such as TopK(0.01) or Int(bits=8)"
            )
        self.strategy = strategy
        self.error_feedback = error_feedback
        self.process_group = process_group
        self.step = 0
        """The number of backwards so far."""
        self.num_nonfinite: Counter[str] = Counter()
        """By parameter: how many elements of its gradients were inf or NaN in the mean."""
        self._names = {} if model is None else {p: n for n, p in _parameters(model).items()}
        self._flats: dict[int, tuple[list[Tensor], Tensor]] = {}  # by bucket, of its parameters
        self._residuals: dict[Tensor, Tensor] = {}  # by parameter, parts of these or loaded
        self._qs: dict[Tensor, Matrix] = {}  # of PowerSGD, equal on all ranks
        self._waiting: list[_Bucket] = []

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

        Residuals fit any strategy. ValueError for what is no such state, or for a parameter that
        ``model`` does not have in this shape; then nothing is changed.
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
        self._residuals = {
            parameters[name]: each.reshape(-1).clone()
            for name, each in state["residuals"].items()
            if self.error_feedback
        }
        self._qs = {
            parameters[name]: np.array(q) for name, q in state["qs"].items() if name in parameters
        }

    def watch(self, buffer: Tensor, index: int, parameters: list[Tensor]) -> Tensor:
        """Count what is not finite in the reduced gradients of a bucket; returns ``buffer``."""
        if buffer.sum().isfinite():
            return buffer
        parts = torch.split(buffer, [each.numel() for each in parameters])
        for place, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
            num = int(part.isfinite().logical_not().sum())
            if num:
                number = f"parameter {place} of bucket {index}, of shape {tuple(parameter.shape)}"
                name = self._names.get(parameter, number)
                self.num_nonfinite[name] += num
                _log.warning(
                    "the gradient of %s: %d of %d elements are inf or NaN at step %d, on a rank or "
                    "in the mean", name, num, part.numel(), self.step,
                )  # fmt: skip
        return buffer

    def group(self) -> dist.ProcessGroup:
        """The group to reduce over."""
        group = self.process_group or dist.group.WORLD
        assert group is not None
        return group

    def own_group(self) -> PotluckProcessGroup:
        """The group, for codecs; TypeError if it is not potluck's."""
        group = self.group()
        if not isinstance(group, PotluckProcessGroup):
            raise TypeError(
                f"{self.strategy!r} needs a process group of backend 'potluck', and this group has "
                f"{dist.get_backend(group)!r}: call init_process_group('potluck')"
            )
        return group

    def residual(self, bucket: GradBucket) -> Tensor | None:
        """The residual of a bucket, flat; its parameters keep theirs when DDP builds new
        buckets."""
        if not self.error_feedback:
            return None
        index, parameters = bucket.index(), bucket.parameters()
        kept = self._flats.get(index)
        if kept is None or [id(each) for each in kept[0]] != [id(each) for each in parameters]:
            flat = torch.zeros(bucket.buffer().numel(), dtype=self.dtype(bucket.buffer()))
            sizes = [each.numel() for each in parameters]
            for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
                if parameter in self._residuals:
                    part.copy_(self._residuals[parameter])
                self._residuals[parameter] = part
            kept = self._flats[index] = (parameters, flat)
        return kept[1]

    def dtype(self, buffer: Tensor) -> torch.dtype:
        """The dtype in which a bucket's gradients are summed, and its residual kept."""
        is_wide = buffer.dtype == torch.float64 and not isinstance(self.strategy, Encoded)
        return torch.float64 if is_wide else torch.float32


def compression_hook(
    state: CompressionState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:  # torch checks these annotations
    """Average a bucket of gradients over the ranks, sent compressed by the state's strategy."""
    buffer, strategy, group = bucket.buffer(), state.strategy, state.group()
    step, call = state.step, state.step << 16 | bucket.index()
    if bucket.is_last():
        state.step += 1
    if step < strategy.start_step:
        dense = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
        assert dense is not None
        summed: torch.futures.Future[Tensor] = dense.get_future().then(lambda done: done.value()[0])
        return summed
    watch = partial(state.watch, index=bucket.index(), parameters=bucket.parameters())
    residual, dtype = state.residual(bucket), state.dtype(buffer)
    flat = buffer if buffer.dtype == dtype else buffer.to(dtype)
    if isinstance(strategy, Encoded):
        coded = state.own_group().all_reduce_encoded(flat, strategy.codec.name, residual)
        return coded.get_future().then(lambda done: watch(buffer.copy_(done.value()[0])))
    host = flat.cpu()
    array: Array = host.numpy()
    kept: Array | None = None if residual is None else residual.numpy()
    if isinstance(strategy, PowerSGD):
        state._waiting.append(_bucket(bucket, host, array, kept))
        future = state._waiting[-1].future
        if bucket.is_last():
            waiting, state._waiting = state._waiting, []
            _reduce_matrices(state, strategy, waiting, step)
        return future
    if isinstance(strategy, Random):
        sent = torch.from_numpy(strategy.take(array, kept, call)).to(buffer.device)
    else:
        payload, _ = compress_any(strategy, array, kept, call)
        sent = torch.from_numpy(payload).to(buffer.device)

    def end(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        future.value()
        if isinstance(strategy, Random):
            strategy.put(array, sent.cpu().numpy(), call)
        else:
            sum_payloads(array, received.cpu().numpy(), strategy, call)
        np.divide(array, array.dtype.type(group.size()), out=array)
        return watch(buffer.copy_(host))

    if isinstance(strategy, Random):
        work = dist.all_reduce(sent, group=group, async_op=True)
    else:
        received = sent.new_empty(group.size(), sent.numel())
        work = dist.all_gather_into_tensor(received.view(-1), sent, group=group, async_op=True)
    assert work is not None
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
    return done


def _bucket(bucket: GradBucket, host: Tensor, array: Array, residual: Array | None) -> _Bucket:
    if residual is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            residual += array
    parts, at = [], 0
    for parameter in bucket.parameters():
        part, shape = slice(at, at + parameter.numel()), tuple(parameter.shape)
        target = array[part].reshape(shape)
        source = target if residual is None else residual[part].reshape(shape)
        parts.append((parameter, target, source))
        at = part.stop
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    return _Bucket(bucket.index(), bucket.buffer(), host, parts, future)


def _reduce_matrices(
    state: CompressionState, strategy: PowerSGD, buckets: list[_Bucket], step: int
) -> None:
    """Reduce all buckets of a backward together: the tensors that are sent as they are with the P
    of the others, then Q. Here, and not in a callback of a future: callbacks run in another order
    on each rank, and so would start their collectives in another order."""
    group, size = state.group(), np.float32(state.group().size())
    parts = [part for each in buckets for part in each.parts]
    for dtype in sorted({target.dtype for _, target, _ in parts}, key=str):
        mine = [part for part in parts if part[1].dtype == dtype]
        dense = [part for part in mine if not strategy.applies_to(part[1].shape)]
        named = {str(i): part for i, part in enumerate(mine) if strategy.applies_to(part[1].shape)}
        before = {name: state._qs[p] for name, (p, _, _) in named.items() if p in state._qs}
        one = LowRankSum(strategy, before, step)
        for name, (_, _, source) in named.items():
            one.add(name, as_matrix(source))
        left = one.begin()
        together = np.concatenate([left, *(source.reshape(-1) for _, _, source in dense)])
        _sum(together, buckets[0].buffer.device, group)
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
        _sum(right, buckets[0].buffer.device, group)
        qs = one.qs()
        for name, (parameter, target, _) in named.items():
            one.decode(name, as_matrix(target))
            target /= size
            if name in qs:
                state._qs[parameter] = qs[name]
    for each in buckets:
        parameters = [parameter for parameter, _, _ in each.parts]
        state.watch(each.buffer.copy_(each.host), each.number, parameters)
        each.future.set_result(each.buffer)


def _sum(array: Array, device: torch.device, group: dist.ProcessGroup) -> None:
    """The sum of ``array`` over all ranks, in place."""
    sent = torch.from_numpy(array).to(device)
    dist.all_reduce(sent, group=group)
    if device.type != "cpu":
        array[:] = sent.cpu().numpy()


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}
