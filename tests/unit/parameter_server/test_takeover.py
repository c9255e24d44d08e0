"""Servers with copies: whichever is lost, cut off or started again, no version that a worker was
told goes back, and all tensors of a version belong to it. Over schedules of everything that can
happen between two calls, on the servers' own code, with groups and links that are lists."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from potluck._core.types import Group, Member
from potluck.errors import HandlerError, PotluckError, ServiceLost
from potluck.parameter_server import SGD, Asynchronous, ElasticAveraging, Synchronous
from potluck.parameter_server import primary as replication_module
from potluck.parameter_server.layout import Placement, layout_of, plain
from potluck.parameter_server.log import Grant, Leave, Log, Position, Update
from potluck.parameter_server.model import Mode
from potluck.parameter_server.primary import Primary, Replication
from potluck.parameter_server.replica import AskAgain, Replica
from potluck.parameter_server.service import PrimaryService, ReplicaService, StaleTerm
from potluck.services import Call, waits
from potluck.services.presence import Presence
from support.momentum import value_of_version

NAMES = [f"layer{number}.weight" for number in range(8)]
START = {name: np.zeros(1) for name in NAMES}
MODES = [
    Synchronous(),
    Synchronous(backup_workers=1),
    Asynchronous(4, scale_by_staleness=False),
    ElasticAveraging(1.0),
]


class Process:
    """A server, or a worker: what it knows of the group."""

    def __init__(self, world: World, name: str, group: Group) -> None:
        self.world = world
        self.name = name
        self.group = group


class Server(Process):
    def __init__(self, world: World, name: str, group: Group) -> None:
        super().__init__(world, name, group)
        presence = Presence(lambda: self.group, 1e6)
        optimizer = SGD(1.0, momentum=0.5)
        arguments = name, world.servers, 2
        self.replica = Replica(world.mode, optimizer, presence, *arguments)
        options: Any = {"checkpoints": None, "save_every": 1000, "worker_timeout_s": 1e6}
        self.primary = Primary(self.replica, **options)
        remotes: Any = Network(self)
        self.replication = Replication(
            self.primary, None, remotes, lambda: self.group, lambda: False
        )
        self.services = (
            ReplicaService(self.replica, None),
            PrimaryService(self.primary),
        )

    def step(self) -> None:
        """What the thread does once."""
        try:
            self.replication.step()
        except ServiceLost:
            pass
        except HandlerError as error:
            if error.type != "StaleTerm":
                raise
            self.primary.step_down()

    def answer(self, call: Call, *args: Any) -> Any:
        replica_service, primary_service = self.services
        service = replica_service if hasattr(replica_service, call.method) else primary_service
        return getattr(service, call.method)(call, *args)


class Network:
    """``Remotes`` of one process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def call_each(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]], **_: Any
    ) -> tuple[dict[str, Any], list[PotluckError]]:
        replies, errors = {}, []
        for server, args in arguments.items():
            try:
                replies[server] = self.call(server, method, *args)
                if next(self.process.world.chances, False):
                    raise ServiceLost("the reply is lost")
            except PotluckError as error:
                replies.pop(server, None)
                errors.append(error)
        return replies, errors

    def call(self, server: str, method: str, *args: Any) -> Any:
        me, world = self.process, self.process.world
        there = world.alive.get(server)
        is_cut = server != me.name and not world.cut.isdisjoint({server, me.name})
        if there is None or is_cut:
            raise ServiceLost(f"{server} is lost")
        if me.group.rank_of(server) < 0:
            raise ServiceLost(f"{server} is not in the group")
        call = Call("node", me.name, there.group.rank_of(me.name), "ps", method, 1.0)
        try:
            return there.answer(call, *args)
        except (AskAgain, StaleTerm, PotluckError, ValueError) as error:
            text, kind = str(error), type(error).__name__
            raise HandlerError(text, type=kind, text=text, place="") from error


