"""``Replication``: a thread on each of several servers. While its server is the primary, it brings
all servers to one state, and then the log to the others."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potluck._core.background import start_thread
from potluck._core.types import Group
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
from potluck.parameter_server.log import Position, encode
from potluck.parameter_server.primary import Primary

_PAUSE_S = 0.1
_POLL_S = 0.2
"""While a checkpoint is under way, or to see whether the group has changed."""
_COPY_BYTES = 1 << 24
"""Bytes of tensors in one call, unless one tensor has more."""
_ATTEMPT_BITS = 20
_CHANCE_BITS = 16
_AWAY = (ServiceLost, ServiceTimeout, UnknownService)

_log = logging.getLogger(__name__)


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
