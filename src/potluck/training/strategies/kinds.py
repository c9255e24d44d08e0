"""The strategies of a training, as a script names them. Each is an immutable set of options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from potluck._core import hints
from potluck._core.collectives.plan import Operation
from potluck._core.collectives.registry import algorithms_for
from potluck._core.collectives.spanning_tree import Cut
from potluck.compressors import Compressor, options
from potluck.compressors.encoded import checked
from potluck.graphs import Graph


@hints.of_init({"lr": "write learning_rate="}, "OuterSGD(0.7)")
@dataclass(frozen=True, slots=True)
class OuterSGD:
    """The rule by which a round changes the parameters: gradient descent with momentum.

    It computes what torch.optim.SGD does, on the *pseudo-gradient*: the parameters at the start of
    a round minus their mean over the ranks at its end. With a rate of 1 and no momentum a round
    ends with that mean. It is a set of options of [DiLoCo][potluck.torch.DiLoCo], not an optimizer
    of a model.
    """

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        options.put(
            self,
            learning_rate=options.number("OuterSGD", "learning_rate", self.learning_rate),
            momentum=options.number("OuterSGD", "momentum", self.momentum),
        )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"OuterSGD(learning_rate={self.learning_rate}): learning_rate must be positive and "
                "finite"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"OuterSGD(momentum={self.momentum}): momentum is at least 0, below 1")
        if self.nesterov and not self.momentum:
            raise ValueError("OuterSGD(nesterov=True) needs a momentum above 0")


class Strategy:
    """How often the ranks of a training agree, and what they exchange then.

    A strategy without an option has the value that stands here; the loop and the planner ask for
    these values, not for the class.
    """

    __slots__ = ()

    every: int | None = None
    """In how many steps all parameters are exchanged once; None: gradients are, in every step."""
    fragments: int = 1
    """In how many rounds all parameters are exchanged once."""
    deadline: float | None = None
    """When a slow rank's steps of a round end (see DiLoCo); None: never."""
    delay: int = 0
    """The steps of the next round during which an exchange goes on."""
    mixing: float = 0.0
    """The weight of a rank's own parameters after a delayed exchange."""
    outer: OuterSGD = OuterSGD(1.0)
    """The rule that applies an exchange; this one takes the mean."""
    neighbors_only: bool = False
    """Whether a rank exchanges with its neighbours in ``graphs`` only, not with all ranks."""
    compression: Compressor | None = None
    """The method that encodes what is sent."""
    bucket_size_mb: float | None = None
    """The size of the buckets of gradients, in MiB; None: that of the model's DDP."""
    algorithm: str | None = None
    """The algorithm of all_reduce; None: the one that the links suggest."""

    @property
    def in_rounds(self) -> bool:
        """Whether ranks take steps alone, and then exchange parameters."""
        return self.every is not None

    @property
    def round_steps(self) -> int:
        """The number of steps between two exchanges; 1 for gradients in every step."""
        return (self.every or 1) // self.fragments

    def in_buckets(self, size_mb: float) -> Self:
        """The same with gradients in buckets of ``size_mb`` MiB; itself if it sends none."""
        return self

    def undivided(self) -> Self:
        """The same with all parameters in one fragment."""
        return self

    def graphs(self, world_size: int, cut: Cut = ()) -> tuple[Graph, ...]:
        """The graphs of neighbours of the rounds, in turn; empty if all ranks exchange."""
        return ()


@dataclass(frozen=True, slots=True)
class DataParallel(Strategy):
    """Every step is averaged over all ranks and committed: the gradients are those of one machine
    with the whole batch.

    The options are those of the model's DistributedDataParallel, where they are given:
    ``compression`` sends gradients in fewer bytes, ``bucket_size_mb`` is the size of its buckets in
    MiB. ``algorithm``, such as ``"hierarchical"``, reduces them by this algorithm of all_reduce
    instead of the one that the links suggest.

    ValueError for a bucket size that is not positive and finite, for another algorithm, and for an
    algorithm with ``compression``, which brings its own.
    """

    compression: Compressor | None = None
    bucket_size_mb: float | None = None
    algorithm: str | None = None

    def __post_init__(self) -> None:
        if callable(self.compression) and not isinstance(self.compression, type):
            raise TypeError(
                "DataParallel(compression=...) is one compressor for all parameters; a function "
                "that chooses for each belongs to DistributedDataParallel(model, compression=...)"
            )
        _check_compressor(self.compression)
        size = self.bucket_size_mb
        if size is not None and not 0 < size < math.inf:
            raise ValueError(f"bucket_size_mb is {size}; it must be positive and finite")
        if self.algorithm is None:
            return
        known = [str(each) for each in algorithms_for(Operation.ALL_REDUCE)]
        if self.algorithm not in known:
            raise ValueError(f"algorithm is {self.algorithm!r}; it is one of {', '.join(known)}")
        if self.compression is not None:
            raise ValueError(
                f"algorithm is {self.algorithm!r}, but compressed gradients take the algorithm of "
                "their method: leave one of the two out"
            )

    def in_buckets(self, size_mb: float) -> Self:
        return replace(self, bucket_size_mb=size_mb)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds(Strategy):
    """What strategies of rounds share: ``every`` steps on each rank alone, then one exchange."""

    every: int = 1
    deadline: float | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        options.put(self, every=options.integer(owner, "every", self.every))
        if self.every < 1:
            raise ValueError(f"{owner}(every={self.every}): a round has at least 1 step")
        if self.deadline is not None:
            options.put(self, deadline=options.number(owner, "deadline", self.deadline))
            if not 0 <= self.deadline < math.inf:
                raise ValueError(
                    f"{owner}(deadline={self.deadline}): deadline must be finite, at least 0"
                )


