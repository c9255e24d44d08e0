"""One node of the model check (``paxos_model.py``): the real objects, as values that compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from potluck._core.cluster.membership.agreement import ViewAgreement
from potluck._core.cluster.membership.outbox import Outbox, StableStorage
from potluck._core.cluster.membership.paxos import Evidence, PaxosInstance, Round
from potluck._core.cluster.membership.view import following
from potluck._core.wire.nodes import StableRecord, View, ViewMember

HISTORY = "h"


def no_lease(member: ViewMember, now: float) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Wish:
    """The view that a proposer wants: ``kept`` members and newcomers ``joining``."""

    view: View
    kept: tuple[str, ...]
    joining: tuple[tuple[str, int], ...] = ()

    def __call__(self, epoch: int) -> View:
        return following(
            self.view,
            epoch,
            kept=self.kept,
            joining=self.joining,
            reason=f"after {self.view.epoch}",
        )


@dataclass(frozen=True, slots=True)
class Local:
    """One node: what is in memory (``None`` while it is down), on disk, on its way to the disk, and
    what the model remembers of it. ``used``: the highest epoch it ever used. ``left_out``: pairs
    (incarnation, node) for each node that an incarnation accepted a view without. ``barred``: the
    nodes that it knows to be banned."""

    node: str
    incarnation: int
    memory: tuple[Any, ...] | None
    record: StableRecord
    disk: StableRecord
    writes: tuple[tuple[StableRecord, Any], ...] = ()
    used: int = 0
    left_out: frozenset[tuple[int, str]] = frozenset()
    num_proposals: int = 0
    barred: frozenset[str] = frozenset()

    @property
    def view(self) -> View | None:
        return None if self.memory is None else self.memory[0]

    @property
    def subtracted(self) -> frozenset[ViewMember]:
        return frozenset() if self.memory is None else self.memory[1]


def freeze(node: ViewAgreement) -> tuple[Any, ...]:
    """All that ``node`` has in memory, as values."""
    known = (
        node.view,
        frozenset(node.subtracted),
        tuple(sorted(node.resigned.items())),
        node.wants,
    )
    if node.paxos is None:
        return (*known, None, None)
    mine, its = node.paxos.acceptor, node.paxos.proposer
    round_: Any = its.round
    if round_ is not None:
        seen = round_.evidence
        round_ = (
            (round_.ballot, round_.asked, round_.ended, round_.build),
            tuple(sorted(seen.promises.items())),
            tuple(sorted(seen.promised_to.items())),
            (round_.proposal, frozenset(round_.accepted)),
        )
    votes = (mine.promised, mine.accepted, mine.promised_to)
    return (*known, votes, (its.highest, tuple(sorted(its.reports.items())), round_))


def thaw(local: Local) -> tuple[ViewAgreement, StableStorage, Outbox]:
    """The real objects of ``local``, which is up."""
    outbox = Outbox()
    storage = StableStorage(local.record, outbox)
    for _, then in local.writes:
        storage._num_saves += 1
        storage._waiting[storage._num_saves] = then
    node = ViewAgreement(local.node, local.incarnation, storage, outbox, 0.0, holds_lease=no_lease)
    node.barred = local.barred
    assert local.memory is not None
    view, subtracted, resigned, node.wants, votes, proposing = local.memory
    node.view, node.subtracted, node.resigned = view, set(subtracted), dict(resigned)
    if votes is not None:
        node.paxos = PaxosInstance(local.node, view)
        mine, its = node.paxos.acceptor, node.paxos.proposer
        mine.promised, mine.accepted, mine.promised_to = votes
        its.highest, reports, round_ = proposing
        its.reports.update(reports)
        if round_ is not None:
            (ballot, asked, ended, build), promises, promised_to, (proposal, accepted) = round_
            seen = Evidence(local.node, view, dict(promises), dict(promised_to), its.reports)
            its.round = Round(ballot, asked, ended, build, 0.0, seen, proposal, set(accepted))
    return node, storage, outbox


def start(node: str, incarnation: int, record: StableRecord, view: View | None = None) -> Local:
    """A node that has just started; in ``view``, if there is one."""
    outbox = Outbox()
    agreement_ = ViewAgreement(
        node, incarnation, StableStorage(record, outbox), outbox, 0.0, holds_lease=no_lease
    )
    if view is None:
        agreement_.wants = HISTORY
    else:
        agreement_.view, agreement_.paxos = view, PaxosInstance(node, view)
    return Local(node, incarnation, freeze(agreement_), record, record, used=record.installed)
