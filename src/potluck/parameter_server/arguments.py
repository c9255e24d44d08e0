"""Checks and conversions of the arguments of ``ParameterServer``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from potluck._core.context import DistributedContext
from potluck._core.wire.tensors import host_bytes, is_tensor
from potluck.checkpoint import CheckpointStore
from potluck.parameter_server.layout import Array
from potluck.parameter_server.model import Mode
from potluck.parameter_server.optimizers import Optimizer

FIRST_EPOCH = 1
"""The epoch of an elastic group before a member is lost or joins."""


def check_arguments(ctx: Any, mode: Mode, optimizer: Any, save_every: Any) -> None:
    """TypeError or ValueError for arguments that make no sense."""
    if not hasattr(ctx, "connect"):
        raise TypeError(f"ParameterServer takes a context, potluck.init(), not {ctx!r}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is {optimizer!r}; it must be SGD(...) or Adam(...) of "
            "potluck.parameter_server: it runs on the server"
        )
    backups = mode.backup_workers
    if backups >= ctx.world_size and _all_are_there(ctx):
        raise ValueError(
            f"backup_workers is {backups} of {ctx.world_size} workers: no gradient would count"
        )
    if not isinstance(save_every, int) or save_every < 1:
        raise ValueError(f"save_every is {save_every!r}; it must be an int of at least 1")


def _all_are_there(ctx: DistributedContext) -> bool:
    """Whether every worker of the job is in the group. In a later group of an elastic context a
    worker may be lost, a server too."""
    return not (ctx.elastic and ctx.epoch > FIRST_EPOCH)


def servers_of(ctx: DistributedContext, servers: Any, replicas: Any) -> tuple[str, ...]:
    """The names of the workers that are servers."""
    all_are_there = _all_are_there(ctx)
    if isinstance(servers, int) and not isinstance(servers, bool):
        if servers < 1 or (all_are_there and servers > ctx.world_size):
            raise ValueError(f"servers={servers}: there are {ctx.world_size} workers")
        servers = list(range(servers))  # by name, not by rank, which changes with the group
    if not isinstance(servers, list | tuple) or not servers:
        raise TypeError(f"servers is {servers!r}; it must be a number, or a list of workers")
    names = tuple(str(each) for each in servers)
    for name in names:
        if all_are_there and ctx.group.rank_of(name) < 0:
            there = ", ".join(member.worker for member in ctx.members)
            raise ValueError(f"servers={servers!r}: there is no such worker; there are: {there}")
    if len(set(names)) < len(names):
        raise ValueError(f"servers={servers!r} names a worker twice")
    _check_replicas(ctx, replicas, len(names))
    return names


def _check_replicas(ctx: DistributedContext, replicas: Any, num_servers: int) -> None:
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        raise ValueError(f"replicas is {replicas!r}; it must be an int of at least 0")
    if replicas >= num_servers:
        raise ValueError(
            f"replicas={replicas} needs at least {replicas + 1} servers, and there are "
            f"{num_servers}: each copy of a tensor lies on another one"
        )
    if replicas and not ctx.elastic:
        raise ValueError(
            f"replicas={replicas} needs a group that goes on without a lost worker, as that of "
            "`potluck run` is; here a loss ends it"
        )


def store_of(checkpoint: Any, server: str = "") -> CheckpointStore | None:
    """The store of the first of ``servers``, or of another ``server``, which keeps more
    checkpoints, since the servers may have to go back to an older checkpoint. CheckpointError for a
    bad directory."""
    if checkpoint is None:
        return None
    store = checkpoint
    if not isinstance(store, CheckpointStore):
        store = CheckpointStore(Path(checkpoint))
    if server:
        store = CheckpointStore(store.directory / f"server-{server}", store.keep + 2)
    store.make_directory()
    return store


def arrays_of(given: Any, what: str) -> dict[str, Array]:
    """``given`` as arrays in host memory; tensors of torch that are there already are not
    copied."""
    if not isinstance(given, Mapping) or not given:
        raise TypeError(
            f"{what} is a dict of arrays by name, such as {{'w': array}}, with at least one, not "
            f"{given!r:.80}"
        )
    found = {}
    for name, each in given.items():
        if not isinstance(name, str):
            raise TypeError(f"{what} has the name {name!r:.60}, which is no str")
        array = _of_tensor(each) if is_tensor(each) else np.asarray(each)
        if array.dtype.kind not in "fciubV":
            raise TypeError(f"{what} has {name!r} of dtype {array.dtype}; it must be numbers")
        found[name] = array
    return found


def _of_tensor(tensor: Any) -> Array:
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    return host_bytes(tensor).view(dtype).reshape(tuple(tensor.shape))
