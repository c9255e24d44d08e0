"""Orders about the list of admitted keys: what is written, in which order, and what is not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core.cluster.trust import operator
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.admissions import MAX_OF_SIGNER, Admissions, sign
from potluck._core.transport.credentials import namespace_of, node_id_of
from potluck._core.wire.admissions import (
    MAX_NUMBER,
    Admission,
    Founding,
    Record,
    SecretChange,
    Verdict,
)
from potluck.errors import ConfigurationError, IdentityError

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


EVIL, SECOND, THIRD = (
    Ed25519PrivateKey.from_private_bytes(each * 32) for each in (b"e", b"2", b"3")
)
EVILS = node_id_of(EVIL.public_key())


def said(
    file: AdmissionFile, signer: Ed25519PrivateKey, number: int, verdict: Verdict, key: bytes
) -> Admission:
    """A record with a number of the signer's choice."""
    admissions = file.load()
    assert admissions is not None
    cluster = admissions.founding.cluster
    record = Admission(
        cluster=cluster, number=number, signer=public(signer), at=0, key=key, verdict=verdict
    )
    return sign(record, signer)


def roles(file: AdmissionFile) -> dict[str, str]:
    return {node: each.role for node, each in file.roster.entries.items()}


@pytest.mark.parametrize("number", [MAX_NUMBER, MAX_NUMBER - 1, (1 << 20) + 1, 1 << 40])
@pytest.mark.parametrize("keys", [1, 2, 3])
def test_admins_that_jump_to_the_last_number_stop_nobody(
    file: AdmissionFile, number: int, keys: int
) -> None:
    """Alone, with a second key that it made an admin, and with one that the founder did: each order
    of the founder works, and holds; one ban is enough for a key and all that it made."""
    operator.admit(file, ME, public(EVIL), verdict="admin")
    operator.admit(file, ME, public(THIRD), verdict="admin")
    file.add([said(file, EVIL, 10, "admin", public(SECOND))])
    for key in (EVIL, SECOND, THIRD)[:keys]:
        file.add([said(file, key, number, "revoked", public(BOB))])
        file.add([said(file, key, number, "member", public(key))])
    carl = Ed25519PrivateKey.generate()
    operator.admit(file, ME, public(carl), name="carl")
    operator.change_of_secret(file, ME, b"1" * 32)
    assert file.roster.namespace == namespace_of(b"1" * 32)
    operator.revoke(file, ME, EVILS, psk=b"2" * 32)
    assert file.roster.namespace == namespace_of(b"2" * 32)
    assert roles(file)[EVILS] == "revoked"
    assert roles(file)[node_id_of(SECOND.public_key())] == "member", "its words are void, too"
    operator.admit(file, ME, public(BOB), name="bob")
    assert roles(file)[BOBS] == "member"
    assert roles(file)[node_id_of(carl.public_key())] == "member"
    operator.revoke(file, ME, node_id_of(THIRD.public_key()), psk=None)


def test_to_make_an_admin_an_admin_again_throws_none_of_its_machines_out(
    file: AdmissionFile,
) -> None:
    operator.admit(file, ME, public(EVIL), name="admin", verdict="admin")
    operator.admit(file, EVIL, public(SECOND), name="its machine")
    before = file.path.read_bytes()
    operator.admit(file, ME, public(EVIL), name="admin", verdict="admin")
    assert file.path.read_bytes() == before
    assert roles(file)[node_id_of(SECOND.public_key())] == "member"


def test_an_order_about_a_senior_or_oneself_is_an_error_and_no_void_record(
    file: AdmissionFile,
) -> None:
    operator.admit(file, ME, public(EVIL), verdict="admin")
    operator.admit(file, EVIL, public(SECOND), verdict="admin")
    before = file.path.read_bytes()
    with pytest.raises(ConfigurationError, match=f"{EVILS[:12]} is an admin that is senior to"):
        operator.admit(file, SECOND, public(EVIL))
    with pytest.raises(ConfigurationError, match="can't change its own role"):
        operator.admit(file, EVIL, public(EVIL))
    assert file.path.read_bytes() == before


