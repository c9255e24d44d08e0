"""Hostile bytes and messages for everything that decodes or decides in the control plane.

A decoder raises ProtocolError and nothing else; a core takes whatever a decoder lets through, and
its tables stay bounded.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import msgspec
import pytest

from potluck._core.cluster.home.node_state import NodeState
from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.roster import JobPolicy
from potluck._core.cluster.jobs.permissions import MAX_BYTES, DeferredMessages
from potluck._core.cluster.membership.failure_detector import MAX_PEERS
from potluck._core.cluster.membership.guard import MAX_RESIGNED
from potluck._core.cluster.topology.survey import Survey
from potluck._core.types import Member
from potluck._core.wire import facts, gathering, greeting, jobs, local, peers, worker_link
from potluck._core.wire import nodes as wire
from potluck._core.wire.format import MessageFormat
from potluck._core.wire.nodes import (
    MAX_HISTORIES,
    MAX_VIEW_BYTES,
    HistoryRecord,
    JobGroup,
    NodeMessage,
    Proposal,
    StableRecord,
    View,
)
from potluck.errors import ProtocolError
from support.cluster_sim.liars import over_the_wire
from support.hostile import Hostile
from support.membership_story import Member3, Story, view

FORMATS: list[tuple[MessageFormat, object]] = [
    (peers.MESSAGE, peers.PeerMessage),
    (greeting.GREETING, greeting.Greeting),
    (local.REQUEST, local.Request),
    (local.REPLY, local.Reply),
    (facts.MEASURING, facts.Measuring),
    (worker_link.TO_AGENT, worker_link.FromWorker),
    (worker_link.FROM_AGENT, worker_link.FromAgent),
    (gathering.ROSTER, tuple[Member, ...]),
]


@pytest.mark.parametrize(("form", "kind"), FORMATS, ids=lambda each: getattr(each, "name", ""))
def test_a_decoder_raises_one_error_for_whatever_bytes(form: MessageFormat, kind: object) -> None:
    chance = random.Random(form.name)
    hostile = Hostile(chance, ["a"])
    for _ in range(300):
        data = bytearray(msgspec.msgpack.encode(hostile.anything(kind)))
        way = chance.random()
        if way < 0.3:
            data = bytearray(chance.randbytes(chance.randint(0, 200)))
        elif way < 0.9 and data:
            for _ in range(chance.randint(1, 4)):
                at = chance.randrange(len(data) + 1)
                data[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 6))
        with contextlib.suppress(ProtocolError):
            form.decode(bytes(data))
    for depth in (100, 100_000):
        with pytest.raises(ProtocolError):
            form.decode(b"\x91" * depth)


@pytest.mark.parametrize("seed", range(6))
def test_the_membership_protocol_takes_whatever_its_decoder_lets_through(seed: int) -> None:
    chance = random.Random(seed)
    story: Story = Member3() if seed % 2 else Story(me="b")
    hostile = Hostile(chance, ["a", "b", "c", "z", "L", "job"])
    hostile.saw(view("abc"))
    for _ in range(1000):
        made = hostile.anything(NodeMessage)
        message = over_the_wire(made)
        if message is None:
            continue
        if not isinstance(message, wire.Heartbeat) or chance.random() < 0.5:
            hostile.saw(message)
        sender = chance.choice(["a", "c", "z", f"key{chance.randrange(10_000)}"])
        story.hear(sender, message, chance.choice([0, 1, 1, 2]))
        if chance.random() < 0.1:
            story.run(0.2)
    detector = story.node.detector
    assert len(detector.peers) <= MAX_PEERS
    assert len(story.node._agreement.resigned) <= MAX_RESIGNED
    assert len(story.node.record.histories) <= MAX_HISTORIES
    for peer in detector.peers.values():
        assert 0 <= peer.latency_s < 1e10, "no infinity, and no NaN"
        assert 0 <= peer.deviation_s < 1e10
    assert (
        detector._patience(next(iter(detector.peers.values()))) <= detector.timing.max_suspicion_s
    )
    data = msgspec.msgpack.encode(story.disk)
    assert msgspec.msgpack.decode(data, type=StableRecord) == story.disk


@pytest.mark.parametrize("seed", range(4))
def test_the_membership_of_a_job_takes_whatever_workers_say(seed: int) -> None:
    chance = random.Random(seed)
    hostile = Hostile(chance, ["0", "1", "2", "a"])
    state, _ = membership.begin("012", JobPolicy())
    for step in range(1000):
        said = hostile.anything(jobs.Event)
        said = jobs_event(said)
        if said is None or not any(each.name == said.worker for each in state.workers):
            continue
        if isinstance(said, worker_link.WorkerNote | worker_link.WorkerProgress | jobs.Started):
            continue  # the controller keeps these to itself
        if isinstance(said, jobs.OutputEnded | worker_link.ChaosDue | worker_link.Waiting):
            continue
        state, _ = membership.handle(state, said, step / 10)
        assert len(state.workers) == 3
        assert state.epoch < 1 << 31
        assert len(state.groups) < 100


def jobs_event(event: jobs.Event) -> jobs.Event | None:
    """``event`` as it arrives from a node; None if it is refused as malformed."""
    try:
        told = peers.MESSAGE.decode(peers.MESSAGE.encode(jobs.WorkerEvent("job", event))[4:])
    except ProtocolError:
        return None
    assert isinstance(told, jobs.WorkerEvent)
    return told.event


def test_facts_of_many_nodes_are_kept_of_linked_ones_only() -> None:
    survey = Survey(facts.NodeFacts("me"))
    hostile = Hostile(random.Random(1), ["a", "b"])
    for number in range(300):
        row = hostile.anything(facts.Facts)
        known = set(survey.rows)
        survey.heard(f"key{number}", msgspec.structs.replace(row, node=facts.NodeFacts("other")))
        assert set(survey.rows) == known, "facts about another node"
        survey.heard(row.node.node, row)
    survey.forget(())
    assert survey.rows == {}
    survey.topology(survey.row({}, {}), ("a", "b"))


def test_early_orders_of_any_kind_are_bounded() -> None:
    early, hostile = DeferredMessages(), Hostile(random.Random(2), ["a"])
    for number in range(2000):
        order = hostile.anything(jobs.FromLeader)
        try:
            early.keep_orders(f"node{number % 50}", order)
        except ProtocolError:
            continue
        assert early.nbytes <= MAX_BYTES
    assert early.take()


def test_an_agent_reads_back_the_largest_record_that_it_can_write(tmp_path: Path) -> None:
    """Views of the largest size, in all histories: an agent that can't read its record back does
    not start again."""
    members = tuple(Member(f"{'w' * 80}{i}", "a") for i in range(2900))
    histories = []
    for number in range(MAX_HISTORIES):
        large = View(f"L{number}", 6, view("abc").members, (JobGroup("job", 6, members),))
        assert 0.8 * MAX_VIEW_BYTES < len(msgspec.msgpack.encode(large)) < MAX_VIEW_BYTES
        histories.append(HistoryRecord(large, Proposal((7, "a"), 6, large)))
    record = StableRecord(6, tuple(histories))
    state = NodeState(tmp_path)
    state.write(record)
    state.close()
    again = NodeState(tmp_path)
    assert again.record == record
    again.close()
