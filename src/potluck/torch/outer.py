"""The ends of rounds. Local SGD and DiLoCo: what has changed in the parameters in a round, summed
over the ranks. Gossip: parameters of each rank's own, averaged with those of its neighbours.

The *anchors* are the global parameters, equal on all ranks: those from which a round began. What a
rank's steps have changed, anchor - parameter, is its *pseudo-gradient*. Its mean over the ranks is
the gradient of the outer optimizer, which moves the anchors, and the parameters with them. (Reddi
et al., "Adaptive Federated Optimization", 2021, algorithm 1; a mean of the parameters themselves is
the case of a rate of 1.)

Anchors and outer momentum are kept on the host, in float32 or wider, and updated there, each
product in a call of its own: a call that multiplies and adds (``alpha=``) is rounded once or twice,
by the processor. So ranks on unlike machines end with equal bits.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck._core.collectives.spanning_tree import Cut
from potluck._core.context.compressed import OverContext
from potluck.checkpoint.state import State, fingerprint
from potluck.compressors.base import cast
from potluck.compressors.reduction import Residuals
from potluck.errors import CheckpointError
from potluck.graphs import Graph
from potluck.torch.compression import check_sizes
from potluck.torch.structure import synchronize
from potluck.training.buckets import Bucket, Slot, assign
from potluck.training.rounding import tolerant_hash
from potluck.training.strategies import Strategy
from potluck.training.strategies.kinds import fragment_of, partition

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)
_BUCKET_BYTES = 25 << 20
LEAST_BYTES_PER_S = 100_000
"""A reduction may take as long as on a network of this rate."""
_LEAST_PRESENT = 1e-6
"""Less is rounding: no rank had finite numbers."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that are reduced as one flat array."""

    number: int
    bucket: Bucket
    dtype: torch.dtype
    is_trained: bool

    def flat(self, kept: Mapping[int, Tensor], weight: float) -> Tensor:
        """The pseudo-gradients of the part, times ``weight``; zeros for a weight of 0."""
        flat = torch.zeros(self.bucket.numel, dtype=self.dtype)
        if weight:
            for index, offset in zip(self.bucket.parameters, self.bucket.offsets, strict=True):
                view = flat[offset : offset + kept[index].numel()]
                torch.mul(kept[index].reshape(-1), weight, out=view)
        return flat


