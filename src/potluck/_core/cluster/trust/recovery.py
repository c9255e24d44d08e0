"""Recovery codes: a key that is senior to a cluster's founder, cut into codes for people to keep.
No I/O.

The founder signs once that this key is senior to its own, and nobody keeps the key: more than half
of the codes make it again (Shamir's secret sharing), fewer say nothing about it. So a stolen
founder is banned like any other admin, by the word of a key that the thief has never had, and no
word of the thief's changes who holds a code. For a cluster's machines the first such word counts
for good: which of two was first no set of signed records can tell (a thief dates its own back), so
each machine keeps the one that it heard first.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.trust.admissions import Admissions
from potluck._core.shamir import SECRET_BYTES, SHORT, join, split
from potluck._core.transport.credentials import node_id_of_bytes
from potluck._core.wire.admissions import MAX_CODES, Founding, Recovery
from potluck.errors import ConfigurationError

_CHECK = 7
_LABEL = b"potluck recovery code v1"
_GROUP = 4


@dataclass(frozen=True, slots=True)
class Code:
    """One share of the key: the polynomial's value at ``at`` (1 to ``MAX_CODES``), 32 bytes."""

    at: int
    share: bytes = field(repr=False)

    def spoken(self, key: bytes) -> str:
        """The code as people write it down: 64 letters and digits in groups. Secret."""
        raw = bytes([self.at]) + self.share + _check(key, self.at, self.share)
        text = base64.b32encode(raw).decode().lower()
        return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def make_codes(
    admissions: Admissions, founder: Ed25519PrivateKey, count: int
) -> tuple[Recovery, list[str]]:
    """``count`` codes for the cluster of ``admissions``, and the founder's word about their key.
    ConfigurationError unless 1 <= ``count`` <= ``MAX_CODES`` and ``founder`` founded the cluster,
    which has no codes."""
    founding = admissions.founding
    if not 1 <= count <= MAX_CODES:
        raise ConfigurationError(f"{count} recovery codes: make 1 to {MAX_CODES}; 3 are usual")
    if founding.codes_needed:
        raise ConfigurationError(
            f"this cluster has recovery codes already, of which {founding.codes_needed} are "
            "needed. They are made once: nothing but the codes can replace them. If they are "
            "lost, found a new cluster: remove ~/.potluck on a machine that you trust, run "
            "`potluck init --recovery-codes 3` there, and pair anew"
        )
    if founder.public_key().public_bytes_raw() != founding.key:
        raise ConfigurationError(
            "only the machine that founded the cluster makes recovery codes: run the command on "
            f"node {node_id_of_bytes(founding.key)[:12]} (`potluck nodes`)"
        )
    seed = secrets.token_bytes(SECRET_BYTES)
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    needed = count // 2 + 1
    recovery = Recovery(key, needed, admissions.roster.number + 1)
    changed = msgspec.structs.replace(founding, recovery=recovery)
    signature = founder.sign(changed.recovery_bytes)
    shares = split(seed, range(1, count + 1), needed, SHORT)
    return (
        msgspec.structs.replace(recovery, signature=signature),
        [Code(at, share).spoken(key) for at, share in shares.items()],
    )


def parse_code(text: str, founding: Founding) -> Code:
    """The code in a typed text, with any blanks and dashes; ConfigurationError if it is none of
    the cluster of ``founding``."""
    letters = "".join(each for each in text if each not in " -\u2013\u2014.\t").upper()
    try:
        raw = base64.b32decode(letters)
    except (binascii.Error, ValueError):
        raw = b""
    at, share, check = raw[:1], raw[1 : 1 + SECRET_BYTES], raw[1 + SECRET_BYTES :]
    is_whole = len(raw) == 1 + SECRET_BYTES + _CHECK and 1 <= raw[0] <= MAX_CODES
    if not is_whole or check != _check(founding.root, at[0], share):
        raise ConfigurationError(
            "this is no recovery code of this cluster. A code has 64 letters and digits (a to z, "
            "2 to 7), as `potluck init --recovery-codes` showed it: look for a mistyped one"
        )
    return Code(at[0], share)


def recovery_key(codes: Sequence[Code], founding: Founding) -> Ed25519PrivateKey:
    """The key that ``codes`` make. ConfigurationError if they are too few."""
    shares = {each.at: each.share for each in codes}
    if len(shares) < founding.codes_needed:
        raise ConfigurationError(
            f"{founding.codes_needed} different recovery codes are needed, and {len(shares)} given"
        )
    key = Ed25519PrivateKey.from_private_bytes(join(shares, SHORT))
    if key.public_key().public_bytes_raw() != founding.root:
        raise ConfigurationError("these recovery codes do not make the key of this cluster's codes")
    return key


def _check(key: bytes, at: int, share: bytes) -> bytes:
    return hashlib.sha3_256(_LABEL + key + bytes([at]) + share).digest()[:_CHECK]
