"""Creation of process groups: of a world, or of a sub-group that shares the world's links."""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from potluck._core.autoload import NAME
from potluck.errors import ConfigurationError
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.torch.process_group.storeless import FormedStore
from potluck.torch.process_group.world import World, meet

OLDEST_TORCH = "2.10"
"""The oldest supported release (``make test-oldest-torch``). Before 2.7 torch's C++ code loses the
Python part of a Work that it holds, so that DDP waits for ever; 2.7 to 2.9 have defects in
pipelines, HSDP on CPUs and clipped DTensors."""


def create(options: Any, backend_options: Any) -> PotluckProcessGroup:
    """Create a group for ``init_process_group`` or ``new_group``; torch calls it on the members.

    A sub-group of a potluck world shares its links and needs no communication. Any other group
    meets through the store and gets a world of its own. ConfigurationError for an old torch, or for
    a group with several backends.
    """
    if torch.__version__ < OLDEST_TORCH:
        raise ConfigurationError(
            f"the process group needs torch {OLDEST_TORCH} or newer, this is {torch.__version__}: "
            "pip install --upgrade torch"
        )
    check_alone("new_group" if options.global_ranks_in_group else "init_process_group")
    replace_builtin_hooks()
    replace_set_timeout()
    name = options.group_id
    ranks = list(options.global_ranks_in_group)
    timeout = getattr(backend_options, "_timeout", None) or options.timeout
    parent = _parent() if ranks else None
    if parent is not None:
        communicator = parent.communicator.subgroup(tuple(ranks), key=name)
        assert communicator is not None, "torch calls the creator on members only"
        return PotluckProcessGroup(
            parent._world, communicator, name=name, timeout=timeout, store=options.store
        )
    formed = None if ranks else _formed(options.store)
    world = formed or meet(
        options.store,
        options.group_rank,
        options.group_size,
        timeout_s=timeout.total_seconds(),
    )
    return PotluckProcessGroup(
        world, world.communicator, name=name, timeout=timeout, store=options.store
    )


def _parent() -> PotluckProcessGroup | None:
    """The default group, if it is potluck's."""
    default = dist.distributed_c10d._world.default_pg
    return default if isinstance(default, PotluckProcessGroup) else None


def _formed(store: Any) -> World | None:
    """The world of a store that ``potluck://`` made."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.world if isinstance(store, FormedStore) else None


@functools.cache
def replace_builtin_hooks() -> None:
    """Replace DDP's built-in communication hook FP16_COMPRESS on potluck's groups by torch's Python
    version of it, which computes the same. Idempotent.

    The built-in hook is C++ and expects a C++ list of tensors in the future of an all_reduce. The
    future of a group in Python holds a Python list, on which the hook fails with an internal assert
    of torch. There is no extension point for this, so the method of DDP is replaced.
    """
    model: Any = DistributedDataParallel  # torch's stubs know no types here
    register = model._register_builtin_comm_hook

    @functools.wraps(register)
    def replaced(self: DistributedDataParallel, comm_hook_type: Any) -> None:
        is_ours = isinstance(self.process_group, PotluckProcessGroup)
        if is_ours and comm_hook_type == BuiltinCommHookType.FP16_COMPRESS:
            self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
        else:
            register(self, comm_hook_type)

    model._register_builtin_comm_hook = replaced


@functools.cache
def replace_set_timeout() -> None:
    """Let torch's ``_set_pg_timeout`` set the timeout of potluck's groups. Idempotent.

    torch's own sets that of Gloo and NCCL groups only, and warns about all others. There is no
    extension point for this, so the function is replaced.
    """
    module: Any = dist.distributed_c10d
    torchs = module._set_pg_timeout

    @functools.wraps(torchs)
    def replaced(timeout: timedelta, group: Any = None) -> None:
        chosen = dist.group.WORLD if group is None else group
        if isinstance(chosen, PotluckProcessGroup):
            chosen.set_timeout(timeout)
        else:
            torchs(timeout, group)

    module._set_pg_timeout = replaced


_MAKER = "_new_process_group_helper"
"""The function of torch that makes a group. It passes a backend neither the other backends nor the
device type, so these are read from that function's frame. If a release of torch renames the
function, the tests of this module fail."""


def check_alone(call: str) -> None:
    """ConfigurationError if the group that torch is creating has backends besides potluck, which
    torch can't combine.

    In torch a group has either one backend in Python, which serves all devices, or several of
    torch's own, one for each device type. For ``"cpu:gloo,cuda:potluck"`` torch makes both and
    silently drops all but the backend in Python.

    ``call`` is the name of the user's call, for the error.
    """
    named = _named_backends()
    others = sorted({backend for backend in named.values() if backend != NAME})
    if not others:
        return
    asked = ",".join(f"{device}:{backend}" for device, backend in named.items())
    raise ConfigurationError(
        f'{call}(backend="{asked}"): potluck can\'t share a group with {" and ".join(others)}. '
        f'Either let potluck serve all devices, with backend="{NAME}" (tensors of accelerators go '
        f'through host memory), or make a group for each: init_process_group("{others[0]}") '
        f'and then group = torch.distributed.new_group(backend="{NAME}")'
    )


def _named_backends() -> dict[str, str]:
    """The backend of each device type, from the caller's ``backend`` argument."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == _MAKER:
            return dict(frame.f_locals["backend_config"].get_device_backend_map())
    return {}
