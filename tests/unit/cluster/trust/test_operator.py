"""Orders about the list of admitted keys: what is written, in which order, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.cluster.trust import operator
from potluck.cluster.trust.admission_file import AdmissionFile
from potluck.errors import ConfigurationError, IdentityError
from potluck.transport.credentials import node_id_of

ME = Ed25519PrivateKey.from_private_bytes(b"m" * 32)
BOB = Ed25519PrivateKey.from_private_bytes(b"b" * 32)
BOBS = node_id_of(BOB.public_key())


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


@pytest.fixture
def file(tmp_path: Path) -> AdmissionFile:
    made = AdmissionFile(tmp_path)
    made.found(ME)
    operator.admit(made, ME, public(BOB), name="bob")
    return made


def test_a_lock_is_written_whole_and_once(tmp_path: Path) -> None:
    opened = AdmissionFile(tmp_path)
    operator.lock(opened, ME, [(public(BOB), "bob")])
    assert {each.role for each in opened.roster.entries.values()} == {"founder", "member"}
    before = opened.path.read_bytes()
    with pytest.raises(IdentityError, match="closed already"):
        operator.lock(AdmissionFile(tmp_path), BOB, [])
    assert opened.path.read_bytes() == before


def test_a_secret_is_stored_before_the_record_that_names_it(file: AdmissionFile) -> None:
    before = file.path.read_bytes()

    def full_disk(psk: bytes) -> None:
        raise IdentityError("no room")

    for order in (
        lambda: operator.change_of_secret(file, ME, b"n" * 32, full_disk),
        lambda: operator.revoke(file, ME, BOBS, psk=b"n" * 32, store=full_disk),
    ):
        with pytest.raises(IdentityError, match="no room"):
            order()
        assert file.path.read_bytes() == before, "the list names a secret that nobody has"
    stored: list[bytes] = []
    operator.revoke(file, ME, BOBS, psk=b"n" * 32, store=stored.append)
    assert stored == [b"n" * 32]
    assert file.roster.entries[BOBS].role == "revoked"


def test_what_can_not_be_ordered_stores_no_secret(file: AdmissionFile) -> None:
    stored: list[bytes] = []
    founder = node_id_of(ME.public_key())
    for signer, node, why in (
        (ME, founder, "founded the cluster"),
        (BOB, founder, "founded the cluster"),
        (BOB, BOBS, "can't ban itself"),
        (ME, "ee" * 32, "not on the list"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            operator.revoke(file, signer, node, psk=b"n" * 32, store=stored.append)
    with pytest.raises(ConfigurationError, match="no admin of the cluster"):
        operator.change_of_secret(file, BOB, b"n" * 32, stored.append)
    assert stored == []


def test_an_admission_that_was_renewed_meanwhile_is_not_ended(
    file: AdmissionFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.admit(file, ME, public(BOB), days=1e-9)
    change = file.change

    def renewed_first(make: object) -> object:
        """Another process renews between the look and the lock."""
        monkeypatch.setattr(file, "change", change)
        operator.admit(AdmissionFile(file.path.parent), ME, public(BOB))
        return change(make)  # type: ignore[arg-type]

    monkeypatch.setattr(file, "change", renewed_first)
    operator.end_expired(file, ME)
    assert file.roster.entries[BOBS].role == "member"


def test_an_admission_that_ended_is_revoked_for_machines_with_a_wrong_clock(
    file: AdmissionFile,
) -> None:
    operator.admit(file, ME, public(BOB), days=1e-9)
    operator.end_expired(file, BOB)  # no admin
    assert file.roster.entries[BOBS].role == "member"
    operator.end_expired(file, ME)
    assert file.roster.entries[BOBS].role == "revoked"
