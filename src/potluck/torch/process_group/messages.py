"""Point-to-point operations: send, recv, recv from any rank; and the monitored barrier."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.work import Work
from potluck.errors import OperationTimeout
from potluck.torch.process_group import staging
from potluck.torch.process_group.staging import in_place
from potluck.torch.process_group.work import GroupWork
from potluck.torch.process_group.world import Comms

ANY = -1
_FAR_S = 7 * 24 * 3600.0
"""The deadline of messages of a monitored barrier: far away, since a missed one ends the group."""

_FIRST_TAG = 16


def send(comms: Comms, tensor: Tensor, peer: int, tag: int) -> GroupWork:
    staging.check(tensor, "send")

    def post(array: Array) -> Work:
        if peer == comms.rank:
            return comms.self_messages.send(array, tag)
        return comms.communicator.send(array, peer, tag, timeout_s=comms.timeout_s)

    return in_place(comms, tensor, post, writes=False, is_cut=False)


def recv(comms: Comms, tensor: Tensor, peer: int, tag: int) -> GroupWork:
    """Receive from ``peer``, or from any other rank if it is ``ANY``; the work's ``source_rank`` is
    the sender."""
    staging.check(tensor, "recv")

    def post(array: Array) -> Work:
        if peer == comms.rank:
            return comms.self_messages.recv(array, peer, tag, timeout_s=comms.timeout_s)
        return comms.communicator.recv(array, peer, tag, timeout_s=comms.timeout_s)

    return in_place(comms, tensor, post, reads=False, is_cut=False)


class MonitoredBarrier:
    """A barrier through rank 0 that names missing ranks, and does not end the group.

    Rank 0 receives a message of every rank, then answers all. The tag counts the calls, so that a
    late message of one barrier does not count for the next.
    """

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, comms: Comms, timeout_s: float, wait_all_ranks: bool) -> None:
        tag = _FIRST_TAG + self._number
        self._number += 1
        deadline = time.monotonic() + timeout_s
        if comms.rank == 0:
            self._monitor(comms, tag, deadline, timeout_s, wait_all_ranks)
        else:
            token = np.zeros(1, dtype=np.uint8)
            comms.messages.send(token, 0, tag, timeout_s=_FAR_S)
            answer = comms.messages.recv(token, 0, tag, timeout_s=_FAR_S)
            if not _came(answer, deadline):
                raise OperationTimeout(
                    f"Rank {comms.rank} successfully reached monitoredBarrier, but received errors "
                    f"while waiting for send/recv from rank 0: no answer within {timeout_s:g} s. "
                    "Please check rank 0 logs for faulty rank.",
                    rank=0,
                    operation="monitored_barrier",
                )

    def _monitor(
        self, comms: Comms, tag: int, deadline: float, timeout_s: float, wait_all_ranks: bool
    ) -> None:
        if timeout_s <= 0:
            raise OperationTimeout(
                f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1000:.0f} ms.",
                rank=0,
                operation="monitored_barrier",
            )
        tokens = [np.zeros(1, dtype=np.uint8) for _ in range(comms.world_size)]
        waits = {
            rank: comms.messages.recv(tokens[rank], rank, tag, timeout_s=_FAR_S)
            for rank in range(1, comms.world_size)
        }
        missing = []
        for rank, wait in waits.items():
            if not _came(wait, deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            plural = "Ranks" if len(missing) > 1 else "Rank"
            raise OperationTimeout(
                f"{plural} {', '.join(map(str, missing))} failed to pass monitoredBarrier in "
                f"{timeout_s * 1000:.0f} ms",
                rank=missing[0],
                operation="monitored_barrier",
            )
        for rank in waits:
            comms.messages.send(tokens[rank], rank, tag, timeout_s=_FAR_S)


def _came(work: Work, deadline: float) -> bool:
    try:
        work.wait(max(0.0, deadline - time.monotonic()))
    except OperationTimeout:
        if work.done():
            raise
        return False
    return True


def single(tensors: Sequence[Tensor] | Tensor, operation: str) -> Tensor:
    """The single tensor of a list; ValueError for more, since a rank has one device."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(
            f"{operation}: one tensor per rank, not {len(tensors)}; use the coalesced operation "
            "for several (requires a single-element tensor list)"
        )
    return tensors[0]
