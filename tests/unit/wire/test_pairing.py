"""Prefixes of pairing messages: what is refused before a body is read."""

from __future__ import annotations

import pytest

from potluck._core.wire import pairing as wire
from potluck.errors import ProtocolError


def test_another_version_of_the_protocol_is_refused_with_both_versions() -> None:
    prefix = bytearray(wire.encode(wire.BUSY))
    for version in set(range(256)) - {wire.VERSION}:
        prefix[4] = version
        text = f"has version {version} of the pairing protocol, this machine {wire.VERSION}:"
        with pytest.raises(ProtocolError, match=text):
            wire.decode_prefix(bytes(prefix), wire.BUSY)
