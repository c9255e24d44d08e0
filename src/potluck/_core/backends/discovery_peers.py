"""The processes that were found on the network, and the groups that already exist there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from operator import attrgetter

from potluck._core.backends.discovery_rules import ExistingGroups
from potluck._core.background import why
from potluck._core.waiting import Reminder
from potluck._core.wire.gathering import MAX_PARTICIPANTS, Participant
from potluck.errors import LinkError, OperationTimeout, Refused

FORMED = "formed"
"""The code of a refusal by a member of a group that accepts no new members."""

_LOOK_S = 0.25


class KnownPeers:
    """The processes found so far, which have proved that they hold the cluster's secret.
    ``changed`` is notified of each change. Thread-safe."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self._peers: dict[str, Participant] = {}
        self._existing = ExistingGroups()
        self._broken: BaseException | None = None

    @property
    def peers(self) -> tuple[Participant, ...]:
        """The processes in the order of their ids."""
        with self.changed:
            return tuple(sorted(self._peers.values(), key=attrgetter("instance")))

    def get(self, instance: str) -> Participant:
        """The process with this id; KeyError if it is lost."""
        with self.changed:
            return self._peers[instance]

    def wait(self, n: int, timeout: float, complaint: Callable[[], str]) -> tuple[Participant, ...]:
        """Block until at least ``n`` processes are found; see
        ``AutoDiscoveryBackend.wait_for_peers``."""
        deadline = time.monotonic() + timeout

        def missing() -> str:
            peers = ", ".join(f"{m.host}:{m.port}" for m in (p.member for p in self.peers[:8]))
            found = f"{len(self._peers)} of {n} other processes found"
            return f"{found}{f' ({peers})' if peers else ''}{complaint()}"

        reminder = Reminder(lambda: f"waiting for peers: {missing()}", deadline)
        with self.changed:
            while len(self._peers) < n:
                if self._broken is not None:
                    raise LinkError(
                        f"the search for other processes broke ({why(self._broken)}) when "
                        f"{len(self._peers)} of {n} were found. Start this process again, or name "
                        "all addresses with backend='ring'; please report this with the traceback "
                        "above"
                    ) from self._broken
                self.check_existing()
                if reminder.is_overdue:
                    self._raise_if(self._existing.reasons())
                    raise OperationTimeout(
                        f"{missing()} in {timeout:g} s. Do they run, on the same network, on "
                        "machines of the same cluster (`potluck nodes`)? Where multicast is "
                        "blocked, write addresses down: POTLUCK_PEERS=host:port,...",
                        operation="wait_for_peers",
                    )
                reminder.tick()
                self.changed.wait(min(_LOOK_S, reminder.patience()))
            return self.peers

    def check_existing(self) -> None:
        """Refused, with the remedy, if a group that goes on has refused this process."""
        with self.changed:
            self._raise_if(self._existing.answer(time.monotonic()))

    @property
    def is_late(self) -> bool:
        """Whether a group without this process exists, which may be about to end."""
        with self.changed:
            return bool(self._existing)

    def lost(self, instance: str) -> None:
        """Remove the process ``instance``, which no longer answers."""
        with self.changed:
            self._peers.pop(instance, None)
            self.changed.notify_all()

    # -- called by the search, on its thread

    def found(self, peer: Participant) -> None:
        """Add ``peer``, which answered and proved that it holds the cluster's secret."""
        with self.changed:
            place = peer.member.host, peer.member.port
            self._existing.ended(place)
            for known in list(self._peers.values()):
                if (known.member.host, known.member.port) == place:
                    del self._peers[known.instance]  # another process has taken over its port
            if len(self._peers) < MAX_PARTICIPANTS - 1:
                self._peers[peer.instance] = peer
            self.changed.notify_all()

    def refused(self, host: str, port: int, error: Refused) -> None:
        """Note that the process at this address belongs to a group."""
        with self.changed:
            self._existing.refused((host, port), str(error), time.monotonic())
            self.changed.notify_all()

    def unreached(self, host: str, port: int) -> None:
        """Note that no process answered at this address."""
        with self.changed:
            self._existing.ended((host, port))

    def broke(self, error: BaseException) -> None:
        """Note that the search ended by ``error``."""
        with self.changed:
            self._broken = error
            self.changed.notify_all()

    @staticmethod
    def _raise_if(reason: str) -> None:
        if reason:
            raise Refused(reason, FORMED)