class OuterStrategy:
    """LocalSGD or DiLoCo on one model (not its wrapper): a ``training.rounds.RoundStrategy``.

    Floating-point buffers are averaged with the parameters; others remain those of each rank.
    """

    def __init__(
        self,
        config: Strategy,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.deadline = config.deadline
        self._outer = config.outer
        self.num_fragments = config.fragments
        self.num_steps = config.round_steps
        self.delay = config.delay
        self._mixing = config.mixing
        self._compression = config.compression
        self.needs_whole_weights = self._compression is not None
        self._optimizers = list(optimizers)
        self._also = dict(also)
        named: list[tuple[str, Tensor]] = [
            (name, p) for name, p in model.named_parameters() if p.requires_grad
        ]
        self._num_trained = len(named)
        kept = model.state_dict().keys()  # other buffers do not travel with the state
        named += [(n, b) for n, b in model.named_buffers() if _has_mean(b) and n in kept]
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
        self._num_parts = 0
        self._fragments = [
            self._lay_out(fragment)
            for fragment in partition([t.numel() for t in self._tensors], self.num_fragments)
        ]
        self._kept: dict[int, dict[int, Tensor]] = {}  # by round and tensor: pseudo-gradients
        self._residuals = self._trial = (
            Residuals()
        )  # the trial: what they become if the round counts
        self._sums: list[tuple[Part, Tensor]] = []
        self.num_nonfinite: Counter[str] = Counter()
        """By parameter or buffer: how many elements of what rounds changed were inf or NaN."""

    # ------------------------------------------------------------ a round

    @torch.no_grad()
    def begin(self, number: int) -> None:
        if self._anchors is None:
            self._anchors = [_host(tensor) for tensor in self._tensors]

    @torch.no_grad()
    def close(self, number: int, *, whole: bool) -> None:
        anchors = self._anchors or [_host(tensor) for tensor in self._tensors]
        one = [self._fragments[fragment_of(number, self.num_fragments)]]
        self._kept[number] = {
            index: anchors[index] - self._tensors[index].detach().to("cpu", anchors[index].dtype)
            for parts in (self._fragments if whole else one)
            for part in parts
            for index in part.bucket.parameters
        }

    @torch.no_grad()
    def start(
        self, ctx: DistributedContext, number: int, weight: float, timeout_s: float
    ) -> Callable[[], None]:
        kept = self._kept[number]
        self._sums, self._trial = [], self._residuals.fork()
        for part in (part for parts in self._fragments for part in parts):
            if part.bucket.parameters[0] in kept:
                self._sums.append((part, part.flat(kept, weight)))
        timeout_s += sum(flat.nbytes for _, flat in self._sums) / LEAST_BYTES_PER_S
        waits = [self._start(ctx, number, part, flat, timeout_s) for part, flat in self._sums]

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def _start(
        self, ctx: DistributedContext, number: int, part: Part, flat: Tensor, timeout_s: float
    ) -> Callable[[], object]:
        if self._compression is None or not part.is_trained or part.dtype.is_complex:
            work = ctx.all_reduce(flat, "sum", timeout=timeout_s, async_op=True)
            return lambda: work.wait()
        wide = flat.numpy()
        dtype = self._compression.sum_dtype(is_double=part.dtype == torch.float64)
        residual = self._trial.flat(part.number, self._sizes(part), dtype)
        sent = cast(wide, dtype)
        call = number << 16 | part.number
        summed = self._compression.exchange(OverContext(ctx, timeout_s), sent, residual, call)

        def wait() -> None:
            summed.wait()
            if sent is not wide:
                wide[:] = sent

        return wait

    def _sizes(self, part: Part) -> dict[str, int]:
        """The numbers of elements of a part's tensors, by name."""
        return {self._names[i]: self._tensors[i].numel() for i in part.bucket.parameters}

    @torch.no_grad()
    def apply(self, number: int, fraction: float, *, delayed: bool) -> None:
        kept = self._kept.pop(number)
        if self._anchors is None:  # this rank has no steps of its own yet
            self._anchors = [_host(tensor) for tensor in self._tensors]
        if fraction:
            self._residuals = self._trial
            for index, gradient in self._gradients():
                self._count_nonfinite(number, index, gradient)
                self._move(index, gradient / fraction if fraction != 1 else gradient)
        for index in kept:
            tensor, anchor = self._tensors[index], self._anchors[index]
            if delayed and self._mixing:
                tensor.mul_(self._mixing).add_(
                    anchor.to(tensor.device, tensor.dtype), alpha=1 - self._mixing
                )
            else:
                tensor.copy_(anchor)
        self._sums = []

    def _count_nonfinite(self, number: int, index: int, gradient: Tensor) -> None:
        if gradient.sum().isfinite():
            return
        num = gradient.numel() - int(gradient.isfinite().sum())
        if num:
            name = self._names[index]
            if name not in self.num_nonfinite:  # a parameter that is NaN stays so
                _log.warning(
                    "%s: %d of %d elements of what round %d changed are inf or NaN, on a rank or "
                    "in the sum: so they are on all ranks now", name, num, gradient.numel(), number,
                )  # fmt: skip
            self.num_nonfinite[name] += num

    def _gradients(self) -> Iterator[tuple[int, Tensor]]:
        """The summed pseudo-gradients, by the tensor's index."""
        for part, flat in self._sums:
            for index, offset in zip(part.bucket.parameters, part.bucket.offsets, strict=True):
                tensor = self._tensors[index]
                yield index, flat[offset : offset + tensor.numel()].view(tensor.shape)

    def _lay_out(self, fragment: tuple[int, ...]) -> list[Part]:
        """The parts of a fragment that are reduced one by one."""
        tensors = [self._tensors[index] for index in fragment]
        slots = [
            Slot(t.numel(), _wide(t).itemsize, (_wide(t), index < self._num_trained))
            for index, t in zip(fragment, tensors, strict=True)
        ]
        buckets = assign(slots, bucket_bytes=_BUCKET_BYTES, first_bucket_bytes=_BUCKET_BYTES)
        parts = []
        for bucket in buckets:
            own = tuple(fragment[place] for place in bucket.parameters)
            number, self._num_parts = self._num_parts, self._num_parts + 1
            parts.append(
                Part(
                    number,
                    Bucket(own, bucket.offsets, bucket.numel),
                    _wide(self._tensors[own[0]]),
                    own[0] < self._num_trained,
                )
            )
        return parts

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
            gradient = gradient + momentum * outer.momentum if nesterov else momentum
        anchor.sub_(gradient * outer.learning_rate)

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
        self._residuals = Residuals()

    def capture_residuals(self) -> dict[str, Any]:
        """What compression has lost on this rank, by parameter name, copies."""
        return self._residuals.capture()

    def restore_residuals(self, states: Sequence[Mapping[str, Any]]) -> set[str]:
        """Set the residuals to the sum of ``states``: what several ranks owe adds up. Returns the
        names of the parameters that have one now; what others owed is dropped. CheckpointError for
        one of another shape."""
        dtypes: dict[str, Any] = {}
        for part in (part for parts in self._fragments for part in parts):
            if self._compression is not None and part.is_trained:
                dtype = self._compression.sum_dtype(is_double=part.dtype == torch.float64)
                for name, size in self._sizes(part).items():
                    check_sizes(name, size, states)
                    dtypes[name] = dtype
        return self._residuals.restore(states, dtypes)

    def fingerprint(self) -> str:
        """Hex SHA-256 of the global parameters."""
        anchors = self._anchors
        return fingerprint(anchors if anchors is not None else list(self._tensors))

    def inner_hash(self) -> int:
        return tolerant_hash(hyperparameters(self._optimizers))

    def synchronize(self) -> None:
        for device in {tensor.device for tensor in self._tensors}:
            synchronize(device)

    def capture_inner(self) -> State:
        return {
            "hyperparameters": hyperparameters(self._optimizers),
            "also": {name: each.state_dict() for name, each in self._also.items()},
        }

    def restore_inner(self, state: State) -> None:
        set_hyperparameters(self._optimizers, state["hyperparameters"])
        for name, each in self._also.items():
            each.load_state_dict(state["also"][name])


class GossipStrategy(OuterStrategy):
    """Gossip on one model: a ``training.rounds.RoundStrategy`` without global parameters.

    Ranks are equal only after a round without samples, in which they take the mean over all ranks.
    The loop makes such a round before each checkpoint and at the end. A newcomer gets the
    parameters of the most senior member.

    A tensor with NaN or inf does not count: its rank sends zeros, and 1 in place of 0 in a flag
    beside the numbers, by whose mean every receiver knows how much is missing. So the receivers,
    and the rank itself, get the mean of the others, weighted as in the graph. ``num_nonfinite``
    counts the elements by name, on the rank that has them.
    """

    def __init__(
        self,
        config: Strategy,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Mapping[str, Any],
    ) -> None:
        super().__init__(config, model, optimizers, also)
        self.num_fragments = 2  # more than one round: all are equal after one without samples only
        self._are_equal = False
        self._whole: dict[int, bool] = {}
        self._graphs: dict[tuple[int, Cut], tuple[Graph, ...]] = {}  # by world size and cut links

    def begin(self, number: int) -> None:
        self._are_equal = False

    def close(self, number: int, *, whole: bool) -> None:
        self._whole[number] = whole
        for name, tensor in zip(self._names, self._tensors, strict=True):
            num = tensor.numel() - int(tensor.detach().isfinite().sum())
            if num:
                self.num_nonfinite[name] += num
                _log.warning(
                    "%s: %d of %d elements are inf or NaN after round %d on this rank: "
                    "the mean leaves them out", name, num, tensor.numel(), number,
                )  # fmt: skip

    @torch.no_grad()
    def start(
        self, ctx: DistributedContext, number: int, weight: float, timeout_s: float
    ) -> Callable[[], None]:
        now = {index: tensor.detach().cpu() for index, tensor in enumerate(self._tensors)}
        parts = [part for parts in self._fragments for part in parts]
        self._sums = [(part, _with_flags(part, now)) for part in parts]
        timeout_s += sum(flat.nbytes for _, flat in self._sums) / LEAST_BYTES_PER_S
        options: dict[str, Any] = {"timeout": timeout_s, "async_op": True}
        if self._whole[number]:
            works = [ctx.all_reduce(flat, "mean", **options) for _, flat in self._sums]
        else:
            links = ctx.world_size, ctx.group.cut
            if links not in self._graphs:
                self._graphs[links] = self.config.graphs(*links)
            sequence = self._graphs[links]
            graph = sequence[number % len(sequence)]
            works = [ctx.neighbor_all_reduce(flat, graph, **options) for _, flat in self._sums]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    @torch.no_grad()
    def apply(self, number: int, fraction: float, *, delayed: bool) -> None:
        missing = {
            index: float(flag)
            for part, flat in self._sums
            for index, flag in zip(part.bucket.parameters, flat[part.bucket.numel :], strict=True)
        }
        for index, mean in self._gradients():
            if missing[index]:
                present = 1 - missing[index]
                mean = mean / present if present > _LEAST_PRESENT else mean.fill_(math.nan)
            self._tensors[index].copy_(mean)
        self._are_equal = self._whole.pop(number)
        self._sums = []

    # ------------------------------------------------------------ the state

    def capture(self) -> State:
        return {"strategy": f"Gossip(every={self.config.every})", "are_equal": self._are_equal}

    def restore(self, state: State) -> None:
        self._are_equal = bool(state["are_equal"])
        self._whole.clear()

    def fingerprint(self) -> str:
        """Of the parameters where they are equal on all ranks; else of their names."""
        return fingerprint(list(self._tensors) if self._are_equal else self._names)


def outer_of(
    config: Strategy,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    also: Mapping[str, Any],
) -> OuterStrategy:
    """The exchange at the end of a round by this strategy, which is one of rounds."""
    made = GossipStrategy if config.neighbors_only else OuterStrategy
    return made(config, model, optimizers, also)


def _with_flags(part: Part, now: Mapping[int, Tensor]) -> Tensor:
    """The tensors of a part, then a flag for each: 1 for zeros in place of one that is not
    finite."""
    bad = {index for index in part.bucket.parameters if not now[index].isfinite().all()}
    sent = {index: torch.zeros_like(t) if index in bad else t for index, t in now.items()}
    flags = torch.tensor([float(i in bad) for i in part.bucket.parameters], dtype=part.dtype)
    return torch.cat([part.flat(sent, 1.0), flags])


def hyperparameters(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """By optimizer and parameter group: the numbers that are not parameters, such as the rate."""
    return [
        [
            {name: value for name, value in group.items() if name not in _NOT_NUMBERS}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


@torch.no_grad()
def set_hyperparameters(
    optimizers: Sequence[Optimizer], values: Sequence[Sequence[dict[str, Any]]]
) -> None:
    """Set what ``hyperparameters`` returns to ``values``. Tensors are set in place: they stay on
    their device, and where a compiled step finds them."""
    for optimizer, groups in zip(optimizers, values, strict=True):
        for group, theirs in zip(optimizer.param_groups, groups, strict=True):
            for name, value in theirs.items():
                group[name] = _set(group.get(name), value)


def _set(own: Any, value: Any) -> Any:
    if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
        return own.copy_(value)
    return value


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


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", _wide(tensor), copy=True)
