"""The consensus holds in every order of events of three nodes, and each of its rules is needed.

The model and its search are in ``support/paxos_model.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

from potluck._core.cluster.membership import paxos, view
from potluck._core.cluster.membership.paxos import Evidence, PaxosAcceptor, Round
from potluck._core.wire import nodes as wire
from potluck._core.wire.nodes import StableRecord, View, ViewMember
from support import paxos_model
from support.paxos_model import MEMBERS, Model, Violation, newcomer, three
from support.paxos_node import HISTORY, Local, start, thaw

pytestmark = pytest.mark.costly

# ---------------------------------------------------------------- the protocol holds


@pytest.mark.parametrize(
    ("first", "num_proposals", "num_crashes", "at_least"),
    [
        pytest.param(three, 2, 1, 250_000, id="two proposers and a crash"),
        pytest.param(three, 3, 0, 400_000, id="three proposals and no crash"),
        pytest.param(three, 1, 2, 30_000, id="one proposer and two crashes"),
        pytest.param(newcomer, 2, 1, 1_000, id="a newcomer with a higher epoch"),
    ],
)
def test_no_order_of_events_breaks_an_invariant(
    first: Callable[..., Model], num_proposals: int, num_crashes: int, at_least: int
) -> None:
    model = first(num_proposals=num_proposals, num_crashes=num_crashes)
    model.run()
    assert model.num_states >= at_least
    assert model.views, "views were decided"


@pytest.mark.parametrize(
    ("first", "bounds", "at_least"),
    [
        pytest.param(newcomer, (2, 0, 1), 90_000, id="two proposals with a newcomer, one ban"),
        pytest.param(three, (1, 1, 1), 50_000, id="one proposal, a crash, one ban"),
        pytest.param(three, (1, 0, 2), 12_000, id="one proposal, two bans"),
        pytest.param(
            three, (2, 0, 1), 100_000, id="two proposals, one ban", marks=pytest.mark.long
        ),
        pytest.param(
            newcomer, (2, 0, 2), 1_000_000, id="a newcomer, two bans", marks=pytest.mark.long
        ),
        pytest.param(
            newcomer, (2, 1, 1), 5_000_000, id="a newcomer, a crash, a ban", marks=pytest.mark.long
        ),
    ],
)
def test_bans_that_not_all_know_of_and_forks_break_no_invariant(
    first: Callable[..., Model], bounds: tuple[int, int, int], at_least: int
) -> None:
    """A node that learns of a ban is deaf to the banned node, and may leave for a fork; what others
    decide without knowing of the ban counts as before."""
    num_proposals, num_crashes, num_bans = bounds
    model = first(num_proposals=num_proposals, num_crashes=num_crashes, num_bans=num_bans)
    model.run()
    assert model.num_states >= at_least
    assert model.views


def test_quorums_meet_whichever_of_the_dead_are_subtracted() -> None:
    """Of two quorums of one view, with members subtracted that accepted neither: both can be a
    majority only if a member is in both. All views of up to five members, all ways to choose."""
    num_pairs = 0
    for size in range(1, 6):
        members = tuple(ViewMember(f"n{i}", 1, i) for i in range(size))
        # What each proposer has of a member: its vote (v), its death (d), neither (-). Who gave one
        # proposer a vote is not subtracted by the other: leases, or its disk, would tell.
        for ways in product(["vv", "v-", "-v", "--", "d-", "-d", "dd"], repeat=size):
            sides = []
            for i in (0, 1):
                votes = {m.node for m, way in zip(members, ways, strict=True) if way[i] == "v"}
                dead = {m.node for m, way in zip(members, ways, strict=True) if way[i] == "d"}
                sides.append((votes, view.has_majority(members, votes, dead)))
            (one, first), (other, second) = sides
            if first and second:
                num_pairs += 1
                assert one & other
    assert num_pairs > 1000


def test_the_model_takes_all_of_the_state_along() -> None:
    """Whoever adds a field to the core has to add it to ``freeze`` and ``thaw``."""
    node, storage, _ = thaw(start("a", 1, StableRecord(), View(HISTORY, 1, MEMBERS)))
    fixed = {
        "me",
        "incarnation",
        "backoff",
        "_storage",
        "_outbox",
        "_holds_lease",
        "_hears",
        "_on_installed",
        "_on_left",
        "barred",
        "awaited",  # why the last round failed; decides nothing in the agreement
    }
    assert set(vars(node)) - fixed == {"view", "paxos", "subtracted", "resigned", "wants"}
    assert node.paxos is not None
    assert set(vars(node.paxos)) == {"me", "view", "acceptor", "proposer"}
    assert set(vars(node.paxos.acceptor)) == {"promised", "accepted", "promised_to"}
    assert set(vars(node.paxos.proposer)) == {
        "me",
        "view",
        "highest",
        "round",
        "reports",
    }
    assert set(vars(storage)) == {"record", "_outbox", "_num_saves", "_waiting"}
    in_round = {"ballot", "asked", "ended", "build", "ends_at", "evidence", "proposal", "accepted"}
    assert {each.name for each in fields(Round)} == in_round
    in_evidence = {"me", "view", "promises", "promised_to", "reports"}
    assert {each.name for each in fields(Evidence)} == in_evidence


# ---------------------------------------------------------------- and its rules are needed


def violation(first: Callable[..., Model] = three, **bounds: Any) -> str:
    with pytest.raises(Violation) as caught:
        first(**({"num_proposals": 2, "num_crashes": 1} | bounds)).run()
    return str(caught.value)


def test_without_the_promise_two_views_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptor that accepts older ballots than it promised."""

    def accept(self: PaxosAcceptor, proposal: wire.Proposal) -> bool:
        self.accepted, self.promised_to = proposal, frozenset()
        return True

    monkeypatch.setattr(PaxosAcceptor, "refusal", lambda self, proposal, objection: None)
    monkeypatch.setattr(PaxosAcceptor, "accept", accept)
    assert "two views follow" in violation(num_crashes=0)


