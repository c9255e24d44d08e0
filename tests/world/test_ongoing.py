"""What is under way has a name for as long as it is: so an agent learns of a call that hangs."""

from __future__ import annotations

import time
from collections.abc import Hashable

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from support.worlds import WORLD_KINDS, open_world

WAIT_S = 20.0


def ongoing(ctx: DistributedContext, *, is_some: bool) -> list[Hashable]:
    """What is under way at ``ctx``, once something is, or nothing any more."""
    deadline = time.monotonic() + WAIT_S
    while bool(names := ctx.communicator.ongoing()) != is_some:
        assert time.monotonic() < deadline, names
    return names


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_a_call_that_waits_for_others_has_a_name_of_its_own(kind: str) -> None:
    with open_world(kind, 2) as world:
        world.run(lambda ctx: ctx.barrier())
        first, second = world.contexts
        names: list[list[Hashable]] = []

        def call_in_turn(ctx: DistributedContext) -> None:
            """Rank 1 calls once rank 0 waits for it."""
            if ctx is second:
                names.append(ongoing(first, is_some=True))
                for _ in range(100):
                    assert first.communicator.ongoing() == names[-1]
            ctx.all_reduce(np.ones(3))

        for _ in range(2):
            world.run(call_in_turn)
            ongoing(first, is_some=False)
        assert names[0] != names[1]


def test_a_receive_that_waits_for_a_message_is_under_way() -> None:
    with open_world("tls", 2) as world:
        first, second = world.contexts
        work = first.communicator.recv(np.zeros(1), 1, 7, timeout_s=WAIT_S)
        assert len(ongoing(first, is_some=True)) == 1
        second.communicator.send(np.ones(1), 0, 7, timeout_s=WAIT_S).wait()
        work.wait()
        ongoing(first, is_some=False)
