"""A model on one server: which gradients make its next version, and its tensors here. Its modes,
and the staleness of asynchronous gradients. Pure: no lock, no clock, no I/O.

The primary decides. Every decision of a ``Model`` is an entry of the log, and ``follow`` applies an
entry, on all servers alike: so all have the same version, each of its own tensors, and know the
outcomes of pushes. Workers stage gradients on the servers of the tensors; entries of the log say
what becomes of them. ``version`` counts updates, so it is also the number of the present step.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from potluck._core.types import AnyCase
from potluck.errors import ProtocolError
from potluck.parameter_server.layout import (
    Layout,
    Placement,
    Tensors,
    check_layout,
    checked,
    layout_of,
    of_plain,
    plain,
)
from potluck.parameter_server.log import Drop, Entry, Grant, Leave, SetParameters, Update
from potluck.parameter_server.optimizers import Optimizer
from potluck.parameter_server.table import Table

LEASES_FOR_EACH = 8
"""``max_staleness`` of ``Asynchronous`` for each worker, unless it is given."""

LIFE_BITS = 31

MAX_STAGED = 4
"""Limits, per worker, of what no entry has named yet: gradients for one model, and models with
first parameters."""


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
    """The state machine of one model on one server."""

    def __init__(
        self,
        name: str,
        mode: Mode,
        optimizer: Optimizer,
        here: Placement,
        decide: Callable[[Entry], None],
    ) -> None:
        """``here``: with this server alone as the live one. ``decide`` appends a decision to the
        log, with ``follow`` as a part of that."""
        self.name = name
        self.mode = mode
        self.layout: Layout = {}
        """Of the tensors on all servers; empty before there are any."""
        self.table = Table({}, optimizer)
        """The tensors of this server."""
        self.version = -1
        """Of the parameters, by number of updates; -1 before there are any."""
        self.counts: Counter[str] = Counter()
        """Gradients by what became of them."""
        self.counted: Counter[str] = Counter()
        """By worker, how many of its gradients are in this version, or were before it was set."""
        self.rate = optimizer.learning_rate
        self.waiting: dict[str, Gradient] = {}
        """Gradients that wait for their update, by worker."""
        self.leases = Leases(0)
        self.staged: dict[str, dict[int, Tensors]] = {}
        """By worker, in the order of arrival: tensors that no entry has named yet, by push
        number."""
        self._granted: dict[str, tuple[int, Tensors]] = {}
        """By worker: a version to be fetched, and its number."""
        self._server = here.present[0]
        self._here = here
        self._decide = decide
        self._outcomes: dict[str, tuple[int, Outcome]] = {}

    @property
    def is_set(self) -> bool:
        """Whether it has parameters."""
        return self.version >= 0

    # -- the log

    def follow(self, entry: Entry) -> None:
        """Apply a decision on this model. ProtocolError if it names tensors that are not staged
        here: then this server has lost some."""
        match entry:
            case SetParameters(layout=layout, worker=worker, push=push, version=version):
                tensors = self._take(layout, worker, push)
                if self.is_set:  # staged before that, perhaps: then in dtypes of its own
                    what, layout = f"what is set for {self.name}", self.layout
                    tensors = checked(tensors, layout, self._part(layout), what)
                self.layout = layout
                self.table.replace(tensors)
                self.version = version
                self._outcomes[worker] = push, Outcome(True, version)
            case Update(_, how, pushes, rate, version, alpha, staleness):
                gradients = [self._take(self.layout, *each) for each in pushes]
                if how == "step":
                    self.table.step(gradients, rate)
                elif how == "mix":
                    self.table.mix(gradients[0], alpha, rate)
                else:
                    self.table.add(gradients[0])
                self.version = version
                for worker, push in pushes:
                    self.counts["counted"] += 1
                    self.counted[worker] += 1
                    self._outcomes[worker] = push, Outcome(True, version)
                if staleness is not None:
                    self.counts["max staleness"] = max(self.counts["max staleness"], staleness)
            case Drop(_, worker, push, reason):
                self.staged.get(worker, {}).pop(push, None)
                if reason:
                    self.counts[reason] += 1
                    self._outcomes[worker] = push, Outcome(False, self.version, reason)
            case Grant(_, worker, version):
                self._granted[worker] = version, self.table.tensors
            case Leave(worker):
                self._granted.pop(worker, None)  # its staged gradients may still count
                self.leave(worker)

    def begin(self) -> None:
        """Forget what no entry has named, and grants: workers begin again."""
        self.waiting.clear()
        self.leases.held.clear()
        self.staged.clear()
        self._granted.clear()

    # -- a worker's tensors

    def stage(
        self, of: Gradient, tensors: Tensors, what: str, layout: Layout | None, has_room: bool
    ) -> bool:
        """Keep the ``tensors`` of a push until an entry names them; a repeat changes nothing.
        ``layout`` and ``has_room`` are for first parameters.

        False if there is no room. ValueError, which begins with ``what``, for tensors that do not
        fit the model's part here.
        """
        layout = self.layout if self.is_set else layout
        if layout is None:
            raise ValueError(f"{what}: there is no such model. Call set_parameters first")
        tensors = checked(tensors, layout, self._part(layout), what)
        staged = self.staged.get(of.worker, {})
        if of.push in staged:
            return True
        if self.is_set and len(staged) == MAX_STAGED:
            oldest = next(iter(staged))
            if oldest >> LIFE_BITS == of.push >> LIFE_BITS:
                return False
            del staged[oldest]  # its worker was killed before it pushed it
        elif not self.is_set and not has_room:
            return False
        self.staged.setdefault(of.worker, {})[of.push] = tensors
        return True

    def is_staged(self, of: Gradient, layout: Layout) -> bool:
        """Whether this server's part of a push with ``layout`` is staged."""
        return of.push in self.staged.get(of.worker, {}) or not self._part(layout)

    def fetch(self, worker: str, version: int, names: Iterable[str]) -> Tensors | None:
        """The tensors ``names`` of the version granted to ``worker``, once; None without such a
        grant. ValueError for a tensor that is not here."""
        granted = self._granted.get(worker)
        if granted is None or granted[0] != version:
            return None
        for name in names:
            if name not in granted[1]:
                raise ValueError(
                    f"server {self._server} has no tensor {name!r:.80} of {self.name!r}"
                )
        del self._granted[worker]
        return {name: granted[1][name] for name in names}

    def _take(self, layout: Layout, worker: str, push: int) -> Tensors:
        staged = self.staged.get(worker, {})
        found = staged.get(push)
        if found is None:
            if self._part(layout):
                raise ProtocolError(
                    f"server {self._server} has no push {push} of worker {worker} for {self.name!r}"
                )
            return {}
        for each in list(staged):
            del staged[each]  # also what came before it: of a push that was never made
            if each == push:
                break
        return found

    def _part(self, layout: Layout) -> Layout:
        """The part of ``layout`` on this server."""
        return self._here.split(layout)[self._server]

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

    def set(self, worker: str, push: int, layout: Layout) -> None:
        """Take the parameters that ``worker`` has staged, with ``layout``, as the next version;
        waiting gradients are dropped."""
        for gradient in self.waiting.values():
            self.drop(gradient.worker, gradient.push, "replaced")
        self.waiting.clear()
        self.leases.held.clear()
        self._decide(SetParameters(self.name, layout, worker, push, self.version + 1))

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

    # -- for checkpoints and for other servers

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the ``table``, the same on all servers: not waiting
        gradients, whose workers push them again."""
        outcomes = {worker: [push, *outcome] for worker, (push, outcome) in self._outcomes.items()}
        return {
            "version": self.version,
            "outcomes": outcomes,
            "counts": dict(self.counts),
            "counted": dict(self.counted),
            "layout": plain(self.layout),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state``; ``install`` adds the tensors."""
        self.layout = of_plain(state["layout"])
        self.version = state["version"]
        self.counts.update(state.get("counts", {}))
        self.counted.update(state.get("counted", {}))
        self._outcomes = {
            worker: (push, Outcome(*outcome))
            for worker, (push, *outcome) in state["outcomes"].items()
        }

    def install(self, part: Mapping[str, Any]) -> None:
        """Add a part of the table of another server. ValueError for tensors that do not belong
        here, or other shapes."""
        here, given = self._part(self.layout), layout_of(part["tensors"])
        known = {name: here[name] for name in given if name in here}
        check_layout(given, known, f"a copy of {self.name!r}")
        self.table.install(part)


def _by_number(name: str) -> tuple[int, str]:
    return len(name), name
