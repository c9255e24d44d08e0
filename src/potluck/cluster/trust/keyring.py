"""The files of the cluster's secrets: the current secret, and during a rotation the next or the
previous secret.

``cluster_secret`` is shown and accepted. ``cluster_secret.next`` is accepted as soon as the file
exists, so that all nodes accept the new secret before the first node shows it.
``cluster_secret.previous`` is accepted for ``GRACE_S`` seconds after the rotation. Processes check
the files at each connection (three stats), so a rotation needs no message to running workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.cluster.home.keyfile import read_private, replace_private
from potluck.cluster.trust.secret import SECRET_FILE, load_or_create_secret, parse_psk
from potluck.errors import IdentityError, PotluckError
from potluck.transport.credentials import CredentialSet, make_credential_set, namespace_of

NEXT_FILE = SECRET_FILE + ".next"
PREVIOUS_FILE = SECRET_FILE + ".previous"
GRACE_S = 600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets that a node holds. The repr shows the namespace, and no secret."""

    current: bytes
    next: bytes | None = None
    previous: bytes | None = None

    def __repr__(self) -> str:
        return f"Secrets({namespace_of(self.current)})"

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """The secrets that are accepted in addition to the current secret."""
        others = (self.next, self.previous)
        return tuple(s for s in others if s is not None and s != self.current)


class Keyring:
    """The secrets in ``home``, and the credentials of ``key`` under them.

    Creates a missing secret. IdentityError as for ``load_or_create_secret``.
    """

    def __init__(self, home: Path, key: Ed25519PrivateKey, *, grace_s: float = GRACE_S) -> None:
        self._home = home
        self._key = key
        self._grace_s = grace_s
        self._lock = threading.Lock()
        load_or_create_secret(home)
        self._stamp: object = self._look()
        self._expires = float("inf")
        self._current = self._load()

    def current(self) -> CredentialSet:
        """The credentials to show and accept now. If changed files can't be read, the credentials
        stay, and a warning is logged."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp or time.monotonic() >= self._expires:
                self._stamp = stamp
                try:
                    self._current = self._load()
                except PotluckError as error:
                    _log.warning("the cluster's secret was not taken over: %s", error)
            return self._current

    def _look(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(map(_stamp, (self._home / f for f in (SECRET_FILE, NEXT_FILE, PREVIOUS_FILE))))

    def _load(self) -> CredentialSet:
        secrets = read_secrets(self._home, grace_s=self._grace_s)
        self._expires = float("inf")
        if secrets.previous is not None:
            left = self._grace_s - _age(self._home / PREVIOUS_FILE)
            self._expires = time.monotonic() + max(0.0, left)
        return make_credential_set(secrets.current, self._key, also=secrets.accepted)


def read_secrets(home: Path, *, grace_s: float = GRACE_S) -> Secrets:
    """The secrets in the files of ``home``; the previous secret only for ``grace_s`` seconds."""
    current = load_or_create_secret(home)
    previous = None
    if 0 <= _age(home / PREVIOUS_FILE) < grace_s:
        previous = _read(home / PREVIOUS_FILE)
    return Secrets(current, _read(home / NEXT_FILE), previous)


def store_next(home: Path, psk: bytes) -> None:
    """Store ``psk`` as the next secret, which is accepted from now on."""
    replace_private(home / NEXT_FILE, "the cluster's next secret", _text(psk))


def use_next(home: Path) -> bool:
    """Make the next secret current and the current secret previous; False without a next secret.

    After a crash between the steps, a second call finishes the rotation.
    """
    next_psk = _read(home / NEXT_FILE)
    if next_psk is None:
        return False
    current = load_or_create_secret(home)
    if current != next_psk:
        replace_private(home / PREVIOUS_FILE, "the cluster's previous secret", _text(current))
        replace_private(home / SECRET_FILE, "the cluster's secret", _text(next_psk))
    (home / NEXT_FILE).unlink(missing_ok=True)
    return True


def drop_next(home: Path) -> None:
    """Remove the next secret, after a rotation that failed."""
    (home / NEXT_FILE).unlink(missing_ok=True)


def drop_previous(home: Path) -> None:
    """Remove the previous secret before the end of its grace time."""
    (home / PREVIOUS_FILE).unlink(missing_ok=True)


def replace_secret(home: Path, psk: bytes) -> Path | None:
    """Make ``psk`` the secret of this node, which so changes to another cluster.

    Returns the path of a copy of the old secret, or None if there was none. The next and the
    previous secret of the old cluster are removed, so its nodes are no longer accepted.
    """
    kept = None
    with contextlib.suppress(FileNotFoundError):
        old = parse_psk(read_private(home / SECRET_FILE, "the cluster's secret").decode())
        if old != psk:
            kept = home / f"{SECRET_FILE}.{namespace_of(old)[:8]}.old"
            replace_private(kept, "the old cluster's secret", _text(old))
    drop_next(home)
    drop_previous(home)
    replace_private(home / SECRET_FILE, "the cluster's secret", _text(psk))
    return kept


def _text(psk: bytes) -> bytes:
    return psk.hex().encode() + b"\n"


def _read(path: Path) -> bytes | None:
    try:
        return parse_psk(read_private(path, "the cluster's secret").decode())
    except FileNotFoundError:
        return None
    except ValueError:
        raise IdentityError(f"the cluster's secret {path} is damaged: remove the file") from None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _age(path: Path) -> float:
    """Seconds (wall clock) since ``path`` was written; below 0 if there is no file."""
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except OSError:
        return -1.0
