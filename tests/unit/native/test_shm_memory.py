"""The memory of a native channel stays for as long as somebody may look into it."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from potluck._core import native
from potluck._core.collectives.plan import Operation
from potluck._core.engine.fingerprint import OPERATIONS, REDUCTIONS
from potluck._core.transport import memory
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import code_of

pytestmark = pytest.mark.skipif(
    not native.available or sys.platform != "linux", reason="needs the native core and a memfd"
)

NUM_SLOTS, SLOT_BYTES = 4, 4096


def test_a_call_may_be_waited_for_when_the_shared_memory_was_given_back() -> None:
    fd, shared = memory.create(native.core.shm_bytes(2, NUM_SLOTS, SLOT_BYTES))
    engine = native.core.ShmEngine(OPERATIONS, REDUCTIONS)
    channel = native.core.ShmChannel(
        memory=shared,
        rank=0,
        world=2,
        num_slots=NUM_SLOTS,
        slot_bytes=SLOT_BYTES,
        small_bytes=SLOT_BYTES,
        spin_s=0.0,
        salt=0,
        sequence=0,
        engine=engine,
        error_of=RuntimeError,
    )
    array = np.ones(10, np.float32)
    call = channel.start(
        Operation.ALL_REDUCE,
        code_of(array.dtype),
        ReduceOp.SUM,
        0,
        [10],
        array.ctypes.data,
        array.ctypes.data,
        channel.take_sequence(),
        60.0,
        1,
    )
    # As when a context is closed while another thread is about to wait: its engine ends, the call
    # does not (there is no rank 1), and nobody else has the channel.
    engine.close()
    del channel
    shared.close()
    os.close(fd)
    assert not call.wait(0.05)
    assert call.failure() == ("pending", -1, True, 0)


def test_operations_or_reductions_in_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match="operations in another order"):
        native.core.ShmEngine(OPERATIONS[::-1], REDUCTIONS)
    with pytest.raises(ValueError, match="reductions in another order"):
        native.core.ShmEngine(OPERATIONS, REDUCTIONS[::-1])
    with pytest.raises(ValueError, match="missing"):
        native.core.ShmEngine(OPERATIONS[:-1], REDUCTIONS)
    with pytest.raises(ValueError, match="missing"):
        native.core.ShmEngine(OPERATIONS, REDUCTIONS[:-1])
