"""The texts of failures, and their way to the other ranks and back."""

from __future__ import annotations

import pytest

from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.engine.call import Call
from potluck._core.engine.failures.group_errors import (
    abort_of,
    desync,
    error_of,
    message_mismatch,
    overdue,
    peer_lost,
    refusal_of,
)
from potluck._core.types import Group, Member
from potluck._core.wire.frames import Abort
from potluck.errors import (
    Desync,
    Evicted,
    GroupClosed,
    GroupError,
    LinkError,
    OperationTimeout,
    PeerLost,
    ProtocolError,
    Refused,
    RemoteError,
)

GROUP = Group(4, 1, (Member("a", host="10.0.0.1", port=7), Member("b"), Member("c")))


class Item:
    def __init__(self, *waits: tuple[int, str]) -> None:
        self._waits = list(waits)

    def awaited(self) -> list[tuple[int, str]]:
        return self._waits

    def __str__(self) -> str:
        return "all_reduce(x) #3"


def test_a_lost_peer_is_named_with_operation_step_and_cause() -> None:
    cause = LinkError("the cable")
    error = peer_lost(GROUP, 0, cause, Item((2, "step 4 of 9, COPY chunk 1")))
    assert isinstance(error, PeerLost)
    assert str(error) == (
        "lost rank 0 (worker a at 10.0.0.1:7) in epoch 4 during all_reduce(x) #3 on rank 1 "
        "(worker b), at step 4 of 9, COPY chunk 1: Connection closed by peer: the cable"
    )
    assert (error.rank, error.epoch, error.operation) == (0, 4, "all_reduce(x) #3")
    assert error.certain
    assert error.__cause__ is cause
    idle = peer_lost(GROUP, 2, cause, None)
    assert str(idle) == "lost rank 2 (worker c) in epoch 4: Connection closed by peer: the cable"
    assert idle.operation == ""


def test_only_an_ended_link_is_certain() -> None:
    assert peer_lost(GROUP, 0, LinkError("x"), None).certain
    assert not peer_lost(GROUP, 0, Refused("x", "busy"), None).certain
    assert not peer_lost(GROUP, 0, ProtocolError("x"), None).certain


def test_a_stale_group_is_my_own_eviction() -> None:
    error = peer_lost(GROUP, 0, Refused("epoch 4 is over", "stale"), None)
    assert isinstance(error, Evicted)
    assert error.rank == 1
    assert "gone on without rank 1 (worker b): epoch 4 is over" in str(error)


@pytest.mark.parametrize("cls", [PeerLost, OperationTimeout, Desync, RemoteError])
def test_a_refusal_says_why_the_group_is_over(cls: type[GroupError]) -> None:
    reason = cls("the reason", rank=2, epoch=4, certain=True)
    refusal = refusal_of(GROUP, reason)
    told = peer_lost(GROUP, 0, Refused(f"a refused: {refusal.reason}", refusal.code), None)
    assert type(told) is cls
    assert (told.rank, told.epoch, told.certain) == (2, 4, True)
    assert "the reason" in str(told)


def test_a_group_that_ended_because_of_me_is_my_eviction() -> None:
    for cls in (PeerLost, OperationTimeout):
        refusal = refusal_of(GROUP, cls("lost rank 1", rank=1))
        told = peer_lost(GROUP, 0, Refused(refusal.reason, refusal.code), None)
        assert type(told) is Evicted
        assert told.rank == 1


def test_a_refusal_after_an_orderly_end_names_who_left() -> None:
    refusal = refusal_of(GROUP, GroupClosed("closed"))
    assert refusal.code == "left"
    told = peer_lost(GROUP, 0, Refused(refusal.reason, refusal.code), None)
    assert isinstance(told, PeerLost)
    assert told.rank == 0
    assert "left the group" in str(told)


