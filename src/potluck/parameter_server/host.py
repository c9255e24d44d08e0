"""``Host``: the models of one server, their checkpoints, and the calls that wait for an update.

A call that waits takes no thread: it gets a Future, which ends as soon as the update is there. It
ends without one after ``wait_s``, and the caller asks again; so a caller that is gone, or a group
that has changed, is noticed in time.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from potluck.checkpoint import CheckpointStore
from potluck.checkpoint.writer import BackgroundWriter
from potluck.errors import CheckpointError
from potluck.parameter_server.model import Gradient, Model, Outcome
from potluck.parameter_server.modes import Mode, Synchronous
from potluck.parameter_server.optimizers import Optimizer
from potluck.parameter_server.table import Table, Tensors
from potluck.services.presence import Presence
from potluck.services.waits import WaitingCalls

MAX_MODELS = 1024

_log = logging.getLogger(__name__)


class Host:
    """For any number of threads; a call holds the lock of all models."""

    def __init__(
        self,
        mode: Mode,
        optimizer: Optimizer,
        presence: Presence,
        *,
        store: CheckpointStore | None,
        save_every: int,
        worker_timeout_s: float,
    ) -> None:
        """``presence`` knows the workers. A lease of a worker that
        pushes nothing ends after ``worker_timeout_s``. CheckpointError if ``store`` has checkpoints
        and none is intact."""
        self._mode = mode
        self._optimizer = optimizer
        self._presence = presence
        self._store = store
        self._save_every = save_every
        self._worker_timeout_s = worker_timeout_s
        self.incarnation = secrets.randbits(62)
        """Another number after each start: what was pulled before is of another life."""
        self._models: dict[str, Model] = {}
        self._writer = BackgroundWriter("parameter-server-writer")
        self._changed = threading.Condition(threading.RLock())
        self._waits = WaitingCalls(self._changed, self._on_time, thread="potluck-parameter-server")
        self.num_failed_saves = 0
        self._load()

    @property
    def arguments(self) -> tuple[str, str]:
        """Mode and optimizer, which all workers must give alike."""
        return repr(self._mode), repr(self._optimizer)

    # -- calls

    def create(self, name: str, tensors: Tensors, *, replace: tuple[str, int] | None = None) -> int:
        """Take the first parameters of a model, or others if ``replace`` is the worker that gives
        them, and a push number; its version."""
        with self._changing():
            model = self._models.get(name)
            if model is None:
                if len(self._models) >= MAX_MODELS:
                    raise ValueError(f"a parameter server has at most {MAX_MODELS} models")
                model = Model(name, Table(tensors, self._optimizer), self._mode, self._optimizer)
                self._models[name] = model
                if replace is not None:
                    model.note(*replace)
                self._save(model.version)
            elif replace is not None:
                if model.outcome(*replace) is None:
                    model.replace(tensors)
                    model.note(*replace)
                    self._save(model.version)
            else:
                model.check(tensors)
            return model.version

    def push(self, name: str, gradient: Gradient, incarnation: int) -> Outcome | None:
        """Take a gradient. What became of it; None if it waits, see ``outcome``."""
        with self._changing():
            model = self._model(name)
            if incarnation != self.incarnation:
                if model.outcome(gradient.worker, gradient.push) is None:
                    model.drop(gradient.worker, gradient.push, "restarted")
            else:
                model.push(gradient, self._presence.workers())
            return model.outcome(gradient.worker, gradient.push)

    def outcome(self, name: str, worker: str, push: int, wait_s: float) -> Any:
        """What became of a push, as a dict; a Future of it while it waits."""
        model = self._model(name)

        def attempt() -> dict[str, Any] | None:
            found = model.outcome(worker, push)
            return None if found is None else as_reply(found)

        return self._when(attempt, partial(self._waits_for, model), wait_s)

    def pull(
        self, name: str, worker: str, after: tuple[int, int] | None, wait_s: float, *, compute: bool
    ) -> Any:
        """The newest version, as a dict; a Future of it while it must be waited for.

        ``after``: a version to wait for, and the incarnation that it is of. ``compute``: a gradient
        will follow.
        """
        model = self._model(name)

        def attempt() -> dict[str, Any] | None:
            if compute:
                if after is not None and after[0] > model.version and after[1] == self.incarnation:
                    return None
                expires_at = time.monotonic() + self._worker_timeout_s
                if not model.may_pull(worker, self._presence.workers(), expires_at):
                    return None
            return {
                "version": model.version,
                "incarnation": self.incarnation,
                "tensors": dict(model.tensors),
            }

        return self._when(attempt, partial(self._waits_for, model), wait_s)

    def is_ready(self, name: str) -> bool:
        """Whether the update of the present step can be made."""
        with self._changed:
            model = self._model(name)
            return isinstance(self._mode, Synchronous) and model.is_ready(self._presence.workers())

    def apply(self, name: str, step: int, rate: float | None) -> int:
        """Make the update of ``step`` by hand, once; the version after it."""
        with self._changing():
            model = self._model(name)
            model.apply(step, rate, self._presence.workers())
            return model.version

    def clear(self, name: str, step: int) -> None:
        """Drop the gradients of ``step``."""
        with self._changing():
            self._model(name).clear(step)

    def save(self) -> None:
        """Write a checkpoint now, and wait for it. CheckpointError if it can't be written,
        ValueError without a directory."""
        if self._store is None:
            raise ValueError("there is no directory for checkpoints: pass checkpoint=DIRECTORY")
        with self._changed:
            self._save(max((each.version for each in self._models.values()), default=0))
            self._writer.wait()  # held: else a push begins a second write

    def stats(self) -> dict[str, Any]:
        """Versions, and counts of gradients by what became of them."""
        with self._changed:
            return {
                name: {"version": model.version, **model.counts}
                for name, model in self._models.items()
            }

    # -- the end

    def leave(self, worker: str) -> None:
        """``worker`` calls no more."""
        with self._changing():
            self._presence.leave(worker)
            for model in self._models.values():
                model.leave(worker)

    def await_others(self, worker: str, deadline: float) -> list[str]:
        """Wait until the others have left or are silent; the names of those that have not."""
        with self._changed:
            while (rest := self._presence.others(worker)) and time.monotonic() < deadline:
                self._changed.wait(0.2)
            return rest

    def close(self) -> None:
        """Write the last checkpoint, and wait for it. CheckpointError if it can't be written."""
        if self._store is not None and self._models:
            self.save()

    # -- inside

    def _model(self, name: str) -> Model:
        model = self._models.get(name)
        if model is None:
            there = ", ".join(map(repr, sorted(self._models))) or "none"
            raise ValueError(
                f"there is no model {name!r:.80} on this parameter server; there are: {there}. "
                "Call set_parameters first"
            )
        return model

    def _waits_for(self, model: Model) -> dict[str, Any]:
        return {"waits_for": model.waits_for(self._presence.workers())}

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """A change of a model: calls that wait are looked at again, and a save may be due."""
        with self._changed:
            before = {name: each.version for name, each in self._models.items()}
            try:
                yield
            finally:
                self._look(before)
                self._changed.notify_all()

    def _look(self, before: Mapping[str, int]) -> None:
        """End the waits that are over, and make the updates that these make possible."""
        while True:
            self._waits.look()
            workers = self._presence.workers()
            made = [model.progress(workers) for model in self._models.values()]
            if not any(made):
                break
        for name, model in self._models.items():
            known = before.get(name, model.version)
            if model.version // self._save_every > known // self._save_every:
                self._save(model.version)

    def _when(
        self, attempt: Callable[[], Any], otherwise: Callable[[], Any], wait_s: float
    ) -> Future[Any]:
        with self._changing():
            self._expire()
            return self._waits.add(attempt, otherwise, wait_s)

    def _on_time(self) -> None:
        with self._changing():
            self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        for model in self._models.values():
            for worker in model.expire(now, now + self._worker_timeout_s):
                _log.warning(
                    "worker %s has pushed no gradient of %r for %g s: the others wait for it no "
                    "more, and what it pushes does not count until it pulls again",
                    worker,
                    model.name,
                    self._worker_timeout_s,
                )

    def _save(self, version: int) -> None:
        """Have all models written; waits until the save before it has ended. Versions are
        immutable, so nothing is copied."""
        if self._store is None:
            return
        state = {name: model.state() for name, model in self._models.items()}
        try:
            self._writer.submit(partial(self._store.save, state, version))
        except CheckpointError as error:  # of the save before
            self.num_failed_saves += 1
            _log.error("%s", error)

    def _load(self) -> None:
        found = None if self._store is None else self._store.load_latest()
        if found is None:
            return
        for name, state in found.state.items():
            self._models[name] = Model.of_state(name, state, self._mode, self._optimizer)
        _log.info("parameters of version %d from %s", found.step, found.path)


def as_reply(outcome: Outcome) -> dict[str, Any]:
    """``outcome`` as a payload."""
    return {"counted": outcome.counted, "version": outcome.version, "reason": outcome.reason}
