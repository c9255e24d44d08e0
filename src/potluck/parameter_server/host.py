"""``Host``: the first server: what it decides of all models, its own shard, checkpoints, and the
calls that wait for an update.

A call that waits takes no thread: it gets a Future, which ends as soon as the update is there. It
ends without one after ``wait_s``, and the caller asks again; so a caller that is gone, or a group
that has changed, is noticed in time.

With several servers every decision is an entry of a log, which ``Followers`` brings to the others.
A checkpoint is an entry too, so that all servers write the same state. The others write theirs
first: once the first server's own is on the disk, the whole one is.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from potluck.checkpoint import CheckpointStore
from potluck.errors import PotluckError
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.entries import Close, Drop, Entry, Grant, Leave, Save
from potluck.parameter_server.layout import Layout, Tensors
from potluck.parameter_server.log import Log
from potluck.parameter_server.model import Gradient, Model, Outcome
from potluck.parameter_server.modes import Mode, Synchronous
from potluck.parameter_server.optimizers import Optimizer
from potluck.parameter_server.placement import server_of
from potluck.parameter_server.shard import Shard
from potluck.parameter_server.shard_calls import ShardCalls
from potluck.parameter_server.signals import AskAgain
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
        servers: tuple[str, ...] = ("0",),
        store: CheckpointStore | None,
        save_every: int,
        worker_timeout_s: float,
    ) -> None:
        """``presence`` knows the workers; the first of ``servers`` is this one. A lease of a worker
        that pushes nothing ends after ``worker_timeout_s``. CheckpointError if ``store`` has
        checkpoints and none is intact; with several servers see ``Followers``."""
        self._mode = mode
        self._optimizer = optimizer
        self._presence = presence
        self.servers = servers
        self._save_every = save_every
        self._worker_timeout_s = worker_timeout_s
        self.incarnation = 0
        """Another number after each start: what was pulled before is of another life."""
        self._models: dict[str, Model] = {}
        self._changed = changed = threading.Condition(threading.RLock())
        self._waits = WaitingCalls(changed, self._on_time, thread="potluck-parameter-server")
        self._shard = Shard(optimizer, servers[0], servers)
        self.shard_calls = ShardCalls(self._shard, changed, self._waits, self._open_as)
        self.log = Log(changed, is_kept=len(servers) > 1)
        self._is_open = False
        self._error: PotluckError | None = None
        self._checkpoints = None if store is None else Checkpoints(store, servers, self._changed)
        self._is_save_due = False
        if len(servers) == 1:
            self._start_alone()

    @property
    def arguments(self) -> tuple[str, str, str]:
        """Mode, optimizer and servers, which all workers must give alike."""
        return repr(self._mode), repr(self._optimizer), ", ".join(self.servers)

    # -- calls

    def begun(self, wait_s: float) -> Any:
        """An empty reply as soon as calls are answered. Raises what has failed."""

        def attempt() -> dict[str, Any] | None:
            self._check_error()
            return {} if self._is_open else None

        with self._changed:
            return self._waits.add(attempt, self._to_begin, wait_s)

    def create(
        self,
        name: str,
        tensors: Tensors | None,
        worker: str,
        push: int,
        *,
        layout: Layout,
        replace: bool = False,
        incarnations: Sequence[int] = (),
    ) -> int | None:
        """Take the first parameters of a model, or others with ``replace``; its version.
        ``layout`` is that of all tensors. With several servers these are staged, on servers with
        these ``incarnations``, and ``tensors`` is None; the reply is None if a server began anew
        since, and has to be given them again."""
        with self._changing(), self._dropped_if_wrong(name, worker, push):
            if any(each != self.incarnation for each in incarnations):
                return None
            model = self._models.get(name)
            what = f"what is set for {name!r}"
            if model is None:
                if len(self._models) >= MAX_MODELS:
                    raise ValueError(f"a parameter server has at most {MAX_MODELS} models")
                self._stage(name, worker, push, tensors, what, layout)
                model = Model(name, layout, self._mode, self._optimizer.learning_rate)
                self._models[name] = model
                model.set(worker, push)
                self._save()
            elif not replace:
                model.check(layout)
                self._append(Drop(name, worker, push))
            elif model.outcome(worker, push) is None:
                model.check(layout)
                self._stage(name, worker, push, tensors, what, layout)
                model.replace(worker, push)
                self._save()
            return model.version

    def push(
        self, name: str, gradient: Gradient, tensors: Tensors | None, incarnation: int
    ) -> Outcome | None:
        """Take a gradient, which is staged if ``tensors`` is None. What became of it; None if it
        waits, see ``outcome``."""
        worker, push = gradient.worker, gradient.push
        with self._changing():
            model = self._model(name)
            if incarnation != self.incarnation:
                if model.outcome(worker, push) is None:
                    model.drop(worker, push, "restarted")
            elif not model.knows(worker, push):
                with self._dropped_if_wrong(name, worker, push):
                    self._stage(name, worker, push, tensors, gradient.of(name))
                    model.push(gradient, self._presence.workers())
            self._carry_out()
            return model.outcome(worker, push)

    def outcome(self, name: str, worker: str, push: int, wait_s: float) -> Any:
        """What became of a push, as a dict; a Future of it while it waits."""

        def attempt() -> dict[str, Any] | None:
            found = self._model(name).outcome(worker, push)
            return None if found is None else found.reply()

        return self._when(attempt, name, wait_s)

    def pull(
        self, name: str, worker: str, after: tuple[int, int] | None, wait_s: float, *, compute: bool
    ) -> Any:
        """The newest version, as a dict; a Future of it while it must be waited for.

        ``after``: a version to wait for, and the incarnation that it is of. ``compute``: a gradient
        will follow. With several servers the reply has no tensors, but the ``names`` of all, and
        the ``servers`` from which the worker fetches that version.
        """

        def attempt() -> dict[str, Any] | None:
            model = self._model(name)
            if compute:
                if after is not None and after[0] > model.version and after[1] == self.incarnation:
                    return None
                expires_at = time.monotonic() + self._worker_timeout_s
                if not model.may_pull(worker, self._presence.workers(), expires_at):
                    return None
            found = {"version": model.version, "incarnation": self.incarnation}
            if len(self.servers) == 1:
                return found | {"tensors": dict(self._shard.tensors(name)), "servers": []}
            self._append(Grant(name, worker, model.version))
            where = {server_of(each, self.servers) for each in model.layout}
            return found | {"names": list(model.layout), "servers": sorted(where)}

        return self._when(attempt, name, wait_s)

    def is_ready(self, name: str) -> bool:
        """Whether the update of the present step can be made."""
        with self._changed:
            self._check_open()
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
        if self._checkpoints is None:
            raise ValueError("there is no directory for checkpoints: pass checkpoint=DIRECTORY")
        with self._changed:
            self._checkpoints.await_others(self._worker_timeout_s)  # the one before
            self._save()
            self._checkpoints.await_others(self._worker_timeout_s)
            self._checkpoints.await_written()  # held: else a push begins a second write

    def abandon(self, name: str, worker: str, push: int) -> None:
        """What ``worker`` has staged as ``push`` will not be pushed."""
        with self._changing():
            model = self._models.get(name)
            if model is None or not model.knows(worker, push):
                self._append(Drop(name, worker, push))

    def stats(self) -> dict[str, Any]:
        """Versions, and counts of gradients by what became of them."""
        with self._changed:
            self._check_open()
            return {
                name: {"version": model.version, **model.counts}
                for name, model in self._models.items()
            }

    # -- the end

    def leave(self, worker: str) -> None:
        """``worker`` calls no more."""
        with self._changing():
            self._presence.leave(worker)
            self._append(Leave(worker))
            for model in self._models.values():
                model.leave(worker)

    def await_others(self, worker: str, deadline: float) -> list[str]:
        """Wait until the others have left or are silent; the names of those that have not."""
        with self._changed:
            while (rest := self._presence.others(worker)) and time.monotonic() < deadline:
                self._changed.wait(0.2)
            return rest

    def close(self) -> None:
        """Write the last checkpoint, and wait for it; tell the other servers, and wait for them.
        CheckpointError if it can't be written."""
        try:
            if self._checkpoints is not None and self._models and self._is_open:
                self.save()
        finally:
            with self._changed:
                self._append(Close())
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.log.is_empty, self._worker_timeout_s)

    # -- for Followers

    def saved_elsewhere(self, index: int) -> None:
        """The others have checkpoints of ``index``: time for the one that makes it whole."""
        with self._changed:
            if self._checkpoints is not None:
                self._checkpoints.commit(index)

    def failed_elsewhere(self, reason: str) -> None:
        """Another server could not write its checkpoint."""
        with self._changed:
            if self._checkpoints is not None:
                self._checkpoints.fail(reason)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint waits for the other servers."""
        return self._checkpoints is not None and self._checkpoints.is_under_way

    def begin_opening(self) -> tuple[int, list[int]]:
        """Answer no calls until the servers agree on a state: the highest number of an entry that
        is known here, and the numbers of the checkpoints, the newest first."""
        with self._changed:
            self._is_open = self._is_save_due = False
            if self._checkpoints is None:
                return self.log.index, []
            self._checkpoints.give_up()
            steps = self._checkpoints.store.steps()
            return max([self.log.index, *steps]), steps

    def load(self, index: int | None) -> None:
        """Be as the checkpoint of ``index`` says, or without models. CheckpointError if it is
        damaged, or of other servers."""
        state: Mapping[str, Any] = {"models": {}, "shard": {}}
        if index is not None:
            assert self._checkpoints is not None
            state = self._checkpoints.load(index)
        with self._changed:
            self._restore(state)

    def open(self, index: int, incarnation: int) -> None:
        """Answer calls: all servers have the same state, the one after entry ``index``."""
        with self._changed:
            self.log.begin(index)
            self.incarnation, self._is_open = incarnation, True
            self._look({})
            self._changed.notify_all()

    def fail(self, error: PotluckError) -> None:
        """Answer all calls by ``error`` from now on."""
        with self._changed:
            self._error = error
            self._waits.look()
            self._changed.notify_all()

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

    def _stage(
        self,
        name: str,
        worker: str,
        push: int,
        tensors: Tensors | None,
        what: str,
        layout: Layout | None = None,
    ) -> None:
        if tensors is None:
            if not self._shard.is_staged(name, worker, push, layout):
                raise ValueError(f"{what} was not staged on worker {self.servers[0]}")
        elif not self._shard.stage(name, worker, push, tensors, what, layout):
            raise ValueError(f"{what}: too many of worker {worker} wait already")

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """A change of a model: calls that wait are looked at again, and a save may be due."""
        with self._changed:
            self._check_open()
            before = {name: each.version for name, each in self._models.items()}
            try:
                yield
            finally:
                self._look(before)
                self._changed.notify_all()

    @contextlib.contextmanager
    def _dropped_if_wrong(self, name: str, worker: str, push: int) -> Iterator[None]:
        """A mistake of a worker: the servers let go of what it staged."""
        try:
            yield
        except ValueError:
            self._append(Drop(name, worker, push))
            raise

    def _to_begin(self) -> dict[str, str]:
        return {"waits_for": f"its servers, worker {', '.join(self.servers)}, to begin"}

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _open_as(self) -> int:
        self._check_open()
        return self.incarnation

    def _check_open(self) -> None:
        self._check_error()
        if not self._is_open:
            raise AskAgain("the servers have not agreed on a state yet")
        if self.log.is_full:
            raise AskAgain("another server of this parameter server does not answer")

    def _look(self, before: Mapping[str, int]) -> None:
        """End the waits that are over, and make the updates that these make possible."""
        while True:
            self._carry_out()
            self._waits.look()
            if not self._is_open:
                return
            workers = self._presence.workers()
            made = [model.progress(workers) for model in self._models.values()]
            if not any(made):
                break
        for name, model in self._models.items():
            known = before.get(name, model.version)
            self._is_save_due |= model.version // self._save_every > known // self._save_every
        if self._is_save_due:
            self._save()

    def _carry_out(self) -> None:
        for model in self._models.values():
            for entry in model.take_decided():
                self._append(entry)

    def _append(self, entry: Entry) -> None:
        self.log.append(entry)
        self._shard.carry_out(entry)

    def _when(self, attempt: Callable[[], Any], name: str, wait_s: float) -> Future[Any]:
        def attempt_if_open() -> Any:
            self._check_error()
            return attempt() if self._is_open else None

        def otherwise() -> dict[str, Any]:
            if not self._is_open:
                return self._to_begin()
            return {"waits_for": self._model(name).waits_for(self._presence.workers())}

        with self._changing():
            self._expire()
            return self._waits.add(attempt_if_open, otherwise, wait_s)

    def _on_time(self) -> None:
        with self._changed:
            self._expire()
            self._look({name: each.version for name, each in self._models.items()})

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

    def _save(self) -> None:
        """Have all models written; waits until the write before has ended. Versions are immutable,
        so nothing is copied."""
        if self._checkpoints is None:
            self._is_save_due = False
            return
        self._is_save_due = self._checkpoints.is_under_way
        if not self._is_save_due:
            self._carry_out()
            self._append(Save())
            models = {name: model.state() for name, model in self._models.items()}
            state = {"models": models, "shard": self._shard.state()}
            self._checkpoints.begin(self.log.index, state)

    def _start_alone(self) -> None:
        found = None if self._checkpoints is None else self._checkpoints.load_latest()
        if found is not None:
            self._restore(found[1])
        self.open(0 if found is None else found[0], new_incarnation())

    def _restore(self, state: Mapping[str, Any]) -> None:
        rate = self._optimizer.learning_rate
        self._models = {
            name: Model.of_state(name, each, self._mode, rate)
            for name, each in state["models"].items()
        }
        self._shard.restore(state["shard"])


def new_incarnation() -> int:
    """A number that no start of a parameter server had before."""
    return secrets.randbits(62)
