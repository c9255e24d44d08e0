"""Recovery codes: which of them make the founding key, and that no key on a machine can do
anything against what it says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from potluck.cluster.trust import admissions, operator, recovery
from potluck.cluster.trust.admission_file import AdmissionFile
from potluck.cluster.trust.admissions import Admissions, sign
from potluck.errors import ConfigurationError, IdentityError
from potluck.transport.credentials import node_id_of
from potluck.wire.admissions import MAX_NUMBER, Admission, Record, SecretChange

FIRST, ANN, BOB, CARL = (
    Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in range(1, 5)
)
FIRSTS, ANNS, BOBS, CARLS = (node_id_of(each.public_key()) for each in (FIRST, ANN, BOB, CARL))


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


FOUNDING, FIRST_WORD, CODES = recovery.found_with_codes(public(FIRST), "first", 3)
ROOT = recovery.founding_key([recovery.parse_code(each, FOUNDING) for each in CODES[:2]], FOUNDING)


@pytest.fixture
def file(tmp_path: Path) -> AdmissionFile:
    """The cluster of FIRST, which admitted ANN as an admin, and BOB and CARL as members."""
    made = AdmissionFile(tmp_path)
    made.take_over(FOUNDING, [FIRST_WORD])
    operator.admit(made, FIRST, public(ANN), name="ann", verdict="admin")
    operator.admit(made, FIRST, public(BOB), name="bob")
    operator.admit(made, FIRST, public(CARL), name="carl")
    return made


@pytest.mark.parametrize(("count", "needed"), [(1, 1), (2, 2), (3, 2), (5, 3), (9, 5)])
def test_a_strict_majority_of_the_codes_makes_the_key_and_fewer_do_not(
    count: int, needed: int
) -> None:
    founding, record, texts = recovery.found_with_codes(public(FIRST), "first", count)
    assert founding.codes_needed == needed
    assert Admissions(founding, [record]).roster.entries[FIRSTS].role == "admin"
    codes = [recovery.parse_code(each, founding) for each in texts]
    for chosen in itertools.combinations(codes, needed):
        assert public(recovery.founding_key(chosen, founding)) == founding.key
    with pytest.raises(ConfigurationError, match=f"{needed} different recovery codes"):
        recovery.founding_key([codes[0]] * (needed - 1), founding)


def test_fewer_codes_than_needed_fit_every_key() -> None:
    """Any one code of three, and any guess of the seed's byte, lie on one line with a third."""
    code = recovery.parse_code(CODES[0], FOUNDING)
    seeds = {recovery._join({1: code.share, 2: bytes([guess]) * 32})[0] for guess in range(256)}
    assert len(seeds) == 256


