"""``Leader``: a thread on each of several servers. While this server is the first one of the group
that is there, it brings all servers to one state, and then the log to the others."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from potluck._core.background import start_thread
from potluck._core.types import Group
from potluck.errors import (
    CheckpointError,
    HandlerError,
    PotluckError,
    ProtocolError,
    ServiceLost,
    ServiceTimeout,
    UnknownService,
)
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.entries import encode
from potluck.parameter_server.host import Host
from potluck.parameter_server.log import Position
from potluck.parameter_server.remotes import CONNECT_S, Remotes
from potluck.parameter_server.replica import Replica
from potluck.parameter_server.signals import OutOfStep

_PAUSE_S = 0.1
_POLL_S = 0.2
"""While a checkpoint is under way, or to see whether the group has changed."""
_COPY_BYTES = 1 << 24
"""Of the tensors in one call, or one tensor that is larger."""
_ATTEMPT_BITS = 20
_CHANCE_BITS = 16
_AWAY = (ServiceLost, ServiceTimeout, UnknownService)

_log = logging.getLogger(__name__)


class Leader:
    """From ``start`` until ``is_over()``.

    The servers agree anew when one begins, when one is out of step, and when another one is the
    first. The newest state counts: of the servers that agreed last, that of the greatest
    ``Position``. Servers that lack entries of it get these, all others copies of its tensors.
    ``replicas`` servers may be without that state, since each tensor lies on so many others. If
    more are, all have to be there, and go on from the newest checkpoint of which the same holds; or
    from none, if the first of all has none. Numbers of entries are never used twice, so that
    checkpoints of one number are of one history.
    """

    def __init__(
        self,
        replica: Replica,
        host: Host,
        checkpoints: Checkpoints | None,
        remotes: Remotes,
        group: Callable[[], Group],
        is_over: Callable[[], bool],
    ) -> None:
        """``remotes`` are the thread's own; ``group()`` is the present group."""
        self._replica = replica
        self._host = host
        self._checkpoints = checkpoints
        self._remotes = remotes
        self._group = group
        self._is_over = is_over
        self._num_attempts = 0
        self._asks = False

    def start(self) -> None:
        """Begin, by agreeing on a state."""
        start_thread(self._run, name="potluck-parameter-server-log", on_broken=self._broken)

    def ask(self) -> None:
        """A server began: ask all whether they are in step."""
        self._asks = True
        self._host.log.wake()

    # -- inside

    def _run(self) -> None:
        while not self._is_over():
            try:
                self.step()
            except _AWAY as error:
                _log.debug("another server is away: %s", error)
                self._asks = True
                time.sleep(_PAUSE_S)
            except HandlerError as error:
                if error.type != OutOfStep.__name__:
                    raise
                _log.info("the servers agree anew: %s", error)
                self._host.stand_down()
                time.sleep(_PAUSE_S)
            except CheckpointError as error:
                self._host.fail(error)
                return

    def step(self) -> None:
        """What is due: an agreement, or entries for the others. Waits if nothing is."""
        group = self._group()
        present = self._present(group)
        if present[:1] != (self._replica.server,):
            self._host.stand_down()
            time.sleep(_POLL_S)
            return
        led = self._host.led
        if led is not None and present != self._host.present:
            if set(present) < set(self._host.present) and self._are_enough(present):
                self._lead(led, present)  # the others go on
            else:
                led = None
        if led is not None:
            self._bring(led)
        else:
            self._host.stand_down()
            incarnation = self._next_incarnation(group.epoch)
            self._agree(incarnation, present)
            self._lead(incarnation, present)

    def _lead(self, incarnation: int, present: tuple[str, ...]) -> None:
        self._host.lead(incarnation, present)
        away = [server for server in self._replica.servers if server not in present]
        if away:
            _log.warning(
                "the parameter server goes on with worker %s, which has copies of all tensors, "
                "until worker %s is back",
                ", ".join(present),
                ", ".join(away),
            )

    def _present(self, group: Group) -> tuple[str, ...]:
        """The servers that are there. Without copies no state is whole without all of them."""
        if self._replica.copies == 1:
            return self._replica.servers
        return tuple(each for each in self._replica.servers if group.rank_of(each) >= 0)

    def _next_incarnation(self, epoch: int) -> int:
        """Above those of earlier groups, and of earlier attempts; another one in each job."""
        self._num_attempts += 1
        attempt = (epoch << _ATTEMPT_BITS) + self._num_attempts
        return (attempt << _CHANCE_BITS) + secrets.randbits(_CHANCE_BITS)

    def _bring(self, incarnation: int) -> None:
        """The entries that are not everywhere, to all other servers."""
        first, entries = self._host.log.entries(_POLL_S)
        others = self._host.present[1:]
        is_saving = self._checkpoints is not None and self._checkpoints.is_under_way
        if not others or not (entries or self._asks or is_saving):
            return
        self._asks = False
        replies = self._each(others, "follow", incarnation, first, encode(entries))
        self._host.carried_out(first + len(entries))
        if self._checkpoints is None:
            return
        with self._replica.changed:
            for server, reply in replies.items():
                if reply["failure"]:
                    self._checkpoints.fail(f"on worker {server}: {reply['failure']}")
            # Time for the one that makes it whole.
            self._checkpoints.commit(min(int(reply["saved"]) for reply in replies.values()))

    # -- agreement

    def _agree(self, incarnation: int, present: tuple[str, ...]) -> None:
        """On the state of all servers that are present."""
        reports = self._each(present, "join", incarnation)
        # Above all that anyone knows of: numbers of checkpoints are never used twice.
        index = max(int(report["index"]) for report in reports.values())
        fresh = self._on_the_newest(incarnation, reports)
        if fresh is None:
            if len(present) < len(self._replica.servers):
                raise ServiceLost(f"only worker {', '.join(present)} is there, of the servers")
            fresh = self._on_a_checkpoint(incarnation, present, reports)
        holders, position = fresh
        self._copy(incarnation, holders, [s for s in present if s not in holders])
        self._each(present, "begin", incarnation, index, list(position))

    def _on_the_newest(
        self, incarnation: int, reports: Mapping[str, Any]
    ) -> tuple[list[str], Position] | None:
        """Have those that lack entries of the newest state carry them out: who has it then. None
        if too few have."""
        begun, positions = {}, {}
        for server, report in reports.items():
            if report["state"] is not None:
                begun[server], *position = report["state"]
                positions[server] = Position(*position)
        if not positions:
            return None
        # One that was cut off may have decided more, alone: nobody was told of that.
        first = max(positions, key=lambda server: (begun[server], positions[server]))
        newest = positions[first]
        behind = [server for server, each in positions.items() if each != newest]
        if behind:
            kept = self._each([first], "kept", incarnation)[first]
            given = kept["base"], kept["newest"], kept["data"]
            caught_up = self._each(behind, "catch_up", incarnation, *given)
            behind = [server for server in behind if not caught_up[server]]
        fresh = [server for server in positions if server not in behind]
        return (fresh, newest) if self._are_enough(fresh) else None

    def _on_a_checkpoint(
        self, incarnation: int, present: Sequence[str], reports: Mapping[str, Any]
    ) -> tuple[list[str], Position]:
        steps = {server: set(report["steps"]) for server, report in reports.items()}
        why = "the other servers have no checkpoint of the same time"
        for checkpoint in sorted(set().union(*steps.values()), reverse=True):
            having = [server for server in present if checkpoint in steps[server]]
            if not self._are_enough(having):
                continue
            wrote: dict[str, int] = {}
            for server in having:
                try:
                    loaded = self._each([server], "load", incarnation, checkpoint)
                except HandlerError as error:
                    if error.type != CheckpointError.__name__:
                        raise
                    why = error.text
                    _log.warning("checkpoint %d is not used: %s", checkpoint, why)
                else:
                    wrote[server] = int(loaded[server]["incarnation"])
            if self._are_enough(wrote):
                if len(set(wrote.values())) == 1:
                    return list(wrote), Position(incarnation, 0)
                why = f"those numbered {checkpoint} are of different histories"
        first = present[0]
        if steps[first]:
            raise CheckpointError(
                f"none of the {len(steps[first])} checkpoints of worker {first} can be used: {why}"
            )
        self._each(present, "load", incarnation, None)
        return list(present), Position(incarnation, 0)

    def _are_enough(self, servers: Collection[str]) -> bool:
        """Whether each tensor lies on one of ``servers``."""
        return len(self._replica.servers) - len(servers) < self._replica.copies

    def _copy(self, incarnation: int, holders: Sequence[str], others: Sequence[str]) -> None:
        """The state of ``holders`` to ``others``."""
        if not others:
            return
        _log.info("worker %s gets a copy of the parameters", ", ".join(others))
        known = self._each(holders, "models", incarnation)
        first = known[holders[0]]
        self._each(others, "take", incarnation, first["models"], first["gone"])
        for model, state in first["models"].items():
            for server in others:
                wanted = set(self._replica.shard.names_on(server, state["layout"]))
                for holder in holders:
                    nbytes = known[holder]["nbytes"][model]
                    mine = {name: nbytes[name] for name in nbytes if name in wanted}
                    wanted -= mine.keys()
                    for names in _batches(mine):
                        part = self._each([holder], "give", incarnation, model, names)[holder]
                        self._each([server], "take_part", incarnation, model, part)
                if wanted:
                    raise ProtocolError(f"no server has {min(wanted)!r:.80} of {model!r}")

    def _each(self, servers: Iterable[str], method: str, *args: Any) -> Mapping[str, Any]:
        """The replies of these servers, asked at once."""
        replies, errors = self._remotes.call_each(
            method, dict.fromkeys(servers, args), connect_s=CONNECT_S
        )
        if errors:
            raise errors[0]
        return replies

    def _broken(self, error: BaseException) -> None:
        text = f"the parameter server broke down: {error}"
        self._host.fail(error if isinstance(error, PotluckError) else PotluckError(text))


def _batches(nbytes: Mapping[str, int]) -> Iterable[list[str]]:
    batch: list[str] = []
    total = 0
    for name, size in nbytes.items():
        if batch and total + size > _COPY_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch
