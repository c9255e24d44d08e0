"""The planner's measurements, inside the group that is to train, and the plan file of a script.

``potluck plan train.py`` runs the script with ``POTLUCK_PLAN`` set. Then its ElasticLoop takes a
few steps on each rank alone, measures the links, the methods and the memory of every machine
and tries the strategies (``measuring.py``), reports all that, and ends the script.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from torch import nn

from potluck.torch.ddp import DistributedDataParallel
from potluck.torch.measuring import measure
from potluck.torch.structure import device_of, synchronize
from potluck.training.planner import encode, named
from potluck.training.planner.candidates import BUCKET_SIZE_MB
from potluck.training.planner.measured import FACT, SUFFIX, VARIABLE
from potluck.training.policy import Policy
from potluck.training.strategies import DataParallel, Strategy

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

NUM_STEPS, _MOST_STEPS = 5, 25
"""The least and the largest number of steps of a rehearsal."""
_ENOUGH_S = 0.5
"""Steps take at least so long together: a few short ones would measure other load of the
machine."""
_WARM_STEPS = 1
_NUM_SAMPLED = 5
"""Steps whose times a suggestion is made from."""
_LONG_STEP_S = 0.25

_log = logging.getLogger(__name__)


def is_planning() -> bool:
    """Whether this script is only measured."""
    return bool(os.environ.get(VARIABLE))


class Of(msgspec.Struct, frozen=True):
    """The machines and the model that a plan was measured on."""

    nodes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class _Choice(msgspec.Struct):
    """The fields of a plan file that a training reads."""

    choice: str
    bucket_size_mb: float = BUCKET_SIZE_MB
    every: int | None = None
    measured: Of | None = None


class Planning:
    """What a loop does beside its steps for a plan: by default nothing."""

    def begin(self) -> None:
        """A step begins, with the loading of its samples."""

    def end(self, *, is_last: bool) -> bool:
        """A step has ended; whether the loop is to end. Equal on all ranks."""
        return False

    def timed(self, step_s: float, waited_s: float) -> None:
        """A step of ``step_s`` is committed, of which this rank has waited ``waited_s``."""

    def finish(self) -> None:
        """The loop has ended. A collective call."""


class Planned(Planning):
    """What ``strategy="auto"`` means for the script of this process: the choice in its plan file.

    ValueError, with the command that makes one, if there is none and this is no world of one. A
    plan of other machines, or of another model, is taken with a warning.
    """

    def __init__(self, ctx: DistributedContext, model: nn.Module) -> None:
        self._ctx, self._of = ctx, None
        self._seen: frozenset[str] = frozenset()
        self._warnings: set[str] = set()
        self.strategy: Strategy = DataParallel()
        script = getattr(sys.modules["__main__"], "__file__", None)
        path = None if script is None else Path(script).with_suffix(SUFFIX)
        if path is None or not path.is_file():
            if ctx.world_size == 1 and not ctx.elastic:
                return  # nothing is sent
            spec = sys.modules["__main__"].__spec__
            name = "SCRIPT" if script is None else Path(script).name
            name = name if spec is None else f"-m {spec.name}"
            raise ValueError(
                f'strategy="auto" takes the strategy of a plan, and there is no '
                f"{'plan file' if path is None else path.name}: make one with `potluck plan {name}`"
            )
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=_Choice)
            choice = named(plan.choice).in_buckets(plan.bucket_size_mb).in_rounds_of(plan.every)
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(
                f"{path.name} is no plan ({error}): make it anew with `potluck plan`"
            ) from None
        self.strategy, self._of = choice.strategy, plan.measured
        self._name, self._shapes = path.name, _shapes_of(model)
        self.begin()

    def begin(self) -> None:
        """Warn, on rank 0, if the plan was measured on other machines than those of the present
        group. Each warning is given once, and none if machines have only left: they may return."""
        nodes = frozenset(member.node for member in self._ctx.members)
        if self._of is None or nodes <= self._seen:
            return
        self._seen |= nodes
        doubt = doubt_of(self._of, nodes, self._shapes)
        if doubt is not None and doubt not in self._warnings and self._ctx.rank == 0:
            self._warnings.add(doubt)
            _log.warning("%s %s: make it anew with `potluck plan`", self._name, doubt)


def doubt_of(
    measured: Of, nodes: Collection[str], shapes: tuple[tuple[int, ...], ...]
) -> str | None:
    """Why a plan from these measurements does not hold for a model of these ``shapes`` on these
    machines; None if it does."""
    if measured.shapes != shapes:
        return "is of another model"
    then, now = set(measured.nodes), set(nodes)
    if now == then or len(now) == 1:  # alone, a worker trains as it will when others join
        return None
    if len(then) == 1:
        return (
            f"was made on one machine, where no strategy is compared; this training has {len(now)}"
        )
    if len(now) != len(then):
        return f"was made on {len(then)} machines; this training has {len(now)}"
    return "was made on other machines"


def _shapes_of(model: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Of the gradients of ``model``, in its order."""
    return tuple(tuple(p.shape) for p in model.parameters() if p.requires_grad)


