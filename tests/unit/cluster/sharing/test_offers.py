"""What machines tell each other of whose jobs they run, and what each holds to by itself."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.links.local import Commands
from potluck._core.cluster.names import NodeNames
from potluck._core.cluster.sharing.offers import Offers, SharingStore
from potluck._core.cluster.sharing.rules import Kept
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.cluster.trust.credentials import signed
from potluck._core.transport.credentials import node_id_of
from potluck._core.wire import local
from potluck._core.wire.jobs import JobSpec
from potluck._core.wire.peers import Offer, Rule
from support.disk import changes_by_this_thread

MINE, ADAS, EVES = (Ed25519PrivateKey.generate() for _ in range(3))
ME, ADA, EVE = (node_id_of(key.public_key()) for key in (MINE, ADAS, EVES))


class Machine:
    """Links and commands of an agent: what it sends is written down."""

    def __init__(self, home: Path, rule: Rule) -> None:
        self.nodes = (ADA, EVE)
        self.sent: list[tuple[str, Offer]] = []
        self.on_linked: list[Any] = []
        self.changes = 0
        self.out: set[str] = set()
        self.replies: list[local.Reply] = []
        names = NodeNames(ME, "me")
        names.met(ADA, "ada")
        names.met(EVE, "eve")
        links: Any = self
        store = SharingStore(home)
        if store.read() == Kept():
            store.write(Kept(rule))
        self.offers = Offers(
            ME,
            names,
            links,
            links,
            store=store,
            objects_to=lambda node: "it is out" if node in self.out else None,
            on_note=lambda text: None,
        )
        self.offers.listeners.append(self.changed)

    def on(self, message: object, take: object) -> None:
        pass

    def send(self, node: str, offer: Offer) -> bool:
        self.sent.append((node, offer))
        return True

    def changed(self) -> None:
        self.changes += 1

    def take(self, reply: local.Reply) -> None:
        self.replies.append(reply)


def job_of(starter: str, **options: Any) -> JobSpec:
    given = {"package": bytes(32), "versions": own_versions(), **options}
    return JobSpec(job="train-1", script="train.py", starter=starter, **given)


def test_a_leader_can_not_pass_a_job_off_as_anothers(tmp_path: Path) -> None:
    """Neither as one of a member that is allowed here, nor as this machine's own: with that a
    leader would start any file here, with the owner's whole environment."""
    offers = Machine(tmp_path, "none").offers
    asyncio.run(offers.decide(ADA, is_allowed=True))
    assert offers.refuses(signed(job_of(ADA), ADAS)) == ""
    assert offers.refuses(signed(job_of(ME), MINE)) == ""
    forged = (job_of(ADA), signed(job_of(ADA), EVES), job_of(ME, package=None))
    for spec in forged:
        assert "has no signature of that node" in offers.refuses(spec)
    assert "does not let it run jobs of eve" in offers.refuses(signed(job_of(EVE), EVES))


def test_a_job_of_a_node_that_is_not_in_is_refused_under_every_rule(tmp_path: Path) -> None:
    """The list of this machine decides, whatever the leader says: a banned node's job, and one by
    a key that nobody admitted."""
    for rule in ("all", "ask", "none"):
        machine = Machine(tmp_path / rule, rule)  # type: ignore[arg-type]
        asyncio.run(machine.offers.decide(ADA, is_allowed=True))
        spec = signed(job_of(ADA), ADAS)
        assert machine.offers.refuses(spec) == ""
        machine.out.add(ADA)
        assert machine.offers.refuses(spec) == "it is out"


def test_what_a_banned_node_was_allowed_is_over_also_if_it_comes_back(tmp_path: Path) -> None:
    for rule, left in (
        ("ask", Offer("ask", (), (EVE,))),
        ("none", Offer("none", (), (EVE,))),
        ("all", Offer("all", (), (EVE, ADA))),
    ):
        machine = Machine(tmp_path / rule, rule)  # type: ignore[arg-type]
        for node in (ADA, EVE):
            asyncio.run(machine.offers.decide(node, is_allowed=node == ADA))
        asyncio.run(machine.offers.barred([ADA]))
        assert machine.offers.mine == left
        assert machine.offers.refusal(ME, ADA), "not without a question"
        assert Machine(tmp_path / rule, rule).offers.mine == left, "kept"  # type: ignore[arg-type]
        before = machine.changes
        asyncio.run(machine.offers.barred([ADA]))
        assert machine.changes == before, "nothing is written or told again"


def test_each_change_is_told_to_all_and_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "ask")
    assert machine.offers.undecided() == (ADA, EVE)
    asyncio.run(machine.offers.decide(ADA, is_allowed=True))
    asyncio.run(machine.offers.pause(True))
    told = [offer for node, offer in machine.sent if node == EVE]
    assert told == [Offer("ask", (ADA,)), Offer("ask", (ADA,), is_paused=True)]
    assert machine.changes == 2
    again = Machine(tmp_path, "all").offers.mine
    assert again == Offer("ask", (ADA,), is_paused=True), "the rule that they were made under, too"


def test_a_node_that_told_nothing_is_not_used_and_does_not_leave_a_job(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "all")
    assert machine.offers.objection(ADA, ME) == "it has not told yet whose jobs it runs"
    assert machine.offers.refusal(ADA, ME) == ""
    machine.offers._received(ADA, Offer("none"))
    assert machine.offers.objection(ADA, ME) == machine.offers.refusal(ADA, ME) != ""


def test_a_command_of_the_owner_is_answered(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "all")
    client: Any = machine
    requests = (local.ShareRequest("deny", ADA), local.ShareRequest("pause"))
    replies = [asyncio.run(machine.offers._asked(request, client)) for request in requests]
    assert replies == [
        local.CommandResult(True, f"jobs of ada ({ADA[:8]}) are denied here"),
        local.CommandResult(True, "paused"),
    ]


def test_decisions_are_kept_by_another_thread_and_none_is_lost(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "ask")
    offers = machine.offers

    async def story() -> list[str]:
        with changes_by_this_thread(tmp_path) as changes:
            await asyncio.gather(
                offers.decide(ADA, is_allowed=True),
                offers.pause(True),
                offers.decide(EVE, is_allowed=False),
            )
        return changes

    assert asyncio.run(story()) == []
    assert Machine(tmp_path, "ask").offers.mine == offers.mine
    assert offers.mine == Offer("ask", (ADA,), (EVE,), is_paused=True)


def test_a_decision_that_can_not_be_kept_does_not_hold(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "home", "ask")
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").write_text("no folder")
    commands, client = Commands(), cast(Any, machine)
    commands.on(local.ShareRequest, machine.offers._asked)
    asyncio.run(commands.answer(local.ShareRequest("pause"), client))
    [reply] = machine.replies
    assert isinstance(reply, local.CommandResult)
    assert not reply.ok
    assert not machine.offers.mine.is_paused
