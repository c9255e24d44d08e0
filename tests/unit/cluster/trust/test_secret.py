"""Where the cluster's secret comes from, and that it goes nowhere else."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from potluck._core.cluster.trust.secret import (
    SECRET_FILE,
    derive_psk,
    load_or_create_secret,
    load_secret,
    parse_psk,
)
from potluck._core.settings import Settings
from potluck.errors import ConfigurationError, IdentityError

HEX = "0123456789abcdef" * 4
WORDS = "subway useless cement misery cause lawsuit"


def test_the_first_to_ask_makes_the_secret_and_all_others_get_it(tmp_path: Path) -> None:
    secret = load_or_create_secret(tmp_path)
    assert len(secret) == 32
    assert load_or_create_secret(tmp_path) == secret
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert load_or_create_secret(tmp_path / "elsewhere") != secret


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_or_create_secret(tmp_path)
    (tmp_path / SECRET_FILE).chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        load_or_create_secret(tmp_path)


@pytest.mark.parametrize("content", ["", HEX[:-1], HEX + "0", "g" * 64, HEX[:32] + " " + HEX[33:]])
def test_a_damaged_secret_is_reported_and_not_shown(tmp_path: Path, content: str) -> None:
    path = tmp_path / SECRET_FILE
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(IdentityError, match=r"is damaged.*64 hexadecimal") as caught:
        load_or_create_secret(tmp_path)
    shown = [str(caught.value), repr(caught.value.__cause__)]
    assert not content or content not in "".join(shown)


def test_a_secret_copied_by_hand_may_end_in_a_line_break(tmp_path: Path) -> None:
    path = tmp_path / SECRET_FILE
    path.touch(0o600)
    path.write_text(f"{HEX.upper()}\r\n")
    assert load_or_create_secret(tmp_path) == bytes.fromhex(HEX)


def test_the_variable_wins_over_the_file_and_no_file_is_made(tmp_path: Path) -> None:
    assert load_secret(Settings(home=tmp_path, psk=HEX)) == bytes.fromhex(HEX)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [HEX[:-2], "x" * 64, "é" * 64, "٣" * 64])
def test_a_variable_that_is_no_secret_is_refused_and_not_shown(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigurationError, match="POTLUCK_PSK should hold 64") as caught:
        load_secret(Settings(home=tmp_path, psk=value))
    assert value not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_passphrase_goes_through_scrypt() -> None:
    """A known answer: another release must not lock the nodes of a cluster out."""
    expected = hashlib.scrypt(
        WORDS.encode(),
        salt=b"potluck passphrase v2 attic",
        n=1 << 17,
        r=8,
        p=1,
        maxmem=1 << 28,
        dklen=32,
    )
    assert derive_psk(WORDS, "attic") == expected
    assert derive_psk(f"  {WORDS}\n", " attic ") == expected


def test_each_cluster_has_a_salt_of_its_own() -> None:
    assert derive_psk(WORDS, "attic") != derive_psk(WORDS, "cellar")


def test_the_same_words_typed_on_another_keyboard_are_the_same_words() -> None:
    composed, separate = f"caf\u00e9 {WORDS}", f"cafe\u0301 {WORDS}"
    assert derive_psk(composed, "attic") == derive_psk(separate, "attic")


@pytest.mark.parametrize(
    "words", ["s3cret", "password1234", "123456789012", "aaaaaaaaaaaa" * 6, "qwertyuiop[]", " "]
)
def test_a_passphrase_that_is_guessed_easily_is_refused_and_six_words_are_offered(
    tmp_path: Path, words: str
) -> None:
    with pytest.raises(ConfigurationError, match="POTLUCK_PASSPHRASE is guessed too") as caught:
        load_secret(Settings(home=tmp_path, passphrase=words, cluster="attic"))
    assert words.strip() == "" or words not in str(caught.value)
    assert len(str(caught.value).rpartition(": ")[2].split()) == 6


def test_the_six_words_that_are_offered_are_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_secret(Settings(home=tmp_path, passphrase="s3cret", cluster="attic"))
    offered = str(caught.value).rpartition(": ")[2]
    assert len(load_secret(Settings(home=tmp_path, passphrase=offered, cluster="attic"))) == 32


def test_a_passphrase_without_the_name_of_a_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="POTLUCK_CLUSTER beside it"):
        load_secret(Settings(home=tmp_path, passphrase=WORDS))


def test_no_secret_is_logged_or_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = Settings(home=tmp_path, psk=HEX, passphrase="correct horse battery")
    load_secret(settings)
    for text in (repr(settings), str(settings), caplog.text):
        assert HEX not in text
        assert "correct horse" not in text


def test_a_secret_is_read_from_its_digits_only() -> None:
    assert parse_psk(f" {HEX}\n") == bytes.fromhex(HEX)
    with pytest.raises(ValueError, match="64"):
        parse_psk(HEX[:-1] + "z")
