"""``Host``: the first server: what it decides of all models, and the calls that wait for an update.

A call that waits takes no thread: it gets a Future, which ends as soon as the update is there. It
ends without one after ``wait_s``, and the caller asks again; so a caller that is gone, or a group
that has changed, is noticed in time.

With several servers every decision is an entry of a log, which ``Leader`` brings to the others. A
checkpoint is an entry too, so that all servers write the same state. Where each tensor lies on
several servers, a caller is told only what all servers that are present have carried out: whichever
of them is lost, no version that was told is.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from potluck.errors import PotluckError
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.entries import Close, Drop, Grant, Leave, Save
from potluck.parameter_server.layout import Layout, Tensors
from potluck.parameter_server.log import Position
from potluck.parameter_server.model import Gradient, Model
from potluck.parameter_server.modes import Synchronous
from potluck.parameter_server.placement import Placement
from potluck.parameter_server.replica import Replica
from potluck.parameter_server.signals import AskAgain
from potluck.parameter_server.telling import Telling

MAX_MODELS = 1024

_log = logging.getLogger(__name__)


class Host:
    """For any number of threads; a call holds the lock of all models. It answers while this is the
    first server: from ``lead`` until ``stand_down``, or until it joins another one."""

    def __init__(
        self,
        replica: Replica,
        *,
        checkpoints: Checkpoints | None,
        save_every: int,
        worker_timeout_s: float,
    ) -> None:
        """A worker's lease ends ``worker_timeout_s`` after its last pull, or when it is lost.
        CheckpointError if this server is alone, has checkpoints, and none is intact."""
        self._replica = replica
        self._presence = replica.presence
        self._changed = replica.changed
        self._waits = replica.waits
        self._shard = replica.shard
        self.log = replica.log
        self._append = replica.decided
        self._checkpoints = checkpoints
        self._save_every = save_every
        self._worker_timeout_s = worker_timeout_s
        self.present: tuple[str, ...] = ()
        """The servers that are there. Empty while another one is the first."""
        self._led: int | None = None
        """The incarnation in which this server was the first one at last."""
        self._where: dict[str, frozenset[str]] = {}
        """By model: which of them have tensors of it."""
        self._telling = Telling(replica, self._may_answer, self._carry_out)
        self._error: PotluckError | None = None
        self._is_save_due = False
        replica.on_time = self._on_time
        if len(replica.servers) == 1:
            self._start_alone()

    @property
    def arguments(self) -> tuple[str, ...]:
        """What all workers must give alike."""
        return self._replica.arguments

    @property
    def incarnation(self) -> int:
        """The present one, while this is the first server."""
        return self._replica.incarnation or 0

    @property
    def _is_open(self) -> bool:
        return self._led is not None and self._led == self._replica.incarnation

    @property
    def _models(self) -> dict[str, Model]:
        return self._replica.models

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
        staged: Mapping[str, int] | None = None,
    ) -> Any:
        """Take the first parameters of a model, or others with ``replace``; its version.
        ``layout`` is that of all tensors. With several servers ``tensors`` is None, and ``staged``
        the incarnation of each that has some; None if they are to be staged anew there."""
        with self._changing(), self._dropped_if_wrong(name, worker, push):
            if tensors is None and self._lacks(name, layout, staged or {}):
                return None
            model = self._models.get(name)
            what = f"what is set for {name!r}"
            if model is None:
                if len(self._models) >= MAX_MODELS:
                    raise ValueError(f"a parameter server has at most {MAX_MODELS} models")
                self._stage(name, worker, push, tensors, what, layout)
                replica = self._replica
                model = Model(name, layout, replica.mode, replica.optimizer.learning_rate)
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
            version = model.version
        return self._told(version)

    def push(
        self,
        name: str,
        gradient: Gradient,
        tensors: Tensors | None,
        incarnation: int,
        staged: Mapping[str, int] | None = None,
    ) -> Any:
        """Take a gradient, staged or not as for ``create``. What became of it, as a dict; an empty
        one if it waits, see ``outcome``."""
        worker, push = gradient.worker, gradient.push
        with self._changing():
            model = self._model(name)
            if incarnation != self.incarnation:
                if model.outcome(worker, push) is None:
                    model.drop(worker, push, "restarted")
            elif not model.knows(worker, push):
                with self._dropped_if_wrong(name, worker, push):
                    if tensors is None and self._lacks(name, model.layout, staged or {}):
                        return None
                    self._stage(name, worker, push, tensors, gradient.of(name))
                    model.push(gradient, self._presence.workers())
            self._carry_out()
            outcome = model.outcome(worker, push)
        return {} if outcome is None else self._told(outcome.reply())

    def outcome(self, name: str, worker: str, push: int, incarnation: int, wait_s: float) -> Any:
        """What became of a push on parameters of ``incarnation``, as a dict; a Future of it while
        it waits."""

        def attempt() -> dict[str, Any] | None:
            model = self._model(name)
            found = model.outcome(worker, push)
            if found is None and incarnation != self.incarnation:
                model.drop(worker, push, "restarted")
                found = model.outcome(worker, push)
            return None if found is None else found.reply()

        return self._when(attempt, name, wait_s)

    def pull(
        self, name: str, worker: str, after: tuple[int, int] | None, wait_s: float, *, compute: bool
    ) -> Any:
        """The newest version, as a dict; a Future of it while it must be waited for.

        ``after``: a version to wait for, and the incarnation that it is of. ``compute``: a gradient
        will follow. With several servers the reply has no tensors, but the ``names`` of all, and
        the servers that are ``present``, from which the worker fetches that version.
        """

        def attempt() -> dict[str, Any] | None:
            model = self._model(name)
            if compute:
                if after is not None and after[0] > model.version and after[1] == self.incarnation:
                    return None
                expires_at = time.monotonic() + self._worker_timeout_s
                if not model.may_pull(worker, self._presence.workers(), expires_at):
                    return None
            found: dict[str, Any] = {
                "version": model.version,
                "incarnation": self.incarnation,
                "counted": dict(model.counted),
            }
            if len(self._replica.servers) == 1:
                return found | {"tensors": dict(self._shard.tensors(name)), "present": []}
            self._append(Grant(name, worker, model.version))
            return found | {"names": list(model.layout), "present": list(self.present)}

        return self._when(attempt, name, wait_s)

    def is_ready(self, name: str) -> bool:
        """Whether the update of the present step can be made."""
        with self._changed:
            self._check_open()
            model = self._model(name)
            mode = self._replica.mode
            return isinstance(mode, Synchronous) and model.is_ready(self._presence.workers())

    def apply(self, name: str, step: int, rate: float | None) -> Any:
        """Make the update of ``step`` by hand, once; the version after it."""
        with self._changing():
            model = self._model(name)
            model.apply(step, rate, self._presence.workers())
            version = model.version
        return self._told(version)

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

    def stats(self) -> Any:
        """Versions, and counts of gradients by what became of them."""
        with self._changed:
            self._check_open()
            found = {
                name: {"version": model.version, **model.counts}
                for name, model in self._models.items()
            }
        return self._told(found)

    # -- the end

    def leave(self, worker: str) -> Any:
        """``worker`` calls no more."""
        with self._changing():
            self._presence.leave(worker)
            self._append(Leave(worker))
            for model in self._models.values():
                model.leave(worker)
        return self._told(True)

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
                if self._is_open:
                    self._append(Close())
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.log.is_empty, self._worker_timeout_s)

    # -- for Leader

    @property
    def led(self) -> int | None:
        """The incarnation that this server leads; None while it is not the first one."""
        with self._changed:
            return self._led if self._is_open else None

    def lead(self, incarnation: int, present: tuple[str, ...]) -> None:
        """Answer calls: the servers that are ``present`` have agreed on a state of ``incarnation``,
        or some that had are there no more."""
        with self._changed:
            self._led, self.present, self._where = incarnation, present, {}
            self.log.is_kept = len(present) > 1
            if len(present) == 1:
                self.log.begin(self.log.index)
                if self._checkpoints is not None:
                    self._checkpoints.commit(self.log.index)
            self._look({})
            self._changed.notify_all()

    def stand_down(self) -> None:
        """Another server is the first one, or the servers agree anew. Idempotent."""
        with self._changed:
            if self._led is None:
                return
            self._led, self.present, self._is_save_due = None, (), False
            self.log.is_kept = True
            if self._checkpoints is not None:
                self._checkpoints.give_up()
            self._replica.look()

    def carried_out(self, first: int) -> None:
        """All other servers have carried out the entries before number ``first``."""
        with self._changed:
            self.log.drop_before(first)
            self._waits.look()

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
                raise ValueError(f"{what} was not staged on worker {self._replica.server}")
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
        servers = ", ".join(self._replica.servers)
        return {"waits_for": f"its servers, worker {servers}, to begin"}

    def _check_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _may_answer(self) -> bool:
        self._check_error()
        return self._is_open

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

    def _lacks(self, name: str, layout: Layout, staged: Mapping[str, int]) -> bool:
        """Whether a server that is present has not all that is to be staged there."""
        where = self._where.get(name)
        if where is None:
            replica = self._replica
            placement = Placement(replica.servers, replica.copies, self.present)
            where = frozenset(s for s, part in placement.split(layout).items() if part)
            if name in self._models:
                self._where[name] = where
        return any(staged.get(server) != self.incarnation for server in where)

    def _told(self, reply: Any) -> Any:
        with self._changed:
            return self._telling.told(reply)

    def _when(self, attempt: Callable[[], Any], name: str, wait_s: float) -> Future[Any]:
        def otherwise() -> dict[str, Any]:
            if not self._is_open:
                return self._to_begin()
            return {"waits_for": self._model(name).waits_for(self._presence.workers())}

        with self._changing():
            self._expire()
            return self._telling.when(attempt, otherwise, wait_s)

    def _on_time(self) -> None:
        with self._changed:
            self._expire()
            self._look({name: each.version for name, each in self._models.items()})

    def _expire(self) -> None:
        now = time.monotonic()
        lost = self._presence.lost()
        for model in self._models.values():
            for worker in lost:
                model.leave(worker)
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
            state = self._replica.state(self.incarnation)
            is_alone = len(self.present) == 1
            self._checkpoints.begin(self.log.index, state, is_alone=is_alone)

    def _start_alone(self) -> None:
        found = None if self._checkpoints is None else self._checkpoints.load_latest()
        index, state = found or (0, {})
        with self._changed:
            self._replica.restore(state)
            incarnation = secrets.randbits(62)
            self._replica.begin(incarnation, index, Position(0, index))
            self.lead(incarnation, self._replica.servers)
