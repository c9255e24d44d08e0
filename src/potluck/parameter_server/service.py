"""The service of a parameter server, as other workers call it: what ``PrimaryService`` answers,
with several servers also ``ReplicaService``.

Each public method is one call. What callers send is checked here: they are other programs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from potluck._core.printable import MAX_NAME
from potluck.errors import CheckpointError, ProtocolError
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.layout import Array, of_plain
from potluck.parameter_server.log import Close, Drop, Grant, Leave, Position, Save, decode, encode
from potluck.parameter_server.model import Gradient
from potluck.parameter_server.primary import Primary
from potluck.parameter_server.replica import AskAgain, Replica
from potluck.services import Call

MAX_MODELS = 1024

MAX_WAIT_S = 10.0
"""Of one call: a caller that waits longer asks again."""


class StaleTerm(Exception):
    """A server knows a later term than its caller, which is not the primary any more, or has not
    agreed on this one. The caller sees the name alone."""


class PrimaryService:
    """What workers ask of the primary. AskAgain while this server is not the primary. A reply may
    be a Future, which ends when the other servers have applied the entries before the reply."""

    def __init__(self, primary: Primary) -> None:
        self._primary = primary
        self._replica = primary.replica

    def begin_worker(self, call: Call, arguments: dict[str, str], wait_s: float) -> Any:
        """A worker has made its ParameterServer: an empty reply as soon as calls are answered.
        ValueError for other ``arguments`` than the servers have; raises what has failed."""
        for what, mine in self._replica.arguments.items():
            if arguments.get(what) != mine:
                raise ValueError(
                    f"every worker makes its ParameterServer with equal arguments, but {what} is "
                    f"{arguments.get(what, ''):.200} on worker {call.worker} and {mine} on the "
                    "server"
                )
        p = self._primary
        with self._replica.changed:
            return self._replica.waits.add(
                lambda: {} if p.may_answer() else None, p.waits_to_begin, _seconds(wait_s)
            )

    def create(
        self,
        call: Call,
        model: str,
        tensors: Any,
        layout: Any,
        push: int,
        replace: bool,
        staged: dict[str, int],
    ) -> Any:
        """Take the first parameters of a model, or new ones with ``replace``; the ``version``, in a
        dict. ``layout``: of all tensors. With several servers ``tensors`` is None, and ``staged``
        the term in which each server has staged its part; the reply is None if the parts are to be
        staged anew."""
        p, models, worker, push = self._primary, self._replica.models, call.worker, int(push)
        name, layout, staged = _model(model), of_plain(layout), _staged(staged)
        what, staging = f"what is set for {name!r}", Gradient(worker, call.rank, push, 0)
        given = None if tensors is None else _tensors(tensors)
        with p.changing(), p.dropping(name, worker, push):
            it = models.get(name)
            if it is not None:
                it.check(layout)
                layout = it.layout
            elif len(models) >= MAX_MODELS:
                raise ValueError(f"a parameter server has at most {MAX_MODELS} models")
            else:
                p.check_savable(layout, what)
            if it is not None and (not replace or it.outcome(worker, push) is not None):
                self._replica.decide(Drop(name, worker, push))
            elif not p.has_staged(staging, name, layout, given, staged, what):
                return None
            else:
                it = self._replica.known_or_new(name)
                it.set(worker, push, layout)
                p.begin_save()
            version = it.version
        return p.committed({"version": version})

    def push(
        self,
        call: Call,
        model: str,
        tensors: Any,
        step: int,
        push: int,
        term: int,
        staged: dict[str, int],
    ) -> Any:
        """Take a gradient for parameters of ``term``, staged or not as for ``create``. What became
        of it, as a dict; an empty one if it waits, see ``outcome``."""
        if call.rank < 0:
            raise AskAgain(f"worker {call.worker} is not in the group of this parameter server")
        p, worker, push, staged = self._primary, call.worker, int(push), _staged(staged)
        gradient = Gradient(worker, call.rank, push, int(step))
        given, what = None if tensors is None else _tensors(tensors), gradient.of(model)
        with p.changing():
            it = p.model(model)
            if int(term) != self._replica.term:
                if it.outcome(worker, push) is None:
                    it.drop(worker, push, "restarted")
            elif not it.knows(worker, push):
                with p.dropping(model, worker, push):
                    if not p.has_staged(gradient, model, it.layout, given, staged, what):
                        return None
                    it.push(gradient, self._workers())
            outcome = it.outcome(worker, push)
        return {} if outcome is None else p.committed(outcome._asdict())

    def outcome(self, call: Call, model: str, push: int, term: int, wait_s: float) -> Any:
        """What became of a push on parameters of ``term``, as a dict; a Future of it while it
        waits."""
        worker, push, term = call.worker, int(push), int(term)

        def attempt() -> dict[str, Any] | None:
            it = self._primary.model(model)
            found = it.outcome(worker, push)
            if found is None and term != self._replica.term:
                it.drop(worker, push, "restarted")
                found = it.outcome(worker, push)
            return None if found is None else found._asdict()

        return self._primary.when(attempt, model, _seconds(wait_s))

    def pull(
        self, call: Call, model: str, after: tuple[int, int] | None, wait_s: float, compute: bool
    ) -> Any:
        """The newest version, as a dict; a Future of it while it must be waited for.

        ``after``: a version to wait for, and its term. ``compute``: a gradient will follow. With
        several servers the reply has the ``names`` of all tensors in place of the tensors, which
        the worker fetches from the servers that are ``present``.
        """
        p, replica, worker = self._primary, self._replica, call.worker
        awaited = None if after is None else (int(after[0]), int(after[1]))

        def attempt() -> dict[str, Any] | None:
            it = p.model(model)
            if compute:
                if awaited and awaited[0] > it.version and awaited[1] == replica.term:
                    return None
                expires_at = time.monotonic() + p.worker_timeout_s
                if not it.may_pull(worker, self._workers(), expires_at):
                    return None
            found: dict[str, Any] = {"version": it.version, "term": replica.term}
            found |= {"counted": dict(it.counted), "present": list(p.present)}
            if len(replica.servers) == 1:
                return found | {"tensors": dict(it.table.tensors)}
            replica.decide(Grant(model, worker, it.version))
            return found | {"names": list(it.layout)}

        return p.when(attempt, model, _seconds(wait_s))

    def ready(self, call: Call, model: str) -> bool:
        """Whether the update of the present step can be made."""
        with self._replica.changed:
            self._primary.check_open()
            it = self._primary.model(model)
            return it.mode.is_by_step and it.is_ready(self._workers())

    def apply(self, call: Call, model: str, step: int, rate: float | None) -> Any:
        """Make the update of ``step`` by hand, once; the version after it."""
        with self._primary.changing():
            it = self._primary.model(model)
            it.apply(int(step), None if rate is None else float(rate), self._workers())
            version = it.version
        return self._primary.committed(version)

    def clear(self, call: Call, model: str, step: int) -> None:
        """Drop the gradients of ``step``."""
        with self._primary.changing():
            self._primary.model(model).clear(int(step))

    def abandon(self, call: Call, model: str, push: int) -> None:
        """The caller will not push what it has staged as ``push``."""
        name, push = _model(model), int(push)
        with self._primary.changing():
            it = self._replica.models.get(name)
            if it is None or not it.knows(call.worker, push):
                self._replica.decide(Drop(name, call.worker, push))

    def stats(self, call: Call) -> Any:
        """Versions, and counts of gradients by what became of them."""
        with self._replica.changed:
            self._primary.check_open()
            found = {
                name: {"version": each.version, **each.counts}
                for name, each in self._replica.models.items()
            }
        return self._primary.committed(found)

    def leave(self, call: Call) -> Any:
        """The caller calls no more."""
        with self._primary.changing():
            self._replica.decide(Leave(call.worker))
        return self._primary.committed(True)

    def _workers(self) -> list[str]:
        return self._replica.presence.workers()


class ReplicaService:
    """What workers and the primary ask of each of several servers, the primary itself among them.

    The primary calls ``prepare`` on all servers; each promises to hear no earlier primary, and
    reports its state. It brings all to one state by ``append``, ``install`` or ``load``, and calls
    ``begin``. From then on ``append`` brings new entries of the log. Calls of an earlier term raise
    StaleTerm.
    """

    def __init__(self, replica: Replica, checkpoints: Checkpoints | None) -> None:
        self._replica = replica
        self._checkpoints = checkpoints
        self._promised = 0
        """The highest term heard of."""
        self._failure = ""
        self._primaries = replica.servers if replica.copies > 1 else replica.servers[:1]
        """The workers that may be the primary: any server, where others can take over."""

    # -- for workers

    def stage(
        self, call: Call, model: str, tensors: Any, layout: Any, step: int, push: int, wait_s: float
    ) -> Future[Any]:
        """Keep a worker's tensors until an entry names them; a Future of the term. ``layout`` with
        parameters, None with a gradient. ValueError for tensors that do not fit the model's part
        here."""
        gradient = Gradient(call.worker, call.rank, int(push), int(step))
        name, given = _model(model), _tensors(tensors)
        what = gradient.of(name) if layout is None else f"what is set for {name!r}"
        its = None if layout is None else of_plain(layout)

        def attempt() -> dict[str, Any] | None:
            term = self._term()
            if not self._replica.stage(name, gradient, given, what, its):
                return None
            return {"term": term}

        return self._when(attempt, "the primary, which has not decided on earlier ones", wait_s)

    def fetch(
        self, call: Call, model: str, version: int, term: int, names: list[str], wait_s: float
    ) -> Future[Any]:
        """The tensors ``names`` of a version that the primary has granted to the caller."""
        name, version, term, names = _model(model), int(version), int(term), _strings(names)

        def attempt() -> dict[str, Any] | None:
            if self._term() != term:
                return {"waits_for": "the primary, which began a new term"}
            found = self._replica.known_or_new(name).fetch(call.worker, version, names)
            return None if found is None else {"tensors": dict(found)}

        return self._when(attempt, "the primary, which has not granted that version", wait_s)

    def _term(self) -> int:
        if self._replica.term is None:
            raise AskAgain("the servers have not agreed on a state yet")
        return self._replica.term

    def _when(self, attempt: Callable[[], Any], waits_for: str, wait_s: float) -> Future[Any]:
        with self._replica.changed:
            otherwise = {"waits_for": waits_for}
            return self._replica.waits.add(attempt, lambda: otherwise, _seconds(wait_s))

    # -- for the primary: agreement on a state

    def prepare(self, call: Call, term: int) -> dict[str, Any]:
        """Append nothing more of an earlier primary. The report of this server: the last term that
        began here (None if the state is not whole), its log, the highest number of a checkpoint,
        and the numbers of its checkpoints on disk."""
        self._check_caller(call)
        it = self._replica
        with it.changed:
            self._check_term(int(term))
            self._promised, it.term = int(term), None
            steps = [] if self._checkpoints is None else self._checkpoints.store.steps()
            return {
                "term": it.last_term,
                "log": [list(it.log.committed), list(it.log.last), encode(it.log.entries)],
                "checkpoint": max([it.checkpoint, *steps]),
                "steps": steps,
            }

    def describe(self, call: Call, term: int) -> tuple[dict[str, Any], list[str]]:
        """For a copy: the state of the models, without tensors, and the workers that have left."""
        with self._agreeing(call, term) as it:
            return {name: each.state() for name, each in it.models.items()}, it.presence.gone()

    def read(self, call: Call, term: int, model: str, names: list[str]) -> dict[str, Any]:
        """Tensors for a copy, and their optimizer's state."""
        with self._agreeing(call, term) as it:
            return it.models[_model(model)].table.state(_strings(names))

    def install(self, call: Call, term: int, models: dict[str, Any], gone: list[str]) -> None:
        """Begin a copy; ``install_part`` adds its tensors."""
        with self._agreeing(call, term) as it:
            it.restore({"models": models})
            for worker in _strings(gone):
                it.presence.leave(worker)

    def install_part(self, call: Call, term: int, model: str, part: dict[str, Any]) -> None:
        """Tensors of the copy that ``install`` began."""
        with self._agreeing(call, term) as it:
            it.models[_model(model)].install(part)

    def load(self, call: Call, term: int, checkpoint: int | None) -> int:
        """Restore a checkpoint, or the state without models; the term in which it was written.
        CheckpointError if it is damaged, or of other servers."""
        self._check_caller(call)
        state: dict[str, Any] = {}
        if checkpoint is not None:
            if self._checkpoints is None:
                raise CheckpointError("this server has no directory for checkpoints")
            state = dict(self._checkpoints.load(int(checkpoint)))
        with self._agreeing(call, term) as it:
            it.restore(state)
            return int(state.get("term") or 0)

    def begin(self, call: Call, term: int, position: list[int], checkpoint: int) -> None:
        """All have the state of ``position``; new entries and checkpoints have higher numbers."""
        with self._agreeing(call, term) as it:
            it.begin(int(term), _position(position), int(checkpoint))

    # -- for the primary: the log

    def append(
        self, call: Call, term: int, committed: list[int], last: list[int], data: bytes
    ) -> dict[str, Any]:
        """Apply entries that lead from ``committed`` to ``last``; known ones are skipped, and all
        servers have the log up to ``committed``. The reply says whether this server is ``in_step``,
        that is, has come to ``last``; the number of the newest checkpoint, and why one failed."""
        self._check_caller(call)
        it, end = self._replica, _position(last)
        entries = decode(data)
        with it.changed:
            self._check_term(int(term))
            missing = None
            if int(term) == self._promised and it.last_term is not None:
                missing = it.log.missing(_position(committed), end, entries)
            if missing is not None:
                it.log.commit(_position(committed))
                try:
                    for entry in missing:
                        it.apply(entry, end.term)
                        if isinstance(entry, Save):
                            self._save(entry.number, end.term)
                        it.is_closed |= isinstance(entry, Close)
                except ProtocolError:
                    missing = None
            it.look()
            saved, failure = 0, self._failure
            if self._checkpoints is not None:
                saved, failure = self._checkpoints.saved()
            return {"in_step": missing is not None, "saved": saved, "failure": failure}

    def _save(self, number: int, term: int) -> None:
        if self._checkpoints is None:
            self._failure = "it has no directory for checkpoints"
        else:
            self._checkpoints.write(number, self._replica.state(term))

    @contextlib.contextmanager
    def _agreeing(self, call: Call, term: int) -> Iterator[Replica]:
        self._check_caller(call)
        with self._replica.changed:
            self._check_term(int(term))
            if int(term) != self._promised or self._replica.term is not None:
                raise StaleTerm(f"this server agrees on no state in term {int(term)}")
            yield self._replica

    def _check_term(self, term: int) -> None:
        if term < self._promised:
            raise StaleTerm(f"a primary of term {self._promised} was heard")

    def _check_caller(self, call: Call) -> None:
        if call.worker not in self._primaries:
            raise ValueError(
                f"{call.method} is for the primary, worker {' or '.join(self._primaries)}"
            )


def _position(given: Any) -> Position:
    term, number = given
    return Position(int(term), int(number))


def _staged(given: Any) -> dict[str, int]:
    return {str(server): int(term) for server, term in dict(given).items()}


def _strings(given: Any) -> list[str]:
    return [str(each) for each in given]


def _seconds(wait_s: float) -> float:
    return min(max(0.0, float(wait_s)), MAX_WAIT_S)


def _model(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"a model's name is 1 to {MAX_NAME} printable characters")
    return name


def _tensors(given: Any) -> dict[str, Array]:
    if not isinstance(given, dict):
        raise TypeError(f"tensors are a dict of arrays by name, not {type(given).__name__}")
    for name, array in given.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r:.60} is not the name of an array")
    return given