class Worker(Process):
    """Pulls, fetches what was granted, stages a gradient, pushes it."""

    def __init__(self, world: World, name: str, group: Group) -> None:
        super().__init__(world, name, group)
        self.network = Network(self)
        self.asked: tuple[Server, Future[Any]] | None = None
        self.floor = 0
        self.reply: dict[str, Any] | None = None
        self.after: tuple[int, int] | None = None
        self.push = 0

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(s for s in self.world.servers if self.group.rank_of(s) >= 0)

    def act(self) -> None:
        try:
            if self.asked is not None:
                self.hear()
            elif self.reply is None:
                self.pull()
            else:
                self.give()
        except (ServiceLost, AskAgain):
            self.asked = None  # and again
        except HandlerError as error:
            if error.type != "AskAgain":
                raise

    def ask(self, method: str, *args: Any) -> Any:
        if not self.servers:
            raise ServiceLost("no server is there")
        return self.network.call(self.servers[0], method, *args)

    def pull(self) -> None:
        self.floor = self.world.told
        after = self.after if isinstance(self.world.mode, Synchronous) else None
        future = self.ask("pull", "m", after, 10.0, True)
        self.asked = self.world.alive[self.servers[0]], future

    def hear(self) -> None:
        assert self.asked is not None
        server, future = self.asked
        if self.world.alive.get(server.name) is not server or server.name in self.world.cut:
            self.asked = None  # it is lost
            return
        if not future.done():
            if server.primary.led is None:
                self.asked = None  # its wait ends, and the worker asks the first one
            return
        self.asked, found = None, future.result(0)
        if "waits_for" in found:
            return
        version = found["version"]
        assert version >= self.floor, f"version {version} after {self.floor} was told"
        self.world.told = max(self.world.told, version)
        self.fetch(found)

    def fetch(self, found: dict[str, Any]) -> None:
        there = [each for each in found["present"] if each in self.servers]
        sources = Placement(self.world.servers, 2, tuple(there)).sources(found["names"])
        tensors: dict[str, Any] = {}
        for server, names in sources.items():
            asked = "m", found["version"], found["term"], names, 0.0
            part = self.network.call(server, "fetch", *asked).result(0)
            if "waits_for" in part:
                return
            tensors |= part["tensors"]
        if len(tensors) < len(NAMES):
            assert set(there) < set(found["present"])
            return
        values = {float(each[0]) for each in tensors.values()}
        assert values == {value_of_version(found["version"])}, (values, found["version"])
        self.reply = found
        self.push += 1

    def give(self) -> None:
        assert self.reply is not None
        there = tuple(each for each in self.reply["present"] if each in self.servers)
        version, term = self.reply["version"], self.reply["term"]
        staged = {}
        gradient = dict.fromkeys(NAMES, np.full(1, -1.0))
        for server, part in Placement(self.world.servers, 2, there).split(gradient).items():
            asked = "m", part, None, version, self.push, 0.0
            reply = self.network.call(server, "stage", *asked).result(0)
            if "waits_for" in reply:
                return
            staged[server] = reply["term"]
        reply = self.ask("push", "m", None, version, self.push, term, staged)
        if reply is None:
            return  # a server came: stage it there, too
        if isinstance(reply, Future):
            if not reply.done():
                return  # the same call again: what came of it is told later
            reply = reply.result(0)
        counts = reply.get("counted", True)
        self.after = (version + 1, term) if counts else None
        self.reply = None


