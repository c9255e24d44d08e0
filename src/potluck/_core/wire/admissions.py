"""Signed records of admission: which keys are in a cluster, and in which role.

A record is signed with the Ed25519 key of an admin, over its msgpack encoding with an empty
signature. ``cluster.trust.admissions`` says what a set of records means. Agents pass records on to
each other, and keep them on disk.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from potluck._core.wire.format import MachineName

MAX_RECORDS = 4096
"""Records in one cluster, about 300 bytes each."""
MAX_IN_MESSAGE = 1024
MAX_CODES = 9
"""Recovery codes of one cluster (``cluster.trust.admissions``)."""

_CLUSTER_LABEL = b"potluck cluster v1"
_RECORD_LABEL = b"potluck admission v1"
_RECOVERY_LABEL = b"potluck recovery v1"

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
MAX_NUMBER = (1 << 53) - 1
Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
Time = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Reason = Annotated[str, msgspec.Meta(max_length=200)]
Fingerprint = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Verdict = Literal["admin", "member", "revoked"]


class Recovery(msgspec.Struct, frozen=True):
    """The founder's word that ``key`` is senior to its own. That key is on no machine:
    ``codes_needed`` recovery codes make it. ``number`` is higher than those of all records that the
    founder knew."""

    key: Key
    codes_needed: Annotated[int, msgspec.Meta(ge=1, le=MAX_CODES)]
    number: Number
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Founding(msgspec.Struct, frozen=True):
    """The beginning of a cluster: the key of its first node, and 16 random bytes. ``recovery``, if
    there is one, can come later, and counts once for good."""

    key: Key
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    recovery: Recovery | None = None

    @property
    def cluster(self) -> bytes:
        """The id of the cluster (16 bytes), which every record names."""
        return hashlib.sha3_256(_CLUSTER_LABEL + self.key + self.nonce).digest()[:16]

    @property
    def root(self) -> bytes:
        """The key that is senior to all."""
        return self.key if self.recovery is None else self.recovery.key

    @property
    def codes_needed(self) -> int:
        """How many recovery codes make the root's key; 0: there are none."""
        return 0 if self.recovery is None else self.recovery.codes_needed

    @property
    def recovery_bytes(self) -> bytes:
        """The bytes under the signature of ``recovery``; empty without one."""
        if self.recovery is None:
            return b""
        unsigned = msgspec.structs.replace(self.recovery, signature=b"")
        return _RECOVERY_LABEL + self.cluster + msgspec.msgpack.encode(unsigned)


class _Signed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What all records have in common.

    ``number`` is higher than that of every record that the signer knew, ``at`` the Unix time of the
    signature by the signer's clock, in seconds.
    """

    cluster: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    number: Number
    signer: Key
    at: Time
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    @property
    def signed_bytes(self) -> bytes:
        """The bytes under the signature."""
        return _RECORD_LABEL + msgspec.msgpack.encode(msgspec.structs.replace(self, signature=b""))

    @property
    def fingerprint(self) -> bytes:
        """Eight bytes that stand for this record in ``RecordsWanted``."""
        return hashlib.sha3_256(self.signed_bytes + self.signature).digest()[:8]


class Admission(_Signed, frozen=True, kw_only=True, array_like=True, tag=True):
    """The signer's word about ``key``: it is in the cluster as ``member`` or ``admin``, or it is
    ``revoked``.

    A member admission ends at ``expires`` (Unix time in seconds; 0: never). ``name`` is what the
    machine called itself when it was admitted, ``reason`` a sentence of the person. With
    ``delete_code`` the machines delete the code packages that came from a revoked one.
    """

    key: Key
    verdict: Verdict
    expires: Time = 0
    name: MachineName = ""
    reason: Reason = ""
    delete_code: bool = False


class SecretChange(_Signed, frozen=True, kw_only=True, array_like=True, tag=True):
    """The signer's word that the cluster's secret is now the secret of ``namespace``."""

    namespace: Annotated[str, msgspec.Meta(min_length=32, max_length=32, pattern="^[0-9a-f]*$")]


Record = Admission | SecretChange


# The exchange of records between agents, after a link was made and whenever the digests differ.


class RecordsDigest(msgspec.Struct, frozen=True, tag=True):
    """A digest of the sender's records (eight zero bytes: the sender's cluster is open), and the
    namespace of the secret that it has."""

    digest: Fingerprint
    namespace: Annotated[str, msgspec.Meta(max_length=32)]


class RecordsWanted(msgspec.Struct, frozen=True, tag=True):
    """A request for the records that are not among ``known``."""

    known: Annotated[tuple[Fingerprint, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()


class Records(msgspec.Struct, frozen=True, tag=True):
    """Records in the order of their numbers, and the founding of their cluster."""

    founding: Founding
    records: Annotated[tuple[Record, ...], msgspec.Meta(max_length=MAX_IN_MESSAGE)]


class SecretWanted(msgspec.Struct, frozen=True, tag=True):
    """A request for the secret of ``namespace``, to which the cluster has changed. ``digest`` is
    that of the sender's records."""

    namespace: Annotated[str, msgspec.Meta(max_length=32)]
    digest: Fingerprint


class Secret(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``SecretWanted``."""

    psk: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        return "Secret()"


AdmissionMessage = RecordsDigest | RecordsWanted | Records | SecretWanted | Secret
