"""Worlds on every kind of link: contexts of one process that talk as those of several would."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.backends.base import StaticBackend
from potluck._core.backends.inprocess import InProcessBackend
from potluck._core.backends.tcp import TcpBase
from potluck._core.context import DistributedContext, init
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.loop.native import is_available
from potluck._core.settings import Settings
from potluck._core.transport.credentials import Credentials
from potluck._core.types import Group, MeasuredPath, Member
from potluck.errors import ConfigurationError, GroupError
from potluck.testing.world import run_all
from support.links import make_credentials, psk

T = TypeVar("T")

NATIVE_KINDS = ("native", "native+shm", "mixed") if is_available() else ()
"""The native loop over loopback, without and with shared memory; every second rank in Python."""

WORLD_KINDS = ("inproc", "tls", "tls+shm", "shm", *NATIVE_KINDS)
"""In process, by the native loop over socket pairs (without the native core over pipes, as "pipes"
always is); the Python loop over TLS on loopback; the same with shared memory for each link's
payloads; all ranks on one node, calls through shared memory (with the native core, else as before);
the native kinds.
"""

MAIN_KINDS = ("inproc", NATIVE_KINDS[0] if NATIVE_KINDS else "tls", "shm")
"""One of each way that bytes take: in process, over TLS by the loop that ships, shared memory."""


class TcpBackend(StaticBackend[Any]):
    """One rank of a world over TCP whose listener has any free port; ``group`` is set later."""

    def __init__(self, settings: Settings, credentials: Credentials) -> None:
        self.base = TcpBase("127.0.0.1", 0, settings, credentials)
        self.switchboard = self.base.switchboard
        self.group: Group | None = None

    def member(self, worker: str) -> Member:
        return Member(
            worker,
            node=self.base.credentials.node_id,
            host="127.0.0.1",
            port=self.base.port,
            engine=self.base.engine,
        )

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        if self.group is None or after_epoch >= self.group.epoch:
            raise ConfigurationError("this world has one group only") from cause
        return self.base.open(self.group)

    def close(self) -> None:
        self.base.close()


class World:
    """Contexts that stay, and a way to run a function on all of them at once."""

    def __init__(self, contexts: Sequence[DistributedContext], timeout_s: float) -> None:
        self.contexts = list(contexts)
        self._timeout_s = timeout_s

    def run(self, function: Callable[[DistributedContext], T]) -> list[T]:
        """``[function(ctx) for each rank]``, at the same time; WorldError if any raised."""
        return run_all([partial(function, ctx) for ctx in self.contexts], self._timeout_s)

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return len(self.contexts)

    def close(self) -> None:
        """Close all contexts at once, as workers that end together do."""
        run_all([ctx.close for ctx in self.contexts], self._timeout_s)


class JoinedWorld(World):
    """This process's rank of a world whose other ranks are other processes, doing the same."""

    def run(self, function: Callable[[DistributedContext], T]) -> list[T]:
        """As ``World.run``; results are lists, numbers or bytes. If one raises, all do."""
        (ctx,) = self.contexts
        try:
            result = function(ctx)
        except BaseException as error:
            ctx.abort(error)
            raise
        mine = np.frombuffer(msgspec.msgpack.encode(result), dtype=np.uint8)
        return [msgspec.msgpack.decode(part.tobytes()) for part in ctx.all_gather_uneven(mine)]

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return self.contexts[0].world_size


@contextlib.contextmanager
def join_world(backend: str, *, timeout_s: float = 30.0) -> Iterator[World]:
    """The world that a launcher started this process for."""
    with init(backend, timeout_s=timeout_s) as ctx:
        ctx.barrier()
        yield JoinedWorld([ctx], timeout_s)
        if ctx.communicator.error is None:
            ctx.barrier()


@contextlib.contextmanager
def open_world(
    kind: str,
    world_size: int,
    *,
    segment_bytes: int = 1 << 19,
    max_early_bytes: int = 64 << 20,
    num_nodes: int = 2,
    nodes: Sequence[int] | None = None,
    rates: Callable[[int, int], float] | None = None,
    timeout_s: float = 30.0,
) -> Iterator[World]:
    """A world of ``world_size`` ranks on links of one of ``WORLD_KINDS``.

    Over TCP the ranks spread over ``num_nodes`` identities, or as ``nodes`` says, the number of
    every rank's node (in process there is one node). ``rates(a, b)`` are the bytes per second that
    were measured from a node to another, as the group is told. The early bound holds over TCP only.
    """
    with contextlib.ExitStack() as stack:
        backends: Sequence[Any]
        if kind in ("inproc", "pipes"):
            backends = InProcessBackend.world(world_size, segment_bytes=segment_bytes)
            if kind == "pipes":
                backends[0].hub.most_native = 0
        else:
            backends = tcp_backends(
                world_size,
                1 if kind == "shm" else num_nodes,
                Settings(
                    psk=hashlib.sha256(b"unused").hexdigest(),
                    use_shared_memory=kind.endswith("shm"),
                    segment_bytes=segment_bytes,
                    max_early_bytes=max_early_bytes,
                    shared_memory_slots=2,
                    shared_memory_slot_bytes=64 * 1024,
                    peer_timeout_s=timeout_s,
                ),
                kind=kind,
                nodes=nodes,
                rates=rates,
            )
        for backend in backends:
            stack.callback(backend.close)
        world = World([DistributedContext(each, timeout_s=timeout_s) for each in backends], 150.0)
        stack.callback(world.close)
        yield world


def tcp_backends(
    world_size: int,
    num_nodes: int,
    settings: Settings,
    *,
    kind: str = "native",
    nodes: Sequence[int] | None = None,
    rates: Callable[[int, int], float] | None = None,
) -> list[TcpBackend]:
    """Backends that know each other's addresses, neighbours on one node. See ``WORLD_KINDS``."""
    if nodes is None:
        most = min(num_nodes, world_size)
        nodes = [rank * most // world_size for rank in range(world_size)]
    keys = {node: Ed25519PrivateKey.generate() for node in nodes}
    backends = []
    for rank in range(world_size):
        is_native = kind.startswith("native") or (kind.startswith("mixed") and rank % 2 == 0)
        credentials = make_credentials(psk(), keys[nodes[rank]], use_native=is_native)
        backends.append(TcpBackend(settings, credentials))
    members = tuple(backend.member(str(rank)) for rank, backend in enumerate(backends))
    name_of = {node: member.node for node, member in zip(nodes, members, strict=True)}
    paths = tuple(
        MeasuredPath(name_of[a], name_of[b], 1e-3, rates(a, b))
        for a in (name_of if rates is not None else ())
        for b in name_of
        if a != b and rates is not None
    )
    for rank, backend in enumerate(backends):
        backend.group = Group(1, rank, members, paths=paths)
    return backends