class World:
    """Three servers and two workers. ``chances`` says which replies are lost."""

    servers = ("0", "1", "2")

    def __init__(self, mode: Mode, chances: Iterator[bool]) -> None:
        self.mode = mode
        self.chances: Iterator[bool] = iter(())
        self.epoch = 0
        self.alive: dict[str, Server] = {}
        self.cut: set[str] = set()
        self.told = 0
        self.num_lost = 0
        self.away: dict[str, int] = {}
        """The servers that were lost, and the highest term then."""
        for name in self.servers:
            self.alive[name] = Server(self, name, self.new_group(self.servers))
        self.workers = [Worker(self, name, self.new_group(self.servers)) for name in ("8", "9")]
        self.enter_all()
        self.alive["0"].step()
        layout = plain(layout_of(START))
        terms = {}
        network = self.workers[0].network
        for server, part in Placement(self.servers, 2, self.servers).split(START).items():
            reply = network.call(server, "stage", "m", part, layout, 0, 0, 0.0).result(0)
            terms[server] = reply["term"]
        created = network.call("0", "create", "m", None, layout, 0, False, terms)
        assert not created.done()  # no other server has it yet
        self.alive["0"].step()
        assert created.result(0) == {"version": 0}
        for name in self.servers:  # they compute nothing, and all servers remember that
            Network(self.alive[name]).call("0", "leave")
        self.alive["0"].step()
        self.chances = chances

    # -- groups

    def new_group(self, servers: Any) -> Group:
        self.epoch += 1
        return Group(self.epoch, 0, tuple(Member(each) for each in (*servers, "8", "9")))

    def form(self) -> None:
        """A group of those that are there; who enters it does so later."""
        self.next = self.new_group(s for s in self.servers if s in self.alive and s not in self.cut)

    def enter(self, process: Process) -> None:
        if self.next.rank_of(process.name) >= 0:
            self.next, group = self.next, self.next
            process.group = group

    def enter_all(self) -> None:
        self.form()
        for process in (*self.alive.values(), *self.workers):
            self.enter(process)

    # -- faults

    def may_lose(self, name: str) -> bool:
        """Whether no other server is away. A lost server is back when it has a state on which it
        agreed with the others since, and they have not begun a later term without it."""
        newest = max(each.replica.last_term or 0 for each in self.alive.values())
        for other, term in list(self.away.items()):
            there = self.alive.get(other)
            if there and other not in self.cut and there.replica.term == newest > term:
                del self.away[other]
        return not self.away.keys() - {name}

    def lose(self, name: str) -> None:
        self.num_lost += 1
        self.away[name] = max(each.services[0]._promised for each in self.alive.values())

    def kill(self, name: str) -> None:
        if name in self.alive and self.may_lose(name):
            self.lose(name)
            del self.alive[name]
            self.cut.discard(name)

    def cut_off(self, name: str) -> None:
        if name in self.alive and not self.cut and self.may_lose(name):
            self.lose(name)
            self.cut.add(name)

    def restart(self, name: str) -> None:
        """It is in a group that is formed now, and the others enter it in their own time."""
        if name not in self.alive and not self.cut:
            alive = {*self.alive, name}
            self.next = self.new_group(each for each in self.servers if each in alive)
            self.alive[name] = Server(self, name, self.next)

    def train(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for process in self.workers:
                process.act()
            for process in list(self.alive.values()):
                process.step()

    def heal(self) -> None:
        self.chances = iter(())
        self.cut.clear()
        for name in self.servers:
            if name not in self.alive:
                self.alive[name] = Server(self, name, self.next)
        self.enter_all()
        for name in self.servers:
            self.alive[name].step()
        for _ in range(3):
            self.alive["0"].step()

    def check(self) -> None:
        """All servers have one state, and training goes on in it."""
        before = self.told
        self.train(40)
        assert self.told >= before + 3
        self.alive["0"].step()
        first = self.alive["0"].replica
        for server in self.alive.values():
            replica = server.replica
            assert replica.log.last == first.log.last
            assert replica.term == first.term
            models = {name: each.state() for name, each in replica.models.items()}
            assert models == {name: each.state() for name, each in first.models.items()}
            its = Placement(self.servers, 2, self.servers).split(START)[server.name]
            tensors = replica.models["m"].table.tensors
            assert tensors.keys() == its.keys()
            for each in tensors.values():
                assert each[0] == value_of_version(first.models["m"].version)


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the schedule says what happens next."""
    monkeypatch.setattr(replication_module, "_POLL_S", 0.0)
    monkeypatch.setattr(waits, "start_thread", lambda *_, **__: None)


ACTIONS = ["train"] * 4 + ["act"] * 8 + ["step"] * 8 + ["enter"] * 4
ACTIONS += ["kill", "cut", "mend", "restart", "restart", "form", "meet"]


def play(mode: Mode, chance: random.Random) -> World:
    """200 actions by chance, on links that lose a reply now and then."""
    world = World(mode, (chance.random() < 0.01 for _ in itertools.count()))
    for _ in range(200):
        action, number = chance.choice(ACTIONS), chance.randrange(6)
        name = world.servers[number % 3]
        if action == "train":
            world.train(number)
        elif action == "meet":
            world.enter_all()
        elif action == "act":
            world.workers[number % 2].act()
        elif action == "kill":
            world.kill(name)
        elif action == "cut":
            world.cut_off(name)
        elif action == "mend":
            world.cut.clear()
        elif action == "restart":
            world.restart(name)
        elif action == "form":
            world.form()
        elif action == "enter":
            processes = [*world.alive.values(), *world.workers]
            world.enter(processes[number % len(processes)])
        elif name in world.alive:
            world.alive[name].step()
    world.heal()
    world.check()
    return world


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_no_version_that_was_told_goes_back_whichever_server_is_lost(mode: Mode) -> None:
    # In 2018 a server lags while another one is killed: two of three are without the newest state.
    worlds = [play(mode, random.Random(seed)) for seed in (*range(40), 2018)]
    assert sum(world.num_lost for world in worlds) > 100
    assert sum(world.told for world in worlds) > 400


def test_entries_of_another_log_differ_from_entries_that_are_missing() -> None:
    committed, last = Position(1, 4), Position(2, 7)
    entries = [Grant("m", "0", 0), Leave("0"), Leave("1")]  # 5, 6, 7 of term 2

    def missing(term: int, index: int) -> Any:
        log = Log()
        log.begin(Position(term, index))
        return log.missing(committed, last, entries)

    assert missing(*last) == []
    assert missing(*committed) == entries
    assert missing(2, 5) == entries[1:]
    assert missing(2, 8) is None
    assert missing(2, 4) is None
    assert missing(1, 5) is None  # of a server that was cut off
    assert missing(1, 3) is None


def decided(world: World) -> Server:
    """The primary, server 0, has decided on an update that no other server has applied."""
    primary = world.alive["0"]
    for _ in range(100):
        for worker in world.workers:
            worker.act()
        if any(isinstance(entry, Update) for entry in primary.replica.log.entries):
            return primary
        primary.step()
    raise AssertionError("no update was decided")


def values(server: Server) -> dict[str, float]:
    return {name: float(each[0]) for name, each in server.replica.models["m"].table.tensors.items()}


def version(server: Server) -> int:
    return server.replica.models["m"].version


def test_an_entry_that_one_of_two_survivors_lacks_comes_from_the_other_ones_log() -> None:
    """The case that needs a log. The primary is lost after one of two servers has applied an
    update. Neither survivor has all tensors of one version: of some the older version alone is
    left, of others the newer one. A copy can't help; the missing entry can, by what workers have
    staged."""
    world = World(Synchronous(), iter(()))
    world.train(4)
    primary = decided(world)
    world.cut.add("2")
    primary.step()
    world.cut.clear()
    world.kill("0")
    ahead, behind = world.alive["1"], world.alive["2"]
    assert version(ahead) == version(behind) + 1
    only_old = values(behind).keys() - values(ahead).keys()
    only_new = values(ahead).keys() - values(behind).keys()
    assert only_old
    assert only_new
    world.enter_all()
    ahead.step()
    assert version(ahead) == version(behind)
    everywhere = values(ahead) | values(behind)
    assert everywhere.keys() == set(NAMES)
    assert set(everywhere.values()) == {value_of_version(version(ahead))}
    world.heal()
    world.check()


def test_what_a_primary_that_was_cut_off_decided_alone_is_forgotten() -> None:
    """Two servers lead at once, each in a group of its own, and number their entries alike: the
    term tells the logs apart."""
    world = World(Synchronous(), iter(()))
    world.train(4)
    alone = decided(world)
    world.cut_off("0")
    alone.step()
    assert version(alone) == version(world.alive["1"]) + 1
    world.form()
    for process in (world.alive["1"], world.alive["2"], *world.workers):
        world.enter(process)
    world.train(10)
    mine, theirs = alone.replica.log.last, world.alive["1"].replica.log.last
    assert mine.term < theirs.term
    assert version(world.alive["1"]) > version(alone)
    world.heal()
    world.check()
