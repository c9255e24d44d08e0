"""Keys and certificates: what is the same on every node, what differs, what is never shown."""

from __future__ import annotations

import hashlib
import os
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.transport.credentials import (
    Credentials,
    era_of,
    identity_of_certificate,
    namespace_of,
)
from potluck.errors import SecurityError
from support.links import make_credentials, new_credentials, tls_pair

PSK = bytes(range(32))
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def authority(credentials: Credentials) -> x509.Certificate:
    (der,) = credentials.client_context.get_ca_certs(binary_form=True)
    return x509.load_der_x509_certificate(der)


def test_the_issuer_is_the_same_for_all_clusters_to_the_byte_and_the_key_says_who_a_node_is() -> (
    None
):
    one = make_credentials(PSK, Ed25519PrivateKey.generate())
    other = make_credentials(PSK, Ed25519PrivateKey.generate())
    elsewhere = make_credentials(bytes(32), KEY)
    assert authority(one) == authority(other) == authority(elsewhere)
    assert one.namespace == other.namespace != elsewhere.namespace
    assert one.node_id != other.node_id


def test_a_certificate_says_nothing_but_its_key() -> None:
    """A machine that shows it gives away neither its name nor its cluster."""
    with tls_pair(memory=None) as (near, _):
        der = near._sock.getpeercert(binary_form=True)
        assert der is not None
        shown = x509.load_der_x509_certificate(der)
        assert list(shown.subject) == []
        assert shown.issuer.rfc4514_string() == "CN=potluck"
        assert shown.not_valid_before_utc.year == 1970
        assert new_credentials().namespace.encode() not in der
        with pytest.raises(x509.ExtensionNotFound):
            shown.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_a_changed_secret_holds_from_the_next_connection_and_the_earlier_one_is_heard() -> None:
    eras = [era_of(PSK)]
    credentials = Credentials(KEY, lambda: eras)
    before = credentials.namespace
    eras.insert(0, era_of(bytes(32)))
    assert credentials.namespace == namespace_of(bytes(32)) != before
    assert len(set(credentials.advert_keys)) == 2


def test_what_follows_from_a_secret_has_a_key_for_each_purpose() -> None:
    era = era_of(PSK)
    assert len({era.knock_key, era.advert_key, PSK}) == 3


def test_names_are_hashes_that_never_change() -> None:
    """Known answers: another release must not give a node another identity or cluster."""
    credentials = make_credentials(PSK, KEY)
    raw = KEY.public_key().public_bytes_raw()
    assert credentials.node_id == hashlib.sha3_256(raw).hexdigest()
    assert credentials.namespace == hashlib.sha3_256(b"potluck namespace v1" + PSK).hexdigest()[:32]
    assert namespace_of(PSK) == credentials.namespace


def test_certificates_are_valid_whatever_the_clock_says() -> None:
    certificate = authority(make_credentials(PSK, KEY))
    assert certificate.not_valid_before_utc.year == 1970
    assert certificate.not_valid_after_utc.year == 9999


def test_only_tls_1_3_with_certificates_on_both_sides_and_no_resumption() -> None:
    credentials = make_credentials(PSK, KEY)
    for context in (credentials.server_context, credentials.client_context):
        assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
    assert credentials.server_context.num_tickets == 0


def test_the_client_is_given_no_session_to_resume() -> None:
    with tls_pair(memory=None) as (near, _):
        assert near._sock.session is None or not near._sock.session.has_ticket
        assert near._sock.session_reused is False


def test_a_secret_of_another_length_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="32 bytes, this one 31"):
        make_credentials(bytes(31), KEY)


def test_no_secret_is_printed() -> None:
    shown = repr(make_credentials(PSK, KEY))
    assert PSK.hex() not in shown
    assert "context" not in shown
    era = era_of(PSK)
    assert repr(era) == f"Era(namespace={era.namespace!r})"


def test_no_key_is_left_on_disk(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make_credentials(PSK, KEY)
    monkeypatch.delattr(os, "memfd_create")  # as on macOS
    make_credentials(PSK, KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_that_holds_another_kind_of_key_names_nobody() -> None:
    key = generate_private_key(SECP256R1())
    name = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(authority(make_credentials(PSK, KEY)).not_valid_before_utc)
        .not_valid_after(authority(make_credentials(PSK, KEY)).not_valid_after_utc)
        .sign(KEY, None)
    )
    with pytest.raises(SecurityError, match="Ed25519"):
        identity_of_certificate(certificate.public_bytes(serialization.Encoding.DER))
    with pytest.raises(SecurityError, match="no certificate"):
        identity_of_certificate(None)
    with pytest.raises(SecurityError, match="can't be read"):
        identity_of_certificate(b"junk")