@pytest.mark.parametrize(
    "code",
    ["over", "over:", "over:PeerLost:x:1", "over:PeerLost:--5:1", "over:PeerLost:9999999:1",
     "over:PeerLost:1:2", "over:PeerLost:٣:1", "over:PeerLost:1:1\n", "over::1:1"],
)  # fmt: skip
def test_codes_that_a_stranger_made_up_are_only_refusals(code: str) -> None:
    error = peer_lost(GROUP, 0, Refused("no", code), None)
    assert type(error) is PeerLost
    assert error.rank == 0


def test_a_deadline_names_what_is_missing_and_who_holds_it_up() -> None:
    item = Item((0, "step 1"), (2, "step 5"))
    error = overdue(GROUP, item)
    assert error.rank == 0
    assert str(error) == (
        "all_reduce(x) #3 in epoch 4 exceeded its timeout on rank 1 (worker b); it still waits for "
        "rank 0 (worker a at 10.0.0.1:7) (step 1); rank 2 (worker c) (step 5)"
    )
    named = overdue(GROUP, item, 2)
    assert named.rank == 2
    assert "rank 2 (worker c) has not made this call; it still waits for" in str(named)
    assert "any rank (receive)" in str(overdue(GROUP, Item((-1, "receive"))))
    assert overdue(GROUP, Item((-1, "receive"))).rank == -1
    assert "its own last segment" in str(overdue(GROUP, Item()))


def test_a_disagreement_names_both_sides() -> None:
    theirs = Call(Operation.BARRIER, Algorithm.RING, "uint8", (0,)).fingerprint
    error = desync(GROUP, 2, Item(), theirs)
    assert error.rank == 2
    assert str(error) == (
        "ranks disagree in epoch 4: rank 1 (worker b) called all_reduce(x) #3, but rank 2 "
        "(worker c) called barrier (all ranks must make the same calls: operation, dtype, shape, "
        "op, root, algorithm, order)"
    )
    assert "but rank 2 (worker c) another one (all" in str(desync(GROUP, 2, Item(), 7))


def test_a_message_that_does_not_fit_names_both_sides() -> None:
    error = message_mismatch(GROUP, 2, "recv(float32, shape (4,))", 12, 3)
    assert "called recv(float32, shape (4,)), but rank 2 (worker c) sent 12 bytes of float32" in (
        str(error)
    )
    assert "sent 12 bytes of an unknown dtype" in str(message_mismatch(GROUP, 2, "recv", 12, 99))


@pytest.mark.parametrize(
    "cls", [PeerLost, OperationTimeout, Desync, RemoteError, GroupClosed, GroupError]
)
def test_an_abort_is_the_same_error_on_the_other_side(cls: type[GroupError]) -> None:
    error = cls("text", rank=2, epoch=4, operation="op", certain=True)
    other = error_of(GROUP, abort_of(error), None)
    assert type(other) is cls
    assert (other.rank, other.epoch, other.operation, other.certain) == (2, 4, "op", True)
    assert str(other) == "text"


def test_a_disagreement_told_by_another_also_says_what_was_called_here() -> None:
    error = error_of(GROUP, abort_of(Desync("they differ", rank=0)), Item())
    assert str(error) == "they differ; this rank, 1, called all_reduce(x) #3"
    assert error.operation == "all_reduce(x) #3"
    assert str(error_of(GROUP, abort_of(Desync("0 did x, 1 did y", rank=1)), Item())) == (
        "0 did x, 1 did y"  # this rank is the one of which it tells
    )


def test_another_ranks_eviction_is_a_loss_here() -> None:
    assert type(error_of(GROUP, Abort("Evicted", "x", 2), None)) is PeerLost
    assert type(error_of(GROUP, Abort("Evicted", "x", 1), None)) is Evicted


def test_nonsense_in_an_abort_is_harmless() -> None:
    for rank in (-2, 3, 2**40):
        error = error_of(GROUP, Abort("SystemExit", "x", rank), None)
        assert type(error) is GroupError
        assert error.rank == -1
