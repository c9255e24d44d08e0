"""What a terminal obeys never reaches one from a name, a reason or a program's output."""

from __future__ import annotations

import json
import random
import re
import unicodedata

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.printable import (
    PRINTABLE,
    coloured,
    json_text,
    lines_of,
    name_of,
    paragraph,
    plain,
)
from potluck._core.settings import load_settings
from potluck._core.wire import peers
from potluck._core.wire.format import Versions
from potluck._core.wire.pairing import Newcomer
from potluck.errors import ConfigurationError, LinkError, ProtocolError

ATTACKS = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "clear": "\x1b[2J\x1b[H",
    "up": "\x1b[5A",
    "title": "\x1b]0;root@bank\x1b\\",
    "report": "\x1b[6n",
    "one-byte CSI": "\x9b2J",
    "carriage return": "good\rpotluck: all is well",
    "new line": "good\npotluck: all is well",
    "next line": "good\x85potluck: all is well",
    "separator": "good\u2028potluck: all is well",
    "backspace": "no\x08\x08yes",
    "bidi": "\u202etxt.exe",
    "isolate": "\u2066a\u2069",
    "private mode": "\x1b[?1049h",
    "SGR with a wrong end": "\x1b[31",
    "SGR with an intermediate byte": "\x1b[31 m",
}
"""What terminals obey, or what reads as another text."""

CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_attack_is_shown_and_not_obeyed(text: str) -> None:
    assert not CONTROL.search(plain(text))
    assert not CONTROL.search(coloured(text))
    assert not CONTROL.search(name_of(text))
    assert plain(text) != text
    assert str(LinkError(text)) == lines_of(text)
    assert not re.search(PRINTABLE, text)


def test_escapes_can_be_read() -> None:
    assert (
        plain("a\x1b[2J\r\n\x9b\u202e\tä é 日本 👍🏽")
        == r"a\x1b[2J\r\n\x9b\u202e" + "\tä é 日本 👍🏽"
    )


def test_later_lines_are_indented_so_that_none_looks_like_potlucks_own() -> None:
    assert paragraph("one\npotluck: two\n\nthree") == "one\n    potluck: two\n\n    three"
    assert str(LinkError("one\ntwo\x1b")) == "one\ntwo\\x1b"


def test_colours_of_a_program_stay_and_end_with_its_line() -> None:
    assert coloured("\x1b[1;31mred\x1b[0m") == "\x1b[1;31mred\x1b[0m"
    assert coloured("\x1b[38;5;196mred") == "\x1b[38;5;196mred\x1b[0m"
    assert coloured("\x1b[38:2::1:2:3mred\x1b[2J") == "\x1b[38:2::1:2:3mred\\x1b[2J\x1b[0m"
    assert coloured("plain") == "plain"


@given(st.text(alphabet=st.sampled_from("\x1b[]0;1mJ\r\n\x07\x9b\u202e a")))
def test_nothing_but_colours_gets_through(text: str) -> None:
    assert not CONTROL.search(re.sub(r"\x1b\[[0-9;:]*m", "", coloured(text)))


@given(st.text())
def test_json_is_safe_and_means_the_same(text: str) -> None:
    text = text.encode(errors="replace").decode()
    shown = json_text(msgspec.json.format(msgspec.json.encode({"a": [text]})).decode())
    assert json.loads(shown) == {"a": [text]}
    assert not CONTROL.search(shown.replace("\n", ""))


# Names.

VERSIONS = Versions("3.11", "0.1", "", "2", "x86_64")


def read_introduction(name: str) -> None:
    introduction = peers.Introduction(1, name, bytes(32), 52415, VERSIONS)
    peers.MESSAGE.decode(peers.MESSAGE.encode(introduction)[4:])


def read(name: str) -> None:
    """Read an agent's introduction and a joiner's, as off the wire."""
    read_introduction(name)
    msgspec.msgpack.decode(msgspec.msgpack.encode(Newcomer(bytes(32), name)), type=Newcomer)


@pytest.mark.parametrize("name", ["", "ada", "Ada's laptop (2)", "köln", "実験室", "x" * 64])
def test_a_name_that_people_give_is_read(name: str) -> None:
    read(name)
    assert name_of(name) == name


@pytest.mark.parametrize(
    "name", [*ATTACKS.values(), "x" * 65, "a\tb", "ad\u200ba", "a\ufeff", "\U000e0041", "a\xad"]
)
def test_any_other_name_is_refused_when_it_is_read(name: str) -> None:
    with pytest.raises(ProtocolError):
        read_introduction(name)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Newcomer(bytes(32), name)), type=Newcomer)
    read(name_of(name))


def test_controls_and_format_characters_of_unicode_are_none_of_a_name(seed: int) -> None:
    codes = [*range(0x3000), *random.Random(seed).sample(range(0x3000, 0x110000), 5000)]
    for code in codes:
        character = chr(code)
        if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp"):
            assert not re.search(PRINTABLE, character), f"U+{code:04X}"


def test_the_name_of_this_machine_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "evil\x1b[2J" + "x" * 100)
    assert load_settings().machine_name == "evil?[2J" + "x" * 56
    monkeypatch.setenv("POTLUCK_NAME", "a\x1b[2J")
    with pytest.raises(ConfigurationError, match=r"POTLUCK_NAME=.*at most 64 printable"):
        load_settings()
