"""The identity of this node: an Ed25519 key that never leaves it."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.home.keyfile import load_or_create
from potluck.errors import IdentityError

KEY_FILE = "node_keypair"


def load_or_create_identity(home: Path) -> Ed25519PrivateKey:
    """The node's key at ``home/node_keypair`` (PKCS#8 PEM, mode 0600), created if missing.

    Processes that start at the same time get the same key. IdentityError if other users may read
    the file, or if it is damaged or can't be created; the text says what to do.
    """
    path = home / KEY_FILE
    pem = load_or_create(path, "the node's key", _new_key)
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _damaged(path, "it holds no private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _damaged(path, "its key is not an Ed25519 key")
    return key


def _new_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _damaged(path: Path, why: str) -> IdentityError:
    return IdentityError(
        f"the node's key {path} is damaged: {why}. Restore it from a backup, or remove it: the "
        "node then gets a new identity, and bans of the old one have no effect on it"
    )
