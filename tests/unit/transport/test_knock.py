"""The knock as bytes: who is heard under which secret, and that none of it can be recognised."""

from __future__ import annotations

import itertools

import pytest

from potluck._core.transport.credentials import era_of
from potluck._core.transport.knock import (
    ANSWER_BYTES,
    CALL_BYTES,
    MAX_ERAS,
    PROOF_BYTES,
    Heard,
    Knock,
)
from potluck.errors import ProtocolError, WrongSecret

ERAS = [era_of(bytes([number]) * 32) for number in range(10)]
NONCE = 16


def test_both_sides_prove_that_they_hold_the_secret() -> None:
    mine = Knock(ERAS[:1])
    heard = Heard(mine.call, ERAS[:1])
    proof = mine.proof(heard.answer)
    heard.check(proof)
    assert (len(mine.call), len(heard.answer), len(proof)) == (
        CALL_BYTES,
        ANSWER_BYTES,
        PROOF_BYTES,
    )


@pytest.mark.parametrize("server", range(MAX_ERAS))
@pytest.mark.parametrize("caller", range(MAX_ERAS))
def test_a_machine_that_was_away_is_heard_for_eight_secrets(caller: int, server: int) -> None:
    """Each side knows the secrets up to its own; ``caller`` and ``server`` are how old it is."""
    theirs = ERAS[caller : caller + MAX_ERAS]
    known = ERAS[server : server + MAX_ERAS]
    mine = Knock(theirs)
    heard = Heard(mine.call, known)
    heard.check(mine.proof(heard.answer))


def test_under_a_ninth_secret_nobody_is_heard() -> None:
    with pytest.raises(WrongSecret):
        Heard(Knock(ERAS[8:9]).call, ERAS)
    with pytest.raises(WrongSecret):
        Heard(Knock(ERAS[:9]).call, ERAS[8:9])
    Heard(Knock(ERAS[7:8]).call, ERAS)
    Heard(Knock(ERAS[:8]).call, ERAS[7:8])


def test_another_secret_is_not_heard_and_cannot_answer() -> None:
    mine, other = Knock(ERAS[:1]), Knock(ERAS[1:2])
    with pytest.raises(WrongSecret, match="does not hold this cluster's secret"):
        Heard(other.call, ERAS[:1])
    with pytest.raises(ProtocolError, match="does not hold this cluster's secret"):
        mine.proof(Heard(other.call, ERAS[1:2]).answer)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400", bytes(ANSWER_BYTES)])
def test_what_is_no_answer_is_never_proved_to(answer: bytes) -> None:
    with pytest.raises(ProtocolError, match="another program"):
        Knock(ERAS[:1]).proof(answer)


def test_a_recorded_knock_has_no_proof_for_the_next_answer() -> None:
    mine = Knock(ERAS[:1])
    first, second = Heard(mine.call, ERAS), Heard(mine.call, ERAS)
    assert first.answer != second.answer
    with pytest.raises(WrongSecret, match="recorded"):
        second.check(mine.proof(first.answer))


def test_one_bit_changed_anywhere_ends_the_knock() -> None:
    mine = Knock(ERAS[:1])
    for bit in range(8 * ANSWER_BYTES):
        with pytest.raises(ProtocolError):
            mine.proof(flipped(Heard(mine.call, ERAS).answer, bit))
    for bit in range(8 * PROOF_BYTES):
        heard = Heard(mine.call, ERAS)
        with pytest.raises(WrongSecret):
            heard.check(flipped(mine.proof(heard.answer), bit))
    for bit in range(8 * NONCE):
        with pytest.raises(WrongSecret):
            Heard(flipped(mine.call, bit), ERAS)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_byte_of_many_knocks_is_constant_and_no_tag_comes_again() -> None:
    calls, answers, proofs = [], [], []
    for _ in range(200):
        mine = Knock(ERAS[:3])
        heard = Heard(mine.call, ERAS)
        calls.append(mine.call)
        answers.append(heard.answer)
        proofs.append(mine.proof(heard.answer))
    for messages in (calls, answers, proofs):
        for at in range(len(messages[0])):
            # Of 200 random bytes fewer than 64 values never come: chance below 10^-60.
            assert len({message[at] for message in messages}) >= 64
    pieces = [
        message[at : at + 8]
        for message in itertools.chain(calls, answers, proofs)
        for at in range(0, len(message), 8)
    ]
    assert len(set(pieces)) == len(pieces)
