"""Credentials: who this node is, and whom it talks to.

A node is its Ed25519 key. Both sides of each connection show a certificate for their key (mutual
TLS 1.3), and each asks ``Credentials.refusal_of`` whether it wants to talk to the identity that the
other side has proved. The certificate says nothing else: no name, no date that matters, and an
issuer that is the same for all potlucks in the world. Its private key is public (``_AUTHORITY``):
TLS libraries want a chain to check, and the check that counts is that of the key. A worker has a
key of its own, and its certificate the word of its node about that key (``delegation.py``).

Before TLS a caller *knocks* (``knock.py``) with a key derived from the cluster's secret. The secret
keeps strangers out of earshot; it makes nobody a member.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck._core.transport import native_tls
from potluck._core.transport.delegation import Delegation, delegation_in, extension_of
from potluck._core.transport.native_tls import NativeContext
from potluck._core.wire.greeting import Refusal
from potluck.errors import SecurityError

T = TypeVar("T")

PSK_BYTES = 32

_ADVERT_LABEL = b"potluck adverts v1"
_KNOCK_LABEL = b"potluck knock v1"
_NAMESPACE_LABEL = b"potluck namespace v1"
_AUTHORITY = Ed25519PrivateKey.from_private_bytes(
    hashlib.sha3_256(b"potluck issuer of certificates v1: this key is public").digest()
)
_ALWAYS = datetime.datetime(1970, 1, 1)
_FOREVER = datetime.datetime(9999, 12, 31, 23, 59, 59)


@dataclass(frozen=True, slots=True)
class Era:
    """What follows from one of the cluster's secrets. From none of it can the secret be computed,
    or what follows from the next secret. Safe to print."""

    namespace: str
    """The cluster's public name under this secret, 32 hex digits."""
    knock_key: bytes = field(repr=False)
    advert_key: bytes = field(repr=False)
    """The key of the tags in adverts."""


class Identity(NamedTuple):
    """What a certificate proves: the id of a node, and the only job for which its holder may speak;
    empty for the node itself."""

    node: str
    job: str = ""


def _objects_to_nobody(node: str) -> str | None:
    return None


class Credentials:
    """The credentials of a node, or of a node's workers in one job, as they are now. Safe to print:
    it shows no secret.

    ``eras()`` is asked anew for each connection, so that a changed secret holds from the next one
    on: the present era, then earlier ones, under which a machine that was away may still knock.
    ``objects_to(node)`` says why this node does not talk to ``node``, or None.
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        eras: Callable[[], Sequence[Era]],
        objects_to: Callable[[str], str | None] = _objects_to_nobody,
        *,
        delegation: Delegation | None = None,
        use_native: bool = True,
    ) -> None:
        """``delegation``: by which node, and for which job, ``key`` was made; None for a node's own
        key. ``use_native``: let the native core do the TLS of links, where it can. SecurityError if
        the delegation is not one of ``key``."""
        own = key.public_key().public_bytes_raw()
        if delegation is not None:
            delegation.check(own)
        self.public_key = own if delegation is None else delegation.node
        """The node's."""
        self.node_id = node_id_of_bytes(self.public_key)
        self.job = "" if delegation is None else delegation.job
        """The job for which these credentials are good; empty for the node's own."""
        self.is_native = use_native and native_tls.is_available()
        """Whether links made with these credentials are the native core's."""
        self.objects_to = objects_to
        self._eras = eras
        authority = _issuer().public_bytes(serialization.Encoding.PEM)
        chain = _chain(key, delegation)
        self.server_context = _context(ssl.PROTOCOL_TLS_SERVER, authority, chain)
        self.client_context = _context(ssl.PROTOCOL_TLS_CLIENT, authority, chain)
        self._native = functools.cache(
            lambda server_side: NativeContext(authority, chain, server_side=server_side)
        )

    def __repr__(self) -> str:
        return f"Credentials(node_id={self.node_id!r}, namespace={self.namespace!r})"

    def refusal_of(self, peer: Identity) -> Refusal | None:
        """Why this side does not talk to ``peer``; None if it does.

        Workers talk to workers of their own job, and to the agent and commands of their own node.
        """
        reason = self.objects_to(peer.node)
        if reason is not None:
            return Refusal("banned", reason)
        is_own_node = peer.node == self.node_id and not (peer.job and self.job)
        if peer.job == self.job or is_own_node:
            return None
        mine, theirs = (f"job {job!r}" if job else "no job" for job in (self.job, peer.job))
        return Refusal(
            "job",
            f"one side belongs to {mine}, the other to {theirs}: a worker talks to the workers of "
            "its own job, and to its own node",
        )

    @property
    def eras(self) -> tuple[Era, ...]:
        """The present era, then earlier ones that are still heard."""
        return tuple(self._eras())

    @property
    def namespace(self) -> str:
        """The cluster's public name, 32 hex digits; says nothing about the secret."""
        return self._eras()[0].namespace

    def native_context(self, *, server_side: bool) -> NativeContext | None:
        """For one side of a link that begins now, None if links are left to ``ssl``."""
        return self._native(server_side) if self.is_native else None

    @property
    def advert_keys(self) -> tuple[bytes, ...]:
        """Keys of the tags in adverts: own adverts use the first, all are recognised."""
        return tuple(era.advert_key for era in self._eras())


def era_of(psk: bytes) -> Era:
    """The era of a secret; ValueError unless it has 32 bytes."""
    if len(psk) != PSK_BYTES:
        raise ValueError(f"a cluster secret has {PSK_BYTES} bytes, this one {len(psk)}")
    return Era(namespace_of(psk), _derive(psk, _KNOCK_LABEL), _derive(psk, _ADVERT_LABEL))


def namespace_of(psk: bytes) -> str:
    """The public name of the cluster that shares ``psk``."""
    return hashlib.sha3_256(_NAMESPACE_LABEL + psk).hexdigest()[:32]


def node_id_of(key: Ed25519PublicKey) -> str:
    """The identity that a public key stands for."""
    return node_id_of_bytes(key.public_bytes_raw())


def node_id_of_bytes(key: bytes) -> str:
    """The identity that a public Ed25519 key of 32 bytes stands for."""
    return hashlib.sha3_256(key).hexdigest()


def identity_of_certificate(der: bytes | None) -> Identity:
    """The identity in a peer's verified certificate (DER); SecurityError if it can't hold one."""
    key, delegation = _read_certificate(
        der, lambda certificate: (certificate.public_key(), delegation_in(certificate))
    )
    if not isinstance(key, Ed25519PublicKey):
        raise SecurityError("the peer's certificate does not hold an Ed25519 key")
    if delegation is None:
        return Identity(node_id_of(key))
    delegation.check(key.public_bytes_raw())
    return Identity(node_id_of_bytes(delegation.node), delegation.job)


def _read_certificate(der: bytes | None, read: Callable[[x509.Certificate], T]) -> T:
    """What ``read`` takes from a peer's verified certificate (DER)."""
    if not der:
        raise SecurityError("the peer showed no certificate")
    try:
        return read(x509.load_der_x509_certificate(der))
    except SecurityError:
        raise
    except Exception as error:  # the library has many, and DuplicateExtension is no ValueError
        raise SecurityError(f"the peer's certificate can't be read: {error}") from error


def _derive(psk: bytes, label: bytes) -> bytes:
    """32 bytes for one purpose, from which nothing about those for another can be learned."""
    return HKDF(hashes.SHA256(), length=32, salt=None, info=label).derive(psk)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


@functools.cache
def _issuer() -> x509.Certificate:
    """The certificate of ``_AUTHORITY``: the same bytes everywhere."""
    return _certificate(_AUTHORITY.public_key(), 1, is_ca=True).sign(_AUTHORITY, None)


def _chain(key: Ed25519PrivateKey, delegation: Delegation | None) -> bytes:
    """A certificate for ``key``, with its delegation if it has one, and the key itself (PEM)."""
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(_AUTHORITY.public_key())
    serial = int(node_id_of(key.public_key())[:30], 16) + 2
    builder = (
        _certificate(key.public_key(), serial, is_ca=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(authority, critical=False)
    )
    if delegation is not None:
        builder = builder.add_extension(extension_of(delegation), critical=False)
    certificate = builder.sign(_AUTHORITY, None)
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _certificate(public: Ed25519PublicKey, serial: int, *, is_ca: bool) -> x509.CertificateBuilder:
    """What the certificates of the issuer and of the nodes have in common."""
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "potluck")])
    constraints = x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None)
    return (
        x509.CertificateBuilder()
        .subject_name(issuer if is_ca else x509.Name([]))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(_ALWAYS)
        .not_valid_after(_FOREVER)
        .add_extension(constraints, critical=True)
        .add_extension(_key_usage(signs_certificates=is_ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


class _SSLSocket(ssl.SSLSocket):
    """Closes itself where its peer is gone before it is made: ``wrap_socket`` has taken the socket
    over by then, and gives it back to nobody."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            if getattr(self, "_sslobj", None) is None:
                self.close()
                raise ConnectionResetError(errno.ECONNRESET, error.strerror) from None
            raise


def _context(protocol: int, authorities: bytes, chain: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _SSLSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # No resumption: every connection proves its key anew, and no ticket waits to be read.
        context.num_tickets = 0
    context.load_verify_locations(cadata=authorities.decode())
    with _as_file(chain) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path that holds ``data`` for the moment OpenSSL reads it; in memory where the OS can."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        fd = os.memfd_create("potluck-credentials")
        try:
            os.write(fd, data)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        fd, path = tempfile.mkstemp(prefix="potluck-")  # mode 0600
        try:
            os.write(fd, data)
            yield path
        finally:
            os.close(fd)
            os.unlink(path)
