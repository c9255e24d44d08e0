"""What of a tensor a machine between two ranks can read: nothing."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck._core.settings import Settings
from potluck._core.transport.credentials import namespace_of
from potluck._core.types import Group
from support.links import psk
from support.proxy import RecordingProxy
from support.worlds import NATIVE_KINDS, World, tcp_backends

SETTINGS = Settings(
    psk=hashlib.sha256(b"unused").hexdigest(), use_shared_memory=False, peer_timeout_s=20
)
MARKER = b"A-TENSOR-THAT-NOBODY-ELSE-SHOULD"
TENSOR = np.frombuffer(MARKER * 4096, np.uint8)


def exchange(ctx: DistributedContext) -> bool:
    return bool((ctx.all_gather(TENSOR, algorithm="ring") == TENSOR).all())


@pytest.mark.parametrize("kind", ["tls", *NATIVE_KINDS[:1], *NATIVE_KINDS[2:]])
def test_the_wire_shows_no_tensor_and_no_name_of_the_cluster(kind: str) -> None:
    with contextlib.ExitStack() as stack:
        backends = tcp_backends(2, 2, SETTINGS, kind=kind)
        for backend in backends:
            stack.callback(backend.close)
        proxies = [
            stack.enter_context(RecordingProxy("127.0.0.1", backend.base.port))
            for backend in backends
        ]
        for rank, backend in enumerate(backends):  # a rank calls the other through its proxy
            assert backend.group is not None
            members = (
                member if index == rank else replace(member, port=proxies[index].port)
                for index, member in enumerate(backend.group.members)
            )
            backend.group = Group(1, rank, tuple(members))
        world = World([DistributedContext(each, timeout_s=20) for each in backends], 60.0)
        stack.callback(world.close)
        assert world.run(exchange) == [True, True]
    recorded = [record for proxy in proxies for record in proxy.recordings]
    streams = [bytes(each) for one in recorded for each in (one.to_server, one.to_client)]
    assert sum(map(len, streams)) > 2 * TENSOR.nbytes
    for words in (MARKER, namespace_of(psk()).encode()):
        assert not any(words in stream for stream in streams)
