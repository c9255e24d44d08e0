"""The file of the admitted keys: ``home/admissions`` (msgpack, mode 0600).

The agent, its workers and the commands share it. Changes are atomic and made under a lock; readers
notice them at the next connection, for the price of a stat.

A cluster without this file is *open*: every holder of its secret is in. Only clusters whose secret
comes from a variable (POTLUCK_PSK, POTLUCK_PASSPHRASE) begin open; ``lock`` closes them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.home.keyfile import (
    UNKNOWN,
    Stamp,
    load_or_create,
    locked,
    read_private,
    replace_private,
    stamp,
)
from potluck._core.cluster.trust.admissions import Admissions, Entry, Roster, new_founding, now_of
from potluck._core.wire.admissions import Founding, Record, Recovery
from potluck.errors import IdentityError, PotluckError

ADMISSIONS_FILE = "admissions"
FORMAT = 1
MAX_LIST_BYTES = 8 << 20

_LOCK_FILE = ".admissions.lock"
_WHAT = "the list of admitted keys"


class _File(msgspec.Struct, frozen=True):
    version: int
    founding: Founding
    records: tuple[Record, ...]


class AdmissionFile:
    """The admitted keys of the cluster of ``home``. Threads and processes may use one home at the
    same time. Methods raise IdentityError if the file is damaged or others can change it."""

    def __init__(self, home: Path, name: str = ADMISSIONS_FILE) -> None:
        self.path = home / name
        self._name = str(self.path)
        self._lock = threading.Lock()
        self._known: tuple[Stamp | None, Admissions | None] = UNKNOWN, None
        """The file's stamp, and the list when it had that."""

    def load(self) -> Admissions | None:
        """The list as it is now; None if the cluster is open. Not to be changed by the caller."""
        known, admissions = self._known
        if stamp(self._name) == known != UNKNOWN:
            return admissions
        with self._lock:
            return self._refresh()

    @property
    def roster(self) -> Roster:
        """Who is in, and in which role; empty if the cluster is open."""
        admissions = self.load()
        return Roster() if admissions is None else admissions.roster

    def entry(self, node: str) -> Entry | None:
        """The entry of ``node`` in the list."""
        return self.roster.entries.get(node)

    def objects_to(self, node: str) -> str | None:
        """The reason why nobody here talks to ``node``; None if it is in."""
        try:
            admissions = self.load()
        except PotluckError as error:  # a list that can't be read lets nobody in
            return str(error)
        if admissions is None:
            return None
        roster = admissions.roster
        if roster.is_admitted(node, now_of(time.time(), admissions.roster)):
            return None
        return refusal(node, roster.entries.get(node))

    def found(self, key: Ed25519PrivateKey) -> Admissions:
        """The list of this home; a new one with ``key`` as founder if there is none."""
        load_or_create(self.path, _WHAT, lambda: _encode(new_founding(key), ()))
        admissions = self.load()
        assert admissions is not None, "the list was made and is not there"
        return admissions

    def take_over(self, founding: Founding, records: Iterable[Record]) -> None:
        """Replace the list by that of another cluster; SecurityError if it is not genuine."""
        admissions = Admissions(founding, records)
        with self.changing():
            self._write(admissions)

    def add(self, records: Iterable[Record]) -> tuple[Record, ...]:
        """Take records that others signed; returns the new ones. SecurityError for forged ones."""
        return self.change(lambda admissions: tuple(records))

    def create(self, founding: Founding, records: Iterable[Record]) -> None:
        """Close an open cluster, with the whole list at once. IdentityError if it has a list."""
        admissions = Admissions(founding, records)
        with self.changing() as before:
            if before is not None:
                raise IdentityError("this cluster is closed already: it has a list of its own")
            self._write(admissions)

    def change(
        self,
        make: Callable[[Admissions], Sequence[Record]],
        before: Callable[[Admissions], None] = lambda changed: None,
    ) -> tuple[Record, ...]:
        """Add the records that ``make`` returns for the list as it is; returns the new ones.

        ``make`` runs under the lock, so numbers that it takes are taken by no other process.
        ``before(changed)`` is called under it, too, with the list as it will be, before that is
        written; what it raises keeps the list as it was. A new secret is stored there: before the
        record that names it, so that a crash between leaves no record of a secret that nobody has.
        IdentityError if the cluster is open.
        """
        with self.changing() as admissions:
            changed = _closed(admissions).copy()
            new = changed.add(make(changed))
            if new:
                before(changed)
                self._write(changed)
            return new

    def set_recovery(self, make: Callable[[Admissions], Recovery]) -> None:
        """Take the founder's word about recovery codes, which ``make`` returns for the list as it
        is; it counts for good (``Admissions.set_recovery``). IdentityError if the cluster is
        open."""
        with self.changing() as admissions:
            changed = _closed(admissions).copy()
            if changed.set_recovery(make(changed)):
                self._write(changed)

    @contextlib.contextmanager
    def changing(self) -> Iterator[Admissions | None]:
        """The list, which no other process changes meanwhile."""
        with locked(self.path.with_name(_LOCK_FILE), _WHAT), self._lock:
            yield self._refresh()

    def _write(self, admissions: Admissions) -> None:
        replace_private(self.path, _WHAT, _encode(admissions.founding, admissions.records))
        self._known = stamp(self._name), admissions

    def _refresh(self) -> Admissions | None:
        now = stamp(self._name)
        known, admissions = self._known
        if now == known != UNKNOWN:
            return admissions
        try:
            data = read_private(self.path, _WHAT, max_bytes=MAX_LIST_BYTES)
        except FileNotFoundError:
            self._known = None, None
            return None
        try:
            file = msgspec.msgpack.decode(data, type=_File)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise IdentityError(
                f"{_WHAT} {self.path} is damaged ({error}). Remove it together with cluster_secret "
                "and join the cluster again: `potluck pair` on another machine, `potluck join` here"
            ) from error
        if file.version != FORMAT:
            raise IdentityError(
                f"{_WHAT} {self.path} has format {file.version}, this potluck reads {FORMAT}: "
                "install the version that wrote it"
            )
        # Nobody but this user can write the file: the signatures were checked before it was.
        admissions = Admissions(file.founding, file.records, is_trusted=True)
        self._known = UNKNOWN if now is None else now, admissions  # None: it was made meanwhile
        return admissions


def _closed(admissions: Admissions | None) -> Admissions:
    if admissions is None:
        raise IdentityError(
            "this cluster is open: it has no list of admitted keys. Make one with: potluck lock"
        )
    return admissions


def refusal(node: str, entry: Entry | None) -> str:
    """Why ``node``, whose entry in the list is ``entry``, is not in the cluster."""
    if entry is None:
        return (
            f"node {node[:12]} was never admitted to this cluster. To admit it: `potluck pair` on "
            "a machine of the cluster, `potluck join` on the other"
        )
    if entry.role == "revoked":
        because = f" ({entry.word.reason})" if entry.word and entry.word.reason else ""
        return f"node {node[:12]} is banned from this cluster{because}"
    return f"the admission of node {node[:12]} has ended; `potluck pair` admits it again"


def _encode(founding: Founding, records: Iterable[Record]) -> bytes:
    return msgspec.msgpack.encode(_File(FORMAT, founding, tuple(records)))
