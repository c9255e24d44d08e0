"""What holds for every format of messages: bounds before anything is read, one kind of error."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.wire.facts import MEASURING, Load
from potluck._core.wire.format import PREFIX_BYTES, MessageFormat
from potluck._core.wire.gathering import ROSTER
from potluck._core.wire.greeting import GREETING, Refusal
from potluck._core.wire.local import REPLY, REQUEST, JobNote, JobsRequest, NodesRequest
from potluck._core.wire.peers import MESSAGE, Failure, Response
from potluck._core.wire.worker_link import FROM_AGENT, TO_AGENT, Stop, WorkerNote
from potluck.errors import ProtocolError

FORMATS = [TO_AGENT, FROM_AGENT, MESSAGE, REQUEST, REPLY, MEASURING, GREETING, ROSTER]
each_format = pytest.mark.parametrize("messages", FORMATS, ids=lambda each: each.name)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TO_AGENT, WorkerNote("0", "hello")),
        (FROM_AGENT, Stop("reason")),
        (MESSAGE, Response(1, Failure("gone"))),
        (REQUEST, JobsRequest()),
        (REPLY, JobNote("job", "text")),
        (MEASURING, Load(b"bytes", last=True)),
        (GREETING, Refusal("version", "install the same potluck on both")),
    ],
    ids=lambda each: each.name if isinstance(each, MessageFormat) else "",
)
def test_a_message_arrives_as_it_was_sent(messages: MessageFormat[Any], message: object) -> None:
    data = messages.encode(message)
    assert messages.length(data[:PREFIX_BYTES]) == len(data) - PREFIX_BYTES
    assert messages.decode(data[PREFIX_BYTES:]) == message


@each_format
def test_a_length_out_of_bounds_is_refused_before_anything_is_read(
    messages: MessageFormat[Any],
) -> None:
    for length in (0, messages.limit + 1, 1 << 31, 0xFFFFFFFF):
        text = f"{messages.name} announces {length} bytes; 1 to {messages.limit} are allowed"
        with pytest.raises(ProtocolError, match=re.escape(text)):
            messages.length(length.to_bytes(PREFIX_BYTES, "little"))
    for length in (1, messages.limit):
        assert messages.length(length.to_bytes(PREFIX_BYTES, "little")) == length


def test_what_is_too_long_to_send_is_refused_here_by_its_name() -> None:
    text = r"a message to an agent \(WorkerNote\) of 1048\d\d\d bytes; at most 1048576 are allowed"
    with pytest.raises(ProtocolError, match=text):
        TO_AGENT.encode(WorkerNote("0", "x" * TO_AGENT.limit))


@each_format
@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"GET / HTTP/1.1", b"\x81\xa4type\xa5Virus", b"\x91" * 16_000, b"\xa1\xff"],
    ids=["nothing", "never", "http", "unknown", "deep", "no text"],
)
def test_foreign_bytes_are_refused_by_name(messages: MessageFormat[Any], body: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"not {re.escape(messages.name)}: "):
        messages.decode(body)


def test_a_message_of_another_format_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not an answer of this machine's agent"):
        REPLY.decode(REQUEST.encode(NodesRequest())[PREFIX_BYTES:])


@given(st.sampled_from(FORMATS), st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(messages: MessageFormat[Any], body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        messages.decode(body)
