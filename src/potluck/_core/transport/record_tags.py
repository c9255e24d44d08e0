"""The keys and tags of a signed link (``signed.py``). Twin: ``native/core/tls/record_tags.cpp``.

A tag is AES-256-GMAC (NIST SP 800-38D) of a record: 16 bytes that only a holder of the key can
make. GMAC needs a nonce that never repeats under one key: the number of the record under its key,
which both ends count and neither sends. A record that was changed, repeated, left out or moved
therefore has a wrong tag, and so has a record of the other direction, which has a key of its own.

GMAC was chosen by measurement: for records of 64 KiB OpenSSL 3.0 makes 12.2 GB/s of tags on a
processor with AES and carry-less multiplication, and 10.5 GB/s by Poly1305 with a key of ChaCha20
for each record. The native core makes the hash of GMAC itself where the processor multiplies
vectors of 512 bits: twice as fast (``native/core/tls/ghash.cpp``).

Key agreement. HELLO and WELCOME carry 32 random bytes each (``LinkSecret``). Both are sent
under the connection's own TLS 1.3, after each end has verified the other's certificate. So these
bytes are known to the two ends only, are fresh for each link, and are as forward-secret as the TLS
session's own keys; if the random numbers of one end are bad, the other's suffice. HKDF-SHA256
(RFC 5869) makes the keys of both directions from them, bound to the job, the epoch, the ranks and
the two nodes. The cluster's secret has no part in them: all members know it, so it would keep no
member out, and a stranger gets no greeting. TLS has an exporter for this purpose (RFC 5705), which
Python's ``ssl`` lacks.

The bound of a key. After 2**24 records a key is replaced by HKDF-Expand of itself, on both ends at
the same record, and forgotten. So one key tags at most 1 TiB, in 2**24 records of at most 2**13
blocks: an attempt to forge a tag succeeds with a probability below 2**-114, and the first that
fails ends the link.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from potluck._core.wire.greeting import SECRET_BYTES, Hello, LinkSecret, Welcome
from potluck.errors import ProtocolError

KEY_BYTES = 32
TAG_BYTES = 16
RECORDS_PER_KEY = 1 << 24

_LABEL = b"potluck signed link 1 "
_STEP = _LABEL + b"next key"


class Keys(NamedTuple):
    """The first keys of one end of a link. Secrets."""

    sends: bytes
    receives: bytes

    @property
    def of_peer(self) -> Keys:
        """The other end's."""
        return Keys(self.receives, self.sends)

    def __repr__(self) -> str:
        return "Keys(...)"


def fresh_secret() -> LinkSecret:
    """One end's part of a link's keys, for its greeting."""
    return LinkSecret(os.urandom(SECRET_BYTES))


def agree(hello: Hello, welcome: Welcome, *, client: str, server: str) -> Keys:
    """The client's keys, which both ends make of the greeting; ``client`` and ``server`` are node
    ids. ProtocolError if an end has sent no secret."""
    if hello.secret is None or welcome.secret is None:
        raise ProtocolError("the greeting of a signed link has no secret")
    about = (hello.job, hello.epoch, hello.rank, hello.to_rank, client, server)
    keys = HKDF(
        SHA256(), 2 * KEY_BYTES, salt=None, info=_LABEL + b"keys " + msgspec.msgpack.encode(about)
    ).derive(hello.secret.value + welcome.secret.value)
    return Keys(keys[:KEY_BYTES], keys[KEY_BYTES:])


class RecordTags:
    """One direction's key, and the number of its next record."""

    def __init__(self, key: bytes, records_per_key: int = RECORDS_PER_KEY) -> None:
        assert len(key) == KEY_BYTES
        self._key = key
        self._records_per_key = records_per_key
        self._number = 0

    def next(self, *parts: bytes | memoryview) -> bytes:
        """The tag of the next record, which is all of ``parts``."""
        if self._number == self._records_per_key:
            self._key, self._number = HKDFExpand(SHA256(), KEY_BYTES, _STEP).derive(self._key), 0
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        tagging = Cipher(algorithms.AES(self._key), modes.GCM(nonce)).encryptor()
        for part in parts:
            tagging.authenticate_additional_data(part)
        tagging.finalize()
        return tagging.tag

    def forget(self) -> None:
        """Drop the key. Python cannot overwrite its memory; the native twin does."""
        self._key = b""
