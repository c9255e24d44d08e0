"""A hold on deadlines: ranks wait for one that sits at a breakpoint longer than their timeouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck._core.engine import patience
from support.worlds import NATIVE_KINDS, open_world

TIMEOUT_S = 0.2
KINDS = ("inproc", "tls", "shm", *NATIVE_KINDS[:1])


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """The hold is the process's: it must not last into other tests."""
    yield
    patience._until = 0.0
    patience.hold(0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_a_rank_makes_late_are_waited_for(kind: str) -> None:
    is_called = threading.Event()

    def run(ctx: DistributedContext) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            is_called.wait()
            time.sleep(3 * TIMEOUT_S)
            assert ctx.all_reduce(np.ones(3))[0] == 2
            assert ctx.recv(np.zeros(2), 0)[0] == 7
            time.sleep(3 * TIMEOUT_S)
            ctx.send(np.full(2, 8.0), 0)
            return
        is_called.set()
        assert ctx.all_reduce(np.ones(3), timeout=TIMEOUT_S)[0] == 2
        ctx.send(np.full(2, 7.0), 1, timeout=TIMEOUT_S)
        assert ctx.recv(np.zeros(2), 1, timeout=TIMEOUT_S)[0] == 8

    patience.hold(time.monotonic() + 600)
    with open_world(kind, 2) as world:
        world.run(run)
