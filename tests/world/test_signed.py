"""Signed links: what is on the wire, that no change goes unseen, and who refuses whom."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck._core.settings import Settings
from potluck._core.transport.credentials import namespace_of
from potluck._core.transport.record_tags import TAG_BYTES
from potluck._core.transport.signed import RECORD_BYTES
from potluck._core.types import Group, Member
from potluck._core.wire.frames import FRAME_BYTES, Kind
from potluck._core.wire.greeting import PROTOCOL_VERSION
from potluck.errors import PeerLost
from potluck.testing.world import WorldError
from support.links import psk
from support.proxy import Alter, RecordingProxy
from support.worlds import SIGNED_KINDS, World, tcp_backends

SETTINGS = Settings(
    psk=hashlib.sha256(b"unused").hexdigest(),
    use_shared_memory=False,
    peer_timeout_s=20,
    wire="signed",
)
SEALED = replace(SETTINGS, wire="sealed")
MARKER = b"A-TENSOR-THAT-NOBODY-ELSE-SHOULD"
TENSOR = np.frombuffer(MARKER * 4096, np.uint8)
DATA_HEADER = b"PL" + bytes([PROTOCOL_VERSION, Kind.DATA])


class Flip:
    """Changes one bit of what goes to a server: ``behind`` bytes after a DATA frame has begun.

    Nothing of that frame goes on before the server has sent one of its own: it is in the call.
    """

    def __init__(self, behind: int) -> None:
        self.is_done = False
        self._behind = behind
        self._seen = {True: bytearray(), False: bytearray()}
        self._has_begun = threading.Event()

    def __call__(self, to_server: bool, offset: int, data: bytes) -> bytes:
        seen = self._seen[to_server]
        if offset == 0:
            seen.clear()
        seen += data
        begin = seen.find(DATA_HEADER)
        if begin < 0 or self.is_done:
            return data
        if not to_server:
            self._has_begun.set()
            return data
        assert self._has_begun.wait(20)
        at = begin + self._behind - offset
        if at >= len(data):
            return data
        self.is_done = True
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@contextlib.contextmanager
def through_proxies(
    kind: str, settings: tuple[Settings, Settings], alters: Sequence[Alter | None] = (None, None)
) -> Iterator[tuple[World, list[RecordingProxy]]]:
    """Two ranks; whoever of them calls the other, does so through a proxy."""
    with contextlib.ExitStack() as stack:
        backends = tcp_backends(2, 2, SETTINGS, kind=kind)
        for backend, own in zip(backends, settings, strict=True):
            backend.base.settings = own
            stack.callback(backend.close)
        proxies = [
            stack.enter_context(RecordingProxy("127.0.0.1", backend.base.port, alter=alter))
            for backend, alter in zip(backends, alters, strict=True)
        ]
        for rank, backend in enumerate(backends):
            assert backend.group is not None
            members = [
                member if index == rank else replace(member, port=proxies[index].port)
                for index, member in enumerate(backend.group.members)
            ]
            backend.group = Group(1, rank, tuple[Member, ...](members))
        world = World([DistributedContext(each, timeout_s=20) for each in backends], 60.0)
        stack.callback(world.close)
        yield world, proxies


def exchange(ctx: DistributedContext) -> bool:
    total = ctx.all_gather(TENSOR, algorithm="ring")
    ctx.barrier()  # a rank that has all it wanted may learn only here that another has not
    return bool((total == TENSOR).all())


def errors_of(world: World) -> list[BaseException]:
    with pytest.raises(WorldError) as caught:
        world.run(exchange)
    return [caught.value.errors[rank] for rank in range(2)]


@pytest.mark.parametrize("kind", SIGNED_KINDS)
@pytest.mark.parametrize(("settings", "is_seen"), [(SETTINGS, True), (SEALED, False)])
def test_the_wire_shows_tensors_only_where_it_was_asked_for(
    kind: str, settings: Settings, is_seen: bool
) -> None:
    with through_proxies(kind, (settings, settings)) as (world, proxies):
        assert world.run(exchange) == [True, True]
    recorded = [record for proxy in proxies for record in proxy.recordings]
    streams = [bytes(each) for one in recorded for each in (one.to_server, one.to_client)]
    assert sum(map(len, streams)) > 2 * TENSOR.nbytes
    assert any(MARKER in stream for stream in streams) == is_seen
    assert not any(namespace_of(psk()).encode() in stream for stream in streams), (
        "the greeting is under TLS"
    )


@pytest.mark.parametrize("kind", SIGNED_KINDS)
@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(-3, id="length of a record"),
        pytest.param(20, id="header"),
        pytest.param(FRAME_BYTES + 50_000, id="payload"),
        pytest.param(RECORD_BYTES + TAG_BYTES - 1, id="tag"),
    ],
)
def test_a_flipped_bit_ends_the_operation_with_an_error_that_says_where(
    kind: str, behind: int
) -> None:
    flips = (Flip(behind), Flip(behind))
    with through_proxies(kind, (SETTINGS, SETTINGS), flips) as (world, _):
        errors = errors_of(world)
    assert [flip.is_done for flip in flips].count(True) == 1
    assert all(isinstance(error, PeerLost) for error in errors)
    texts = [str(error) for error in errors]
    for text in texts:
        assert re.search(r"lost rank [01] \(worker [01] at 127.0.0.1:\d+\) in epoch 1", text), text
    # The other rank may have all that it wanted, and learns in the barrier that the link is closed.
    found = [text for text in texts if re.search("a record's tag is wrong|a record of", text)]
    assert len(found) == 1, texts
    assert "during all_gather(uint8, shape (131072,), ring) #0 on rank" in found[0]


@pytest.mark.parametrize("kind", SIGNED_KINDS)
@pytest.mark.parametrize("settings", [(SETTINGS, SEALED), (SEALED, SETTINGS)])
def test_ranks_that_want_different_wires_refuse_each_other(
    kind: str, settings: tuple[Settings, Settings]
) -> None:
    with through_proxies(kind, settings) as (world, proxies):
        texts = [str(error) for error in errors_of(world)]
        recorded = [record for proxy in proxies for record in proxy.recordings]
    assert all("set POTLUCK_WIRE to the same on all ranks" in text for text in texts), texts
    assert not any(MARKER in one.to_server + one.to_client for one in recorded)
