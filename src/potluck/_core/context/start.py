"""``init``: make the context of this process, for any way in which it was started."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from potluck._core import hints
from potluck._core.backends.base import Backend
from potluck._core.backends.launchers import detect, is_half_described
from potluck._core.checks import Duration
from potluck._core.context.context import DistributedContext
from potluck._core.settings import Settings, load_settings
from potluck.errors import ConfigurationError

BACKENDS = ("auto", "agent", "env", "local", "discovery", "gloo", "nccl", "mpi", "ring")
_FOR_RING = (
    "backend 'ring' needs every rank's address, and this rank's number: "
    "potluck.init('ring', peers=['192.168.1.20:52416', '192.168.1.21:52416'], rank=0)"
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the ranks of a world meet, which takes a port of this process or its rank there.
    ``is_shared``: at a store of the launcher's, where a process may form several worlds."""

    address: str
    is_shared: bool = False


@hints.arguments(hints.INIT, "give options by name: potluck.init('ring', peers=[...], rank=0)")
def init(
    backend: str = "auto",
    *,
    timeout_s: Duration | None = None,
    peers: Sequence[str] | None = None,
    rank: int | None = None,
) -> DistributedContext:
    """Make the context of this worker. Blocks until its first group is formed.

    ``backend`` chooses the source of the group and the library of its links:

    - ``"agent"``: the agent that started this worker (``potluck run``); survives lost workers;
    - ``"env"``: the variables of torchrun, mpirun, Slurm, of a Kubernetes pod that has a number,
      or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (LOCAL_RANK if set);
    - ``"discovery"``: processes that find each other on the network: this one and at least
      POTLUCK_MIN_PEERS others (1 if that is not set); survives lost processes;
    - ``"local"``: a world of this process alone;
    - ``"ring"``: a fixed list of ``peers``, each ``"host:port"``, of which this is ``rank``;
    - ``"gloo"``, ``"nccl"``: torch's libraries, with the same variables as ``"env"``;
    - ``"mpi"``: MPI, through mpi4py, under mpirun;
    - ``"auto"``: the first of agent and env that applies; else discovery if POTLUCK_MIN_PEERS is
      set and not 0, else local: a script that is started alone does not search the network.

    ``timeout_s`` is the deadline of every operation that does not name its own
    (``POTLUCK_PEER_TIMEOUT_S``, 30 s).

    [ConfigurationError][potluck.errors.ConfigurationError] or
    [MissingDependency][potluck.errors.MissingDependency], with the remedy, if the backend can't be
    used; [OperationTimeout][potluck.errors.OperationTimeout] or
    [LinkError][potluck.errors.LinkError] if the other members can't be reached. A process is one
    rank of its world: ConfigurationError if it has a context there,
    [ForkedProcess][potluck.errors.ForkedProcess] if the process has from which it was forked.
    """
    global _latest
    context = _begin(backend, timeout_s, peers, rank)
    _latest = weakref.ref(context)
    return context


def _begin(
    backend: str, timeout_s: Duration | None, peers: Sequence[str] | None, rank: int | None
) -> DistributedContext:
    if backend not in BACKENDS:
        raise ConfigurationError(hints.backend(backend, BACKENDS))
    if backend != "ring" and not (peers is None and rank is None):
        raise ConfigurationError(f"peers and rank are for backend='ring', not for {backend!r}")
    settings = load_settings(peer_timeout_s=timeout_s)
    if backend == "auto":
        backend = _detect(settings)
    place = _place(backend, peers, rank)
    _check_free(place)
    made = _make(backend, settings, peers, rank)
    try:
        context = DistributedContext(made, timeout_s=settings.peer_timeout_s)
    except BaseException:
        made.close()
        raise
    _places[context] = place
    return context


_latest: weakref.ref[DistributedContext] | None = None
_kept: list[DistributedContext] = []


@contextmanager
def present() -> Iterator[DistributedContext]:
    """The context that ``init`` made last in this process, if it is open; else a new one of
    ``init()``. A new world of one ends with the block, and no other thread finds it."""
    global _latest
    context = _latest() if _latest is not None else None
    if context is not None and not context.is_closed:
        yield context
        return
    made = _begin("auto", None, None, None)
    if made.world_size > 1 or made.elastic:
        _kept.append(made)  # the group of this process, also for what asks next
        _latest = weakref.ref(made)
        yield made
    else:
        with made:
            yield made


_places: weakref.WeakKeyDictionary[DistributedContext, _Place | None] = weakref.WeakKeyDictionary()
"""The contexts that ``init`` made, with the places that they take."""


def _place(backend: str, peers: Sequence[str] | None, rank: int | None) -> _Place | None:
    """The place that a context takes in its world; None where a process may have any number."""
    if backend == "ring" and peers and rank is not None and 0 <= rank < len(peers):
        return _Place(peers[rank])
    launched = detect(os.environ) if backend in ("env", "gloo", "nccl") else None
    if launched is None:
        return None
    return _Place(f"{launched.host}:{launched.port}", launched.uses_agent_store)


def _check_free(place: _Place | None) -> None:
    for context, taken in list(_places.items()):
        if place is None or taken != place or context.is_closed:
            continue
        context._owner.check()
        if not place.is_shared:
            raise ConfigurationError(
                f"this process has a context already: rank {context.rank} of "
                f"{context.world_size}, in the world at {place.address}. Use that one, or close it "
                "before the next potluck.init()"
            )


def _make(
    backend: str, settings: Settings, peers: Sequence[str] | None, rank: int | None
) -> Backend:
    if backend == "agent":
        from potluck._core.backends.agent import AgentBackend

        return AgentBackend(settings=settings)
    if backend == "env":
        from potluck._core.backends.environment import EnvironmentBackend

        return EnvironmentBackend(settings=settings)
    if backend == "gloo":
        from potluck._core.backends.torchdist import GlooBackend

        return GlooBackend(settings=settings)
    if backend == "nccl":
        from potluck._core.backends.torchdist import NcclBackend

        return NcclBackend(settings=settings)
    if backend == "mpi":
        from potluck._core.backends.mpi import MpiBackend

        return MpiBackend(settings=settings)
    if backend == "discovery":
        from potluck._core.backends.discovery import AutoDiscoveryBackend

        return AutoDiscoveryBackend(settings=settings)
    if backend == "ring":
        from potluck._core.backends.ring import RingBackend

        if peers is None or rank is None:
            raise ConfigurationError(_FOR_RING)
        return RingBackend(peers, rank, settings=settings)
    from potluck._core.backends.local import LocalBackend

    return LocalBackend()


def _detect(settings: Settings) -> str:
    if os.environ.get("POTLUCK_AGENT"):
        return "agent"
    if detect(os.environ) is not None or is_half_described(os.environ):
        return "env"  # its error names a missing variable
    return "discovery" if settings.min_peers else "local"
