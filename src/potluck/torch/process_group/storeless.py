"""Worlds without a store server: ``init_process_group("potluck", init_method="potluck://")``.

The ranks find each other as in ``potluck.init()``: through the agent under ``potluck run``, else by
a launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, of which
``potluck://host:port`` sets the last two; those of mpirun and Slurm; the index of a Kubernetes
pod), else by discovery, if ``world_size`` or POTLUCK_MIN_PEERS gives the number of processes, else
this process is a world of one. torch's store is then served over potluck's links.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from potluck._core.backends.agent import AgentBackend
from potluck._core.backends.discovery import AutoDiscoveryBackend
from potluck._core.backends.environment import EnvironmentBackend
from potluck._core.backends.fixed import leave_world
from potluck._core.backends.launchers import detect, rank_variable
from potluck._core.backends.local import LocalBackend
from potluck._core.settings import Settings, load_settings
from potluck.errors import ConfigurationError
from potluck.services.access import Services
from potluck.torch.process_group.rendezvous import given
from potluck.torch.process_group.store import LinkStore
from potluck.torch.process_group.world import World

Backend = AgentBackend | EnvironmentBackend | AutoDiscoveryBackend | LocalBackend


class FormedStore(LinkStore):
    """A store with the world that was formed for it, for the process group."""

    world: World


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[FormedStore, int, int]]:
    """The rendezvous of ``potluck://`` for torch; yields (store, rank, world size) once.

    ConfigurationError names a missing variable, OperationTimeout the missing ranks; see
    ``AgentBackend``, ``EnvironmentBackend`` and ``AutoDiscoveryBackend``.
    """
    settings = load_settings()
    backend = choose(url, settings)
    resources = contextlib.ExitStack()  # closed in reverse order
    resources.callback(backend.close)
    try:
        communicator = backend.form(0, None, timeout.total_seconds())
        group = communicator.group
        asked = given(url, "world_size")
        if asked not in (-1, group.world_size):
            communicator.close()
            raise ConfigurationError(
                f"init_process_group was given world_size={asked}, but {group.world_size} "
                f"processes were started; omit world_size, or start {asked} processes"
            )
        services = Services(
            backend.service_transport,
            lambda: group,
            timeout_s=timeout.total_seconds(),
            max_bytes=settings.max_call_bytes,
        )
        resources.callback(services.close)
        store = FormedStore(group, services, timeout.total_seconds())
    except BaseException:
        resources.close()
        raise
    store.world = world = World(communicator, resources)
    try:
        world.meet(timeout.total_seconds())  # rank 0 serves the store from here on
    except BaseException:
        world.close()
        raise
    world.store = store  # torch's C++ code holds the store without its Python part
    yield store, group.rank, group.world_size
    raise RuntimeError("a potluck:// world can't be formed twice; call init_process_group again")


def choose(url: str, settings: Settings) -> Backend:
    """The backend that forms the world of ``url`` and the environment. The caller closes it."""
    if os.environ.get("POTLUCK_AGENT"):
        leave_world()  # of an earlier init_process_group with another init_method
        return AgentBackend(settings=settings, elastic=False)
    parts = urlsplit(url)
    rank, world_size = given(url, "rank"), given(url, "world_size")
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
