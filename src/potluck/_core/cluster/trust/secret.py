"""The secret of a cluster: 256 bits (a pre-shared key, PSK) that all its nodes hold.

It comes from a variable, or from the file ``cluster_secret``. ``cluster_secret.earlier`` holds, of
the last secrets, the keys by which a machine that was away during a change is recognised (``Era``);
no secret can be computed from them, and they make nobody a member. Processes check both files at
each connection (two stats), so a change needs no message to running workers."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import secrets
import string
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path

import msgspec

from potluck._core.cluster.home.keyfile import load_or_create, read_private, replace_private, stamp
from potluck._core.settings import Settings
from potluck._core.transport.credentials import PSK_BYTES, Era, era_of
from potluck._core.transport.knock import MAX_ERAS
from potluck.errors import ConfigurationError, IdentityError, PotluckError

NUM_WORDS = 6


@functools.cache
def word_list() -> tuple[str, ...]:
    """2,048 short English words, no two with the same first four letters (the list of BIP 39)."""
    from mnemonic import Mnemonic

    return tuple(Mnemonic("english").wordlist)


def new_passphrase() -> str:
    """Six random words: 66 bits."""
    return " ".join(secrets.choice(word_list()) for _ in range(NUM_WORDS))


SECRET_FILE = "cluster_secret"
MIN_BITS = 60

# scrypt (RFC 7914): 128 MiB and about half a second for each guess.
_SCRYPT_LABEL = b"potluck passphrase v2 "
_SCRYPT_N = 1 << 17
_SCRYPT_R = 8
_SCRYPT_P = 1


def load_or_create_secret(home: Path) -> bytes:
    """The 32-byte secret at ``home/cluster_secret`` (64 hex digits, mode 0600), created if missing.

    Processes that start at the same time get the same secret. IdentityError if other users may read
    the file, or if it is damaged or can't be created.
    """
    path = home / SECRET_FILE
    text = load_or_create(
        path, "the cluster's secret", lambda: secrets.token_hex(PSK_BYTES).encode() + b"\n"
    )
    try:
        return parse_psk(text.decode())
    except ValueError:
        # Not chained: the ValueError's traceback could show most of the secret.
        raise IdentityError(
            f"the cluster's secret {path} is damaged: it should hold 64 hexadecimal digits. Copy "
            "it again from another node of the cluster; removing it begins a cluster of its own"
        ) from None


def is_secret_given(settings: Settings) -> bool:
    """Whether the secret comes from a variable, so that potluck can't change it."""
    return settings.psk is not None or settings.passphrase is not None


def load_secret(settings: Settings) -> bytes:
    """The cluster's secret from POTLUCK_PSK, else POTLUCK_PASSPHRASE, else the file in the home.

    ConfigurationError for an invalid variable; IdentityError as for ``load_or_create_secret``.
    """
    if settings.psk is not None:
        try:
            return parse_psk(settings.psk)
        except ValueError:
            raise ConfigurationError(
                "POTLUCK_PSK should hold 64 hexadecimal digits (32 bytes); it holds "
                f"{len(settings.psk)} characters that are not that. Make it with "
                "`openssl rand -hex 32`; words of your own go into POTLUCK_PASSPHRASE"
            ) from None
    if settings.passphrase is not None:
        return derive_psk(settings.passphrase, settings.cluster)
    return load_or_create_secret(settings.home)


def parse_psk(text: str) -> bytes:
    """32 bytes from 64 hexadecimal digits; ValueError for anything else."""
    digits = text.strip()
    if len(digits) != 2 * PSK_BYTES or not set(digits) <= set(string.hexdigits):
        raise ValueError("a cluster secret has 64 hexadecimal digits")
    return bytes.fromhex(digits)


def derive_psk(passphrase: str, cluster: str) -> bytes:
    """The 32-byte secret derived from a passphrase with scrypt, in about half a second and 128 MiB.

    ``cluster`` is the salt: without it one table of guesses would serve against all clusters.
    ConfigurationError if it is missing, or if the passphrase is estimated (zxcvbn) at fewer than
    ``MIN_BITS`` bits: an attacker that has heard an advert can test guesses offline. A random
    secret is safer.
    """
    words = unicodedata.normalize("NFKC", passphrase).strip()
    bits = _strength(words)
    if bits < MIN_BITS:
        raise ConfigurationError(
            f"POTLUCK_PASSPHRASE is guessed too easily: about {bits:.0f} bits, and {MIN_BITS} are "
            f"needed. Take six random words, for example: {new_passphrase()}"
        )
    name = unicodedata.normalize("NFKC", cluster).strip()
    if not name:
        raise ConfigurationError(
            "POTLUCK_PASSPHRASE needs POTLUCK_CLUSTER beside it: any name of your own, the same on "
            "all machines of the cluster"
        )
    return _scrypt(words, name)


@functools.lru_cache(maxsize=4)  # a process asks several times
def _scrypt(words: str, name: str) -> bytes:
    return hashlib.scrypt(
        words.encode(),
        salt=_SCRYPT_LABEL + name.encode(),
        n=_SCRYPT_N,
        r=_SCRYPT_R,
        p=_SCRYPT_P,
        maxmem=256 << 20,
        dklen=PSK_BYTES,
    )


@functools.lru_cache(maxsize=4)
def _strength(words: str) -> float:
    """The bits of a passphrase, as a guesser with word lists would count them. Of a long one the
    first 72 characters count, which is what the estimator takes."""
    if not words:
        return 0.0
    from zxcvbn import zxcvbn

    return float(zxcvbn(words[:72])["guesses_log10"]) * math.log2(10)


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