def test_with_minorities_two_views_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paxos, paxos_model):
        monkeypatch.setattr(module, "has_majority", lambda members, acks, subtracted=(): bool(acks))
    assert "two views follow" in violation(num_crashes=0)


def test_with_both_halves_of_an_even_split_two_views_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half(members: tuple[ViewMember, ...], acks: Any, subtracted: Any = ()) -> bool:
        living = [member for member in members if member.node not in subtracted]
        return 2 * sum(member.node in acks for member in living) >= len(living)

    for module in (paxos, paxos_model):
        monkeypatch.setattr(module, "has_majority", half)
    assert "two views follow" in violation(newcomer, num_crashes=0)


def test_a_proposer_that_ignores_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paxos, "_may_be_decided", lambda *_: False)
    assert "two views follow" in violation()


def test_a_proposal_called_void_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paxos, "_is_void", lambda *_: True)
    assert "two views follow" in violation()


def test_a_node_that_forgets_what_it_accepted() -> None:
    assert "two views follow" in violation(forgetful="abc")


def test_a_node_that_forgets_its_epoch() -> None:
    assert "went from epoch 9 back to 6" in violation(newcomer, forgetful="c")


def test_a_death_subtracted_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead may have accepted a view without the node that subtracts it."""
    find = Model._about

    def about(self: Model, index: int, local: Local, other: Local) -> Iterator[tuple[int, Any]]:
        if other is local:
            return iter(())
        return find(self, index, local, replace(other, left_out=frozenset()))

    monkeypatch.setattr(Model, "_about", about)
    assert "two views follow" in violation()


def test_a_round_that_subtracts_whom_it_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by this check: a member promised, accepted a newer ballot, and ended; its report told
    so, and its vote was subtracted from the round that it had promised to."""
    monkeypatch.setattr(paxos.Proposer, "lost", lambda self, node: None)
    assert "two views follow" in violation()


def test_members_that_a_ban_leaves_may_not_decide_without_a_majority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The banned leader of two may not know, and decides alone: the other one has to fork."""

    def all_left(members: tuple[ViewMember, ...], acks: Any, subtracted: Any = ()) -> bool:
        return view.has_majority(members, acks, subtracted) or set(acks) == {"b"}

    for module in (paxos, paxos_model):
        monkeypatch.setattr(module, "has_majority", all_left)
    assert "two views follow" in violation(newcomer, num_crashes=0, num_bans=1)
