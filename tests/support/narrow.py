"""A narrow link: two ranks of one process on two nodes, whose bytes pass at a rate. Over loopback,
through proxies, so that no rights and no network namespaces are needed."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace

from potluck._core.context import DistributedContext
from potluck._core.settings import Settings
from potluck._core.types import Group
from support.proxy import RecordingProxy
from support.worlds import World, tcp_backends


@contextlib.contextmanager
def narrow_pair(bytes_per_s: float, *, timeout_s: float = 30.0) -> Iterator[World]:
    """A world of two ranks over TLS, each on a node of its own; each direction of their link lets
    ``bytes_per_s`` pass."""

    def pace(to_server: bool, offset: int, data: bytes) -> bytes:
        time.sleep(len(data) / bytes_per_s)
        return data

    settings = Settings(
        psk=hashlib.sha256(b"unused").hexdigest(), use_shared_memory=False, peer_timeout_s=timeout_s
    )
    with contextlib.ExitStack() as stack:
        backends = tcp_backends(2, 2, settings, kind="tls")
        members = []
        for rank, backend in enumerate(backends):
            stack.callback(backend.close)
            proxy = stack.enter_context(RecordingProxy("127.0.0.1", backend.base.port, alter=pace))
            members.append(replace(backend.member(str(rank)), port=proxy.port))
        for rank, backend in enumerate(backends):
            backend.group = Group(1, rank, tuple(members))
        world = World([DistributedContext(each, timeout_s=timeout_s) for each in backends], 60.0)
        stack.callback(world.close)
        yield world