orders = st.tuples(
    st.integers(0, 4),
    st.sampled_from([1, 2, 3, 5, 9, 1 << 20, 1 << 26, (1 << 26) + 1, 1 << 40, MAX_NUMBER]),
    st.sampled_from(["admin", "admin", "member", "revoked", "secret"]),
    st.integers(0, 4),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(orders, max_size=16), st.integers(1, 4))
def test_the_founder_bans_whom_it_will_after_any_history_and_nobody_gains_by_it(
    history: list[tuple[int, int, str, int]], banned: int
) -> None:
    keys = (ME, BOB, EVIL, SECOND, THIRD)
    founding = Founding(public(ME), bytes(16))
    records: list[Record] = []
    for signer, number, verdict, about in history:
        both = {"cluster": founding.cluster, "number": number, "at": 0}
        if verdict == "secret":
            word: Record = SecretChange(
                **both,
                signer=public(keys[signer]),
                namespace="a" * 32,  # type: ignore[arg-type]
            )
        else:
            word = Admission(
                **both,  # type: ignore[arg-type]
                signer=public(keys[signer]),
                key=public(keys[about]),
                verdict=verdict,  # type: ignore[arg-type]
            )
        if signer or number < 1 << 40:  # the founder is honest: it does not jump
            records.append(sign(word, keys[signer]))
    before = Admissions(founding, records)
    node = node_id_of(keys[banned].public_key())
    if node not in before.roster.entries:
        return
    with tempfile.TemporaryDirectory() as home:
        file = AdmissionFile(Path(home))
        file.create(founding, records)
        operator.revoke(file, ME, node, psk=b"2" * 32)
        after = file.roster
    assert after.namespace == namespace_of(b"2" * 32)
    assert after.entries[node].role == "revoked"
    ranks = {"": 0, "revoked": 0, "member": 1, "admin": 2, "founder": 3}
    for each in {*before.roster.entries, *after.entries} - {node}:
        was, now = (
            ranks["" if each not in roster.entries else roster.entries[each].role]
            for roster in (before.roster, after)
        )
        assert now in (was, min(was, 1)), "a role that it had not, or out without a word"


def test_the_ban_of_an_admin_lets_nobody_back_in_and_puts_nobody_out(file: AdmissionFile) -> None:
    """What the banned admin had said about others is void: this machine says it anew."""
    stolen, helper, friend = (Ed25519PrivateKey.generate() for _ in range(3))
    operator.admit(file, ME, public(EVIL), verdict="admin")
    operator.admit(file, ME, public(stolen))
    operator.revoke(file, EVIL, node_id_of(stolen.public_key()), "lost in a train", psk=None)
    operator.admit(file, EVIL, public(helper), verdict="admin")
    operator.admit(file, helper, public(friend))
    done = operator.revoke(file, ME, EVILS, psk=None)
    ids = [node_id_of(each.public_key()) for each in (stolen, helper, friend)]
    assert [roles(file)[each] for each in ids] == ["revoked", "member", "member"]
    assert (done.kept, done.still_out, done.lost) == (tuple(ids[1:]), (ids[0],), 0)
    word = file.roster.entries[ids[0]].word
    assert word is not None
    assert word.reason == "lost in a train"
    operator.admit(file, ME, public(helper), verdict="admin")
    assert roles(file)[ids[2]] == "member", "what it said before has no force again"


def test_an_admin_that_becomes_a_member_takes_nobody_along(file: AdmissionFile) -> None:
    friend = Ed25519PrivateKey.generate()
    operator.admit(file, ME, public(EVIL), verdict="admin")
    operator.admit(file, EVIL, public(friend))
    operator.admit(file, ME, public(EVIL), verdict="member")
    assert roles(file)[node_id_of(friend.public_key())] == "member"


def test_an_admin_that_filled_the_list_with_admissions_is_banned_all_the_same(
    file: AdmissionFile,
) -> None:
    operator.admit(file, ME, public(EVIL), verdict="admin")
    keys = [number.to_bytes(32) for number in range(MAX_OF_SIGNER)]
    file.add([said(file, EVIL, 10 + at, "member", key) for at, key in enumerate(keys)])
    done = operator.revoke(file, ME, EVILS, psk=b"2" * 32)
    assert (len(done.kept), done.lost) == (operator.MAX_KEPT, MAX_OF_SIGNER - operator.MAX_KEPT)
    assert roles(file)[EVILS] == "revoked"
