"""``init_process_group("potluck", init_method="potluck://")``: a world without a store server.

The ranks find each other as ``potluck.init()`` would: through the agent under ``potluck run``,
else by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (``potluck://host:port`` names the last two),
else this process is alone. What torch wants a store for then travels over potluck's links.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from potluck.backends.agent import AgentBackend
from potluck.backends.environment import EnvironmentBackend
from potluck.backends.local import LocalBackend
from potluck.settings import load_settings
from potluck.torch.process_group.shelf import Keeper, LinkStore, Visitor
from potluck.torch.process_group.world import World

WORLD_NAME = "0"
"""torch's name for the default group, for which alone rendezvous is called."""


class FormedStore(LinkStore):
    """A store whose world is formed already: the process group takes it over."""

    world: World


class _Owner:
    """What a world without a store server must close: the store first, then the links' owner."""

    def __init__(self, backend: Any, asker: Keeper | Visitor) -> None:
        self._backend = backend
        self._asker = asker

    def close(self) -> None:
        self._asker.close()
        self._backend.close()


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[FormedStore, int, int]]:
    """What torch calls for ``potluck://``; gives (store, rank, world size) once.

    ConfigurationError names what is missing; see ``EnvironmentBackend`` and ``AgentBackend``.
    """
    backend: AgentBackend | EnvironmentBackend | LocalBackend
    environment = _environment(url)
    if os.environ.get("POTLUCK_AGENT"):
        backend = AgentBackend(settings=load_settings())
    elif "RANK" in environment or "WORLD_SIZE" in environment:
        backend = EnvironmentBackend(settings=load_settings(), environment=environment)
    else:
        backend = LocalBackend()
    try:
        communicator = backend.form(0, None, timeout.total_seconds())
        group = communicator.group
        switchboard = None if isinstance(backend, LocalBackend) else backend._base.switchboard
        asker: Keeper | Visitor
        if group.rank == 0 or switchboard is None:
            asker = Keeper(switchboard)
        else:
            asker = Visitor(group, switchboard, timeout.total_seconds())
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


def _environment(url: str) -> dict[str, str]:
    environment = dict(os.environ)
    parts = urlsplit(url)
    if parts.hostname:
        environment["MASTER_ADDR"] = parts.hostname
    if parts.port:
        environment["MASTER_PORT"] = str(parts.port)
    query = parse_qs(parts.query)
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        if name in query and int(query[name][0]) >= 0:
            environment[variable] = query[name][0]
    return environment
