"""``Primary``: the server that decides for all models, and the calls that wait for an update.

The primary is the first server of the present group. A call that waits takes no thread: it gets a
Future, which ends as soon as the update is there. It ends without one after ``wait_s``, and the
caller asks again; so a caller that is gone, or a group that has changed, is noticed in time.

With several servers every decision is an entry of a log. ``Replication`` is a thread on each of
them: while its server is the primary, it brings all servers to one state, and then the log to the
others. A checkpoint is an entry too, so that all servers write the same state. Where each tensor
lies on several servers, a reply waits until the log is committed up to it: all live servers have it
then, so no version that a worker has seen is lost with a server.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from typing import Any

from potluck._core.background import start_thread
from potluck._core.types import Group
from potluck.checkpoint.state import SUPPORTED
from potluck.errors import (
    CheckpointError,
    HandlerError,
    PotluckError,
    ServiceLost,
    ServiceTimeout,
    UnknownService,
)
from potluck.parameter_server.calls import CONNECT_S, Remotes
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.layout import Layout, num_bytes, of_plain
from potluck.parameter_server.log import Close, Drop, Position, Save, encode
from potluck.parameter_server.model import Gradient, Model
from potluck.parameter_server.replica import AskAgain, Replica

_COMMIT_S = 1.0
"""A caller that waits longer for the other servers asks again."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Primary:
    """For any number of threads; a call holds the lock of all models. It answers while this server
    is the primary: from ``lead`` until ``step_down``, or until it joins another primary.

    A worker's lease ends ``worker_timeout_s`` after its last pull, or when it is lost.
    CheckpointError if this server is alone, has checkpoints, and none is intact.
    """

    replica: Replica
    _: KW_ONLY
    checkpoints: Checkpoints | None
    save_every: int
    worker_timeout_s: float

    def __post_init__(self) -> None:
        self._changed = self.replica.changed
        self.present: tuple[str, ...] = ()
        """The live servers. Empty while another one is the primary."""
        self._led: int | None = None
        """The term in which this server was last the primary."""
        self._where: dict[str, frozenset[str]] = {}
        """By model: the live servers with tensors of it."""
        self._error: PotluckError | None = None
        self._is_save_due = False
        self.replica.on_time = self._on_time
        if len(self.replica.servers) == 1:
            self._start_alone()

    # -- the term of this server

    @property
    def led(self) -> int | None:
        """The term that this server leads; None while it is not the primary."""
        with self._changed:
            return self._led if self.is_open else None

    @property
    def is_open(self) -> bool:
        """Whether this is the primary."""
        return self._led is not None and self._led == self.replica.term

    def may_answer(self) -> bool:
        """The same for calls, which get the error that ended the parameter server, if there is
        one."""
        if self._error is not None:
            raise self._error
        return self.is_open

    def lead(self, term: int, present: tuple[str, ...]) -> None:
        """Answer calls: the servers that are ``present`` have agreed on a state of ``term``, others
        with it may have been lost since."""
        with self._changed:
            self._led, self.present, self._where = term, present, {}
            if self._is_alone:
                self.replica.log.commit(self.replica.log.last)
                if self.checkpoints is not None:
                    self.checkpoints.commit(self.replica.checkpoint)
            self._look({})
            self._changed.notify_all()

    def step_down(self) -> None:
        """Another server is the primary, or the servers agree anew. Idempotent."""
        with self._changed:
            if self._led is None:
                return
            self._led, self.present, self._is_save_due = None, (), False
            if self.checkpoints is not None:
                self.checkpoints.give_up()
            self.replica.look()

    def commit(self, position: Position) -> None:
        """All other servers have applied the log up to ``position``."""
        with self._changed:
            self.replica.log.commit(position)
            self.replica.look()

    def fail(self, error: PotluckError) -> None:
        """Answer all calls by ``error`` from now on."""
        with self._changed:
            self._error = error
            self.replica.look()

    # -- decisions

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change a model: waiting calls are looked at again, and a checkpoint may be due. AskAgain
        while this is not the primary."""
        with self._changed:
            self.check_open()
            before = {name: each.version for name, each in self.replica.models.items()}
            try:
                yield
            finally:
                self._look(before)
                self._changed.notify_all()

    def check_open(self) -> None:
        """AskAgain while this is not the primary, or its log is full."""
        if not self.may_answer():
            raise AskAgain("the servers have not agreed on a state yet")
        if self.replica.log.is_full:
            raise AskAgain("another server of this parameter server does not answer")

    @contextlib.contextmanager
    def dropping(self, name: str, worker: str, push: int) -> Iterator[None]:
        """After a mistake of a worker the servers forget what it staged as ``push``."""
        try:
            yield
        except ValueError:
            self.replica.decide(Drop(name, worker, push))
            raise

    def model(self, name: str) -> Model:
        """ValueError for a name that no model has."""
        model = self.replica.models.get(name)
        if model is None:
            known = ", ".join(map(repr, sorted(self.replica.models))) or "none"
            raise ValueError(
                f"there is no model {name!r:.80} on this parameter server; there are: {known}. "
                "Call set_parameters first"
            )
        return model

    def check_savable(self, layout: Layout, what: str) -> None:
        """ValueError, which begins with ``what``, for a dtype that no checkpoint can hold."""
        for name, (_, dtype) in layout.items():
            if self.checkpoints is not None and dtype not in SUPPORTED:
                raise ValueError(
                    f"{what} has {name!r} of dtype {dtype}, which a checkpoint can't hold: take "
                    "another dtype, or leave out checkpoint="
                )

    def has_staged(
        self, gradient: Gradient, name: str, layout: Layout, tensors: Any, terms: Any, what: str
    ) -> bool:
        """Whether every live server has staged its part of a push. ``tensors`` are the part of a
        server that is alone, staged here; of several servers ``terms`` has the term in which each
        has staged its part. ValueError, which begins with ``what``, if they do not fit, or are
        missing on this server."""
        replica = self.replica
        if tensors is not None:
            if not replica.stage(name, gradient, tensors, what, layout):
                raise ValueError(f"{what}: too many of worker {gradient.worker} wait already")
            return True
        where = self._where.get(name)
        if where is None:
            parts = replica.placement(self.present).split(layout)
            where = frozenset(server for server, part in parts.items() if part)
            if name in replica.models:
                self._where[name] = where
        if any(terms.get(server) != replica.term for server in where):
            return False
        if not replica.known_or_new(name).is_staged(gradient, layout):
            raise ValueError(f"{what} was not staged on worker {replica.server}")
        return True

    # -- replies

    def committed(self, reply: Any) -> Any:
        """``reply``, or a Future of it, as soon as the log is committed up to now. None for
        None."""
        with self._changed:
            term, number = self.replica.term, self.replica.log.last.number
            if reply is None or self._is_committed(number):
                return reply

            def attempt() -> Any:
                if not self.may_answer() or self.replica.term != term:
                    raise AskAgain("the servers have begun a new term")
                return reply if self._is_committed(number) else None

            def otherwise() -> Any:
                raise AskAgain("another server of this parameter server does not answer")

            return self.replica.waits.add(attempt, otherwise, _COMMIT_S)

    def when(self, attempt: Callable[[], Any], name: str, wait_s: float) -> Future[Any]:
        """The reply of ``attempt()``, as soon as there is one and the log is committed up to it;
        after ``wait_s`` what model ``name`` waits for."""
        found: Any = None
        term: int | None = None
        number = 0

        def attempt_and_commit() -> Any:
            nonlocal found, term, number
            if not self.may_answer():
                return None
            if found is None or term != self.replica.term:
                found = attempt()
                term, number = self.replica.term, self.replica.log.last.number
            return found if found is not None and self._is_committed(number) else None

        def otherwise() -> dict[str, Any]:
            if not self.may_answer():
                return self.waits_to_begin()
            if found is not None:
                return {"waits_for": "the other servers, to apply it"}
            return {"waits_for": self.model(name).waits_for(self.replica.presence.workers())}

        with self.changing():
            self._expire()
            return self.replica.waits.add(attempt_and_commit, otherwise, wait_s)

    def waits_to_begin(self) -> dict[str, str]:
        """The reply to a call that waits for the first agreement."""
        servers = ", ".join(self.replica.servers)
        return {"waits_for": f"its servers, worker {servers}, to begin"}

    # -- checkpoints, and the end

    def save(self) -> None:
        """Write a checkpoint now, and wait for it. CheckpointError if it can't be written,
        ValueError without a directory."""
        if self.checkpoints is None:
            raise ValueError("there is no directory for checkpoints: pass checkpoint=DIRECTORY")
        with self._changed:
            self.checkpoints.await_others(self.worker_timeout_s)  # the checkpoint before
            self.begin_save()
            self.checkpoints.await_others(self.worker_timeout_s)
            self.checkpoints.await_written()  # held: else a push begins a second write

    def begin_save(self) -> None:
        """Have all servers write all models; waits until the write before has ended."""
        if self.checkpoints is None:
            self._is_save_due = False
            return
        self._is_save_due = self.checkpoints.is_under_way
        if not self._is_save_due:
            number = self.replica.checkpoint + 1
            self.replica.decide(Save(number))
            state = self.replica.state(self.replica.log.last.term)
            self.checkpoints.begin(number, state, is_alone=self._is_alone)

    def await_others(self, worker: str, deadline: float) -> list[str]:
        """Wait until the other workers have left or are silent; the names of the others."""
        with self._changed:
            presence = self.replica.presence
            while (rest := presence.others(worker)) and time.monotonic() < deadline:
                self._changed.wait(0.2)
            return rest

    def close(self) -> None:
        """Write the last checkpoint, and wait for it; end the other servers, and wait for them.
        CheckpointError if it can't be written."""
        try:
            if self.checkpoints is not None and self.replica.models and self.is_open:
                self.save()
        finally:
            with self._changed:
                if self.is_open:
                    self.replica.decide(Close())
                self._changed.notify_all()
                log = self.replica.log
                self._changed.wait_for(
                    lambda: self._is_alone or not log.entries, self.worker_timeout_s
                )

    # -- inside

    def _is_committed(self, number: int) -> bool:
        """Always where each tensor lies on one server only: a lost server's tensors are lost
        anyhow."""
        is_committed = number <= self.replica.log.committed.number
        return is_committed or self.replica.copies == 1 or self._is_alone

    @property
    def _is_alone(self) -> bool:
        return len(self.present) == 1

    def _look(self, before: Mapping[str, int]) -> None:
        """End the waits that are over, and make the updates that these make possible."""
        models = self.replica.models
        while True:
            self.replica.waits.look()
            if self._is_alone:
                self.replica.log.commit(self.replica.log.last)
            if not self.is_open:
                return
            workers = self.replica.presence.workers()
            made = [model.progress(workers) for model in models.values()]
            if not any(made):
                break
        for name, model in models.items():
            known = before.get(name, model.version)
            self._is_save_due |= model.version // self.save_every > known // self.save_every
        if self._is_save_due:
            self.begin_save()

    def _on_time(self) -> None:
        with self._changed:
            self._expire()
            self._look({name: each.version for name, each in self.replica.models.items()})

    def _expire(self) -> None:
        now = time.monotonic()
        lost = self.replica.presence.lost()
        for model in self.replica.models.values():
            for worker in lost:
                model.leave(worker)
            for worker in model.expire(now, now + self.worker_timeout_s):
                _log.warning(
                    "worker %s has pushed no gradient of %r for %g s: the others wait for it no "
                    "more, and what it pushes does not count until it pulls again",
                    worker,
                    model.name,
                    self.worker_timeout_s,
                )

    def _start_alone(self) -> None:
        found = None if self.checkpoints is None else self.checkpoints.load_latest()
        number, state = found or (0, {})
        with self._changed:
            self.replica.restore(state)
            term = secrets.randbits(62)
            self.replica.begin(term, Position(0, 0), number)
            self.lead(term, self.replica.servers)


