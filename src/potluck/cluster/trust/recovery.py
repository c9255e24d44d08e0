"""Recovery codes: the founding key of a cluster, cut into codes for people to keep. No I/O.

A cluster that is founded with codes has a founding key that is on no machine: it signs once that
the first machine is an admin, and is forgotten. A strict majority of the codes makes the key again
(Shamir's secret sharing over GF(2^8), one polynomial for each byte of the key's seed), fewer say
nothing about it. So a stolen first machine is banned like any other admin, by the word of a key
that the thief has never had, and no word of the thief's changes who holds a code.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.cluster.trust.admissions import sign
from potluck.errors import ConfigurationError
from potluck.wire.admissions import MAX_CODES, Admission, Founding

_SEED = 32
_CHECK = 7
_LABEL = b"potluck recovery code v1"
_GROUP = 4


@dataclass(frozen=True, slots=True)
class Code:
    """One share of a founding key: the values of its polynomials at ``at`` (1 to ``MAX_CODES``),
    32 bytes."""

    at: int
    share: bytes = field(repr=False)

    def spoken(self, founding_key: bytes) -> str:
        """The code as people write it down: 64 letters and digits in groups. Secret."""
        raw = bytes([self.at]) + self.share + _check(founding_key, self.at, self.share)
        text = base64.b32encode(raw).decode().lower()
        return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def found_with_codes(
    machine: bytes, name: str, count: int
) -> tuple[Founding, Admission, list[str]]:
    """The founding of a cluster with ``count`` codes, the record that makes the key ``machine``
    (32 bytes) an admin, and the codes. ConfigurationError unless 1 <= ``count`` <= ``MAX_CODES``.
    """
    if not 1 <= count <= MAX_CODES:
        raise ConfigurationError(f"{count} recovery codes: make 1 to {MAX_CODES}; 3 are usual")
    seed = secrets.token_bytes(_SEED)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    public = key.public_key().public_bytes_raw()
    needed = count // 2 + 1
    founding = Founding(public, secrets.token_bytes(16), needed)
    record = Admission(
        cluster=founding.cluster,
        number=1,
        signer=public,
        at=int(time.time()),
        key=machine,
        verdict="admin",
        name=name[:64],
    )
    codes = [each.spoken(public) for each in _split(seed, needed, count)]
    return founding, sign(record, key), codes


def parse_code(text: str, founding: Founding) -> Code:
    """The code in a typed text, with any blanks and dashes; ConfigurationError if it is none of
    the cluster of ``founding``."""
    letters = "".join(each for each in text if each not in " -\u2013\u2014.\t").upper()
    try:
        raw = base64.b32decode(letters)
    except (binascii.Error, ValueError):
        raw = b""
    at, share, check = raw[:1], raw[1 : 1 + _SEED], raw[1 + _SEED :]
    is_whole = len(raw) == 1 + _SEED + _CHECK and 1 <= raw[0] <= MAX_CODES
    if not is_whole or check != _check(founding.key, at[0], share):
        raise ConfigurationError(
            "this is no recovery code of this cluster. A code has 64 letters and digits (a to z, "
            "2 to 7), as `potluck init --recovery-codes` showed it: look for a mistyped one"
        )
    return Code(at[0], share)


def founding_key(codes: Sequence[Code], founding: Founding) -> Ed25519PrivateKey:
    """The founding key that ``codes`` make. ConfigurationError if they are too few."""
    places = {each.at: each.share for each in codes}
    if len(places) < founding.codes_needed:
        raise ConfigurationError(
            f"{founding.codes_needed} different recovery codes are needed, and {len(places)} given"
        )
    key = Ed25519PrivateKey.from_private_bytes(_join(places))
    if key.public_key().public_bytes_raw() != founding.key:
        raise ConfigurationError("these recovery codes do not make this cluster's founding key")
    return key


def _check(founding_key: bytes, at: int, share: bytes) -> bytes:
    return hashlib.sha3_256(_LABEL + founding_key + bytes([at]) + share).digest()[:_CHECK]


def _split(secret: bytes, needed: int, count: int) -> list[Code]:
    """``count`` shares of ``secret``, of which ``needed`` make it."""
    # Each row: the coefficients of one power, for all bytes; the secret is the value at 0.
    rows = [secret, *(secrets.token_bytes(len(secret)) for _ in range(needed - 1))]
    codes = []
    for at in range(1, count + 1):
        share = bytes(len(secret))
        for row in reversed(rows):  # Horner
            share = bytes(_times(a, at) ^ b for a, b in zip(share, row, strict=True))
        codes.append(Code(at, share))
    return codes


def _join(places: dict[int, bytes]) -> bytes:
    """The value at 0 of the polynomials with the values ``places`` (Lagrange)."""
    secret = bytes(_SEED)
    for at, share in places.items():
        weight = 1
        for other in places:
            if other != at:
                weight = _times(weight, _times(other, _inverse(other ^ at)))
        secret = bytes(a ^ _times(weight, b) for a, b in zip(secret, share, strict=True))
    return secret


def _times(a: int, b: int) -> int:
    """The product in GF(2^8) with the polynomial of AES."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a = (a << 1) ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def _inverse(a: int) -> int:
    """``a`` to the power of 254."""
    result = 1
    for _ in range(254):
        result = _times(result, a)
    return result
