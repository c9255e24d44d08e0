"""Greetings: what goes out comes in, and nothing else does."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.greeting import (
    GREETING,
    MAX_GREETING,
    Greeting,
    Hello,
    LinkMemoryOffer,
    Refusal,
    Welcome,
)
from potluck.errors import ProtocolError

OFFER = LinkMemoryOffer("boot", 1234, 5, bytes(range(32)), 4, 1 << 20)


@pytest.mark.parametrize(
    "message",
    [
        Hello("data"),
        Hello("data", "job", 7, 2, 0, "w2", 1, OFFER),
        Welcome(),
        Welcome(rank=3, memory=True),
        Refusal("version", "install the same potluck on both"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_greeting_arrives_as_it_was_sent(message: Greeting) -> None:
    data = GREETING.encode(message)
    assert GREETING.length(data[:PREFIX_BYTES]) == len(data) - PREFIX_BYTES
    assert GREETING.decode(data[PREFIX_BYTES:]) == message


def test_the_longest_greeting_is_within_bounds_and_one_byte_more_is_not() -> None:
    spare = MAX_GREETING - (len(GREETING.encode(Refusal("x", "y" * 1000))) - PREFIX_BYTES) + 1000
    data = GREETING.encode(Refusal("x", "y" * spare))
    assert GREETING.length(data[:PREFIX_BYTES]) == MAX_GREETING
    with pytest.raises(ProtocolError, match="at most"):
        GREETING.encode(Refusal("x", "y" * (spare + 1)))


@pytest.mark.parametrize("field", ["target", "via"])
@pytest.mark.parametrize("name", ["x" * 257, "\x1b[2J"], ids=["long", "of a terminal"])
def test_a_caller_names_no_node_that_an_agent_could_not_tell_others(field: str, name: str) -> None:
    """An agent passes ``via`` on in its row of facts, in which others refuse such a name."""
    said = {"type": "Hello", "kind": "node", field: name}
    with pytest.raises(ProtocolError, match=field):
        GREETING.decode(msgspec.msgpack.encode(said))


def test_a_field_of_a_later_version_is_passed_over() -> None:
    """So that the two get as far as telling each other their versions."""
    later = {"type": "Hello", "kind": "data", "version": 9, "mood": "good"}
    hello = GREETING.decode(msgspec.msgpack.encode(later))
    assert isinstance(hello, Hello)
    assert hello.version == 9


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Hello"}),
        msgspec.msgpack.encode({"type": "Farewell"}),
        msgspec.msgpack.encode({"type": "Hello", "kind": 1}),
        msgspec.msgpack.encode([1, 2, 3]),
        GREETING.encode(Welcome())[PREFIX_BYTES:] + b"x",
    ],
)
def test_what_is_no_greeting_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a potluck greeting"):
        GREETING.decode(body)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_greeting_is_read_or_refused(at: int, value: int) -> None:
    body = bytearray(GREETING.encode(Hello("data", memory=OFFER))[PREFIX_BYTES:])
    body[at % len(body)] = value
    with contextlib.suppress(ProtocolError):
        GREETING.decode(bytes(body))
