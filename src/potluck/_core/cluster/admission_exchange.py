"""One agent's part in keeping the list of admitted keys the same on all machines.

When the file changes, by a command of this machine or by other agents, the links of nodes that are
out are cut, the other parts of the agent are informed, and all peers get a digest of the list; also
when this node's secret has changed, when a link was made, and every ``DIGEST_S``. A peer with
another digest asks for what it lacks, and gets *all* of it in the order of the numbers. Single
records are never pushed: so a node that has a record has everything that its signer knew, and one
that holds the next secret knows of all nodes that were banned before it. The secret follows the
list: once an admin's record changes it, a node that lacks the new secret asks its
peers, and takes only the secret that the record names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.background import OnBroken, start_task, stop
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.admissions import Admissions, now_of
from potluck._core.cluster.trust.operator import end_expired
from potluck._core.cluster.trust.secret import change_secret, is_secret_given, load_secret
from potluck._core.settings import Settings
from potluck._core.transport.credentials import Credentials, namespace_of
from potluck._core.waiting import Complaint
from potluck._core.wire import admissions as wire
from potluck._core.wire.peers import Introduction
from potluck.errors import PotluckError, SecurityError

LOOK_S = 0.1
"""How often the file is looked at (one stat)."""
DIGEST_S = 2.0
ASK_S = 0.5
_MIN_ASK_S = 0.02
_IN_MESSAGE = 512
_MAX_QUEUED = 64
_OPEN = bytes(8)


@dataclass(eq=False, repr=False)
class AdmissionExchange:
    """The exchange of records with linked agents, and the watch over the file.

    ``watched()`` are the nodes that other parts of the agent take for members. ``on_barred(nodes,
    new)`` is called with all nodes that may not take part, and the new ones, whenever that changes.
    """

    settings: Settings
    key: Ed25519PrivateKey
    file: AdmissionFile
    credentials: Credentials
    links: PeerLinks
    _: KW_ONLY
    watched: Callable[[], Collection[str]]
    on_barred: Callable[[frozenset[str], frozenset[str]], None]
    on_note: Callable[[str], None]
    on_broken: OnBroken

    def __post_init__(self) -> None:
        self.namespaces: dict[str, str] = {}
        """The namespace of the secret that each linked node has."""
        self._complain = Complaint(self.on_note)
        self._known: tuple[bytes, ...] = ()
        self._digest: bytes | None = None
        self._namespace = ""
        self._barred: frozenset[str] = frozenset()
        self._asked: dict[str, tuple[float, bytes]] = {}
        self._told_at = self._wanted_at = self._ended_at = 0.0
        self._queue: asyncio.Queue[tuple[str, wire.Records | wire.Secret]] = asyncio.Queue(
            _MAX_QUEUED
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.links.on(wire.AdmissionMessage, self._received)
        self.links.on_linked.append(self._linked)
        self.links.on_ended.append(self._ended)

    def start(self) -> None:
        """Take part from now on."""
        self._look()
        self._tasks = [
            start_task(self._watch, name="watching admissions", on_broken=self.on_broken),
            start_task(self._take, name="taking records", on_broken=self.on_broken),
        ]

    async def close(self) -> None:
        """No task stays."""
        await stop(*self._tasks)

    # What changes here.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()
            if _now() - self._ended_at >= DIGEST_S and self._load() is not None:
                self._ended_at = _now()
                await asyncio.to_thread(self._end_expired)

    def _end_expired(self) -> None:
        try:
            end_expired(self.file, self.key)
        except PotluckError as error:
            self._complain(str(error))

    def _look(self) -> None:
        """Pass on what is new, cut off nodes that are out, and see to the secret."""
        admissions = self._load()
        if admissions is not None and admissions.digest != self._digest:
            self._digest = admissions.digest
            self._known = admissions.fingerprints
            self._told_at = -DIGEST_S
        if self.credentials.namespace != self._namespace:
            self._namespace = self.credentials.namespace
            self._told_at = -DIGEST_S  # `potluck rotate` waits until all have told it
        self._bar(admissions)
        now = _now()
        if now - self._told_at >= DIGEST_S:
            self._told_at = now
            for node in self.links.nodes:
                self._tell(node)
        self._want_secret(admissions, now)

    def _bar(self, admissions: Admissions | None) -> None:
        """Cut off the nodes that are out."""
        if admissions is None:
            return
        roster, at = admissions.roster, now_of(time.time(), admissions.roster)
        nodes = {*roster.entries, *self.watched(), *self.links.nodes}
        barred = frozenset(node for node in nodes if not roster.is_admitted(node, at))
        if barred == self._barred:
            return
        words = _parts(admissions, admissions.records)
        for node in barred & set(self.links.nodes):
            # So that an honest machine knows why, and stops its part of the work.
            self.links.drop(node, self.file.objects_to(node) or "it is out", words)
        new = barred - self._barred
        self._barred = barred
        self.on_barred(barred, new)

    def _want_secret(self, admissions: Admissions | None, now: float) -> None:
        if admissions is None or now - self._wanted_at < ASK_S:
            return
        wanted = admissions.roster.namespace
        if not wanted or wanted == self.credentials.namespace:
            return
        self._wanted_at = now
        if is_secret_given(self.settings):
            self._complain(
                "the cluster's secret was changed; this machine's comes from a variable: change "
                "POTLUCK_PSK or POTLUCK_PASSPHRASE there"
            )
            return
        for node in self.links.nodes:
            self.links.send(node, wire.SecretWanted(wanted, admissions.digest))

    def _load(self) -> Admissions | None:
        try:
            return self.file.load()
        except PotluckError as error:
            self._complain(str(error))
            return None

    # Messages of other agents.

    def _linked(self, node: str, introduction: Introduction) -> None:
        self._tell(node)

    def _ended(self, node: str, incarnation: int, reason: str) -> None:
        self.namespaces.pop(node, None)
        self._asked.pop(node, None)

    def _tell(self, node: str) -> None:
        digest = _OPEN if self._digest is None else self._digest
        self.links.send(node, wire.RecordsDigest(digest, self.credentials.namespace))

    def _received(self, node: str, message: wire.AdmissionMessage) -> None:
        match message:
            case wire.RecordsDigest(digest, namespace):
                self.namespaces[node] = namespace
                if digest not in (_OPEN, self._digest) and self._may_ask(node, digest):
                    self.links.send(node, wire.RecordsWanted(self._known))
            case wire.RecordsWanted(known):
                self._answer(node, known)
            case wire.SecretWanted(namespace, digest):
                self._give_secret(node, namespace, digest)
            case wire.Records() | wire.Secret():
                try:
                    self._queue.put_nowait((node, message))
                except asyncio.QueueFull:
                    self.links.drop(node, "it sends records faster than they can be checked")

    def _may_ask(self, node: str, digest: bytes) -> bool:
        """At once for a list that this node has not asked for, else now and then."""
        now = _now()
        at, asked = self._asked.get(node, (-ASK_S, b""))
        if now - at < (ASK_S if digest == asked else _MIN_ASK_S):
            return False
        self._asked[node] = (now, digest)
        return True

    def _answer(self, node: str, known: Collection[bytes]) -> None:
        admissions = self._load()
        if admissions is not None:
            for part in _parts(admissions, admissions.missing(known)):
                self.links.send(node, part)

    def _give_secret(self, node: str, namespace: str, digest: bytes) -> None:
        """Only to a node with the same list. So each holder of a secret also knows all bans that
        its maker knew, and gives it to none of the banned, in whatever order records travel."""
        if self.file.objects_to(node) is not None or namespace != self.credentials.namespace:
            return
        admissions = self._load()
        if (
            admissions is not None
            and admissions.roster.namespace == namespace
            and admissions.digest == digest
        ):
            self.links.send(node, wire.Secret(load_secret(self.settings)))

    async def _take(self) -> None:
        while True:
            node, message = await self._queue.get()
            try:
                await asyncio.to_thread(self._store, message)
            except SecurityError as error:
                self.on_note(f"cut off {node}: {error}")
                self.links.drop(node, str(error))
            except PotluckError as error:
                self._complain(str(error))
            self._look()

    def _store(self, message: wire.Records | wire.Secret) -> None:
        if isinstance(message, wire.Secret):
            with self.file.changing() as now:  # no command changes the secret meanwhile
                wanted = "" if now is None else now.roster.namespace
                if namespace_of(message.psk) == wanted and not is_secret_given(self.settings):
                    change_secret(self.settings.home, message.psk)
            return
        admissions = self.file.load()
        if admissions is None:
            # An open cluster was locked. A list without this node is of no use to it.
            locked = Admissions(message.founding, message.records)
            if locked.roster.is_admitted(self.credentials.node_id, 0.0):
                self.file.create(message.founding, message.records)
        elif admissions.founding.cluster == message.founding.cluster:
            recovery = message.founding.recovery
            if recovery is not None and recovery != admissions.founding.recovery:
                self.file.set_recovery(lambda known: recovery)
            self.file.add(message.records)
        else:
            raise SecurityError(
                "it has the list of another cluster under the same secret. If the cluster was "
                "locked on two machines at once, remove the list of one side there: "
                f"{self.file.path.name} in ~/.potluck"
            )


def _parts(admissions: Admissions, records: tuple[wire.Record, ...]) -> list[wire.Records]:
    """``records`` in messages, in their order; one message at least, because the peer may lack the
    founder's word about recovery codes."""
    starts = range(0, max(1, len(records)), _IN_MESSAGE)
    return [wire.Records(admissions.founding, records[at : at + _IN_MESSAGE]) for at in starts]


def _now() -> float:
    return asyncio.get_running_loop().time()
