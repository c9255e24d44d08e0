"""The list of admitted keys: the same result in whatever order records come, and who may say what
about whom."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.cluster.trust import admissions as rules
from potluck._core.cluster.trust.admissions import MAX_ADMINS, MAX_AHEAD, Admissions, now_of, sign
from potluck._core.transport.credentials import node_id_of_bytes
from potluck._core.wire.admissions import (
    MAX_NUMBER,
    Admission,
    Founding,
    Record,
    SecretChange,
    Verdict,
)
from potluck.errors import IdentityError, SecurityError

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in range(1, 8)]
FOUNDER, ANN, BOB, CARL, THIEF, DORA, EVE = KEYS
FOUNDING = Founding(FOUNDER.public_key().public_bytes_raw(), bytes(16))


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def says(
    signer: Ed25519PrivateKey,
    number: int,
    verdict: Verdict,
    about: Ed25519PrivateKey,
    *,
    expires: int = 0,
    at: int = 0,
) -> Record:
    record = Admission(
        cluster=FOUNDING.cluster,
        number=number,
        signer=public(signer),
        at=at,
        key=public(about),
        verdict=verdict,
        expires=expires,
    )
    return sign(record, signer)


def changes(signer: Ed25519PrivateKey, number: int, namespace: str) -> Record:
    return sign(
        SecretChange(
            cluster=FOUNDING.cluster,
            number=number,
            signer=public(signer),
            at=0,
            namespace=namespace,
        ),
        signer,
    )


def role(of: Ed25519PrivateKey, *records: Record) -> str:
    entry = Admissions(FOUNDING, records).roster.entries.get(node_id_of_bytes(public(of)))
    return "" if entry is None else entry.role


# Small ones mostly, and jumps: near the limits of each place, and the end.
numbers = st.integers(1, 9) | st.builds(
    lambda places, more: places * MAX_AHEAD + more,
    st.sampled_from([MAX_ADMINS - 3, MAX_ADMINS - 2, MAX_ADMINS - 1, MAX_ADMINS, 1 << 32]),
    st.integers(0, 9),
)
words = st.builds(
    says,
    st.sampled_from(KEYS[:6]),
    numbers,
    st.sampled_from(["admin", "admin", "member", "revoked"]),
    st.sampled_from(KEYS[:6]),
)
secrets = st.builds(
    changes, st.sampled_from(KEYS[:6]), numbers, st.sampled_from(["a" * 32, "b" * 32])
)


@given(st.lists(words | secrets, max_size=24), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(records: list[Record], random: object) -> None:
    together = Admissions(FOUNDING, records)
    one_by_one = Admissions(FOUNDING)
    shuffled = records + records[: len(records) // 2]  # some come twice
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for record in shuffled:
        one_by_one.add([record])
    assert one_by_one.roster == together.roster
    assert one_by_one.digest == together.digest
    # What a newcomer is sent says the same as everything that was ever said.
    assert Admissions(FOUNDING, together.records).roster == together.roster


@given(st.lists(words, max_size=24))
def test_nobody_revokes_the_founder_and_only_admins_admit(records: list[Record]) -> None:
    roster = Admissions(FOUNDING, records).roster
    founder = node_id_of_bytes(public(FOUNDER))
    assert roster.entries[founder].role == "founder"
    for entry in roster.entries.values():
        if entry.word is not None:
            assert roster.is_admin(node_id_of_bytes(entry.word.signer))


@given(st.lists(words, max_size=24), st.lists(words, max_size=8))
def test_a_revoked_key_has_no_word_whatever_it_signs(
    records: list[Record], more: list[Record]
) -> None:
    """Not with an old number, not with a high one, not by a key that it admitted itself."""
    last = says(FOUNDER, 1 << 52, "revoked", THIEF)
    before = Admissions(FOUNDING, [*records, last])
    own = [each for each in more if each.signer == public(THIEF)]
    own += [says(THIEF, 10**9, "admin", EVE), says(EVE, 10**9 + 1, "revoked", ANN)]
    after = Admissions(FOUNDING, [*records, last, *own])
    assert after.roster == before.roster


def test_who_is_revoked_can_be_admitted_again_and_the_newest_word_holds() -> None:
    first = says(FOUNDER, 1, "member", BOB)
    out = says(FOUNDER, 2, "revoked", BOB)
    again = says(FOUNDER, 3, "member", BOB)
    assert role(BOB, first) == "member"
    assert role(BOB, out, first) == "revoked"
    assert role(BOB, again, first, out) == "member"


def test_of_two_admins_that_revoke_each_other_the_senior_stays() -> None:
    both = [says(FOUNDER, 1, "admin", ANN), says(FOUNDER, 2, "admin", BOB)]
    at_once = [says(ANN, 3, "revoked", BOB), says(BOB, 3, "revoked", ANN)]
    assert role(ANN, *both, *at_once) == "admin"
    assert role(BOB, *both, *at_once) == "revoked"


def test_a_junior_admin_revokes_members_and_not_its_senior() -> None:
    tree = [says(FOUNDER, 1, "admin", ANN), says(ANN, 2, "admin", BOB)]
    tree += [says(FOUNDER, 3, "member", CARL)]
    assert role(ANN, *tree, says(BOB, 4, "revoked", ANN)) == "admin"
    assert role(CARL, *tree, says(BOB, 4, "revoked", CARL)) == "revoked"


def test_a_member_has_no_word() -> None:
    member = says(FOUNDER, 1, "member", THIEF)
    assert role(EVE, member, says(THIEF, 2, "member", EVE)) == ""
    found = Admissions(FOUNDING, [member, changes(THIEF, 2, "f" * 32)])
    assert found.roster.namespace == ""


def test_what_a_stolen_admin_admitted_goes_with_it_unless_said_again() -> None:
    admitted = [
        says(FOUNDER, 1, "admin", THIEF),
        says(THIEF, 2, "member", CARL),
        says(THIEF, 3, "member", DORA),
    ]
    assert role(CARL, *admitted) == "member"
    banned = [*admitted, says(FOUNDER, 4, "revoked", THIEF), says(FOUNDER, 5, "member", CARL)]
    assert role(CARL, *banned) == "member"
    assert role(DORA, *banned) == ""
    assert role(DORA, *banned, says(FOUNDER, 6, "admin", THIEF)) == "", (
        "words from before its new admission came back"
    )


def test_a_change_of_the_secret_is_an_admins() -> None:
    found = Admissions(FOUNDING, [changes(FOUNDER, 1, "a" * 32), changes(FOUNDER, 2, "b" * 32)])
    assert found.roster.namespace == "b" * 32


def test_an_admission_ends_and_a_clock_that_is_behind_does_not_help() -> None:
    records = [says(FOUNDER, 1, "member", BOB, expires=1000), says(FOUNDER, 2, "member", ANN)]
    bob = node_id_of_bytes(public(BOB))
    roster = Admissions(FOUNDING, records).roster
    assert roster.is_admitted(bob, now_of(999.0, roster))
    assert not roster.is_admitted(bob, now_of(1000.0, roster))
    records.append(says(FOUNDER, 3, "member", CARL, at=1001))
    roster = Admissions(FOUNDING, records).roster
    assert not roster.is_admitted(bob, now_of(5.0, roster))


def test_a_date_that_a_banned_admin_signed_ends_no_admission() -> None:
    records = [
        says(FOUNDER, 1, "admin", THIEF),
        says(FOUNDER, 2, "member", BOB, expires=1000),
        says(THIEF, 3, "member", EVE, at=(1 << 40) - 1),
        says(FOUNDER, 4, "revoked", THIEF),
    ]
    roster = Admissions(FOUNDING, records).roster
    assert roster.is_admitted(node_id_of_bytes(public(BOB)), now_of(999.0, roster))


def test_forged_and_foreign_records_are_refused_and_nothing_of_their_batch_is_taken() -> None:
    good = says(FOUNDER, 1, "member", BOB)
    forged = msgspec.structs.replace(good, number=2, verdict="admin")
    foreign = sign(msgspec.structs.replace(good, number=2, cluster=bytes(16)), FOUNDER)
    for bad, text in ((forged, "signature is wrong"), (foreign, "another cluster")):
        found = Admissions(FOUNDING)
        with pytest.raises(SecurityError, match=text):
            found.add([good, bad])
        assert found.records == ()


def test_records_of_strangers_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_WAITING", 4)
    found = Admissions(FOUNDING)
    strangers = [Ed25519PrivateKey.generate() for _ in range(12)]
    for stranger in strangers:
        assert found.add([says(stranger, 1, "admin", EVE)]) == ()
    assert found.records == ()
    assert len(found._waiting) == 4


def test_more_records_than_the_bound_are_refused_before_they_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules.wire, "MAX_RECORDS", 3)
    found = Admissions(FOUNDING, [says(FOUNDER, 1, "member", each) for each in KEYS[1:4]])
    with pytest.raises(IdentityError, match="at most 3 records"):
        found.add([says(FOUNDER, 2, "member", DORA)])
    assert len(found.records) == 3
    found.add([says(FOUNDER, 3, "revoked", ANN)])  # in place of an older word
    assert role(ANN, *found.records) == "revoked"


def test_an_admin_that_fills_the_list_leaves_room_for_its_ban(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "MAX_OF_SIGNER", 2)
    tree = [says(FOUNDER, 1, "admin", ANN), says(ANN, 2, "admin", THIEF)]
    found = Admissions(FOUNDING, [*tree, says(THIEF, 3, "member", DORA)])
    found.add([says(THIEF, 4, "member", EVE)])
    with pytest.raises(IdentityError, match="2 of one admin"):
        found.add([says(THIEF, 5, "member", CARL)])
    found.add([says(FOUNDER, 6, "revoked", THIEF)])
    assert role(EVE, *found.records) == ""


def test_a_record_that_jumps_ahead_has_no_force_until_the_founder_has_come_near() -> None:
    far = MAX_AHEAD * MAX_ADMINS + 10
    tree = [says(FOUNDER, 1, "admin", ANN), says(FOUNDER, 2, "admin", THIEF)]
    jump = says(THIEF, far, "member", EVE)
    for number in (far, MAX_NUMBER):
        assert role(EVE, *tree, says(THIEF, number, "member", EVE)) == ""
    found = Admissions(FOUNDING, [*tree, jump])
    assert found.roster.number == 2
    assert role(EVE, *tree, jump, changes(FOUNDER, 10 + 2 * MAX_AHEAD, "a" * 32)) == "member"


def test_a_senior_has_numbers_above_all_that_its_juniors_may_give() -> None:
    tree = [says(FOUNDER, 1, "admin", ANN), says(ANN, 2, "admin", BOB), says(BOB, 3, "admin", EVE)]
    limits = Admissions(FOUNDING, tree).roster.limits
    assert list(limits) == [public(each) for each in (FOUNDER, ANN, BOB, EVE)]
    numbers = list(limits.values())
    assert all(a - b >= MAX_AHEAD for a, b in itertools.pairwise(numbers))
    for key, limit in limits.items():
        if key != public(FOUNDER):
            signer = next(each for each in KEYS if public(each) == key)
            assert role(DORA, *tree, says(signer, limit, "member", DORA)) == "member"
            assert role(DORA, *tree, says(signer, limit + 1, "member", DORA)) == ""


def test_a_signer_may_have_many_names_on_the_list_and_the_rest_is_sent() -> None:
    found = Admissions(FOUNDING, [says(FOUNDER, n, "member", k) for n, k in enumerate(KEYS[1:], 1)])
    known = [each.fingerprint for each in found.records[:2]]
    assert found.missing(known) == found.records[2:]
    assert found.missing([]) == found.records


def test_an_admin_that_fills_the_list_by_second_keys_leaves_it_with_the_founders_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules.wire, "MAX_RECORDS", 6)
    tree = [says(FOUNDER, 1, "admin", ANN), says(ANN, 2, "admin", THIEF)]
    full = [says(THIEF, 3, "admin", EVE), says(THIEF, 4, "member", BOB)]
    full += [says(EVE, 5, "member", DORA), says(EVE, 6, "member", CARL)]
    found = Admissions(FOUNDING, [*tree, *full])
    with pytest.raises(IdentityError, match="full"):
        found.add([says(ANN, 7, "member", CARL)])
    found.add([says(FOUNDER, 8, "revoked", THIEF)])
    found.add([says(ANN, 9, "member", CARL)])
    assert {each.signer for each in found.records} == {public(FOUNDER), public(ANN)}
    assert role(EVE, *found.records) == ""
