"""A model on the primary: which gradients make its next version. Its modes, and the staleness of
asynchronous gradients. Pure: no lock, no clock, no I/O, no tensors.

Every decision of a ``Model`` is an entry of the log, and ``follow`` notes what an entry changes, on
all servers alike: so all know the version and the outcomes of pushes. ``version`` counts updates,
so it is also the number of the present step.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from potluck._core.types import AnyCase
from potluck.parameter_server.layout import Layout, check_layout, plain
from potluck.parameter_server.log import Drop, Entry, SetParameters, Update

LEASES_FOR_EACH = 8
"""``max_staleness`` of ``Asynchronous`` for each worker, unless it is given."""

LIFE_BITS = 31


class Mode(ABC):
    """What becomes of gradients: all in which the modes differ."""

    is_by_step: ClassVar[bool] = False
    """Whether all workers push in every step, and one update follows."""
    backup_workers: int = 0
    """How many workers' gradients a step does without."""
    of: str = "gradients"
    """What the workers push, ``"gradients"`` or ``"parameters"``."""
    alpha: float = 1.0
    """The weight of what a worker pushes, in an average with what the server has."""

    @property
    def is_by_hand(self) -> bool:
        """Whether the script makes the updates."""
        return False

    @abstractmethod
    def take(self, model: Model, gradient: Gradient, workers: Sequence[str]) -> None:
        """Make an update by a new ``gradient``, let it wait, or drop it. ValueError for a gradient
        of another step."""

    def may_pull(
        self, model: Model, worker: str, workers: Sequence[str], expires_at: float
    ) -> bool:
        """Whether ``worker`` may compute on the newest version now."""
        return True

    def progress(self, model: Model, workers: Sequence[str]) -> bool:
        """Make the updates for which enough gradients wait; whether there were any."""
        return False


@dataclass(frozen=True, slots=True)
class Synchronous(Mode):
    """One update for each step, by the mean gradient of the workers.

    The first ``n - backup_workers`` gradients of the ``n`` workers count; a later one is dropped
    and counted (Chen et al., "Revisiting distributed synchronous SGD", 2016). ``automatic``: the
    update is made as soon as they are there; else by ``apply_gradients``.
    """

    backup_workers: int = 0
    automatic: bool = True
    is_by_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.backup_workers < 0:
            raise ValueError(f"backup_workers is {self.backup_workers}; it must be at least 0")

    @property
    def is_by_hand(self) -> bool:
        return not self.automatic

    def take(self, model: Model, gradient: Gradient, workers: Sequence[str]) -> None:
        if gradient.step == model.version:
            model.waiting[gradient.worker] = gradient
        elif self.backup_workers:
            model.drop(gradient.worker, gradient.push, "late")
        else:
            raise ValueError(
                f"{gradient.of(model.name)} is of an earlier step: the model is at step "
                f"{model.version}; pull first"
            )

    def progress(self, model: Model, workers: Sequence[str]) -> bool:
        if not self.automatic or not model.is_ready(workers):
            return False
        model.step(model.rate)
        return True


@dataclass(frozen=True, slots=True)
class Asynchronous(Mode):
    """One update for each gradient, when it arrives.

    The staleness of a gradient is the number of updates since the pull of the parameters that it
    was computed on. No worker computes on parameters that are more than ``max_staleness`` updates
    old when its gradient is applied: a pull or a push that would lead there waits. 0: one worker
    at a time. None: eight for each worker, so that a worker may be eight times slower than the
    others before they wait for it.

    ``scale_by_staleness`` divides the learning rate of a gradient by its staleness, if that is
    above 1 (Zhang et al., "Staleness-aware async-SGD", 2016).
    """

    max_staleness: int | None = None
    scale_by_staleness: bool = True

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness is {self.max_staleness}; it must be at least 0")

    def take(self, model: Model, gradient: Gradient, workers: Sequence[str]) -> None:
        lease = self._leases(model, workers).held.get(gradient.worker)
        if lease is None:
            model.drop(gradient.worker, gradient.push, "expired")
        elif lease.version != gradient.step:
            raise ValueError(
                f"{gradient.of(model.name)}: its last pull was of step {lease.version}"
            )
        else:
            model.waiting[gradient.worker] = gradient

    def may_pull(
        self, model: Model, worker: str, workers: Sequence[str], expires_at: float
    ) -> bool:
        if worker in model.waiting:
            return False  # its gradient comes first
        leases = self._leases(model, workers)
        leases.held.pop(worker, None)  # it computes on that version no more
        return leases.pull(worker, model.version, expires_at)

    def progress(self, model: Model, workers: Sequence[str]) -> bool:
        before, leases = model.version, model.leases
        for worker in sorted(model.waiting, key=lambda worker: leases.held[worker].version):
            staleness = leases.apply(worker, model.version)
            if staleness is not None:
                divisor = max(1, staleness) if self.scale_by_staleness else 1
                gradient = model.waiting[worker]
                model.update("step", [gradient], model.rate / divisor, staleness=staleness)
        return model.version > before

    def _leases(self, model: Model, workers: Sequence[str]) -> Leases:
        bound = self.max_staleness
        model.leases.max_staleness = LEASES_FOR_EACH * len(workers) if bound is None else bound
        return model.leases