@hints.of_init({"outer": "DiLoCo(every=..., outer=...)"}, "LocalSGD(every=8)", same=hints.ROUNDS)
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD(Rounds):
    """Ranks train alone for ``every`` steps, then continue from the mean of their parameters.

    (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.) Each rank counts with
    its samples. Cost of a round: one all_reduce of the parameters. ``deadline`` ends a slow rank's
    steps as in [DiLoCo][potluck.torch.DiLoCo].
    """

    every: int = 8


@hints.of_init({}, "DiLoCo(every=100)", same=hints.ROUNDS)
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo(Rounds):
    """Ranks train alone for ``every`` steps; an outer optimizer applies the mean of what changed.

    (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.)
    Each rank counts with its samples. Cost of a round: one all_reduce of the parameters; memory:
    the parameters and the outer momentum once more, on the host.

    With ``deadline`` a rank ends its round before its last step if it has taken longer than the
    median of the ranks' times in the last rounds plus ``deadline`` times their median absolute
    deviation; later rounds compute the samples that it leaves.

    With ``fragments`` the parameters are divided, and every ``every / fragments`` steps, a round,
    one fragment is reduced, in turn: the same bytes, a part at a time. With ``delay`` the reduction
    goes on during the next ``delay`` steps; then a rank continues from ``mixing`` times its own
    parameters and ``1 - mixing`` times the global ones. (Douillard et al., "Streaming DiLoCo with
    overlapping communication", 2025, sections 2.1 to 2.3.)

    ``compression`` sends the pseudo-gradients in fewer bytes, with error feedback. With
    ``TopK(0.02, bits=2)`` and ``outer=OuterSGD(1.0)`` this is SparseLoCo, in which error feedback
    takes the place of the outer momentum. (Sarfi et al., "Communication Efficient LLM Pre-training
    with SparseLoCo", 2025.)

    ValueError for ``every`` below 1 or no multiple of ``fragments``, and for a ``delay`` of
    ``every / fragments`` steps or more.
    """

    every: int = 100
    outer: OuterSGD = OuterSGD(0.7, momentum=0.9, nesterov=True)
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.5
    compression: Compressor | None = None

    def __post_init__(self) -> None:
        Rounds.__post_init__(self)
        if not isinstance(self.outer, OuterSGD):
            what = self.outer if isinstance(self.outer, type) else type(self.outer)
            raise TypeError(
                f"DiLoCo(outer=...): outer is a {what.__module__}.{what.__qualname__}; pass "
                "potluck.torch.OuterSGD(learning_rate, momentum, nesterov), which is not made from "
                "parameters"
            )
        options.put(
            self,
            fragments=options.integer("DiLoCo", "fragments", self.fragments),
            delay=options.integer("DiLoCo", "delay", self.delay),
            mixing=options.number("DiLoCo", "mixing", self.mixing),
        )
        if self.fragments < 1:
            raise ValueError(f"fragments is {self.fragments}; it must be at least 1")
        if self.every % self.fragments:
            raise ValueError(
                f"every is {self.every} and fragments {self.fragments}: every must be a multiple, "
                "for one fragment is reduced after each every / fragments steps"
            )
        if not 0 <= self.delay < self.every // self.fragments:
            raise ValueError(
                f"delay is {self.delay}; it must be at least 0 and below every / fragments = "
                f"{self.every // self.fragments} steps, so that one reduction ends before the next"
            )
        if not 0 <= self.mixing < 1:
            raise ValueError(f"mixing is {self.mixing}; it must be at least 0 and below 1")
        _check_compressor(self.compression)
        if self.compression is not None and self.compression.needs_matrices:
            raise ValueError(
                f"compression is {type(self.compression).__name__}, which needs gradients as "
                "matrices: take TopK, RandomK, Quantize, FP16 or BF16"
            )

    def undivided(self) -> Self:
        return replace(self, fragments=1)


def _check_compressor(compression: object) -> None:
    if compression is not None:
        checked(compression, f"compression is {compression!r}", ", or None")


def partition(sizes: Sequence[int], num_fragments: int) -> list[tuple[int, ...]]:
    """Divide tensors of ``sizes`` elements into fragments of neighbours with near-equal elements.

    Returns the tensors' numbers; no fragment is empty. ValueError for more fragments than tensors.
    """
    if num_fragments > len(sizes):
        raise ValueError(
            f"fragments is {num_fragments}, but the model has {len(sizes)} parameters and buffers "
            "to divide: take fewer"
        )
    total, done = sum(sizes), 0
    fragments: list[list[int]] = [[]]
    for number, size in enumerate(sizes):
        left = len(sizes) - number  # tensors, and fragments that still need one
        is_full = done >= total * len(fragments) / num_fragments
        must = left == num_fragments - len(fragments)
        if fragments[-1] and len(fragments) < num_fragments and (is_full or must):
            fragments.append([])
        fragments[-1].append(number)
        done += size
    return [tuple(fragment) for fragment in fragments]


def fragment_of(number: int, num_fragments: int) -> int:
    """The fragment that round ``number`` reduces: a function of what is committed, so that all
    members of any group reduce the same one."""
    return number % num_fragments