class Suggestion(Planning):
    """Warns once, on rank 0, that steps wait for the network, where a plan would help.

    The first steps on a set of machines are measured; when machines join or leave, the next ones.
    """

    def __init__(self, ctx: DistributedContext) -> None:
        self._ctx = ctx
        self._steps: list[tuple[float, float]] = []
        self._nodes: frozenset[str] = frozenset()
        self._has_warned = False

    def timed(self, step_s: float, waited_s: float) -> None:
        nodes = frozenset(member.node for member in self._ctx.members)
        if nodes != self._nodes:
            self._nodes, self._steps = nodes, []
        if self._has_warned or len(self._steps) == _NUM_SAMPLED:
            return
        self._steps.append((step_s, waited_s))
        if len(self._steps) < _NUM_SAMPLED or self._ctx.rank != 0:
            return
        step_s, waited_s = (statistics.median(each) for each in zip(*self._steps, strict=True))
        if len(nodes) > 1 and step_s >= _LONG_STEP_S and waited_s > step_s / 2:
            self._has_warned = True
            _log.warning(
                "a step takes %.1f s, and %.0f%% of that is waiting for other machines: "
                "`potluck plan` says which strategy sends less, and what it changes",
                step_s,
                waited_s / step_s * 100,
            )


class Rehearsal(Planning):
    """The steps of a script that is only measured."""

    def __init__(self, ctx: DistributedContext, model: nn.Module, policy: Policy | None) -> None:
        self._ctx, self._model, self._device = ctx, model, device_of(model)
        self._is_proportional = policy is not None and policy.shares is not None
        self._times: list[float] = []
        self._num_steps = NUM_STEPS
        self._began = self._waited_s = 0.0

    def begin(self) -> None:
        if isinstance(self._model, DistributedDataParallel):
            self._model.reduces = False
        synchronize(self._device)
        self._began, self._waited_s = time.perf_counter(), self._ctx.waited_s

    def end(self, *, is_last: bool) -> bool:
        synchronize(self._device)  # a GPU computes what the step has only queued
        waited_s = self._ctx.waited_s - self._waited_s
        self._times.append(max(1e-6, time.perf_counter() - self._began - waited_s))
        if len(self._times) == NUM_STEPS:
            longest = np.array([self._step_s])
            self._ctx.all_reduce(longest, "max")
            self._num_steps = min(_MOST_STEPS, max(NUM_STEPS, round(_ENOUGH_S / longest[0])))
        return is_last or len(self._times) >= self._num_steps

    @property
    def _step_s(self) -> float:
        return statistics.median(self._times[_WARM_STEPS:] or self._times or [1e-6])

    def finish(self) -> None:
        """Measure all else, report it, and end the script."""
        if self._ctx.is_master:
            steps = f"{len(self._times)} steps of {1e3 * self._step_s:.3g} ms were computed"
            self._ctx.report(event=f"{steps}; measuring links and what compressing costs")
        measured = measure(
            *(self._ctx, _shapes_of(self._model), self._step_s),
            shares="proportional" if self._is_proportional else "equal",
        )
        if self._ctx.rank == 0:
            self._ctx.report(**{FACT: encode(measured)})
        raise SystemExit(0)