@given(st.integers(0, 63), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_a_mistyped_code_is_found(place: int, letter: str) -> None:
    letters = list(CODES[0].replace("-", ""))
    other = letters[place] != letter
    letters[place] = letter
    if other:
        with pytest.raises(ConfigurationError, match="no recovery code of this cluster"):
            recovery.parse_code("".join(letters), FOUNDING)
    else:
        assert recovery.parse_code(" ".join(letters).upper(), FOUNDING).at == 1


@pytest.mark.parametrize("text", ["", "abcd", "\u00e4" * 64, "a" * 64, "a" * 10_000, "1" * 64])
def test_what_is_no_code_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no recovery code of this cluster"):
        recovery.parse_code(text, FOUNDING)


def test_a_code_of_another_cluster_is_refused() -> None:
    _, _, codes = recovery.found_with_codes(public(FIRST), "first", 3)
    with pytest.raises(ConfigurationError, match="no recovery code of this cluster"):
        recovery.parse_code(codes[0], FOUNDING)


def test_the_first_machine_is_banned_by_codes_alone(file: AdmissionFile) -> None:
    with pytest.raises(ConfigurationError, match=f"potluck ban {FIRSTS[:12]} --codes"):
        operator.revoke(file, ANN, FIRSTS, psk=None)
    done = operator.revoke(file, ROOT, FIRSTS, psk=b"n" * 32, heir=(public(BOB), "bob"))
    roles = {node: each.role for node, each in file.roster.entries.items()}
    assert (roles[FIRSTS], roles[ANNS], roles[BOBS], roles[CARLS]) == (
        "revoked",
        "member",
        "admin",
        "member",
    )
    assert set(done.kept) == {ANNS, CARLS}
    operator.revoke(file, BOB, CARLS, psk=None)  # the new admin may ban
    assert file.roster.entries[CARLS].role == "revoked"
    with pytest.raises(ConfigurationError, match="no admin"):
        operator.admit(file, FIRST, public(CARL))


def test_a_thief_that_banned_everyone_first_is_banned_all_the_same(file: AdmissionFile) -> None:
    for node in (ANNS, BOBS, CARLS):
        operator.revoke(file, FIRST, node, psk=None)
    operator.revoke(file, ROOT, FIRSTS, psk=None, heir=(public(BOB), "bob"))
    assert file.roster.entries[BOBS].role == "admin"
    assert file.roster.entries[FIRSTS].role == "revoked"
    assert file.roster.entries[ANNS].role == "revoked", "it can be named to take its ban back"
    operator.admit(file, BOB, public(ANN))
    assert file.roster.entries[ANNS].role == "member"


def test_a_thief_that_fills_the_list_with_second_keys_is_banned_all_the_same(
    file: AdmissionFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admissions, "MAX_RECORDS", 12)
    second = Ed25519PrivateKey.from_private_bytes(b"2" * 32)
    operator.admit(file, FIRST, public(second), verdict="admin")
    for seed in range(7):
        operator.admit(file, second, bytes([seed]) * 32)
    with pytest.raises(IdentityError, match="full"):
        operator.admit(file, FIRST, b"m" * 32)
    operator.revoke(file, ROOT, FIRSTS, psk=None, heir=(public(BOB), "bob"))
    roster = file.roster
    assert roster.entries[FIRSTS].role == "revoked"
    assert [node for node in roster.entries if roster.is_admin(node)] == [
        node_id_of(ROOT.public_key()),
        BOBS,
    ]


def test_a_machine_does_not_ban_itself_by_codes(file: AdmissionFile) -> None:
    with pytest.raises(ConfigurationError, match="can't ban itself"):
        operator.revoke(file, ROOT, BOBS, psk=None, heir=(public(BOB), "bob"))


def of_thief(
    number: int, verdict: str, about: Ed25519PrivateKey, signer: Ed25519PrivateKey
) -> Record:
    record = Admission(
        cluster=FOUNDING.cluster,
        number=number,
        signer=public(signer),
        at=0,
        key=public(about),
        verdict=verdict,  # type: ignore[arg-type]
    )
    return sign(record, signer)


def secret_of_thief(number: int) -> Record:
    record = SecretChange(
        cluster=FOUNDING.cluster,
        number=number,
        signer=public(FIRST),
        at=0,
        namespace="e" * 32,
    )
    return sign(record, FIRST)


FORGED = st.lists(
    st.builds(
        of_thief,
        st.integers(1, 12) | st.integers(MAX_NUMBER - 9, MAX_NUMBER),
        st.sampled_from(["admin", "member", "revoked"]),
        st.sampled_from([FIRST, ANN, BOB, CARL]),
        st.sampled_from([FIRST, ANN, CARL]),  # two admins that the thief won over or made
    )
    | st.builds(secret_of_thief, st.integers(1, 12) | st.just(MAX_NUMBER)),
    max_size=12,
)


@given(FORGED, st.randoms(use_true_random=False))
def test_nothing_that_the_thief_signs_counts_after_the_codes_in_whatever_order_it_comes(
    forged: list[Record], random: object
) -> None:
    def word(number: int, verdict: str, about: Ed25519PrivateKey) -> Record:
        return of_thief(number, verdict, about, ROOT)

    codes = [FIRST_WORD, word(20, "revoked", FIRST), word(21, "admin", BOB)]
    shuffled = codes + forged
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one_by_one = Admissions(FOUNDING)
    for record in shuffled:
        one_by_one.add([record])
    assert one_by_one.roster == Admissions(FOUNDING, codes).roster
    together = Admissions(FOUNDING, shuffled)
    assert one_by_one.digest == together.digest
    assert Admissions(FOUNDING, together.records).roster == together.roster
