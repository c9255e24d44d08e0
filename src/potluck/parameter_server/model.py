"""``Model``: what the first server decides of one model: which gradients make its next version.
Pure: no lock, no clock, no I/O, no tensors.

Every decision is an entry of the log, and ``follow`` notes what it changes: on the first server
when it is made, on the others when it comes. So all know the version, and what became of pushes.

``version`` counts updates, so it is also the number of the step that workers compute now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.parameter_server.entries import Drop, Entry, SetParameters, Update
from potluck.parameter_server.layout import Layout, check_layout, of_plain, plain
from potluck.parameter_server.modes import Asynchronous, ElasticAveraging, Mode, Synchronous
from potluck.parameter_server.staleness import Leases

LEASES_FOR_EACH = 8
"""``max_staleness`` of ``Asynchronous`` for each worker, unless it is given."""

LIFE_BITS = 31


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a push. ``version``: the model's after it."""

    counted: bool
    version: int
    reason: str = ""

    def reply(self) -> dict[str, Any]:
        """As a payload."""
        return {"counted": self.counted, "version": self.version, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Gradient:
    """A push that waits for its update. ``push`` is a number of its own, by which a repeat of the
    same call is known from a second gradient. Its bits above ``LIFE_BITS`` are the same for all
    pushes of one life of a worker."""

    worker: str
    rank: int
    push: int
    step: int

    def of(self, model: str) -> str:
        """In errors."""
        return f"the gradient of step {self.step} of worker {self.worker} for {model!r}"


class Model:
    """The state machine of one model."""

    def __init__(self, name: str, layout: Layout, mode: Mode, rate: float) -> None:
        """``rate``: the optimizer's learning rate."""
        self.name = name
        self.layout = layout
        self.mode = mode
        self.version = 0
        self.counts: Counter[str] = Counter()
        """Gradients by what became of them."""
        self.counted: Counter[str] = Counter()
        """By worker, how many of its gradients are in this version, or were before it was set."""
        self._rate = rate
        self._decided: list[Entry] = []
        self._pending: dict[str, Gradient] = {}
        self._outcomes: dict[str, tuple[int, Outcome]] = {}
        self._leases: Leases | None = None

    def take_decided(self) -> list[Entry]:
        """The decisions since the last call."""
        decided, self._decided = self._decided, []
        return decided

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
        """Forget what is in no entry: gradients that wait, and leases. Workers compute anew."""
        self._pending.clear()
        self._leases = None

    def _decide(self, entry: Entry) -> None:
        self._decided.append(entry)
        self.follow(entry)

    # -- a worker's gradients

    def push(self, gradient: Gradient, workers: Sequence[str]) -> None:
        """Take a gradient, which is staged; ``outcome`` tells what became of it. A repeat of the
        same push changes nothing. ValueError for a gradient of another step, or a second one of a
        worker."""
        worker, step = gradient.worker, gradient.step
        if self.knows(worker, gradient.push):
            return
        what = gradient.of(self.name)
        if step > self.version:
            raise ValueError(f"{what} is of a later step: the model is at step {self.version}")
        waiting = self._pending.get(worker)
        if waiting is not None and waiting.push >> LIFE_BITS == gradient.push >> LIFE_BITS:
            raise ValueError(f"{what} is its second one in that step")
        if waiting is not None:
            # Its worker was killed, and computes that step again.
            self.drop(worker, waiting.push, "restarted")
        match self.mode:
            case Synchronous():
                self._push_to_round(gradient, what)
            case Asynchronous():
                self._push_on_lease(gradient, workers, what)
            case ElasticAveraging(alpha, of="gradients"):
                self._update("mix", [gradient], self._rate, alpha=alpha)
            case ElasticAveraging():
                self._update("add", [gradient], self._rate)
        self.progress(workers)

    def knows(self, worker: str, push: int) -> bool:
        """Whether a push of ``worker`` has come before."""
        waiting = self._pending.get(worker)
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

    def _push_to_round(self, gradient: Gradient, what: str) -> None:
        assert isinstance(self.mode, Synchronous)
        if gradient.step == self.version:
            self._pending[gradient.worker] = gradient
        elif self.mode.backup_workers:
            self.drop(gradient.worker, gradient.push, "late")
        else:
            raise ValueError(
                f"{what} is of an earlier step: the model is at step {self.version}; pull first"
            )

    def _push_on_lease(self, gradient: Gradient, workers: Sequence[str], what: str) -> None:
        lease = self._leases_of(workers).held.get(gradient.worker)
        if lease is None:
            self.drop(gradient.worker, gradient.push, "expired")
        elif lease.version != gradient.step:
            raise ValueError(f"{what}: its last pull was of step {lease.version}")
        else:
            self._pending[gradient.worker] = gradient

    # -- a worker's pulls

    def may_pull(self, worker: str, workers: Sequence[str], expires_at: float) -> bool:
        """Whether ``worker`` may compute on the newest version now. If not it waits."""
        if not isinstance(self.mode, Asynchronous):
            return True
        if worker in self._pending:
            return False  # its gradient comes first
        leases = self._leases_of(workers)
        leases.held.pop(worker, None)  # it computes on that version no more
        return leases.pull(worker, self.version, expires_at)

    def expire(self, time: float, until: float) -> list[str]:
        """End the leases of workers that have neither pushed nor gone on since; their names. Those
        whose gradients wait here are kept ``until``."""
        if self._leases is None:
            return []
        for worker in self._pending:
            self._leases.held[worker].expires_at = until
        return self._leases.expire(time)

    def leave(self, worker: str) -> None:
        """``worker`` computes no more."""
        if self._leases is not None and worker not in self._pending:
            self._leases.held.pop(worker, None)

    def waits_for(self, workers: Sequence[str]) -> str:
        """What a pull or push waits for, for errors."""
        if self._leases is not None:
            names = self._leases.blocking(self.version)
            return f"worker {', '.join(names)}, which computes on the oldest parameters"
        absent = sorted(set(workers) - self._pending.keys(), key=_by_number)
        if not absent:
            return "apply_gradients, which no worker has called"
        return f"a gradient of step {self.version} of worker {', '.join(absent)}"

    def _leases_of(self, workers: Sequence[str]) -> Leases:
        assert isinstance(self.mode, Asynchronous)
        bound = self.mode.max_staleness
        bound = LEASES_FOR_EACH * len(workers) if bound is None else bound
        if self._leases is None:
            self._leases = Leases(bound)
        self._leases.max_staleness = bound
        return self._leases

    # -- updates

    def progress(self, workers: Sequence[str]) -> bool:
        """Make the updates that can be made; whether there were any."""
        if isinstance(self.mode, Synchronous):
            if self.mode.automatic and self.is_ready(workers):
                self._step_by_round(self._rate)
                return True
            return False
        before = self.version
        if self._leases is not None:
            leases = self._leases.held
            for worker in sorted(self._pending, key=lambda worker: leases[worker].version):
                self._step_on_lease(self._pending[worker], self._leases)
        return self.version > before

    def is_ready(self, workers: Sequence[str]) -> bool:
        """Whether enough workers have pushed the gradients of this step."""
        backups = self.mode.backup_workers if isinstance(self.mode, Synchronous) else 0
        # Not their number: gradients of workers that have left do not stand for those to come.
        missing = sum(worker not in self._pending for worker in workers)
        return len(self._pending) > 0 and missing <= backups

    def apply(self, step: int, rate: float | None, workers: Sequence[str]) -> None:
        """The update of ``step`` by hand, unless it has been made. ValueError if it is not
        ready."""
        self._need_round("apply_gradients")
        if step < self.version:
            return
        if not self.is_ready(workers):
            raise ValueError(
                f"{len(self._pending)} gradients of step {self.version} of {self.name!r} are "
                f"there; it waits for {self.waits_for(workers)}"
            )
        self._step_by_round(self._rate if rate is None else rate)

    def clear(self, step: int) -> None:
        """Drop the gradients of ``step``, unless its update was made."""
        self._need_round("clear_gradients")
        if step == self.version:
            for gradient in self._pending.values():
                self.drop(gradient.worker, gradient.push, "cleared")
            self._pending.clear()

    def set(self, worker: str, push: int) -> None:
        """Take the parameters that ``worker`` has staged; gradients that wait are dropped."""
        self._set(worker, push, self.version)

    def replace(self, worker: str, push: int) -> None:
        """The same for a model that has parameters: as the next version."""
        self._set(worker, push, self.version + 1)

    def _set(self, worker: str, push: int, version: int) -> None:
        for gradient in self._pending.values():
            self.drop(gradient.worker, gradient.push, "replaced")
        self._pending.clear()
        if self._leases is not None:
            self._leases.held.clear()
        self._decide(SetParameters(self.name, self.layout, worker, push, version))

    def check(self, layout: Layout) -> None:
        """ValueError unless ``layout`` has the names and shapes of the model's."""
        check_layout(layout, self.layout, f"what is set for {self.name!r}")

    def _need_round(self, what: str) -> None:
        if not isinstance(self.mode, Synchronous):
            raise ValueError(
                f"{what} is for Synchronous: with {type(self.mode).__name__} each gradient is "
                "applied when it arrives"
            )

    def _step_by_round(self, rate: float) -> None:
        # In rank order, so that the sum does not depend on who was first.
        gradients = sorted(self._pending.values(), key=lambda each: (each.rank, each.worker))
        self._update("step", gradients, rate)

    def _step_on_lease(self, gradient: Gradient, leases: Leases) -> None:
        assert isinstance(self.mode, Asynchronous)
        staleness = leases.apply(gradient.worker, self.version)
        if staleness is None:
            return
        divisor = max(1, staleness) if self.mode.lr_by_staleness else 1
        self._update("step", [gradient], self._rate / divisor, staleness=staleness)

    def _update(self, how: str, gradients: Sequence[Gradient], rate: float, **details: Any) -> None:
        pushes = tuple((each.worker, each.push) for each in gradients)
        self._decide(Update(self.name, how, pushes, rate, self.version + 1, **details))
        for each in gradients:
            self._pending.pop(each.worker, None)

    # -- for checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: not the gradients that wait, whose workers push them again."""
        outcomes = {
            worker: [push, outcome.counted, outcome.version, outcome.reason]
            for worker, (push, outcome) in self._outcomes.items()
        }
        return {
            "version": self.version,
            "outcomes": outcomes,
            "counts": dict(self.counts),
            "counted": dict(self.counted),
            "layout": plain(self.layout),
        }

    @classmethod
    def of_state(cls, name: str, state: Mapping[str, Any], mode: Mode, rate: float) -> Model:
        """The inverse of ``state``."""
        model = cls(name, of_plain(state["layout"]), mode, rate)
        model.version = state["version"]
        model.counts.update(state.get("counts", {}))
        model.counted.update(state.get("counted", {}))
        model._outcomes = {
            worker: (push, Outcome(*outcome))
            for worker, (push, *outcome) in state["outcomes"].items()
        }
        return model


def _by_number(name: str) -> tuple[int, str]:
    return len(name), name
