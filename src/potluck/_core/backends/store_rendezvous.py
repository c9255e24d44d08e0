"""A rendezvous through a key-value store: each rank writes its address and reads those of others.

The store (torch's TCPStore or FileStore, or torchrun's) has only addresses and public names.
potluck's links are mutual TLS under the cluster secret, so a process that writes an address into
the store without holding the secret is refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from potluck._core.backends.addresses import LOOPBACK, machine, own_address, store_server
from potluck._core.backends.fixed import hosts_of_world
from potluck._core.backends.launchers import listed, placed
from potluck._core.backends.tcp import TcpBase
from potluck._core.types import Engine, Group, Member, Site
from potluck._core.waiting import Reminder
from potluck._core.wire.format import decoded
from potluck.errors import (
    ConfigurationError,
    LinkError,
    OperationTimeout,
    PotluckError,
    WrongSecret,
)

EPOCH = 1
_STAY_S = 1.0
_FIRST_NAP_S = 0.001
_LAST_NAP_S = 0.05


class RankEntry(msgspec.Struct, frozen=True):
    """The entry of one rank in the store."""

    host: str
    port: int
    node: str
    namespace: str
    machine: str
    world_size: int
    local_rank: int
    job: str
    engine: Engine
    site: Site = ""


_entries = msgspec.json.Decoder(RankEntry)


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except PotluckError:
        raise
    except RuntimeError as error:
        raise LinkError(
            f"the store in which the ranks meet has ended; did rank 0 fail? ({error})"
        ) from error


@_store_errors()
def meet(
    store: Any,
    rank: int,
    world_size: int,
    *,
    base: TcpBase | None,
    local_rank: int,
    timeout_s: float,
    is_fresh: bool = False,
) -> Group:
    """The group of all ranks that call this with the same store.

    ``base`` has the listener for potluck's links; None if another library makes the links.
    ``is_fresh``: the store was made for this group, so a rank that is already in it was started
    twice. ConfigurationError for such a rank, and if ranks have different world sizes; WrongSecret
    if they hold different cluster secrets; OperationTimeout, with the missing ranks, after
    ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    # torchrun's store outlives a group, so each rendezvous has keys of its own.
    attempt = store.add(f"potluck/rounds/{rank}", 1)
    if is_fresh and attempt > 1:
        raise ConfigurationError(f"RANK={rank} is taken: two processes were started with it")
    prefix = f"potluck/{attempt}"
    entry = RankEntry(
        host=(base.address_for_others if base else "") or own_address(store),
        port=base.port if base else 0,
        node=base.credentials.node_id if base else socket.gethostname(),
        namespace=base.credentials.namespace if base else "",
        machine=machine(),
        world_size=world_size,
        local_rank=local_rank,
        job=secrets.token_hex(8) if rank == 0 else "",
        engine=base.engine if base else Engine.NATIVE,
        site=base.settings.site if base else "",
    )
    store.set(f"{prefix}/{rank}", msgspec.json.encode(entry).decode())
    keys = [f"{prefix}/{other}" for other in range(world_size)]
    reminder = Reminder(lambda: _missing(store, keys, rank, entry), deadline)
    try:
        entries = []
        for other in range(world_size):
            _await(store, keys, other, reminder, timeout_s)
            entries.append(_read(store, keys, other, entry))
    except ConfigurationError:
        _stay(store, prefix, rank, world_size, is_fresh)
        raise
    has_server = store_server(store) is not None
    hosts = hosts_of_world(rank, world_size)
    members = tuple(
        Member(
            str(other),
            node=each.node,
            host=hosts[other] if hosts else _host(each, entry, has_server),
            port=each.port,
            local_rank=each.local_rank,
            engine=each.engine,
            site=each.site,
        )
        for other, each in enumerate(entries)
    )
    return Group(EPOCH, rank, members, job=entries[0].job)


def _await(
    store: Any, keys: Sequence[str], rank: int, reminder: Reminder, timeout_s: float
) -> None:
    """Wait until ``rank`` has written its entry. OperationTimeout names all missing ranks.

    Polls at growing intervals, because torch logs a warning each time that a wait of the store is
    interrupted for a reminder.
    """
    nap_s = _FIRST_NAP_S
    while not store.check([keys[rank]]):
        if reminder.is_overdue:
            missing = _absent(store, keys)
            if not missing:
                return
            raise OperationTimeout(
                f"{placed(missing)} (of {len(keys)} ranks) did not join the process group within "
                f"{timeout_s:g} s; are all ranks started, each with its own RANK, and with the "
                "same WORLD_SIZE and init_method?",
                rank=missing[0],
                operation="init_process_group",
            )
        reminder.tick()
        time.sleep(min(nap_s, reminder.patience()))
        nap_s = min(1.1 * nap_s, _LAST_NAP_S)


def _absent(store: Any, keys: Sequence[str]) -> list[int]:
    return [rank for rank, key in enumerate(keys) if not store.check([key])]


def _missing(store: Any, keys: Sequence[str], rank: int, mine: RankEntry) -> str:
    """The message about missing ranks, on the lowest rank of each machine; empty on others."""
    missing = _absent(store, keys)
    present = [other for other in range(len(keys)) if other not in missing]
    if store_server(store) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        missing = [other for other in missing if other]  # rank 0 runs, since it serves the store
    entries = {
        other: decoded(_entries, store.get(keys[other]), "a rank's entry") for other in present
    }
    here = [other for other, entry in entries.items() if entry.machine == mine.machine]
    if not missing or rank != min(here):
        return ""
    return (
        f"rank {rank} waits for {placed(missing)} (of {len(keys)} ranks) to join the process "
        f"group; rank {listed(present)} joined. Are all ranks started, with the same WORLD_SIZE "
        "and init_method?"
    )


def _read(store: Any, keys: Sequence[str], rank: int, mine: RankEntry) -> RankEntry:
    entry = decoded(_entries, store.get(keys[rank]), "a rank's entry")
    if entry.world_size != mine.world_size:
        raise ConfigurationError(
            f"rank {rank} was started with a world size of {entry.world_size}, this rank with "
            f"{mine.world_size}; give all ranks the same world_size (WORLD_SIZE)"
        )
    if entry.namespace != mine.namespace:
        raise WrongSecret(
            f"rank {rank} at {entry.host} holds another cluster secret: bring its machine into "
            "this cluster (`potluck pair` on one, `potluck join` on the other), or set the same "
            "POTLUCK_PSK on all"
        )
    return entry


def _stay(store: Any, prefix: str, rank: int, world_size: int, is_fresh: bool) -> None:
    """Let the other ranks read the entries, and so find the same error, before rank 0 ends, and
    with it the store."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{prefix}/left/{rank}", "1")
        if rank == 0 and is_fresh:
            others = [f"{prefix}/left/{other}" for other in range(1, world_size)]
            store.wait(others, timedelta(seconds=_STAY_S))


def _host(entry: RankEntry, mine: RankEntry, has_server: bool) -> str:
    return LOOPBACK if not has_server and entry.machine == mine.machine else entry.host
