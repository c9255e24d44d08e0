"""The files of the cluster's secret: the secret, and what is left of earlier secrets.

``cluster_secret`` is the present secret. ``cluster_secret.earlier`` holds, of the last secrets, the
keys by which a machine that was away during a change is heard (``Era``); no secret can be computed
from them, and they make nobody a member. Processes check both files at each connection (two stats),
so a change needs no message to running workers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from potluck._core.cluster.home.keyfile import read_private, replace_private, stamp
from potluck._core.cluster.trust.secret import SECRET_FILE, load_or_create_secret
from potluck._core.transport.credentials import Era, era_of
from potluck._core.transport.knock import MAX_ERAS
from potluck.errors import IdentityError, PotluckError

EARLIER_FILE = SECRET_FILE + ".earlier"

_WHAT = "what is left of earlier secrets"
_log = logging.getLogger(__name__)


class Keyring:
    """Eras that ``read()`` takes from ``files``, read again whenever those change. Errors of the
    first reading are raised."""

    def __init__(self, read: Callable[[], tuple[Era, ...]], *files: Path) -> None:
        self._read = read
        self._files = files
        self._lock = threading.Lock()
        self._stamp: object = self._look()
        self._eras = read()

    def eras(self) -> tuple[Era, ...]:
        """The present era and earlier ones, as the files have them now. If changed files can't be
        read, the eras stay, and a warning is logged."""
        with self._lock:
            now = self._look()
            if now != self._stamp:
                self._stamp = now
                try:
                    self._eras = self._read()
                except PotluckError as error:
                    _log.warning("the cluster's secret was not taken over: %s", error)
            return self._eras

    def _look(self) -> object:
        return tuple(stamp(file) for file in self._files)


def node_keyring(home: Path) -> Keyring:
    """The eras of the secret in ``home``. Creates a missing secret; IdentityError as for
    ``load_or_create_secret``."""
    load_or_create_secret(home)
    return Keyring(lambda: read_eras(home), home / SECRET_FILE, home / EARLIER_FILE)


def read_eras(home: Path) -> tuple[Era, ...]:
    """The present era, and earlier ones, the newest first."""
    present = era_of(load_or_create_secret(home))
    earlier = [each for each in _read_earlier(home) if each.namespace != present.namespace]
    return (present, *earlier)[:MAX_ERAS]


def change_secret(home: Path, psk: bytes) -> None:
    """Make ``psk`` the cluster's secret on this machine; the old secret is gone after that."""
    eras = read_eras(home)
    if eras[0].namespace == era_of(psk).namespace:
        return
    replace_private(home / EARLIER_FILE, _WHAT, msgspec.msgpack.encode(eras[: MAX_ERAS - 1]))
    replace_private(home / SECRET_FILE, "the cluster's secret", psk.hex().encode() + b"\n")


def replace_secret(home: Path, psk: bytes) -> None:
    """Make ``psk`` the secret of this machine, which so changes to another cluster. Nothing of the
    former cluster's secrets is left."""
    (home / EARLIER_FILE).unlink(missing_ok=True)
    replace_private(home / SECRET_FILE, "the cluster's secret", psk.hex().encode() + b"\n")


def _read_earlier(home: Path) -> list[Era]:
    path = home / EARLIER_FILE
    try:
        return msgspec.msgpack.decode(read_private(path, _WHAT), type=list[Era])
    except FileNotFoundError:
        return []
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise IdentityError(f"{_WHAT} {path} is damaged ({error}): remove the file") from error
