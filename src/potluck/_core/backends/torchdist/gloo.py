"""Gloo, torch's library for CPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import numpy as np

from potluck._core.backends.addresses import own_address
from potluck._core.backends.torchdist.library import FLOATS, INTEGERS, OPS, TorchLibrary
from potluck._core.engine.arrays.layout import Array
from potluck._core.types import ReduceOp


class Gloo(TorchLibrary):
    """A Gloo group as a ``Library``. Arrays are in host memory."""

    name = "gloo"

    def _connect(self, store: Any) -> Any:
        gloo: Any = self._torch._C._distributed_c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            device = gloo.create_default_device()
        else:  # the network of the store; the host's name may resolve to another
            device = gloo.create_device(hostname=own_address(self.store))
        options._devices = [device]
        return gloo(store, self.rank, self.world_size, options)

    def can_reduce(self, op: ReduceOp, dtype: Any) -> bool:
        """See ``Library``. False for MIN and MAX of floats, where Gloo drops NaN."""
        if dtype.name in INTEGERS:
            return op in OPS
        return dtype.name in FLOATS and op in (ReduceOp.SUM, ReduceOp.PRODUCT)

    def _typed(self, array: Array) -> Any:
        if array.dtype.name == "bfloat16":
            return self._typed(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array if array.flags.writeable else array.copy())

    def _bytes(self, array: Array) -> Any:
        return self._typed(array.view(np.uint8))
