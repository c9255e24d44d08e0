"""NCCL, NVIDIA's library for CUDA GPUs. Tests run it only where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from potluck._core.backends.library import ANY_SOURCE, FlatCall
from potluck._core.backends.torchdist.library import FLOATS, INTEGERS, OPS, TorchLibrary, left
from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.types import ReduceOp


class Nccl(TorchLibrary):
    """An NCCL group as a ``Library``. Arrays are tensors on this rank's GPU."""

    name = "nccl"
    tag_limit = 0

    def __post_init__(self) -> None:
        # So that a wait raises, instead of the watchdog ending the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        super().__post_init__()
        self.collectives[Operation.REDUCE_SCATTER] = self._reduce_scatter

    def _connect(self, store: Any) -> Any:
        nccl: Any = self._torch._C._distributed_c10d.ProcessGroupNCCL
        self._torch.cuda.set_device(self.device)
        options = nccl.Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        return nccl(store, self.rank, self.world_size, options)

    def can_reduce(self, op: ReduceOp, dtype: Any) -> bool:
        name = str(dtype).removeprefix("torch.")
        if op not in OPS or name not in FLOATS | INTEGERS:
            raise TypeError(
                f"NCCL can't combine {name} with op={op.value!r}; cast the tensor first"
            )
        return True

    def _reduce_scatter(self, call: FlatCall, deadline: float) -> None:
        options = self._options("ReduceScatterOptions", deadline, reduceOp=self._op(call))
        arrays = call.result, call.source
        self._run(lambda: self._group._reduce_scatter_base(*arrays, options), deadline)

    def settle(self) -> None:
        self._torch.cuda.current_stream(self.device).synchronize()

    def check_message(self, peer: int, tag: int) -> None:
        if peer == ANY_SOURCE:
            raise ValueError("NCCL can't receive from any rank; name the sender")

    def _one(self) -> Array:
        one: Array = self._torch.ones(1, dtype=self._torch.int32, device=self.device)
        return one

    def _typed(self, array: Array) -> Any:
        return array

    def _bytes(self, array: Array) -> Any:
        return array.view(self._torch.uint8)

    def _run(self, start: Callable[[], Any], deadline: float) -> None:
        def call() -> None:
            self._torch.cuda.set_device(self.device)  # a setting of the thread
            start().wait(left(deadline))
            self._torch.cuda.current_stream(self.device).synchronize()

        self._translate(call)
