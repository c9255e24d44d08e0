"""What a node shows and trusts: TLS 1.3 contexts made from the cluster's secret and its own key.

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
import hashlib
import os
import ssl
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.errors import SecurityError

PSK_BYTES = 32

_CA_LABEL = b"potluck certificate authority v1"
_NAMESPACE_LABEL = b"potluck namespace v1"
_ALWAYS = datetime.datetime(1970, 1, 1)
_FOREVER = datetime.datetime(9999, 12, 31, 23, 59, 59)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A node's standing in one cluster. Safe to print: it shows no secret."""

    node_id: str
    """SHA3-256 of the node's raw public key, 64 hex digits."""
    namespace: str
    """The cluster's public name, 32 hex digits; says nothing about the secret."""
    server_context: ssl.SSLContext = field(repr=False)
    client_context: ssl.SSLContext = field(repr=False)


def make_credentials(psk: bytes, key: Ed25519PrivateKey) -> Credentials:
    """Credentials for the holder of ``psk`` (32 bytes) whose own key is ``key``. About 1 ms."""
    if len(psk) != PSK_BYTES:
        raise ValueError(f"a cluster secret has {PSK_BYTES} bytes, this one {len(psk)}")
    namespace = namespace_of(psk)
    ca_key = _derive_ca_key(psk)
    ca_certificate = _ca_certificate(ca_key, namespace)
    node_id = node_id_of(key.public_key())
    chain = _node_certificate(key.public_key(), node_id, ca_key, ca_certificate).public_bytes(
        serialization.Encoding.PEM
    ) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return Credentials(
        node_id=node_id,
        namespace=namespace,
        server_context=_context(ssl.PROTOCOL_TLS_SERVER, ca_certificate, chain),
        client_context=_context(ssl.PROTOCOL_TLS_CLIENT, ca_certificate, chain),
    )


def namespace_of(psk: bytes) -> str:
    """The public name of the cluster that shares ``psk``."""
    return hashlib.sha3_256(_NAMESPACE_LABEL + psk).hexdigest()[:32]


def node_id_of(key: Ed25519PublicKey) -> str:
    """The identity that a public key stands for."""
    return hashlib.sha3_256(key.public_bytes_raw()).hexdigest()


def node_id_of_certificate(der: bytes | None) -> str:
    """The identity in a peer's verified certificate (DER); SecurityError if it can't hold one."""
    if not der:
        raise SecurityError("the peer showed no certificate")
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except ValueError as error:
        raise SecurityError(f"the peer's certificate can't be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise SecurityError("the peer's certificate does not hold an Ed25519 key")
    return node_id_of(key)


def _derive_ca_key(psk: bytes) -> Ed25519PrivateKey:
    seed = HKDF(hashes.SHA256(), length=32, salt=None, info=_CA_LABEL).derive(psk)
    return Ed25519PrivateKey.from_private_bytes(seed)


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
    name = _name(f"potluck cluster {namespace}")
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(1)
        .not_valid_before(_ALWAYS)
        .not_valid_after(_FOREVER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, None)
    )


def _node_certificate(
    public: Ed25519PublicKey, node_id: str, ca_key: Ed25519PrivateKey, ca: x509.Certificate
) -> x509.Certificate:
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        x509.CertificateBuilder()
        .subject_name(_name(f"potluck node {node_id[:16]}"))
        .issuer_name(ca.subject)
        .public_key(public)
        .serial_number(int(node_id[:30], 16) + 2)
        .not_valid_before(_ALWAYS)
        .not_valid_after(_FOREVER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, None)
    )


def _context(protocol: int, ca: x509.Certificate, chain: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # No resumption: every connection proves its key anew, and no ticket waits to be read.
        context.num_tickets = 0
    context.load_verify_locations(cadata=ca.public_bytes(serialization.Encoding.PEM).decode())
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
