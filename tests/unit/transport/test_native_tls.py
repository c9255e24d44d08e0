"""The native core's own TLS records: keys that change under way, bytes that were changed."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck._core.settings import Settings
from potluck._core.transport import credentials, native_tls
from potluck._core.transport.native_tls import NativeContext, NativeTlsSocket
from potluck._core.types import Group
from potluck.errors import PeerLost
from potluck.testing.world import WorldError
from support.links import psk
from support.proxy import RecordingProxy
from support.worlds import World, open_world, tcp_backends

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


class Flip:
    """Changes one bit that goes to a server, once, far behind the greeting."""

    def __init__(self) -> None:
        self.is_done = False

    def __call__(self, to_server: bool, offset: int, data: bytes) -> bytes:
        at = 50_000 - offset
        if not to_server or self.is_done or not 0 <= at < len(data):
            return data
        self.is_done = True
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_flipped_bit_of_a_record_ends_the_group_and_is_never_part_of_a_sum() -> None:
    settings = Settings(psk=psk().hex(), use_shared_memory=False, peer_timeout_s=20)
    flips = Flip(), Flip()
    with contextlib.ExitStack() as stack:
        backends = tcp_backends(2, 2, settings, kind="native")
        for rank, backend in enumerate(backends):
            stack.callback(backend.close)
            other = backends[1 - rank]
            proxy = stack.enter_context(
                RecordingProxy("127.0.0.1", other.base.port, alter=flips[rank])
            )
            assert backend.group is not None
            members = list(backend.group.members)
            members[1 - rank] = replace(members[1 - rank], port=proxy.port)
            backend.group = Group(1, rank, tuple(members))
        world = World([DistributedContext(each, timeout_s=20) for each in backends], 60.0)
        stack.callback(world.close)
        with pytest.raises(WorldError) as caught:
            # A rank that has all it wanted may learn only in the barrier that the other has not.
            world.run(lambda ctx: (ctx.all_reduce(np.ones(100_000, np.float32)), ctx.barrier()))
    assert [flip.is_done for flip in flips].count(True) == 1
    errors = [caught.value.errors[rank] for rank in range(2)]
    assert all(isinstance(error, PeerLost) for error in errors), errors
    assert any("DECRYPTION_FAILED_OR_BAD_RECORD_MAC" in str(error) for error in errors), errors
