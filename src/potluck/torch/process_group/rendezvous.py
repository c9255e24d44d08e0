"""How ranks that share a torch store find each other: each writes down where it listens.

The store carries addresses and public names only. Links are mutual TLS under the cluster secret,
and whoever writes an address into the store without holding that secret is refused by the links.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import msgspec

from potluck.backends.tcp import TcpBase
from potluck.errors import ConfigurationError, OperationTimeout, WrongSecret
from potluck.settings import load_settings
from potluck.torch.process_group.addresses import LOOPBACK, machine, own_address, store_server
from potluck.torch.process_group.world import World
from potluck.types import Group, Member

_EPOCH = 1


class Entry(msgspec.Struct, frozen=True):
    """What one rank writes into the store."""

    host: str
    port: int
    node: str
    namespace: str
    machine: str
    world_size: int
    local_rank: int
    job: str


def meet(store: Any, rank: int, world_size: int, *, name: str, timeout_s: float) -> World:
    """The world of all ranks that call this with the same store.

    ConfigurationError if they disagree about the world size, WrongSecret if they hold different
    cluster secrets, OperationTimeout naming the ranks that did not come within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    # A store may outlive a group (torchrun's does): each round of meeting has keys of its own.
    prefix = f"potluck/{store.add(f'potluck/rounds/{rank}', 1)}"
    base = TcpBase("", 0, load_settings())
    try:
        entry = Entry(
            host=own_address(store),
            port=base.port,
            node=base.credentials.node_id,
            namespace=base.credentials.namespace,
            machine=machine(),
            world_size=world_size,
            local_rank=_local_rank(),
            job=secrets.token_hex(8) if rank == 0 else "",
        )
        store.set(f"{prefix}/{rank}", msgspec.json.encode(entry).decode())
        entries = [
            _read(store, prefix, other, world_size, entry, deadline, timeout_s)
            for other in range(world_size)
        ]
        has_server = store_server(store) is not None
        members = tuple(
            Member(
                str(other),
                node=each.node,
                host=_host(each, entry, has_server),
                port=each.port,
                local_rank=each.local_rank,
            )
            for other, each in enumerate(entries)
        )
        communicator = base.open(Group(_EPOCH, rank, members, job=entries[0].job))
    except BaseException:
        base.close()
        raise
    world = World(name, communicator, base)
    try:
        world.meet(max(1.0, deadline - time.monotonic()))
    except BaseException:
        world.close()
        raise
    return world


def _read(
    store: Any, prefix: str, rank: int, world_size: int, mine: Entry, deadline: float,
    timeout_s: float,
) -> Entry:  # fmt: skip
    key = f"{prefix}/{rank}"
    left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    try:
        store.wait([key], left)
    except RuntimeError as error:
        missing = [
            str(other) for other in range(world_size) if not store.check([f"{prefix}/{other}"])
        ]
        if not missing:
            raise
        raise OperationTimeout(
            f"rank {', '.join(missing)} of {world_size} did not join the process group within "
            f"{timeout_s:g} s; are all ranks started, each with its own RANK, and with the same "
            "WORLD_SIZE and init_method?",
            rank=int(missing[0]),
            operation="init_process_group",
        ) from error
    entry = msgspec.json.decode(store.get(key), type=Entry)
    if entry.world_size != world_size:
        raise ConfigurationError(
            f"rank {rank} was started with a world size of {entry.world_size}, this rank with "
            f"{world_size}; give all ranks the same world_size (WORLD_SIZE)"
        )
    if entry.namespace != mine.namespace:
        raise WrongSecret(
            f"rank {rank} at {entry.host} holds another cluster secret; copy "
            "~/.potluck/cluster_secret from one machine to the others, or set the same "
            "POTLUCK_PSK or POTLUCK_PASSPHRASE on all"
        )
    return entry


def _host(entry: Entry, mine: Entry, has_server: bool) -> str:
    return LOOPBACK if not has_server and entry.machine == mine.machine else entry.host


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else 0