@dataclass(frozen=True, slots=True)
class ElasticAveraging(Mode):
    """Workers and server pull each other.

    ``of="gradients"``: the server keeps a gradient, and makes it ``alpha * local + (1 - alpha) *
    global`` with each that arrives, and updates by that.

    ``of="parameters"``: each worker trains parameters of its own, and from time to time calls
    ``average_parameters``: worker and server move towards each other by ``alpha`` of their
    difference (Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", 2015,
    algorithm 1). Choose ``alpha`` near ``0.9 / n``.
    """

    alpha: float = 0.5
    of: str = "gradients"

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha!r}; it must be above 0 and at most 1")
        if self.of not in ("gradients", "parameters"):
            raise ValueError(f"of is {self.of!r}; it must be 'gradients' or 'parameters'")

    def take(self, model: Model, gradient: Gradient, workers: Sequence[str]) -> None:
        if self.of == "gradients":
            model.update("mix", [gradient], model.rate, alpha=self.alpha)
        else:
            model.update("add", [gradient], model.rate)


class AggregationMethod(enum.Enum, metaclass=AnyCase):
    """Names of the modes with their default options: ``AggregationMethod.SYNCHRONOUS`` is another
    way to write ``Synchronous()``."""

    SYNCHRONOUS = Synchronous()
    ASYNCHRONOUS = Asynchronous()
    ELASTIC_AVERAGING = ElasticAveraging()


def mode_of(given: object, what: str = "mode") -> Mode:
    """The argument ``what``, a mode or its name, as a mode. TypeError for anything else."""
    given = given.value if isinstance(given, AggregationMethod) else given
    if not isinstance(given, Mode):
        raise TypeError(
            f"{what} is {given!r}: pass a potluck.AggregationMethod, or Synchronous(), "
            "Asynchronous() or ElasticAveraging() of potluck.parameter_server"
        )
    return given


def is_feasible(now: int, outstanding: Iterable[int], max_staleness: int) -> bool:
    """Whether all gradients on the ``outstanding`` versions can be applied in time."""
    oldest_first = enumerate(sorted(outstanding))
    return all(now + place - version <= max_staleness for place, version in oldest_first)


@dataclass(slots=True)
class Lease:
    """A worker's right to compute on ``version``, until ``expires_at``."""

    version: int
    expires_at: float


@dataclass(slots=True)
class Leases:
    """Bounded staleness: the versions that workers compute on, or whose gradients wait here.

    Each worker that computes on version ``u`` will push a gradient. It may wait on the server until
    it is applied, but never be applied at a version above ``u + max_staleness``. With one update
    for each gradient, and the oldest applied first, the gradient in place ``j`` (from 0) of all
    that are outstanding is applied at version ``now + j`` at best. So a set of outstanding versions
    is feasible if and only if ``now + j - u_j <= max_staleness`` for the ``j``-th oldest ``u_j``
    (earliest deadline first, which meets all deadlines if any order does). Pulls and updates that
    keep the set feasible go on; others wait. The oldest gradient may always be applied, so some
    worker always goes on; also where the bound has shrunk since, with the number of workers, and
    the set is feasible no more.
    """

    max_staleness: int
    held: dict[str, Lease] = field(default_factory=dict)

    def pull(self, worker: str, now: int, expires_at: float) -> bool:
        """Whether ``worker`` may compute on version ``now``; its lease is then as written."""
        others = [lease.version for name, lease in self.held.items() if name != worker]
        if not is_feasible(now, [*others, now], self.max_staleness):
            return False
        self.held[worker] = Lease(now, expires_at)
        return True

    def apply(self, worker: str, now: int) -> int | None:
        """The staleness of the gradient of ``worker``, if it may be applied to version ``now``,
        which ends its lease; None if it must wait. KeyError without a lease."""
        mine = self.held[worker]
        others = [lease.version for name, lease in self.held.items() if name != worker]
        is_oldest = mine.version <= min(others, default=now)
        if not is_oldest and not is_feasible(now + 1, others, self.max_staleness):
            return None
        del self.held[worker]
        return now - mine.version

    def blocking(self, now: int) -> list[str]:
        """The workers with the oldest versions, for which the others wait."""
        oldest = min((lease.version for lease in self.held.values()), default=now)
        return sorted(name for name, lease in self.held.items() if lease.version == oldest)

    def expire(self, time: float) -> list[str]:
        """End the leases that are over; the names of their workers."""
        late = sorted(name for name, lease in self.held.items() if lease.expires_at <= time)
        for name in late:
            del self.held[name]
        return late


