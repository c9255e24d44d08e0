"""``Delegation``: a node's signed word that another key acts for the node, in one job only.

A worker runs scripts of others, so it does not hold its node's key. Its agent makes a key for the
job, and signs that key's delegation, which travels as an extension of the worker's certificate. The
other side of a connection so learns which node a worker belongs to and which job it may speak for.
There is no date in it: only processes of the job, and the agent while the job runs, accept it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from potluck._core.wire.format import decoded
from potluck.errors import ProtocolError, SecurityError

MAX_JOB = 256

_OID = x509.ObjectIdentifier("2.25.187424385105834929160466219613911253037")
"""Below 2.25, where a UUID names an extension that no registry knows."""
_CONTEXT = b"potluck delegation v1\0"
"""No other signature of the node's key can be taken for one of a delegation."""


class Delegation(msgspec.Struct, frozen=True, array_like=True):
    """The node of the Ed25519 key ``node`` lets the holder of the certificate's key act for it in
    ``job``. ``signature`` is the node's, over both."""

    node: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    job: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_JOB)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

    def check(self, key: bytes) -> None:
        """SecurityError unless the node signed this for the public key ``key`` (32 bytes)."""
        signed = _signed_bytes(key, self.job)
        try:
            Ed25519PublicKey.from_public_bytes(self.node).verify(self.signature, signed)
        except (InvalidSignature, ValueError):
            raise SecurityError("the certificate's delegation was not signed by its node") from None


_delegations = msgspec.msgpack.Decoder(Delegation)


def delegate(node: Ed25519PrivateKey, key: Ed25519PublicKey, job: str) -> Delegation:
    """The word of ``node`` that ``key`` acts for it in ``job``."""
    signature = node.sign(_signed_bytes(key.public_bytes_raw(), job))
    return Delegation(node.public_key().public_bytes_raw(), job, signature)


def encode_delegation(delegation: Delegation) -> bytes:
    """``delegation`` as bytes, for a file."""
    return msgspec.msgpack.encode(delegation)


def decode_delegation(data: bytes) -> Delegation:
    """The delegation in ``data``, not checked yet; SecurityError if there is none."""
    try:
        return decoded(_delegations, data, "a delegation")
    except ProtocolError as error:
        raise SecurityError(f"a delegation can't be read: {error}") from error


def extension_of(delegation: Delegation) -> x509.UnrecognizedExtension:
    """``delegation`` as an extension of a certificate."""
    return x509.UnrecognizedExtension(_OID, encode_delegation(delegation))


def delegation_in(certificate: x509.Certificate) -> Delegation | None:
    """The delegation in ``certificate``, not checked yet; None without one. SecurityError or
    ValueError if it can't be read."""
    try:
        extension = certificate.extensions.get_extension_for_oid(_OID).value
    except x509.ExtensionNotFound:
        return None
    assert isinstance(extension, x509.UnrecognizedExtension)
    return decode_delegation(extension.value)


def _signed_bytes(key: bytes, job: str) -> bytes:
    return _CONTEXT + key + job.encode()
