# mypy: disable-error-code="override, assignment"
# torch's stub gives overloads where its own callers use one form.
"""``PotluckProcessGroup``: torch's ProcessGroup over potluck's engine.

Methods have new and old names: ``all_gather_single`` of torch 2.13 was ``_allgather_base`` before,
and other libraries still use the old names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from potluck._core.engine.communicator import Communicator
from potluck.errors import GroupClosed, RemoteError
from potluck.torch.process_group import messages, moving, reducing
from potluck.torch.process_group.messages import MonitoredBarrier, single
from potluck.torch.process_group.work import (
    Completions,
    GroupWork,
    ProfileRecord,
    combine,
    untraced,
)
from potluck.torch.process_group.world import Comms, World

NAME = "potluck"


class GroupOptions:
    """The options that ``split_group`` passes from a group to its parts."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.backend = NAME
        self.group_name = ""
        self.global_ranks_in_group: list[int] = []


@untraced
class PotluckProcessGroup(dist.ProcessGroup):
    """The collectives of one group of ranks, over links that all groups of the world share.

    Tensors on the CPU are used in place, tensors on other devices are copied through host memory. A
    failure ends the world: all later calls, on any of its groups, raise the same error.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        world: World,
        communicator: Communicator,
        *,
        name: str,
        timeout: timedelta,
        store: Any = None,
    ) -> None:
        super().__init__(communicator.rank, communicator.world_size)  # type: ignore[call-arg]
        self._world = world
        self._name = name
        self._desc = "undefined"
        self._store = store
        self._timeout = timeout
        self._comms = Comms(
            communicator,
            world.completions,
            timeout.total_seconds(),
            world.has_devices,
        )
        self._rank = communicator.rank
        self._size = communicator.world_size
        self._monitored = MonitoredBarrier()
        self._coalesced: list[GroupWork] | None = None
        self._num_splits = 0
        self._sequence = 0
        self._is_left = False

    # -- identity

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def options(self) -> GroupOptions:
        return GroupOptions(self._timeout)

    @property
    def communicator(self) -> Communicator:
        """The engine's communicator of this group."""
        return self._comms.communicator

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", *_accelerators())]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def get_group_store(self) -> Any:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def __repr__(self) -> str:
        return f"PotluckProcessGroup({self._name!r}, rank {self._rank} of {self._size})"

    # -- collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        tensor = single(tensors, "all_reduce")
        if tensor.layout is torch.sparse_coo:
            return self._run("sparse_all_reduce", reducing.all_reduce_sparse, tensor, opts)
        opts = _with(opts, timeout)
        return self._run("all_reduce", reducing.all_reduce, tensor, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        calls = ((tensor,) for tensor in tensors)
        return self._all("all_reduce", reducing.all_reduce, calls, opts)

    def all_reduce_encoded(
        self, tensor: Tensor, codec: str, residual: Tensor | None = None
    ) -> GroupWork:
        """The mean over all ranks, in place, sent encoded by a lossy codec. float32 only.

        ``residual`` (float32, on the CPU, as long as ``tensor``) is added to ``tensor`` before
        encoding, and then holds the error of the encoding (error feedback).
        """
        operation = reducing.all_reduce_encoded
        return self._run("all_reduce_encoded", operation, tensor, codec, residual)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        tensor = single(tensors, "broadcast")
        opts = _rooted(opts, timeout)
        return self._run("broadcast", moving.broadcast, tensor, opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> GroupWork:
        tensor = single(tensors, "reduce")
        opts = _rooted(opts, timeout, op)
        return self._run("reduce", reducing.reduce, tensor, opts)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        outputs = _inner(output_tensors, "all_gather")
        source = single(input_tensors, "all_gather")
        opts = _with(opts, timeout)
        return self._run("all_gather", moving.all_gather, outputs, source, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor],
        opts: Any = None,
    ) -> GroupWork:  # fmt: skip
        # Output lists are by input (as in all_gather) or by rank (as in Gloo).
        outputs = [list(each) for each in output_lists]
        if len(outputs) == self._size and all(len(each) == len(input_list) for each in outputs):
            outputs = [list(each) for each in zip(*outputs, strict=True)]
        calls = _pairs(outputs, input_list, "all_gather_coalesced")
        return self._all("all_gather", moving.all_gather, calls, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self._run("all_gather_single", moving.all_gather_single, output, input, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        calls = _pairs(outputs, inputs, "all_gather_single_coalesced")
        return self._all("all_gather_single", moving.all_gather_single, calls, opts)

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        output = single(output_tensors, "reduce_scatter")
        parts = _inner(input_tensors, "reduce_scatter")
        opts = _with(opts, timeout)
        return self._run("reduce_scatter", reducing.reduce_scatter, output, parts, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self._run(
            "reduce_scatter_single", reducing.reduce_scatter_single, output, input, opts
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        calls = _pairs(outputs, inputs, "reduce_scatter_single_coalesced")
        return self._all("reduce_scatter_single", reducing.reduce_scatter_single, calls, opts)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> GroupWork:
        outputs = _inner(output_tensors, "gather") if output_tensors else None
        source = single(input_tensors, "gather")
        opts = _rooted(opts)
        return self._run("gather", moving.gather, outputs, source, opts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> GroupWork:
        output = single(output_tensors, "scatter")
        parts = _inner(input_tensors, "scatter") if input_tensors else None
        opts = _rooted(opts)
        return self._run("scatter", moving.scatter, output, parts, opts)

    def alltoall(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        return self._run("all_to_all", moving.all_to_all, output_tensors, input_tensors, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, opts: Any = None,
    ) -> GroupWork:  # fmt: skip
        sizes = (output_split_sizes, input_split_sizes)
        return self._run("all_to_all", moving.all_to_all_single, output, input, *sizes, opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> GroupWork:
        return self._run("barrier", moving.barrier, _with(opts, timeout))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names, on rank 0, the ranks that did not reach it within ``timeout``."""
        self._check_open()
        timeout_s = self._comms.timeout_s if timeout is None else timeout.total_seconds()
        self._monitored(self._comms, timeout_s, wait_all_ranks)

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- point to point

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> GroupWork:
        tensor = single(tensors, "send")
        return self._run("send", messages.send, tensor, dst_rank, tag)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> GroupWork:
        tensor = single(tensors, "recv")
        return self._run("recv", messages.recv, tensor, src_rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> GroupWork:
        tensor = single(tensors, "recv")
        return self._run("recvAnySource", messages.recv, tensor, messages.ANY, tag)

    # -- coalescing, sub-groups, lifetime

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        works, self._coalesced = self._coalesced or [], None
        return combine(works, self._comms.completions)

    def split_group(
        self, new_ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None,
        group_name: str | None = None, group_desc: str | None = None, device_types: Any = None,
    ) -> PotluckProcessGroup | None:  # fmt: skip
        """The group of ``new_ranks``; None on other ranks. Needs no communication."""
        self._num_splits += 1
        name = group_name or f"{self._name}:split:{self._num_splits}"
        communicator = self._comms.communicator.subgroup(tuple(new_ranks), key=name)
        if communicator is None:
            return None
        group = PotluckProcessGroup(
            self._world,
            communicator,
            name=name,
            timeout=timeout or self._timeout,
            store=self._store,
        )
        group._set_group_desc(group_desc or f"{self._desc}:split:{self._num_splits}")
        return group

    def comm_split_count(self) -> int:
        return self._num_splits

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Keep the device of ``init_process_group(device_id=...)``, for which torch calls this.

        ``dist.split_group`` reads it. There is nothing to connect.
        """
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing. torch calls this, with ``device_id``, on ranks outside of a new group."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of this group's later operations on this rank that name none; also by
        torch's ``_set_pg_timeout``."""
        self._timeout = timeout
        self._comms.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End the world on every rank: blocked calls raise RemoteError naming this rank."""
        group = self._comms.communicator.group
        self._comms.communicator.abort(
            RemoteError(
                f"{group.describe(group.rank)} aborted its process group",
                rank=group.rank,
                epoch=group.epoch,
            )
        )
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group. Leaving the group that made the world closes the world's links, after
        all sent data has arrived. Of another group calls under way end, later ones raise
        GroupClosed, and what it holds is released. Idempotent.
        """
        if self._comms.communicator is self._world.communicator:
            self._world.close()
        elif not self._is_left:
            self._is_left = True
            self._comms.communicator.close()

    # -- inside

    def _check_open(self) -> None:
        self._world.owner.check()
        if self._is_left:
            group = self._comms.communicator.group
            raise GroupClosed(f"the process group {self._name} was destroyed", epoch=group.epoch)

    def _run(self, name: str, operation: Callable[..., GroupWork], *arguments: Any) -> GroupWork:
        """Start ``operation``, as an event for torch's profiler."""
        self._check_open()
        record = None
        if torch._C._autograd._profiler_enabled():
            record = ProfileRecord(f"{self.name()}:{name}")
        work = operation(self._comms, *arguments)
        if record is not None:
            work.ends(record)
        self._sequence += 1
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _all(
        self,
        name: str,
        operation: Callable[..., GroupWork],
        calls: Iterable[tuple[Any, ...]],
        opts: Any,
    ) -> GroupWork:
        """Start ``operation`` for each of several tensors; one work for all."""

        def every(comms: Comms) -> GroupWork:
            works = [operation(comms, *arguments, opts) for arguments in calls]
            return combine(works, comms.completions)

        return self._run(name, every)

    @property
    def completions(self) -> Completions:
        return self._comms.completions


class _Chosen:
    """Options of the older overloads, which take plain arguments."""

    __slots__ = ("reduceOp", "rootRank", "timeout")

    def __init__(self, root: int = 0, op: Any = dist.ReduceOp.SUM, timeout: Any = None) -> None:
        self.rootRank = root
        self.reduceOp = op
        self.timeout = timeout


def _with(opts: Any, timeout: timedelta | None) -> Any:
    if timeout is None:
        return opts
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    return _Chosen(0, op, timeout)


def _rooted(opts: Any, timeout: timedelta | None = None, op: Any = None) -> Any:
    if opts is None or isinstance(opts, int):
        return _Chosen(opts or 0, dist.ReduceOp.SUM if op is None else op, timeout)
    return opts


def _inner(lists: Any, operation: str) -> Sequence[Tensor]:
    """The single list in a list of lists (each rank has one device), or a flat list itself."""
    if lists and isinstance(lists[0], Tensor):
        return lists  # type: ignore[no-any-return]
    if len(lists) != 1:
        raise ValueError(
            f"{operation}: one list of tensors per rank, not {len(lists)} "
            "(requires a single-element list)"
        )
    return lists[0]  # type: ignore[no-any-return]


def _pairs(first: Sequence[Any], second: Sequence[Any], operation: str) -> Any:
    if len(first) != len(second):
        raise ValueError(f"{operation}: {len(first)} outputs but {len(second)} inputs")
    return zip(first, second, strict=True)


def _accelerators() -> list[str]:
    if not torch.accelerator.is_available():
        return []
    device = torch.accelerator.current_accelerator()
    return [] if device is None else [device.type]
