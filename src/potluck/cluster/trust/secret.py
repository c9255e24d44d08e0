"""The secret of a cluster: 256 bits (a pre-shared key, PSK) that all its nodes hold."""

from __future__ import annotations

import hashlib
import secrets
import string
import unicodedata
from pathlib import Path

from potluck.cluster.home.keyfile import load_or_create
from potluck.errors import ConfigurationError, IdentityError
from potluck.settings import Settings
from potluck.transport.credentials import PSK_BYTES

SECRET_FILE = "cluster_secret"
MIN_PASSPHRASE = 12

# scrypt (RFC 7914): 128 MiB and about half a second for each guess. The salt is fixed because
# every node must derive the same secret from the passphrase alone.
_SCRYPT_SALT = b"potluck passphrase v1"
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
                f"{len(settings.psk)} characters that are not that"
            ) from None
    if settings.passphrase is not None:
        return derive_psk(settings.passphrase)
    return load_or_create_secret(settings.home)


def parse_psk(text: str) -> bytes:
    """32 bytes from 64 hexadecimal digits; ValueError for anything else."""
    digits = text.strip()
    if len(digits) != 2 * PSK_BYTES or not set(digits) <= set(string.hexdigits):
        raise ValueError("a cluster secret has 64 hexadecimal digits")
    return bytes.fromhex(digits)


def derive_psk(passphrase: str) -> bytes:
    """The 32-byte secret derived from a passphrase with scrypt, in about half a second and 128 MiB.

    ConfigurationError for fewer than ``MIN_PASSPHRASE`` characters: an attacker that has once
    connected to a node can test guesses offline, so the passphrase must be long. A random secret is
    safer.
    """
    words = unicodedata.normalize("NFKC", passphrase).strip()
    if len(words) < MIN_PASSPHRASE:
        raise ConfigurationError(
            f"POTLUCK_PASSPHRASE has {len(words)} characters; at least {MIN_PASSPHRASE} are needed "
            "(several random words)"
        )
    return hashlib.scrypt(
        words.encode(),
        salt=_SCRYPT_SALT,
        n=_SCRYPT_N,
        r=_SCRYPT_R,
        p=_SCRYPT_P,
        maxmem=256 << 20,
        dklen=PSK_BYTES,
    )