class Outcome(NamedTuple):
    """What became of a push. ``version``: of the model after it."""

    counted: bool
    version: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A push that waits for its update. ``push``, its number, tells a repeat of the same call from
    a second gradient; the bits above ``LIFE_BITS`` are equal in all pushes of one worker
    process."""

    worker: str
    rank: int
    push: int
    step: int

    def of(self, model: str) -> str:
        """In errors."""
        return f"the gradient of step {self.step} of worker {self.worker} for {model!r}"


class Model:
    """The state machine of one model."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        mode: Mode,
        rate: float,
        decide: Callable[[Entry], None],
    ) -> None:
        """``rate``: the optimizer's learning rate. ``decide`` appends a decision to the log, with
        ``follow`` as a part of that."""
        self.name = name
        self.layout = layout
        self.mode = mode
        self.version = -1
        """Of the parameters, by number of updates; -1 before there are any."""
        self.counts: Counter[str] = Counter()
        """Gradients by what became of them."""
        self.counted: Counter[str] = Counter()
        """By worker, how many of its gradients are in this version, or were before it was set."""
        self.rate = rate
        self.waiting: dict[str, Gradient] = {}
        """Gradients that wait for their update, by worker."""
        self.leases = Leases(0)
        self._decide = decide
        self._outcomes: dict[str, tuple[int, Outcome]] = {}

    def follow(self, entry: Entry) -> None:
        """Note a decision, one of this model."""
        match entry:
            case SetParameters(worker=worker, push=push, version=version):
                self.version = version
                self._outcomes[worker] = push, Outcome(True, version)
            case Update(pushes=pushes, version=version, staleness=staleness):
                self.version = version
                for worker, push in pushes:
                    self.counts["counted"] += 1
                    self.counted[worker] += 1
                    self._outcomes[worker] = push, Outcome(True, version)
                if staleness is not None:
                    self.counts["max staleness"] = max(self.counts["max staleness"], staleness)
            case Drop(worker=worker, push=push, reason=reason) if reason:
                self.counts[reason] += 1
                self._outcomes[worker] = push, Outcome(False, self.version, reason)

    def forget_waiting(self) -> None:
        """Forget what is in no entry: waiting gradients, and leases. Workers compute anew."""
        self.waiting.clear()
        self.leases.held.clear()

    # -- a worker's gradients

    def push(self, gradient: Gradient, workers: Sequence[str]) -> None:
        """Take a staged gradient; ``outcome`` says what became of it. A repeat of the same push
        changes nothing. ValueError for a gradient of another step, or a second one of a worker."""
        worker, step = gradient.worker, gradient.step
        if self.knows(worker, gradient.push):
            return
        what = gradient.of(self.name)
        if step > self.version:
            raise ValueError(f"{what} is of a later step: the model is at step {self.version}")
        waiting = self.waiting.get(worker)
        if waiting is not None and waiting.push >> LIFE_BITS == gradient.push >> LIFE_BITS:
            raise ValueError(f"{what} is its second one in that step")
        if waiting is not None:
            # Its worker was killed, and computes that step again.
            self.drop(worker, waiting.push, "restarted")
        self.mode.take(self, gradient, workers)
        self.progress(workers)

    def knows(self, worker: str, push: int) -> bool:
        """Whether a push of ``worker`` has come before."""
        waiting = self.waiting.get(worker)
        if waiting is not None and waiting.push == push:
            return True
        return self.outcome(worker, push) is not None

    def outcome(self, worker: str, push: int) -> Outcome | None:
        """What became of a push of ``worker``; None while it waits, or if it is unknown."""
        known, outcome = self._outcomes.get(worker, (-1, None))
        return outcome if known == push else None

    def drop(self, worker: str, push: int, reason: str) -> None:
        """Let a push count for nothing, and remember that."""
        self._decide(Drop(self.name, worker, push, reason))

    # -- a worker's pulls

    def may_pull(self, worker: str, workers: Sequence[str], expires_at: float) -> bool:
        """Whether ``worker`` may compute on the newest version now. If not it waits."""
        return self.mode.may_pull(self, worker, workers, expires_at)

    def expire(self, time: float, until: float) -> list[str]:
        """End the leases of workers that have not pushed by ``time``; their names. The leases of
        gradients that wait here are kept ``until``."""
        for worker in self.waiting.keys() & self.leases.held.keys():
            self.leases.held[worker].expires_at = until
        return self.leases.expire(time)

    def leave(self, worker: str) -> None:
        """``worker`` computes no more."""
        if worker not in self.waiting:
            self.leases.held.pop(worker, None)

    def waits_for(self, workers: Sequence[str]) -> str:
        """What a pull or push waits for, for errors."""
        if names := self.leases.blocking(self.version):
            return f"worker {', '.join(names)}, which computes on the oldest parameters"
        absent = sorted(set(workers) - self.waiting.keys(), key=_by_number)
        if not absent:
            return "apply_gradients, which no worker has called"
        return f"a gradient of step {self.version} of worker {', '.join(absent)}"

    # -- updates

    def progress(self, workers: Sequence[str]) -> bool:
        """Make the updates that can be made; whether there were any."""
        return self.mode.progress(self, workers)

    def is_ready(self, workers: Sequence[str]) -> bool:
        """Whether enough workers have pushed the gradients of this step."""
        # Not their number: gradients of workers that have left replace none of the present workers.
        missing = sum(worker not in self.waiting for worker in workers)
        return len(self.waiting) > 0 and missing <= self.mode.backup_workers

    def apply(self, step: int, rate: float | None, workers: Sequence[str]) -> None:
        """The update of ``step`` by hand, unless it has been made. ValueError if it is not
        ready."""
        self._need_round("apply_gradients")
        if step < self.version:
            return
        if not self.is_ready(workers):
            raise ValueError(
                f"{len(self.waiting)} gradients of step {self.version} of {self.name!r} are "
                f"there; it waits for {self.waits_for(workers)}"
            )
        self.step(self.rate if rate is None else rate)

    def clear(self, step: int) -> None:
        """Drop the gradients of ``step``, unless its update was made."""
        self._need_round("clear_gradients")
        if step == self.version:
            for gradient in self.waiting.values():
                self.drop(gradient.worker, gradient.push, "cleared")
            self.waiting.clear()

    def set(self, worker: str, push: int) -> None:
        """Take the parameters that ``worker`` has staged, as the next version; waiting gradients
        are dropped."""
        for gradient in self.waiting.values():
            self.drop(gradient.worker, gradient.push, "replaced")
        self.waiting.clear()
        self.leases.held.clear()
        self._decide(SetParameters(self.name, self.layout, worker, push, self.version + 1))

    def check(self, layout: Layout) -> None:
        """ValueError unless ``layout`` has the names and shapes of the model's."""
        check_layout(layout, self.layout, f"what is set for {self.name!r}")

    def _need_round(self, what: str) -> None:
        if not self.mode.is_by_step:
            raise ValueError(
                f"{what} is for Synchronous: with {type(self.mode).__name__} each gradient is "
                "applied when it arrives"
            )

    def step(self, rate: float) -> None:
        """The update of the present step, by the gradients that wait."""
        # In rank order, so that the sum does not depend on the order of arrival.
        gradients = sorted(self.waiting.values(), key=lambda each: (each.rank, each.worker))
        self.update("step", gradients, rate)

    def update(self, how: str, gradients: Sequence[Gradient], rate: float, **details: Any) -> None:
        """The next version; ``how`` and ``details`` as in ``Update``."""
        pushes = tuple((each.worker, each.push) for each in gradients)
        self._decide(Update(self.name, how, pushes, rate, self.version + 1, **details))
        for each in gradients:
            self.waiting.pop(each.worker, None)

    # -- for checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: not waiting gradients, whose workers push them again."""
        outcomes = {worker: [push, *outcome] for worker, (push, outcome) in self._outcomes.items()}
        return {
            "version": self.version,
            "outcomes": outcomes,
            "counts": dict(self.counts),
            "counted": dict(self.counted),
            "layout": plain(self.layout),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state`` of a model with this layout."""
        self.version = state["version"]
        self.counts.update(state.get("counts", {}))
        self.counted.update(state.get("counted", {}))
        self._outcomes = {
            worker: (push, Outcome(*outcome))
            for worker, (push, *outcome) in state["outcomes"].items()
        }


def _by_number(name: str) -> tuple[int, str]:
    return len(name), name
