"""Recovery codes: which of them make the key, that they count once, and that no key on a machine
can do anything against what it says."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.cluster.trust import admissions, operator
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.admissions import Admissions, new_founding, sign
from potluck._core.transport.credentials import node_id_of
from potluck._core.wire.admissions import MAX_NUMBER, Admission, Record, Recovery, SecretChange
from potluck.errors import ConfigurationError, IdentityError, SecurityError

FIRST, ANN, BOB, CARL = (
    Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in range(1, 5)
)
FIRSTS, ANNS, BOBS, CARLS = (node_id_of(each.public_key()) for each in (FIRST, ANN, BOB, CARL))


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def key_of(codes: list[str], changed: Admissions) -> Ed25519PrivateKey:
    founding = changed.founding
    return admissions.recovery_key(
        [admissions.parse_code(each, founding) for each in codes], founding
    )


EMPTY = Admissions(new_founding(FIRST))
RECOVERY, CODES = admissions.make_codes(EMPTY, FIRST, 3)
CHANGED = EMPTY.copy()
CHANGED.set_recovery(RECOVERY)
FOUNDING = CHANGED.founding
ROOT = key_of(CODES[:2], CHANGED)


@dataclass
class Cluster:
    file: AdmissionFile
    root: Ed25519PrivateKey


@pytest.fixture(params=["codes first", "codes later"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Cluster:
    """The cluster of FIRST, which admitted ANN as an admin, and BOB and CARL as members."""
    file, codes = AdmissionFile(tmp_path), list[str]()
    file.found(FIRST)

    def make(known: Admissions) -> Recovery:
        made, texts = admissions.make_codes(known, FIRST, 3)
        codes[:] = texts
        return made

    if request.param == "codes first":
        file.set_recovery(make)
    operator.admit(file, FIRST, public(ANN), name="ann", verdict="admin")
    operator.admit(file, FIRST, public(BOB), name="bob")
    operator.admit(file, ANN, public(CARL), name="carl")
    if request.param == "codes later":
        before = roles(file)
        file.set_recovery(make)
        after = roles(AdmissionFile(tmp_path))
        assert before.pop(FIRSTS) == "founder"
        assert after.pop(FIRSTS) == "admin"
        assert {node for node in after if node not in before} == {
            node_id_of(key_of(codes[:2], loaded(file)).public_key())
        }
        assert before.items() <= after.items(), "what was said before the codes stays in force"
    return Cluster(file, key_of(codes[1:], loaded(file)))


def loaded(file: AdmissionFile) -> Admissions:
    known = file.load()
    assert known is not None
    return known


def roles(file: AdmissionFile) -> dict[str, str]:
    return {node: each.role for node, each in file.roster.entries.items()}


@pytest.mark.parametrize(("count", "needed"), [(1, 1), (2, 2), (3, 2), (5, 3), (9, 5)])
def test_a_strict_majority_of_the_codes_makes_the_key_and_fewer_do_not(
    count: int, needed: int
) -> None:
    changed = Admissions(new_founding(FIRST))
    made, texts = admissions.make_codes(changed, FIRST, count)
    changed.set_recovery(made)
    assert changed.founding.codes_needed == needed
    assert changed.roster.entries[FIRSTS].role == "admin"
    codes = [admissions.parse_code(each, changed.founding) for each in texts]
    for chosen in itertools.combinations(codes, needed):
        assert public(admissions.recovery_key(chosen, changed.founding)) == changed.founding.root
    with pytest.raises(ConfigurationError, match=f"{needed} different recovery codes"):
        admissions.recovery_key([codes[0]] * (needed - 1), changed.founding)


def test_codes_are_made_once_and_by_the_founder(cluster: Cluster) -> None:
    known = loaded(cluster.file)
    with pytest.raises(ConfigurationError, match="has recovery codes already"):
        admissions.make_codes(known, FIRST, 3)
    with pytest.raises(ConfigurationError, match=f"run the command on node {FIRSTS[:12]}"):
        admissions.make_codes(EMPTY, ANN, 3)
    with pytest.raises(ConfigurationError, match="make 1 to 9"):
        admissions.make_codes(EMPTY, FIRST, 10)


@pytest.mark.parametrize("number", [1, 2, 1000, MAX_NUMBER])
def test_a_second_word_of_the_founder_about_codes_is_refused_whatever_its_number(
    cluster: Cluster, number: int
) -> None:
    """That of a thief, which dates it back."""
    founding = loaded(cluster.file).founding
    rival = Recovery(public(CARL), 1, number)
    unsigned = msgspec.structs.replace(founding, recovery=rival).recovery_bytes
    rival = msgspec.structs.replace(rival, signature=FIRST.sign(unsigned))
    before = cluster.file.path.read_bytes()
    with pytest.raises(SecurityError, match="other recovery codes for this cluster"):
        cluster.file.set_recovery(lambda known: rival)
    assert cluster.file.path.read_bytes() == before
    cluster.file.set_recovery(lambda known: founding.recovery)  # type: ignore[arg-type, return-value]
    assert cluster.file.path.read_bytes() == before


def test_codes_that_the_founder_did_not_sign_and_those_of_another_cluster_are_refused(
    tmp_path: Path,
) -> None:
    other = new_founding(FIRST)
    forged = msgspec.structs.replace(RECOVERY, signature=ANN.sign(FOUNDING.recovery_bytes))
    for founding in (
        msgspec.structs.replace(FOUNDING, recovery=forged),
        msgspec.structs.replace(other, recovery=RECOVERY),
        msgspec.structs.replace(
            FOUNDING, recovery=msgspec.structs.replace(RECOVERY, codes_needed=1)
        ),
    ):
        with pytest.raises(SecurityError, match="signature is not the founder's"):
            AdmissionFile(tmp_path).take_over(founding, [])
        changed = Admissions(msgspec.structs.replace(founding, recovery=None))
        with pytest.raises(SecurityError, match="signature is not the founder's"):
            changed.set_recovery(founding.recovery)  # type: ignore[arg-type]
        assert changed.founding.recovery is None


@given(st.integers(0, 63), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_a_mistyped_code_is_found(place: int, letter: str) -> None:
    letters = list(CODES[0].replace("-", ""))
    other = letters[place] != letter
    letters[place] = letter
    if other:
        with pytest.raises(ConfigurationError, match="no recovery code of this cluster"):
            admissions.parse_code("".join(letters), FOUNDING)
    else:
        assert admissions.parse_code(" ".join(letters).upper(), FOUNDING).at == 1


@pytest.mark.parametrize("text", ["", "abcd", "\u00e4" * 64, "a" * 64, "a" * 10_000, "1" * 64])
def test_what_is_no_code_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no recovery code of this cluster"):
        admissions.parse_code(text, FOUNDING)


def test_a_code_of_another_cluster_is_refused() -> None:
    _, codes = admissions.make_codes(EMPTY, FIRST, 3)
    with pytest.raises(ConfigurationError, match="no recovery code of this cluster"):
        admissions.parse_code(codes[0], FOUNDING)


def test_the_first_machine_is_banned_by_codes_alone(cluster: Cluster) -> None:
    file, root = cluster.file, cluster.root
    with pytest.raises(ConfigurationError, match=f"potluck ban {FIRSTS[:12]} --codes"):
        operator.revoke(file, ANN, FIRSTS, psk=None)
    done = operator.revoke(file, root, FIRSTS, psk=b"n" * 32, heir=(public(BOB), "bob"))
    now = roles(file)
    assert (now[FIRSTS], now[ANNS], now[BOBS], now[CARLS]) == (
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


def test_a_thief_that_banned_everyone_first_is_banned_all_the_same(cluster: Cluster) -> None:
    file, root = cluster.file, cluster.root
    for node in (ANNS, BOBS, CARLS):
        operator.revoke(file, FIRST, node, psk=None)
    operator.revoke(file, root, FIRSTS, psk=None, heir=(public(BOB), "bob"))
    assert file.roster.entries[BOBS].role == "admin"
    assert file.roster.entries[FIRSTS].role == "revoked"
    assert file.roster.entries[ANNS].role == "revoked", "it can be named to take its ban back"
    operator.admit(file, BOB, public(ANN))
    assert file.roster.entries[ANNS].role == "member"


def test_a_thief_that_fills_the_list_with_second_keys_is_banned_all_the_same(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, root = cluster.file, cluster.root
    monkeypatch.setattr(admissions.wire, "MAX_RECORDS", 11)
    monkeypatch.setattr(operator, "MAX_KEPT", 8)
    second = Ed25519PrivateKey.from_private_bytes(b"2" * 32)
    operator.admit(file, FIRST, public(second), verdict="admin")
    for seed in range(7):
        operator.admit(file, second, bytes([seed]) * 32)
    with pytest.raises(IdentityError, match="full"):
        operator.admit(file, FIRST, b"m" * 32)
    operator.revoke(file, root, FIRSTS, psk=None, heir=(public(BOB), "bob"))
    roster = file.roster
    assert roster.entries[FIRSTS].role == "revoked"
    assert [node for node in roster.entries if roster.is_admin(node)] == [
        node_id_of(root.public_key()),
        BOBS,
    ]


def test_the_founder_bans_another_by_codes_and_keeps_what_it_has_said(cluster: Cluster) -> None:
    """Also twice: a newer word about an admin voids what that one said before."""
    dora = Ed25519PrivateKey.from_private_bytes(b"d" * 32)
    operator.admit(cluster.file, FIRST, public(dora), name="dora")
    for banned in (ANNS, CARLS):
        operator.revoke(cluster.file, cluster.root, banned, psk=None, heir=(public(FIRST), "first"))
    now = roles(cluster.file)
    assert (now[FIRSTS], now[ANNS], now[CARLS]) == ("admin", "revoked", "revoked")
    assert now[BOBS] == now[node_id_of(dora.public_key())] == "member"


def test_an_admin_that_becomes_one_by_codes_loses_no_machine_that_it_admitted(
    cluster: Cluster,
) -> None:
    operator.revoke(cluster.file, cluster.root, FIRSTS, psk=None, heir=(public(ANN), "ann"))
    now = roles(cluster.file)
    assert (now[FIRSTS], now[ANNS], now[BOBS], now[CARLS]) == (
        "revoked",
        "admin",
        "member",
        "member",
    )


def test_a_machine_does_not_ban_itself_by_codes(cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="can't ban itself"):
        operator.revoke(cluster.file, cluster.root, BOBS, psk=None, heir=(public(BOB), "bob"))


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


@given(FORGED, st.integers(0, 20), st.randoms(use_true_random=False))
def test_nothing_that_the_thief_signs_counts_after_the_codes_in_whatever_order_it_comes(
    forged: list[Record], heard: int, random: object
) -> None:
    """Also before it is heard that there are codes: after ``heard`` of the records."""

    def word(number: int, verdict: str, about: Ed25519PrivateKey) -> Record:
        return of_thief(number, verdict, about, ROOT)

    codes = [word(20, "revoked", FIRST), word(21, "admin", BOB)]
    shuffled = codes + forged
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one_by_one = Admissions(EMPTY.founding)
    for at, record in enumerate(shuffled):
        if at == heard:
            one_by_one.set_recovery(RECOVERY)
        one_by_one.add([record])
    one_by_one.set_recovery(RECOVERY)
    assert one_by_one.roster == Admissions(FOUNDING, codes).roster
    together = Admissions(FOUNDING, shuffled)
    assert one_by_one.digest == together.digest != Admissions(EMPTY.founding, shuffled).digest
    assert Admissions(FOUNDING, together.records).roster == together.roster
