"""Services of programs outside of jobs, found by real agents on the loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.background import start_thread, stop
from potluck._core.cluster.discovery.configured import StaticPeers
from potluck._core.cluster.node_agent import NodeAgent
from potluck._core.cluster.trust.credentials import load_node_credentials, load_or_create_identity
from potluck._core.settings import Settings
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.delegation import delegate
from potluck._core.transport.handshake import connect
from potluck._core.wire.greeting import WORKER, Hello
from potluck._core.wire.services import KIND
from potluck.errors import (
    ConfigurationError,
    HandlerError,
    LinkError,
    PotluckError,
    Refused,
    ServiceLost,
    UnknownService,
)
from potluck.services import Call, NodeServices, service
from potluck.services.node import FILE
from support.clusters import ban, found_cluster

WAIT_S = 60.0


@service("counter")
class Counter:
    def __init__(self) -> None:
        self.total = np.zeros(2)

    def add(self, call: Call, amount: np.ndarray) -> dict[str, object]:
        self.total += amount
        return {"total": self.total.copy(), "node": call.node, "rank": call.rank}

    def fail(self, call: Call) -> None:
        raise RuntimeError(f"no: {call.worker!r}")


@service("place")
def place(call: Call) -> str:
    return "here"


class Agents:
    """Agents of machines with homes in ``root``, in one event loop, each on a port of its own."""

    def __init__(self, root: Path, *names: str) -> None:
        self.homes = {name: root / name for name in names}
        self.nodes = dict(zip(names, found_cluster(*self.homes.values()), strict=True))
        self._ports: dict[str, int] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread(
            self._loop.run_forever, name="agents", on_broken=lambda error: None
        )

    def up(self, name: str) -> None:
        asyncio.run_coroutine_threadsafe(self._up(name), self._loop).result(WAIT_S)

    async def _up(self, name: str) -> None:
        agent = NodeAgent(
            Settings(home=self.homes[name], name=name),
            on_note=lambda text: None,
            finders=[StaticPeers([("127.0.0.1", port) for port in self._ports.values()])],
            host="127.0.0.1",
            port=self._ports.get(name, 0),
        )
        self._running[name] = task = asyncio.create_task(agent.run())
        ready = asyncio.create_task(agent.ready.wait())
        await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self._ports[name] = agent.port

    def down(self, name: str) -> None:
        task = self._running.pop(name)
        asyncio.run_coroutine_threadsafe(stop(task), self._loop).result(WAIT_S)

    def close(self) -> None:
        for name in list(self._running):
            self.down(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class World:
    """Agents, and programs on their machines."""

    def __init__(self, agents: Agents, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        self.agents = agents
        self._patch = patch
        self._stack = stack

    def program(self, name: str) -> NodeServices:
        """A program on the machine ``name``."""
        self._patch.setenv("POTLUCK_HOME", str(self.agents.homes[name]))
        self._patch.setenv("POTLUCK_NAME", name)
        return self._stack.enter_context(NodeServices(timeout_s=WAIT_S))


@contextmanager
def world_of(root: Path, *names: str) -> Iterator[World]:
    agents = Agents(root, *names)
    try:
        for name in names:
            agents.up(name)
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            yield World(agents, patch, stack)
    finally:
        agents.close()


def test_a_program_calls_the_services_of_another_machine(tmp_path: Path) -> None:
    with world_of(tmp_path, "ada", "bob") as world:
        server, caller = world.program("ada"), world.program("bob")
        server.serve(Counter(), place)
        counter = caller.connect("counter")
        ada, bob = world.agents.nodes.values()
        assert repr(counter) == f"<Remote 'counter' on node ada ({ada[:8]})>"
        answer = counter.add(np.ones(2))
        assert (answer["node"], answer["rank"]) == (bob, -1)
        assert counter.add.start(np.ones(2)).wait(WAIT_S)["total"].tolist() == [2.0, 2.0]
        with pytest.raises(HandlerError, match=r"counter.fail\(\) on node ada .*no: ''"):
            counter.fail()
        with pytest.raises(UnknownService, match=r"node ada .* no method 'sub'; it has: add, fail"):
            counter.sub()
        own = server.connect("counter").add(np.ones(2))
        assert (own["node"], own["total"][0]) == (ada, 3.0), "a machine's own services, too"
        with pytest.raises(UnknownService, match=r"nobody served 'other' within 0\.3 s"):
            caller.connect("other", timeout=0.3)
        with pytest.raises(UnknownService, match=r"nobody served 'counter' on node 'bob' within"):
            caller.connect("counter", node="bob", timeout=0.3)
        server.close()
        with pytest.raises(ServiceLost, match=r"not called: node ada .* does not serve 'counter'"):
            counter.add(np.ones(2))
        world.program("ada").serve(Counter())
        assert counter.add(np.ones(2))["total"].tolist() == [1.0, 1.0], "as soon as it is back"


def test_a_name_belongs_to_one_program_of_a_machine(tmp_path: Path) -> None:
    with world_of(tmp_path, "ada", "bob") as world:
        first, second = world.program("ada"), world.program("ada")
        first.serve(place)
        with pytest.raises(ConfigurationError, match=r"another program .* serves 'place' already"):
            second.serve(place, Counter())
        second.serve(Counter())
        with pytest.raises(ValueError, match="serves 'counter' already"):
            second.serve(Counter())
        first.close()
        second.serve(place)
        third = world.program("bob")
        assert third.connect("place").place() == "here"
        third.serve(place)
        caller = world.program("ada")  # where the name is new: on bob it belongs to ada
        ada, bob = world.agents.nodes.values()
        both = rf"by 2 machines: node ada \({ada[:8]}\), node bob \({bob[:8]}\); name one"
        with pytest.raises(UnknownService, match=both):
            caller.connect("place")
        assert "on node ada" in repr(caller.connect("place", node="ada"))
        assert "on node bob" in repr(caller.connect("place", node=bob[:12]))


def test_services_are_found_again_when_the_agent_was_started_again(tmp_path: Path) -> None:
    with world_of(tmp_path, "ada", "bob") as world:
        server, caller = world.program("ada"), world.program("bob")
        server.serve(place)
        there = caller.connect("place")
        assert there.place() == "here"
        world.agents.down("ada")
        assert there.place() == "here", "calls do not pass through agents"
        with pytest.raises(ConfigurationError, match="no agent runs on this machine"):
            world.program("ada")
        world.agents.up("ada")
        assert caller.connect("place").place() == "here"


def test_a_banned_machine_calls_nothing_any_more(tmp_path: Path) -> None:
    with world_of(tmp_path, "ada", "bob", "carl") as world:
        server, bob, carl = (world.program(name) for name in ("ada", "bob", "carl"))
        server.serve(place)
        places = [each.connect("place") for each in (bob, carl)]
        assert [each.place() for each in places] == ["here", "here"]
        homes, nodes = world.agents.homes, world.agents.nodes
        ban(homes["ada"], nodes["bob"], "sold")
        with pytest.raises(PotluckError):
            places[0].place()
        with pytest.raises(PotluckError):
            places[0].place()
        assert places[1].place() == "here"


def test_a_worker_of_a_job_has_no_services_of_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of its own machine nor of another: its script may be another member's."""
    with world_of(tmp_path, "ada", "bob") as world:
        server = world.program("ada")
        server.serve(place)
        assert world.program("bob").connect("place").place() == "here"
        assert server._listener is not None
        address = ("127.0.0.1", server._listener.port)
        for name in ("ada", "bob"):
            home = world.agents.homes[name]
            node, key = load_or_create_identity(home), Ed25519PrivateKey.generate()
            eras = load_node_credentials(Settings(home=home)).eras
            worker = Credentials(
                key, lambda eras=eras: eras, delegation=delegate(node, key.public_key(), "job")
            )
            for hello in (Hello(KIND, job="job", worker="0"), Hello(WORKER, job="job", worker="0")):
                with pytest.raises(Refused):
                    connect(*address, hello, worker, deadline=time.monotonic() + WAIT_S)
    monkeypatch.setenv("POTLUCK_WORKER_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="services of its job only"):
        NodeServices()


def test_bad_input_is_one_clear_error(tmp_path: Path) -> None:
    with world_of(tmp_path, "ada") as world:
        services = world.program("ada")
        with pytest.raises(ConfigurationError, match="nothing is served here yet"):
            services.wait()
        with pytest.raises(TypeError, match="serve takes what"):
            services.serve(print)
        with pytest.raises(ValueError, match="can't be announced to other machines"):
            services.serve(service("a\u3164b")(lambda call: None))
        with pytest.raises(ValueError, match="must be above 0"):
            services.connect("place", timeout=0)
        waiting = threading.Thread(target=services.close)
        services.serve(place)
        waiting.start()
        services.wait()
        waiting.join()
        with pytest.raises(LinkError, match="were closed"):
            services.serve(Counter())
        with pytest.raises(LinkError, match="were closed"):
            services.connect("place", timeout=WAIT_S)
        unused = world.program("ada")
        unused.close()
        with pytest.raises(LinkError, match="were closed"):
            unused.serve(place)
        assert unused._listener is None, "nothing is opened after the end"


def test_a_name_belongs_to_the_machine_that_served_it_first(tmp_path: Path) -> None:
    """While its program is down, another member gets no call by that name, until a person says that
    it may: neither of this program nor of a later one."""
    with world_of(tmp_path, "ada", "eve", "carl") as world:
        ada, eve, _ = world.agents.nodes.values()
        first, evil = world.program("ada"), world.program("eve")
        first.serve(place)
        assert "on node ada" in repr(world.program("carl").connect("place"))
        evil.serve(place)
        caller = world.program("carl")
        assert "on node ada" in repr(caller.connect("place")), "both serve it now"
        first.close()
        with pytest.raises(UnknownService) as caught:
            caller.connect("place", timeout=3.0)
        assert f"'place' belongs to node {ada[:8]}, which served it first" in str(caught.value)
        assert f"node eve ({eve[:8]}) serves it" in str(caught.value)
        assert "on node eve" in repr(caller.connect("place", node="eve"))
        assert "on node eve" in repr(world.program("carl").connect("place")), "it has taken over"
        home = world.agents.homes["carl"]
        assert (home / FILE).stat().st_mode & 0o777 == 0o600
        (home / FILE).write_text("{")
        with pytest.raises(ConfigurationError, match=r"service_names\.json is damaged.*Remove it"):
            caller.connect("place")