_PAUSE_S = 0.1
_POLL_S = 0.2
"""While a checkpoint is under way, or to see whether the group has changed."""
_COPY_BYTES = 1 << 24
"""Bytes of tensors in one call, unless one tensor has more."""
_ATTEMPT_BITS = 20
_CHANCE_BITS = 16
_AWAY = (ServiceLost, ServiceTimeout, UnknownService)


@dataclass(eq=False, repr=False)
class Replication:
    """From ``start`` until ``is_over()``.

    The group elects: its first server is the primary, and the group's epoch makes the term. A
    server knows of a new group at a time of its own, so two may lead at once; the later term wins,
    by the promise that each server gives in ``prepare``.

    The servers agree anew when a server begins, when a server is out of step, and when the primary
    has changed. The newest state counts: of the servers of the last term, the greatest
    ``Position``. Two surviving servers may differ by entries that a lost primary sent to one of
    them; the other gets these from its log, since a state of which half the tensors lag is no
    version. Other servers get a copy. ``replicas`` servers may be without the newest state, since
    each tensor lies on so many others. If more are, all must be live, and go on from the newest
    checkpoint of which the same holds; or from none, if the first of all has none.

    ``remotes`` are the thread's own; ``group()`` is the present group.
    """

    primary: Primary
    checkpoints: Checkpoints | None
    remotes: Remotes
    group: Callable[[], Group]
    is_over: Callable[[], bool]

    def __post_init__(self) -> None:
        self._replica = self.primary.replica
        self._num_attempts = 0
        self._epoch = 0
        self._asks = False
        """Whether to see if all are in step, also without new entries."""

    def start(self) -> None:
        """Begin, by agreeing on a state."""
        start_thread(self._run, name="potluck-parameter-server-log", on_broken=self._broken)

    # -- inside

    def _run(self) -> None:
        while not self.is_over():
            try:
                self.step()
            except _AWAY as error:
                _log.debug("another server is away: %s", error)
                time.sleep(_PAUSE_S)
            except HandlerError as error:
                if error.type != "StaleTerm":
                    raise
                _log.info("the servers agree anew: %s", error)
                self.primary.step_down()
                time.sleep(_PAUSE_S)
            except CheckpointError as error:
                self.primary.fail(error)
                return

    def step(self) -> None:
        """One round: an agreement on a state, or new entries to the other servers. Waits if neither
        is due."""
        group = self.group()
        if group.epoch != self._epoch:  # a server may have been started again
            self._epoch, self._asks = group.epoch, True
        present = self._present(group)
        if present[:1] != (self._replica.server,):
            self.primary.step_down()
            time.sleep(_POLL_S)
            return
        term = self.primary.led
        if term is not None and present != self.primary.present:
            if set(present) < set(self.primary.present) and self._are_enough(present):
                self._lead(term, present)  # the others go on
            else:
                term = None
        if term is None:
            self.primary.step_down()
            term = self._next_term(group.epoch)
            self._agree(term, present)
            self._lead(term, present)
        else:
            self._replicate(term)

    def _lead(self, term: int, present: tuple[str, ...]) -> None:
        self.primary.lead(term, present)
        away = [server for server in self._replica.servers if server not in present]
        if away:
            _log.warning(
                "the parameter server goes on with worker %s, which has copies of all tensors, "
                "until worker %s is back",
                ", ".join(present),
                ", ".join(away),
            )

    def _present(self, group: Group) -> tuple[str, ...]:
        """The live servers. Without copies no state is whole without all of them."""
        if self._replica.copies == 1:
            return self._replica.servers
        return tuple(each for each in self._replica.servers if group.rank_of(each) >= 0)

    def _next_term(self, epoch: int) -> int:
        """Above the terms of earlier groups, and of earlier attempts; another one in each job. Each
        attempt needs a term of its own: calls of one that has timed out may still arrive."""
        self._num_attempts += 1
        attempt = (epoch << _ATTEMPT_BITS) + self._num_attempts
        return (attempt << _CHANCE_BITS) + secrets.randbits(_CHANCE_BITS)

    def _replicate(self, term: int) -> None:
        """Append the uncommitted entries on all other servers, and commit them."""
        log, changed = self._replica.log, self._replica.changed
        others = self.primary.present[1:]
        with changed:
            if not others or not (log.entries or self._asks):
                changed.wait(_POLL_S)
            committed, last, entries = log.committed, log.last, list(log.entries)
        is_saving = self.checkpoints is not None and self.checkpoints.is_under_way
        if not others or not (entries or self._asks or is_saving):
            return
        replies = self._each(others, "append", term, [*committed], [*last], encode(entries))
        self._asks = False
        if not all(reply["in_step"] for reply in replies.values()):
            self.primary.step_down()  # and agree anew
            return
        self.primary.commit(last)
        if self.checkpoints is None:
            return
        with changed:
            for server, reply in replies.items():
                if reply["failure"]:
                    self.checkpoints.fail(f"on worker {server}: {reply['failure']}")
            # The primary's own is written last: it makes the checkpoint valid.
            self.checkpoints.commit(min(int(reply["saved"]) for reply in replies.values()))

    # -- agreement

    def _agree(self, term: int, present: tuple[str, ...]) -> None:
        """Bring all live servers to one state."""
        reports = self._each(present, "prepare", term)
        # Above the numbers that any server knows: a checkpoint's number is never used twice.
        checkpoint = max(int(report["checkpoint"]) for report in reports.values())
        newest = self._on_the_newest(term, reports)
        if newest is None:
            if len(present) < len(self._replica.servers):
                raise ServiceLost(f"only worker {', '.join(present)} is there, of the servers")
            newest = self._on_a_checkpoint(term, present, reports)
        holders, position = newest
        self._copy(term, holders, [server for server in present if server not in holders])
        self._each(present, "begin", term, [*position], checkpoint)

    def _on_the_newest(
        self, term: int, reports: Mapping[str, Any]
    ) -> tuple[list[str], Position] | None:
        """Bring lagging servers to the newest position of the log; the servers that have it. None
        if too few have."""
        begun = {server: int(each["term"]) for server, each in reports.items() if each["term"]}
        if not begun:
            return None
        ends = {server: Position(*reports[server]["log"][1]) for server in begun}
        # The last term first: a primary that was cut off may have decided more, alone. None of its
        # workers has seen that.
        first = max(begun, key=lambda server: (begun[server], ends[server]))
        behind = [server for server, end in ends.items() if end != ends[first]]
        replies = self._each(behind, "append", term, *reports[first]["log"]) if behind else {}
        holders = [s for s in begun if s not in behind or replies[s]["in_step"]]
        return (holders, ends[first]) if self._are_enough(holders) else None

    def _on_a_checkpoint(
        self, term: int, present: Sequence[str], reports: Mapping[str, Any]
    ) -> tuple[list[str], Position]:
        """Load the newest checkpoint that enough servers have; these servers."""
        steps = {server: set(report["steps"]) for server, report in reports.items()}
        why = "the other servers have no checkpoint of the same time"
        for checkpoint in sorted(set().union(*steps.values()), reverse=True):
            having = [server for server in present if checkpoint in steps[server]]
            if not self._are_enough(having):
                continue
            wrote: dict[str, int] = {}
            for server in having:
                try:
                    wrote |= self._each([server], "load", term, checkpoint)
                except HandlerError as error:
                    if error.type != CheckpointError.__name__:
                        raise
                    why = error.text
                    _log.warning("checkpoint %d is not used: %s", checkpoint, why)
            if self._are_enough(wrote):
                if len(set(wrote.values())) == 1:
                    return list(wrote), Position(term, 0)
                why = f"the checkpoints numbered {checkpoint} are of different histories"
        primary = present[0]
        if steps[primary]:
            raise CheckpointError(
                f"none of the {len(steps[primary])} checkpoints of worker {primary} can be used: "
                f"{why}"
            )
        self._each(present, "load", term, None)
        return list(present), Position(term, 0)

    def _are_enough(self, servers: Collection[str]) -> bool:
        """Whether each tensor lies on one of ``servers``."""
        return len(self._replica.servers) - len(servers) < self._replica.copies

    def _copy(self, term: int, holders: Sequence[str], others: Sequence[str]) -> None:
        """Install the state of ``holders`` on ``others``."""
        if not others:
            return
        _log.info("worker %s gets a copy of the parameters", ", ".join(others))
        models, gone = self._each(holders[:1], "describe", term)[holders[0]]
        self._each(others, "install", term, models, gone)
        placement = self._replica.placement(holders)
        for model, state in models.items():
            layout = of_plain(state["layout"])
            for server in others:
                its = self._replica.placement([server]).split(layout)[server]
                for holder, names in placement.sources(its).items():
                    for batch in _batches(names, layout):
                        part = self._each([holder], "read", term, model, batch)[holder]
                        self._each([server], "install_part", term, model, part)

    def _each(self, servers: Iterable[str], method: str, *args: Any) -> dict[str, Any]:
        """The replies of these servers, called at once."""
        replies, errors = self.remotes.call_each(
            method, dict.fromkeys(servers, args), connect_s=CONNECT_S
        )
        if errors:
            raise errors[0]
        return replies

    def _broken(self, error: BaseException) -> None:
        text = f"the parameter server broke down: {error}"
        self.primary.fail(error if isinstance(error, PotluckError) else PotluckError(text))


def _batches(names: Iterable[str], layout: Layout) -> Iterable[list[str]]:
    batch: list[str] = []
    total = 0
    for name in names:
        size = num_bytes(layout, name)
        if batch and total + size > _COPY_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch
