"""Credentials: TLS 1.3 contexts made from the cluster's secret and the node's own key.

The cluster's certificate authority is not stored anywhere: its Ed25519 key is derived (HKDF) from
the pre-shared key, so every holder of the secret arrives at the same, bit-identical CA certificate.
A node's certificate holds the node's own Ed25519 key and is signed by that CA. Both sides verify
the other (mutual TLS); the name a certificate carries means nothing, the key is the identity.

Certificates are valid from 1970 to 9999: a laptop with a flat clock battery must still be able to
join, and taking a node out is done by banning its id and changing the secret, not by expiry.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.errors import SecurityError
from potluck.transport import native_tls
from potluck.transport.native_tls import NativeContext

T = TypeVar("T")

PSK_BYTES = 32

_CA_LABEL = b"potluck certificate authority v1"
_ADVERT_LABEL = b"potluck adverts v1"
_NAMESPACE_LABEL = b"potluck namespace v1"
_CA_NAME = "potluck cluster "
_ALWAYS = datetime.datetime(1970, 1, 1)
_FOREVER = datetime.datetime(9999, 12, 31, 23, 59, 59)


@dataclass(frozen=True, slots=True)
class CredentialSet:
    """What a node shows and accepts at one moment. Safe to print: it shows no secret."""

    namespace: str
    """The cluster's public name, 32 hex digits; says nothing about the secret."""
    namespaces: frozenset[str]
    """The names whose holders are accepted: more than one while the secret is being changed."""
    server_context: ssl.SSLContext = field(repr=False)
    client_context: ssl.SSLContext = field(repr=False)
    native: Callable[[bool], NativeContext] = field(repr=False)
    """The native core's context, for the server side or for the client's; made when needed."""
    advert_keys: tuple[bytes, ...] = field(repr=False)
    """Keys of the tags in adverts: own adverts use the first, all are recognised."""


def _objects_to_nobody(node: str) -> str | None:
    return None


class Credentials:
    """A node's credentials in one cluster, as they are now. Safe to print: it shows no secret.

    ``current`` is asked anew for each connection, so that a changed secret holds from the next
    one on. ``objects_to(node)`` says why a node is refused although it holds the secret (it was
    banned), or None.
    """

    def __init__(
        self,
        node_id: str,
        current: Callable[[], CredentialSet],
        objects_to: Callable[[str], str | None] = _objects_to_nobody,
        *,
        use_native: bool = True,
    ) -> None:
        """``use_native``: let the native core do the TLS of links, where it can."""
        self.node_id = node_id
        self.is_native = use_native and native_tls.is_available()
        """Whether links made with these credentials are the native core's."""
        self.objects_to = objects_to
        self._current = current

    def __repr__(self) -> str:
        return f"Credentials(node_id={self.node_id!r}, namespace={self.namespace!r})"

    @property
    def namespace(self) -> str:
        """The cluster's public name, 32 hex digits; says nothing about the secret."""
        return self._current().namespace

    @property
    def server_context(self) -> ssl.SSLContext:
        """For the accepting side of a connection that begins now."""
        return self._current().server_context

    @property
    def client_context(self) -> ssl.SSLContext:
        """For the calling side of a connection that begins now."""
        return self._current().client_context

    def native_context(self, *, server_side: bool) -> NativeContext | None:
        """For one side of a link that begins now, None if links are left to ``ssl``."""
        return self._current().native(server_side) if self.is_native else None

    @property
    def advert_keys(self) -> tuple[bytes, ...]:
        """Keys of the tags in adverts: own adverts use the first, all are recognised."""
        return self._current().advert_keys

    def accepts(self, namespace: str) -> bool:
        """Whether a peer that calls itself a member of ``namespace`` is in this cluster."""
        return namespace in self._current().namespaces


def make_credentials(
    psk: bytes,
    key: Ed25519PrivateKey,
    objects_to: Callable[[str], str | None] = _objects_to_nobody,
    *,
    use_native: bool = True,
) -> Credentials:
    """Credentials for the holder of ``psk`` (32 bytes) whose own key is ``key``. About 1 ms."""
    credentials = make_credential_set(psk, key)
    node_id = node_id_of(key.public_key())
    return Credentials(node_id, lambda: credentials, objects_to, use_native=use_native)


def make_credential_set(
    psk: bytes, key: Ed25519PrivateKey, *, also: Sequence[bytes] = ()
) -> CredentialSet:
    """Show a certificate under ``psk``; accept those issued under it or under a secret in ``also``.

    ValueError if a secret has another length than 32 bytes.
    """
    secrets = (psk, *also)
    for secret in secrets:
        if len(secret) != PSK_BYTES:
            raise ValueError(f"a cluster secret has {PSK_BYTES} bytes, this one {len(secret)}")
    ca_key = _derive_ca_key(psk)
    own_ca = _ca_certificate(ca_key, namespace_of(psk))
    authorities = [own_ca] + [_ca_certificate(_derive_ca_key(s), namespace_of(s)) for s in also]
    node_id = node_id_of(key.public_key())
    chain = _node_certificate(key.public_key(), node_id, ca_key, own_ca).public_bytes(
        serialization.Encoding.PEM
    ) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    trusted = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in authorities)
    return CredentialSet(
        namespace=namespace_of(psk),
        namespaces=frozenset(map(namespace_of, secrets)),
        server_context=_context(ssl.PROTOCOL_TLS_SERVER, trusted, chain),
        client_context=_context(ssl.PROTOCOL_TLS_CLIENT, trusted, chain),
        native=functools.cache(
            lambda server_side: NativeContext(trusted, chain, server_side=server_side)
        ),
        advert_keys=tuple(_derive(s, _ADVERT_LABEL) for s in secrets),
    )


def namespace_of(psk: bytes) -> str:
    """The public name of the cluster that shares ``psk``."""
    return hashlib.sha3_256(_NAMESPACE_LABEL + psk).hexdigest()[:32]


def node_id_of(key: Ed25519PublicKey) -> str:
    """The identity that a public key stands for."""
    return hashlib.sha3_256(key.public_bytes_raw()).hexdigest()


def node_id_of_certificate(der: bytes | None) -> str:
    """The identity in a peer's verified certificate (DER); SecurityError if it can't hold one."""
    key = _read_certificate(der, lambda certificate: certificate.public_key())
    if not isinstance(key, Ed25519PublicKey):
        raise SecurityError("the peer's certificate does not hold an Ed25519 key")
    return node_id_of(key)


def namespace_of_certificate(der: bytes | None) -> str:
    """The cluster under whose secret a peer's verified certificate (DER) was issued.

    While the secret is being changed this says which one the peer shows. SecurityError if the
    certificate can't be read.
    """
    issuer = _read_certificate(der, lambda certificate: certificate.issuer)
    names = issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value).removeprefix(_CA_NAME) if names else ""


def _read_certificate(der: bytes | None, read: Callable[[x509.Certificate], T]) -> T:
    """What ``read`` takes from a peer's verified certificate (DER)."""
    if not der:
        raise SecurityError("the peer showed no certificate")
    try:
        return read(x509.load_der_x509_certificate(der))
    except ValueError as error:
        raise SecurityError(f"the peer's certificate can't be read: {error}") from error


def _derive_ca_key(psk: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_derive(psk, _CA_LABEL))


def _derive(psk: bytes, label: bytes) -> bytes:
    """32 bytes for one purpose, from which nothing about those for another can be learned."""
    return HKDF(hashes.SHA256(), length=32, salt=None, info=label).derive(psk)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


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


def _ca_certificate(key: Ed25519PrivateKey, namespace: str) -> x509.Certificate:
    """The same bytes on every node: fixed serial and dates, and Ed25519 signs deterministically."""
    name = _name(_CA_NAME + namespace)
    return _certificate(name, name, key.public_key(), 1, is_ca=True).sign(key, None)


def _node_certificate(
    public: Ed25519PublicKey, node_id: str, ca_key: Ed25519PrivateKey, ca: x509.Certificate
) -> x509.Certificate:
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    name, serial = _name(f"potluck node {node_id[:16]}"), int(node_id[:30], 16) + 2
    return (
        _certificate(name, ca.subject, public, serial, is_ca=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(authority, critical=False)
        .sign(ca_key, None)
    )


def _certificate(
    subject: x509.Name, issuer: x509.Name, public: Ed25519PublicKey, serial: int, *, is_ca: bool
) -> x509.CertificateBuilder:
    """What the certificates of the authority and of the nodes have in common."""
    constraints = x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(_ALWAYS)
        .not_valid_after(_FOREVER)
        .add_extension(constraints, critical=True)
        .add_extension(_key_usage(signs_certificates=is_ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _context(protocol: int, authorities: bytes, chain: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
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
