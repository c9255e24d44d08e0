"""The reducer: averages gradients over all ranks in buckets, while backward runs.

Autograd calls ``_on_gradient`` when a parameter's gradient is complete. The gradient, times this
rank's weight, is copied into its bucket; a full bucket is all-reduced in the background while
backward goes on. Where the CPU encodes it first, a thread does so beside backward
(``encoding.py``). Buckets start in the same order on every rank. At the end of backward autograd
calls ``_finish``: it starts the remaining buckets, waits for all results, and only then writes them
into ``.grad``. So after the loss of a peer every ``.grad`` is this rank's own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from potluck.torch.compression import Compression
from potluck.training.buckets import Bucket, Slot, assign

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_MB = 1 << 20


class _Flat:
    """The buffers of a bucket: ``device`` on the parameters' device, ``host`` to be reduced."""

    __slots__ = ("device", "host")

    def __init__(self, bucket: Bucket, like: Tensor) -> None:
        self.device = torch.zeros(bucket.length, dtype=like.dtype, device=like.device)
        on_host = like.device.type == "cpu"
        self.host = self.device if on_host else torch.empty_like(self.device, device="cpu")


class Reducer:
    """Averages the gradients of ``parameters`` over the ranks of ``ctx`` in every backward.

    The result is the sum of ``weight * gradient`` over all ranks; a ``weight`` of None means 1 /
    world size. ``compression`` chooses the gradients that are sent compressed, on all ranks alike,
    else Desync; None if none are. The others are reduced by ``algorithm``, None for the choice that
    the links suggest. A rank with weight 0 contributes zeros even if its gradients are inf or NaN.
    The ``.grad`` of a parameter that no rank has used is unchanged. While ``enabled`` is False
    gradients only accumulate. While ``holds`` is True, in all parts of a step but the last, a
    backward adds its weighted gradients to the buckets instead, and leaves zeros in ``.grad``; the
    next backward that reduces has them in its sum. Cost: one all_reduce of all gradients; with
    compression of their compressed form, and of one number for each compressed parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        ctx: DistributedContext,
        bucket_size_mb: float,
        compression: Compression | None = None,
        *,
        algorithm: str | None = None,
    ) -> None:
        self.enabled = True
        self.holds = False
        self.weight: float | None = None
        self._ctx = ctx
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._compression = compression
        self._algorithm = algorithm
        none: list[None] = [None] * len(self._parameters)
        compressors = none if compression is None else compression.compressors
        self._buckets = assign(
            [
                Slot(p.numel(), p.element_size(), (p.device, p.dtype, compressor))
                for p, compressor in zip(self._parameters, compressors, strict=True)
            ],
            bucket_bytes=int(bucket_size_mb * _MB),
            first_bucket_bytes=int(min(bucket_size_mb, 1) * _MB),
        )
        if compression is not None:
            compression.lay_out(self._buckets)
        self._place = {
            index: (number, offset, bucket.numel + position)
            for number, bucket in enumerate(self._buckets)
            for position, (index, offset) in enumerate(
                zip(bucket.parameters, bucket.offsets, strict=True)
            )
        }
        """By parameter: its bucket, its offset there, and where its flag lies (see ``Bucket``)."""
        self._flats: list[_Flat | None] = [None] * len(self._buckets)
        self._used: set[int] = set()  # since gradients were last reduced
        self.has_parts = self._is_reduced = False
        """Whether buckets hold gradients of earlier parts; whether the last part is reduced."""
        self._failed = self._alone = -1  # autograd's numbers of backwards
        self._here: list[int] = []
        """The parameters that got a gradient in the backward ``_alone``."""
        self._reset()
        for index, parameter in enumerate(self._parameters):
            hook = _hook(weakref.ref(self), index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin_part(self, *, is_first: bool = True, is_last: bool = True) -> None:
        """A part of a step begins. With its first one those of a step that did not count are
        forgotten."""
        self.holds = not is_last
        if is_first:
            self.has_parts = self._is_reduced = False

    def forget(self) -> None:
        """Forget a backward that ended by an error of the script, which the reducer does not see.

        The buckets that it completed are reduced all the same: other ranks may have begun them.
        """
        if self._backward == -1:
            return
        if self.has_parts:
            raise RuntimeError(
                "a backward has failed in a step that is computed in parts, as it does not fit "
                "into memory: its other parts are lost with it, so let the error end the step"
            )
        self._flats = [None] * len(self._buckets)  # the operations still use the old buffers
        self._reset()
        if self._compression is not None:
            self._compression.encoder.drain()

    def _reset(self) -> None:
        self._backward = -1  # autograd's number of the present backward
        self._ready: set[int] = set()
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._waits: list[Callable[[], object]] = []
        self._num_launched = 0

    def _on_gradient(self, index: int) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == self._failed:
            return
        if not self.enabled:
            self._used.add(index)
            return
        is_whole = self.weight in (None, 1.0) and not (self.holds or self._is_reduced)
        if self._ctx.world_size == 1 and is_whole:
            if self._compression is not None:
                self._look_alone(self._compression, backward, index)
            return
        try:
            if self._backward == -1:
                self._backward = backward
                if self._is_reduced:
                    raise RuntimeError(
                        "a step that is computed in parts, as it does not fit into memory, has one "
                        "backward in each part: add the losses up first"
                    )
                if self._compression is not None and not self.holds:
                    self._compression.begin_backward(self._ctx)
                    self._compression.agree(self._ctx)
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            if self._backward != backward or index in self._ready:
                raise RuntimeError(
                    "a backward inside backward reached parameters of a DistributedDataParallel "
                    "module: pass use_reentrant=False to torch.utils.checkpoint"
                )
            self._ready.add(index)
            self._used.add(index)
            if self._stays_here:
                return  # they are kept, or all here, when backward ends
            self._fill(index)
            number = self._place[index][0]
            self._missing[number] -= 1
            while self._has_more and not self._missing[self._num_launched]:
                self._launch()
        except BaseException:
            self._abandon(backward)
            raise

    def _look_alone(self, compression: Compression, backward: int, index: int) -> None:
        """Count what is not finite when this backward ends, which sends nothing."""
        if self._alone != backward:
            self._alone, self._here = backward, []
            compression.begin_backward(self._ctx)
            end = functools.partial(self._end_alone, compression, self._here)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        self._here.append(index)

    def _end_alone(self, compression: Compression, indices: Sequence[int]) -> None:
        compression.watch_alone({i: self._parameters[i].grad for i in indices})
        compression.end_backward(failed=False)

    def _finish(self) -> None:
        """Called by autograd when all gradients of this backward are complete."""
        if self._stays_here:
            self._keep_here()
            return
        try:
            for index in self._place.keys() - self._ready:
                self._fill(index)
            while self._has_more:
                self._launch()
            flags = None
            if self._compression is not None:
                self._compression.encoder.drain()
                matrices = self._compression.end()
                if matrices is not None:
                    self._waits.append(matrices)
                flags = self._launch_flags(self._compression)
            for wait in self._waits:
                wait()
            if flags is not None:
                self._write_flags(*flags)
            with torch.no_grad():
                for number in range(len(self._buckets)):
                    self._write_back(number)
        except BaseException:
            self._abandon(self._backward)
            raise
        if self._compression is not None:
            self._compression.end_backward(failed=False)
        self._end_reduction()
        self._reset()

    @property
    def _stays_here(self) -> bool:
        """Whether a backward sends nothing, as that of a part."""
        return self.holds or (self.has_parts and self._ctx.world_size == 1)

    @torch.no_grad()
    def _keep_here(self) -> None:
        """End a backward that sends nothing."""
        for index, parameter in enumerate(self._parameters):
            self._fill(index)
            if self.holds and parameter.grad is not None:
                parameter.grad.zero_()
        if self.holds:
            self.has_parts = True
        else:
            for number in range(len(self._buckets)):
                self._write_back(number)
            self._end_reduction()
        self._reset()

    def _end_reduction(self) -> None:
        self._used.clear()
        self._is_reduced, self.has_parts = self.has_parts, False

    def _abandon(self, backward: int) -> None:
        # A failed operation may still use its buffer: later backwards get new buffers.
        self._failed = backward
        if self._compression is not None:
            self._compression.end_backward(failed=True)
        self._flats = [None] * len(self._buckets)
        self._used.clear()
        self.has_parts = self._is_reduced = False
        self._reset()

    def _flat(self, number: int) -> _Flat:
        flat = self._flats[number]
        if flat is None:
            bucket = self._buckets[number]
            flat = _Flat(bucket, self._parameters[bucket.parameters[0]])
            self._flats[number] = flat
        return flat

    @torch.no_grad()
    def _fill(self, index: int) -> None:
        """Copy this rank's weighted gradient of one parameter into its bucket.

        A gradient that this backward did not change is copied, too. Either ``no_sync()``
        accumulated it, or it is equal on all ranks, and then the weighted sum is the same gradient.
        """
        number, offset, flag = self._place[index]
        flat = self._flat(number).device
        parameter = self._parameters[index]
        if parameter.shape != self._shapes[index]:
            raise ValueError(
                f"the parameter {self._names[index]!r} has shape "
                f"{tuple(parameter.shape)}, and had {tuple(self._shapes[index])} when "
                "DistributedDataParallel was made: make it anew for the changed model"
            )
        view = flat[offset : offset + parameter.numel()].view(parameter.shape)
        weight = 1 / self._ctx.world_size if self.weight is None else self.weight
        gradient = parameter.grad
        if gradient is None or weight == 0:
            if not self.has_parts:
                view.zero_()
        elif gradient.layout != torch.strided:
            raise TypeError(
                f"the parameter {self._names[index]!r} has a gradient of layout "
                f"{gradient.layout}, which can't be reduced: make the layer without sparse=True"
            )
        elif self.has_parts:
            view.add_(gradient, alpha=weight)
        else:
            torch.mul(gradient, weight, out=view)
        flat[flag] = float(index in self._used and weight != 0)

    @property
    def _has_more(self) -> bool:
        return self._num_launched < len(self._buckets)

    def _launch(self) -> None:
        number = self._num_launched
        self._num_launched += 1
        flat = self._flat(number)
        if flat.host is not flat.device:
            flat.host.copy_(flat.device)
        waits, host = self._waits, flat.host  # a backward after this one has other lists
        if self._compression is not None and self._compression.is_beside:
            # All buckets, for all ranks must start them in one order.
            self._compression.encoder.add(lambda: waits.append(self._start(number, host)))
        else:
            waits.append(self._start(number, host))

    def _start(self, number: int, host: Tensor) -> Callable[[], object]:
        """Start the sum of a bucket over all ranks; returns the function that waits for it."""
        if self._compression is not None:
            gradients = host[: self._buckets[number].numel]
            self._compression.watch(number, gradients)
            if self._compression.is_compressed(number):
                return self._compression.start(number, gradients)
        work = self._ctx.all_reduce(host, "sum", algorithm=self._algorithm, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait

    def _launch_flags(self, compression: Compression) -> tuple[list[Tensor], Tensor] | None:
        """Start the sum of the compressed buckets' flags, which must be exact, in one operation.
        Returns the flags by bucket, and the sum."""
        parts = [
            self._flat(number).host[bucket.numel :]
            for number, bucket in enumerate(self._buckets)
            if compression.is_compressed(number)
        ]
        if not parts:
            return None
        flags = torch.cat([part.float() for part in parts])
        self._waits.append(self._ctx.all_reduce(flags, op="sum", async_op=True).wait)
        return parts, flags

    def _write_flags(self, parts: list[Tensor], flags: Tensor) -> None:
        sizes = [part.numel() for part in parts]
        for part, summed in zip(parts, torch.split(flags, sizes), strict=True):
            part.copy_(summed)

    def _write_back(self, number: int) -> None:
        bucket, flat = self._buckets[number], self._flat(number)
        if flat.host is not flat.device:
            flat.device.copy_(flat.host)
        used = flat.host[bucket.numel :].ne(0).tolist()
        for index, offset, is_used in zip(bucket.parameters, bucket.offsets, used, strict=True):
            if not is_used:
                continue
            parameter = self._parameters[index]
            view = flat.device[offset : offset + parameter.numel()].view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    """A parameter's hook that does not keep the reducer alive."""

    def on_gradient(_: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive._on_gradient(index)

    return on_gradient
