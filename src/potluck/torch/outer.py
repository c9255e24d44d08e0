"""Local SGD and DiLoCo: what has changed in the parameters in a round, summed over the ranks.

The *anchors* are the global parameters, equal on all ranks: those from which a round began. What a
rank's steps have changed, anchor - parameter, is its *pseudo-gradient*. Its mean over the ranks is
the gradient of the outer optimizer, which moves the anchors, and the parameters with them. (Reddi
et al., "Adaptive Federated Optimization", 2021, algorithm 1; a mean of the parameters themselves is
the case of a rate of 1.)

Anchors and outer momentum are kept on the host, in float32 or wider, and updated there, so that
ranks on unlike devices end with equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.checkpoint.state import State, fingerprint
from potluck.errors import CheckpointError
from potluck.torch.buckets import Slot, assign
from potluck.training.strategies import DiLoCo, LocalSGD

if TYPE_CHECKING:
    from potluck.context import DistributedContext

_BUCKET_BYTES = 25 << 20
_LEAST_BYTES_PER_S = 100_000
"""A reduction may take as long as on a network of this rate."""


class OuterStrategy:
    """LocalSGD or DiLoCo on one model (not its wrapper): a ``training.rounds.RoundStrategy``.

    Floating-point buffers are averaged with the parameters; others remain those of each rank.
    """

    def __init__(
        self,
        config: LocalSGD | DiLoCo,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.every, self.deadline = config.every, config.deadline
        self._outer = config.outer
        self._optimizers = list(optimizers)
        self._also = dict(also)
        named: list[tuple[str, Tensor]] = [
            (name, p) for name, p in model.named_parameters() if p.requires_grad
        ]
        self._num_trained = len(named)
        named += [(n, buffer) for n, buffer in model.named_buffers() if buffer.is_floating_point()]
        self._names = [name for name, _ in named]
        self._tensors: list[Tensor] = [tensor for _, tensor in named]
        place = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        every_name: list[tuple[str, Tensor]] = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._index = {name: place[id(each)] for name, each in every_name if id(each) in place}
        self._anchors: list[Tensor] | None = None  # None: the model holds the global parameters
        self._momenta: list[Tensor | None] = [None] * len(named)
        slots = [Slot(t.numel(), _wide(t).itemsize, _wide(t)) for t in self._tensors]
        self._buckets = assign(slots, bucket_bytes=_BUCKET_BYTES, first_bucket_bytes=_BUCKET_BYTES)
        self._kept: dict[int, list[Tensor]] = {}  # by round: its pseudo-gradients
        self._sums: list[Tensor] = []

    # ------------------------------------------------------------ a round

    @torch.no_grad()
    def begin(self, number: int) -> None:
        if self._anchors is None:
            self._anchors = [_host(tensor) for tensor in self._tensors]

    @torch.no_grad()
    def close(self, number: int) -> None:
        anchors = self._anchors or [_host(tensor) for tensor in self._tensors]
        self._kept[number] = [
            anchor - tensor.detach().to("cpu", anchor.dtype)
            for anchor, tensor in zip(anchors, self._tensors, strict=True)
        ]

    @torch.no_grad()
    def start(
        self, ctx: DistributedContext, number: int, weight: float, timeout_s: float
    ) -> Callable[[], None]:
        kept = self._kept[number]
        self._sums = []
        for bucket in self._buckets:
            flat = torch.zeros(bucket.numel, dtype=kept[bucket.parameters[0]].dtype)
            if weight:
                for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                    part = flat[offset : offset + kept[index].numel()]
                    torch.mul(kept[index].reshape(-1), weight, out=part)
            self._sums.append(flat)
        timeout_s += sum(flat.nbytes for flat in self._sums) / _LEAST_BYTES_PER_S
        works = [ctx.all_reduce(f, "sum", timeout=timeout_s, async_op=True) for f in self._sums]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    @torch.no_grad()
    def apply(self, number: int, fraction: float) -> None:
        del self._kept[number]
        if self._anchors is None:  # this rank has no steps of its own yet
            self._anchors = [_host(tensor) for tensor in self._tensors]
        if fraction:
            for index, gradient in self._gradients():
                self._move(index, gradient / fraction if fraction != 1 else gradient)
        for tensor, anchor in zip(self._tensors, self._anchors, strict=True):
            tensor.copy_(anchor)
        self._sums = []

    def _gradients(self) -> Iterator[tuple[int, Tensor]]:
        """The summed pseudo-gradients, by the tensor's index."""
        for bucket, flat in zip(self._buckets, self._sums, strict=True):
            for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                tensor = self._tensors[index]
                yield index, flat[offset : offset + tensor.numel()].view(tensor.shape)

    def _move(self, index: int, gradient: Tensor) -> None:
        """The outer optimizer's step of one tensor. Buffers are not trained: they are averaged."""
        assert self._anchors is not None
        outer, anchor = self._outer, self._anchors[index]
        if index >= self._num_trained:
            anchor.sub_(gradient)
            return
        if outer.momentum:
            momentum = self._momenta[index]
            momentum = gradient.clone() if momentum is None else momentum
            if momentum is self._momenta[index]:
                momentum.mul_(outer.momentum).add_(gradient)
            self._momenta[index] = momentum
            nesterov = outer.nesterov
            gradient = gradient.add(momentum, alpha=outer.momentum) if nesterov else momentum
        anchor.sub_(gradient, alpha=outer.lr)

    # ------------------------------------------------------------ the state

    def global_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the model with the global parameters in place of this rank's."""
        anchors, index = self._anchors, self._index
        if anchors is None:
            return state
        return {
            name: anchors[index[name]].to(value.dtype) if name in index else value
            for name, value in state.items()
        }

    def capture(self) -> State:
        """The state of the outer optimizer, equal on all ranks."""
        exact = self._anchors or []
        return {
            "strategy": repr(self.config),
            "momenta": dict(zip(self._names, self._momenta, strict=True)),
            "anchors": {
                name: anchor
                for name, anchor, tensor in zip(self._names, exact, self._tensors, strict=False)
                if anchor.dtype != tensor.dtype
            },
        }

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Take a state of ``capture``; the model holds its global parameters."""
        found = [state["momenta"].get(name) for name in self._names]
        self._momenta = [None if each is None else each.clone() for each in found]
        self._anchors = [
            state["anchors"].get(name, tensor).detach().to("cpu", _wide(tensor), copy=True)
            for name, tensor in zip(self._names, self._tensors, strict=True)
        ]
        self._kept.clear()

    def fingerprint(self) -> str:
        """Hex SHA3-256 of the global parameters."""
        anchors = self._anchors
        return fingerprint(anchors if anchors is not None else list(self._tensors))

    def inner_hash(self) -> int:
        return int(fingerprint(hyperparameters(self._optimizers))[:13], 16)

    def capture_inner(self) -> State:
        return {
            "hyperparameters": hyperparameters(self._optimizers),
            "also": {name: each.state_dict() for name, each in self._also.items()},
        }

    def restore_inner(self, state: State) -> None:
        for optimizer, groups in zip(self._optimizers, state["hyperparameters"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        for name, each in self._also.items():
            each.load_state_dict(state["also"][name])


def hyperparameters(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """By optimizer and parameter group: the numbers that are not parameters, such as the rate."""
    return [
        [
            {name: value for name, value in group.items() if name not in _NOT_NUMBERS}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def check_strategy(theirs: State, mine: State) -> None:
    """CheckpointError for the state of a training with another strategy."""
    names = [each["strategy"] if each else "DataParallel()" for each in (theirs, mine)]
    if names[0] != names[1]:
        raise CheckpointError(
            f"this state belongs to a training with strategy={names[0]}; this training has "
            f"{names[1]}: pass the same, or another directory for checkpoints"
        )


_NOT_NUMBERS = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
"""What a parameter group has beside hyperparameters; the last three may follow the device."""


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.itemsize < 4 else tensor.dtype


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", _wide(tensor), copy=True)
