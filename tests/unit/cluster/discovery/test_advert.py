"""What an advert shows, whom it convinces, and what an address list may look like."""

from __future__ import annotations

import random

import msgspec
import pytest

from potluck._core.cluster.discovery.advert import (
    BEACON_BYTES,
    WINDOW_S,
    decode_beacon,
    encode_beacon,
    make_advert,
    new_instance,
)
from potluck._core.cluster.discovery.configured import parse_peers
from potluck._core.cluster.discovery.finder import Presence
from potluck._core.transport.credentials import namespace_of
from potluck.errors import ConfigurationError
from support.links import new_credentials, psk

KEY, OTHER = b"k" * 32, b"o" * 32
NOW = 3_000_000
"""The number of a window, in 2027."""


def clock() -> float:
    return NOW * WINDOW_S + 10.0


ME = Presence(lambda: [KEY], 1234, b"m" * 16, clock)


def test_a_member_is_recognised_and_a_stranger_is_not() -> None:
    friend = make_advert(KEY, 99, b"f" * 16, NOW)
    assert decode_beacon(encode_beacon(friend)) == friend
    assert ME.recognises(friend)
    assert not ME.recognises(make_advert(OTHER, 99, b"f" * 16, NOW))
    assert not ME.recognises(ME.advert()), "a node must not take itself for a peer"


def test_while_the_secret_changes_both_are_recognised() -> None:
    both = Presence(lambda: [OTHER, KEY], 1, b"b" * 16, clock)
    assert both.recognises(ME.advert())
    assert both.advert() == make_advert(OTHER, 1, b"b" * 16, NOW)


FIELDS = ("version", "port", "instance", "window", "tag")


@pytest.mark.parametrize("field", FIELDS)
def test_a_changed_field_is_a_forgery(field: str) -> None:
    advert = make_advert(KEY, 99, b"f" * 16, NOW)
    value = getattr(advert, field)
    changed = value + 1 if isinstance(value, int) else bytes([value[0] ^ 1]) + value[1:]
    forged = type(advert)(**{name: getattr(advert, name) for name in FIELDS} | {field: changed})
    assert not ME.recognises(forged)


@pytest.mark.parametrize(
    ("windows", "is_current"), [(0, True), (1, True), (-1, True), (2, False), (-2, False)]
)
def test_an_advert_is_current_for_two_windows_and_known_for_ever(
    windows: int, is_current: bool
) -> None:
    later = Presence(ME.keys, 7, b"l" * 16, lambda: clock() + windows * WINDOW_S)
    assert later.recognises(ME.advert())
    assert later.hint(ME.advert(), "attic", "beacon").is_current is is_current


@pytest.mark.parametrize("seconds", [0.0, -5.0, 1e12, 1e300])
def test_a_clock_that_is_any_number_of_years_wrong_makes_an_advert(seconds: float) -> None:
    wrong = Presence(ME.keys, 7, b"w" * 16, lambda: seconds)
    assert ME.recognises(decode_beacon(encode_beacon(wrong.advert())) or ME.advert())
    assert not ME.hint(wrong.advert(), "attic", "beacon").is_current
    assert not wrong.hint(ME.advert(), "attic", "beacon").is_current


def test_an_advert_holds_nothing_but_version_port_id_time_and_tag() -> None:
    credentials = new_credentials()
    presence = Presence(lambda: credentials.advert_keys, 52415, new_instance(), clock)
    data = encode_beacon(presence.advert())
    assert len(data) == BEACON_BYTES == 44
    for secret in (psk(), credentials.node_id.encode(), namespace_of(psk()).encode()):
        assert secret[:8] not in data
    again = encode_beacon(Presence(presence.keys, 52415, new_instance(), clock).advert())
    assert data[:8] == again[:8]
    assert data[8:24] != again[8:24]
    assert data[24:28] == again[24:28] == NOW.to_bytes(4, "little")
    assert data[28:] != again[28:], "tags of one cluster must have nothing in common"


def test_junk_is_no_beacon(seed: int) -> None:
    rng = random.Random(seed)
    good = encode_beacon(make_advert(KEY, 99, b"f" * 16, NOW))
    assert decode_beacon(b"") is None
    assert decode_beacon(good + b"x") is None
    assert decode_beacon(b"PLCK" + good[4:]) is None
    assert not any(
        (advert := decode_beacon(b"plck" + rng.randbytes(40))) and ME.recognises(advert)
        for _ in range(1000)
    )


def test_peers_are_written_as_people_write_addresses() -> None:
    assert parse_peers(" attic , 10.0.0.2:7,[fd00::2]:8, fd00::3,[fd00::4],", 52415) == (
        ("attic", 52415),
        ("10.0.0.2", 7),
        ("fd00::2", 8),
        ("fd00::3", 52415),
        ("fd00::4", 52415),
    )
    assert parse_peers("", 1) == ()


@pytest.mark.parametrize("text", ["a:b", "a:0", "a:70000", ":5", "[fd00::1", "[fd00::1]x", "a:"])
def test_an_unreadable_peer_is_quoted(text: str) -> None:
    with pytest.raises(ConfigurationError, match="POTLUCK_PEERS"):
        parse_peers(text, 1)


def test_too_many_peers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at most 256"):
        parse_peers(",".join(["a"] * 257), 1)


def test_no_key_of_adverts_is_printed() -> None:
    credentials = new_credentials()
    shown = repr(credentials) + repr(credentials.eras)
    assert not any(key.hex() in shown or repr(key) in shown for key in credentials.advert_keys)
    assert msgspec.json.encode(shown)
