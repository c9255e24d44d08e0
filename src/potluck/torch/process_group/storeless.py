"""``init_process_group("potluck", init_method="potluck://")``: a world without a store server.

The ranks find each other as ``potluck.init()`` would: through the agent under ``potluck run``,
else by a launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, of which
``potluck://host:port`` names the last two; mpirun's; Slurm's; a Kubernetes pod's number), else by
discovery, if ``world_size`` or POTLUCK_MIN_PEERS says for how many to look, else this process is
alone. What torch wants a store for then travels over potluck's links.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from potluck.backends.agent import AgentBackend
from potluck.backends.discovery import AutoDiscoveryBackend
from potluck.backends.environment import EnvironmentBackend
from potluck.backends.fixed import leave_world
from potluck.backends.launchers import detect, rank_variable
from potluck.backends.local import LocalBackend
from potluck.errors import ConfigurationError
from potluck.settings import load_settings
from potluck.torch.process_group.store import LinkStore, StoreClient, StoreServer
from potluck.torch.process_group.world import World

WORLD_NAME = "0"
"""torch's name for the default group, for which alone rendezvous is called."""


Backend = AgentBackend | EnvironmentBackend | AutoDiscoveryBackend | LocalBackend


class FormedStore(LinkStore):
    """A store whose world is formed already: the process group takes it over."""

    world: World


class _Owner:
    """What a world without a store server must close: the store first, then the links' owner."""

    def __init__(self, backend: Any, asker: StoreServer | StoreClient) -> None:
        self._backend = backend
        self._asker = asker

    def close(self) -> None:
        self._asker.close()
        self._backend.close()


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[FormedStore, int, int]]:
    """What torch calls for ``potluck://``; gives (store, rank, world size) once.

    ConfigurationError names what is missing, OperationTimeout who did not come; see
    ``AgentBackend``, ``EnvironmentBackend`` and ``AutoDiscoveryBackend``.
    """
    backend = choose(url)
    try:
        communicator = backend.form(0, None, timeout.total_seconds())
        group = communicator.group
        asked = _given(url, "world_size")
        if asked not in (-1, group.world_size):
            communicator.close()
            raise ConfigurationError(
                f"init_process_group was given world_size={asked}, but {group.world_size} "
                "processes were started; leave world_size away, or start as many"
            )
        switchboard = backend.switchboard
        asker: StoreServer | StoreClient
        if group.rank == 0 or switchboard is None:
            asker = StoreServer(switchboard)
        else:
            asker = StoreClient(group, switchboard, timeout.total_seconds())
    except BaseException:
        backend.close()
        raise
    world = World(WORLD_NAME, communicator, _Owner(backend, asker))
    try:
        world.meet(timeout.total_seconds())
    except BaseException:
        world.close()
        raise
    store = FormedStore(asker, timeout.total_seconds())
    store.world = world
    world.store = store  # torch's C++ side holds it too, but not its Python half
    yield store, group.rank, group.world_size
    raise RuntimeError("a potluck:// world can't be formed twice; call init_process_group again")


def choose(url: str) -> Backend:
    """What forms the world that ``url`` and the environment describe; the caller closes it."""
    settings = load_settings()
    if os.environ.get("POTLUCK_AGENT"):
        leave_world()  # of an init_process_group by another method before this one
        return AgentBackend(settings=settings, elastic=False)
    parts = urlsplit(url)
    rank, world_size = _given(url, "rank"), _given(url, "world_size")
    environment = dict(os.environ)
    if parts.hostname:
        environment["MASTER_ADDR"] = parts.hostname
    if parts.port:
        environment["MASTER_PORT"] = str(parts.port)
    if rank >= 0:
        environment["RANK"] = str(rank)
    is_pod = bool(environment.get("MASTER_ADDR") and rank_variable(environment))
    if world_size >= 0 and (environment.get("RANK") or is_pod):
        environment["WORLD_SIZE"] = str(world_size)
    launched = detect(environment)
    named = environment.get("RANK") or environment.get("WORLD_SIZE") or parts.hostname
    if launched is None and not named:
        if world_size == 1 or (world_size < 0 and not settings.min_peers):
            return LocalBackend()
        return AutoDiscoveryBackend(None if world_size < 0 else world_size, settings=settings)
    return EnvironmentBackend(settings=settings, environment=environment)


def _given(url: str, name: str) -> int:
    """The rank or world_size that ``init_process_group`` was given; torch puts it into the URL."""
    return int(parse_qs(urlsplit(url).query).get(name, ["-1"])[0])
