"""The memory of a training step with torch: what it takes for each sample, and whether enough is
left for everything else."""

from __future__ import annotations

import torch
from torch import nn

from potluck._core.room import Room, begin_peak, host_room, own_room, peak, return_at_once
from potluck.torch.structure import device_of

_LEAST_LEFT, _PART_LEFT = 48 << 20, 0.05
"""What a step must leave of a limit, at least, in bytes and as a part: threads of the worker start
and connections are made while it computes, and a process that is at its limit can't even say so."""


class StepMemory:
    """Watches the memory of the steps of ``model``: what a step takes at its peak, and what it
    leaves while the whole graph is there.

    A step that leaves less than 48 MiB, or 5%, of the process's own limit with the first gradient
    of its backward raises MemoryError, unless it has one sample only. The peak is that of resident
    memory, on a GPU that of torch's allocator. For Linux, and GPUs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._device = device_of(model)
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._before = self._resident = self._num_samples = 0
        self._is_measured = False
        if not self._is_cuda:
            return_at_once()
        self._hook = torch.autograd.graph.register_multi_grad_hook(
            self._parameters, self._look, mode="any"
        )

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()

    def begin(self, num_samples: int) -> None:
        """A step, or a part of one, begins with ``num_samples`` at once."""
        self._num_samples, self._is_measured = num_samples, False
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._resident = begin_peak()
        self._before = self._used()

    def room(self) -> Room:
        """The memory of the model's device, with what other programs have left of it."""
        if self._is_cuda:
            free, _ = torch.cuda.mem_get_info(self._device)
            return Room(free + torch.cuda.memory_reserved(self._device), self._used())
        return host_room()

    @property
    def sample_bytes(self) -> float:
        """What the last step took for each sample, beside ``fixed_bytes``; 0 if it has not come to
        a backward."""
        if not self._is_measured:
            return 0.0
        if self._is_cuda:
            taken = int(torch.cuda.max_memory_allocated(self._device)) - self._before
        else:
            taken = peak() - self._resident
        return max(0, taken) / max(1, self._num_samples)

    @property
    def fixed_bytes(self) -> int:
        """What was in use when the last step began: parameters, the optimizer's state, gradients
        and buckets, the data set, the interpreter and its libraries."""
        return self._before

    def most(self) -> int:
        """How many samples at once leave enough of the device's memory; 0 if that is unknown."""
        if not self.sample_bytes:
            return 0
        room = self.room()
        return max(1, int((room.limit - _least(room) - self._before) / self.sample_bytes))

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _used(self) -> int:
        if self._is_cuda:
            return int(torch.cuda.memory_allocated(self._device))
        return self.room().used

    def _look(self, _: torch.Tensor) -> None:
        self._is_measured = True
        if self._is_cuda:
            return
        room = own_room()
        if room is not None and room.left < _least(room) and self._num_samples > 1:
            raise MemoryError(
                f"{self._num_samples} samples at once leave {room.left >> 20} MiB of "
                f"{room.limit >> 20}; {_least(room) >> 20} are needed beside them"
            )


def _least(room: Room) -> int:
    return max(_LEAST_LEFT, int(_PART_LEFT * room.limit))
