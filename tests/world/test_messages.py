"""Messages that their receiver refuses, or that nobody receives."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck._core.wire.payload import Packed
from potluck.errors import Desync, OperationTimeout, PeerLost
from support.worlds import WORLD_KINDS, open_world


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_a_message_beyond_the_receivers_bound_takes_no_memory_and_ends_the_group(kind: str) -> None:
    def act(ctx: DistributedContext) -> str:
        with pytest.raises(Desync) as caught:
            if ctx.rank == 1:
                ctx.send_message(np.zeros(100_000), 0, tag=3)
            else:
                ctx.recv_message(max_bytes=799_999)
            ctx.barrier()
        return str(caught.value)

    with open_world(kind, 2) as world:
        for told in world.run(act):
            assert "rank 1 sent rank 0 a message of 800000 bytes with tag 3" in told
            assert "at most 799999 (max_bytes)" in told


def test_messages_that_nobody_receives_are_counted() -> None:
    def act(ctx: DistributedContext) -> None:
        with pytest.raises(Desync, match="rank 1 sent rank 0 1024 messages that nobody receives"):
            if ctx.rank == 1:
                for _ in range(1025):
                    ctx.send_message(None, 0, tag=1, async_op=True)
            else:
                ctx.recv_message(tag=2)
            ctx.barrier()

    with open_world("inproc", 2) as world:
        world.run(act)


def test_a_header_of_more_values_than_the_bound_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile = b"\xdd" + (2 << 20).to_bytes(4, "big") + b"\x80" * (2 << 20)
    monkeypatch.setattr(
        "potluck._core.context.messages.pack", lambda payload: Packed(hostile, [], 0)
    )

    def act(ctx: DistributedContext) -> None:
        with pytest.raises(Desync, match=r"can't be read: .*has more than 1048576 values"):
            if ctx.rank == 1:
                ctx.send_message(None, 0)
            else:
                ctx.recv_message()
            ctx.barrier()

    with open_world("inproc", 2) as world:
        world.run(act)


def test_a_wait_for_a_message_has_a_deadline_and_ends_with_its_sender() -> None:
    def wait(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            with pytest.raises(OperationTimeout):
                ctx.recv_message(1, timeout=0.2)

    def leave(ctx: DistributedContext) -> None:
        if ctx.rank == 1:
            ctx.close()
        else:
            with pytest.raises(PeerLost):
                ctx.recv_message(1)

    for act in (wait, leave):
        with open_world("inproc", 2) as world:
            world.run(act)


def test_a_thread_without_a_turn_keeps_its_deadline_and_the_group_goes_on() -> None:
    def act(ctx: DistributedContext) -> None:
        if ctx.rank == 1:
            assert ctx.recv_message(0).payload == "go"
            ctx.send_message("for the first", 0, tag=1)
            return
        inbox = ctx._present_inbox()
        found: list[object] = []
        first = threading.Thread(target=lambda: found.append(ctx.recv_message(1, tag=1).payload))
        first.start()
        while not inbox.lock.locked():
            assert first.is_alive()
        with pytest.raises(OperationTimeout, match=r"had no turn within 0\.2 s: another"):
            ctx.recv_message(1, tag=2, timeout=0.2)
        ctx.send_message("go", 1)
        first.join(20)
        assert found == ["for the first"]

    with open_world("inproc", 2) as world:
        world.run(act)


def test_a_bound_that_is_none_costs_no_message() -> None:
    def act(ctx: DistributedContext) -> None:
        if ctx.rank == 1:
            ctx.send_message("kept", 0)
            return
        with pytest.raises(TypeError, match="max_bytes is '1'"):
            ctx.recv_message(1, max_bytes="1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max_bytes is -1"):
            ctx.recv_message(1, max_bytes=-1)
        assert ctx.recv_message(1).payload == "kept"

    with open_world("inproc", 2) as world:
        world.run(act)
