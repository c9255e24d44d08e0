"""The native core's TLS, where it does more than Python's: keys that change under way."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from potluck.testing.worlds import open_world
from potluck.transport import credentials, native_tls
from potluck.transport.native_tls import NativeContext, NativeTlsSocket

if TYPE_CHECKING:
    from potluck import DistributedContext

pytestmark = pytest.mark.skipif(not native_tls.is_available(), reason="needs the native core's TLS")

RECORDS_PER_KEY = 3


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NativeTlsSocket]]:
    """Every native connection that is made meanwhile; each soon changes its keys."""
    made: list[NativeTlsSocket] = []

    class Hasty(NativeContext):
        def wrap(self, sock: socket.socket) -> NativeTlsSocket:
            made.append(super().wrap(sock))
            return made[-1]

    hasty = functools.partial(Hasty, records_per_key=RECORDS_PER_KEY)
    monkeypatch.setattr(credentials, "NativeContext", hasty)
    yield made
    made.clear()


@pytest.mark.parametrize("kind", ["native", "mixed"])
def test_a_link_changes_its_keys_under_way_and_its_peer_whoever_makes_its_tls_follows(
    kind: str, wrapped: list[NativeTlsSocket]
) -> None:
    calls, count = 3, 100_000

    def reduce(ctx: DistributedContext) -> list[float]:
        array = np.arange(count, dtype=np.float32)
        return [float(ctx.all_reduce(array, op="mean")[-1]) for _ in range(calls)]

    with open_world(kind, 2) as world:
        assert world.run(reduce) == [[count - 1.0] * calls] * 2
        keys = [sock.stream.num_keys for sock in wrapped]
    # Both halves of the array cross the link, once each, in records of at most 16 KiB.
    least = calls * count * 4 // (16 * 1024) // RECORDS_PER_KEY
    # Connections that the ranks made and did not use have changed nothing.
    assert sum(each >= least for each in keys) == (2 if kind == "native" else 1), keys
