"""The worker's side of its agent, against an agent that says exactly what the test wants."""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import pytest

from potluck._core.backends import agent_link
from potluck._core.backends.agent import AgentBackend
from potluck._core.cluster.trust.credentials import load_credentials
from potluck._core.collectives.plan import Operation
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.request import Request
from potluck._core.settings import load_settings
from potluck._core.transport import aio
from potluck._core.types import Member, ReduceOp
from potluck._core.wire import worker_link
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import (
    AgentLost,
    ConfigurationError,
    Evicted,
    GroupError,
    LinkError,
    OperationTimeout,
    PeerLost,
    Refused,
    RemoteError,
)

WAIT_S = 20.0
T = TypeVar("T")


class ScriptedAgent:
    """Takes one worker's link to its agent, keeps what it says, says what it is told to."""

    def __init__(self, answer: Welcome | Refusal) -> None:
        self.heard: queue.Queue[worker_link.FromWorker | None] = queue.Queue()
        self._answer = answer
        self._credentials = load_credentials(load_settings())
        self._linked: Future[aio.MessageLink[worker_link.FromWorker, worker_link.FromAgent]] = (
            Future()
        )
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(WAIT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._over = asyncio.Event()
        server = aio.Server("127.0.0.1", 0, self._credentials, self._greeted)
        self.port = server.port
        self._started.set()
        await self._over.wait()
        await server.close()

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        self.hello = hello
        await aio.write_greeting(writer, self._answer)
        if isinstance(self._answer, Refusal):
            return
        link = aio.MessageLink(
            reader, writer, received=worker_link.TO_AGENT, sent=worker_link.FROM_AGENT
        )
        self._linked.set_result(link)
        try:
            while not isinstance(message := await link.receive(), worker_link.Finished):
                self.heard.put(message)
            self.heard.put(message)
        except LinkError:
            pass
        self.heard.put(None)

    def say(self, message: worker_link.FromAgent) -> None:
        self._loop.call_soon_threadsafe(self._linked.result(WAIT_S).send, message)

    def hang_up(self) -> None:
        self._loop.call_soon_threadsafe(self._linked.result(WAIT_S).abort)

    def hear(self, kind: type[T]) -> T:
        """The next message, which must be a ``kind``. On a busy machine any call may be long."""
        message = self.heard.get(timeout=WAIT_S)
        while isinstance(message, worker_link.Waiting) and kind is not worker_link.Waiting:
            message = self.heard.get(timeout=WAIT_S)
        assert isinstance(message, kind), message
        return message

    def hear_the_end(self) -> None:
        assert self.heard.get(timeout=WAIT_S) is None

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


@pytest.fixture
def make_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptedAgent]]:
    agents: list[ScriptedAgent] = []
    # An agent may get the port of one before, whose worker left its group in this very process.
    monkeypatch.setattr(agent_link, "_left", set())

    def make(answer: Welcome | Refusal | None = None) -> ScriptedAgent:
        agents.append(ScriptedAgent(answer or Welcome()))
        monkeypatch.setenv("POTLUCK_AGENT", f"127.0.0.1:{agents[-1].port}")
        monkeypatch.setenv("POTLUCK_JOB", "job")
        monkeypatch.setenv("POTLUCK_WORKER", "1")
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def agent(make_agent: Callable[..., ScriptedAgent]) -> ScriptedAgent:
    return make_agent()


@pytest.fixture
def backend(agent: ScriptedAgent) -> Iterator[AgentBackend]:
    backend = AgentBackend()
    yield backend
    backend.close()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where somebody listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


class Call:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._result: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(function, *arguments))
        self._thread.start()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._result.append(function(*arguments))
        except BaseException as error:
            self._result.append(error)

    @property
    def is_waiting(self) -> bool:
        return not self._result

    def result(self) -> Any:
        self._thread.join(WAIT_S)
        (result,) = self._result
        return result


def view(
    epoch: int, *names: str, port: int = 1, chaos: tuple[int, ...] = ()
) -> worker_link.NewGroup:
    members = tuple(Member(name, host="127.0.0.1", port=port) for name in names)
    return worker_link.NewGroup("job", epoch, members, chaos)


def formed(
    agent: ScriptedAgent, backend: AgentBackend, first: worker_link.NewGroup, after: int = 0
) -> Communicator:
    call = Call(backend.form, after, None, WAIT_S)
    agent.hear(worker_link.Ready)
    agent.say(first)
    communicator = call.result()
    assert agent.hear(worker_link.Entered).epoch == first.epoch
    return communicator


def blocked_in(communicator: Communicator) -> Call:
    """An all-reduce with a member that never answers."""
    array = np.ones(8)
    work = communicator.run(
        Request(Operation.ALL_REDUCE, array, array, ReduceOp.SUM, timeout_s=600)
    )
    return Call(work.wait)


def test_it_says_hello_for_its_job_and_worker(agent: ScriptedAgent, backend: AgentBackend) -> None:
    assert (agent.hello.kind, agent.hello.job, agent.hello.worker) == ("worker", "job", "1")


def test_the_first_group_is_the_first_view(agent: ScriptedAgent, backend: AgentBackend) -> None:
    call = Call(backend.form, 0, None, WAIT_S)
    ready = agent.hear(worker_link.Ready)
    assert ready.after_epoch == 0
    assert ready.port > 0
    agent.say(view(7, "0", "1", "2"))
    communicator = call.result()
    assert (communicator.group.epoch, communicator.group.rank) == (7, 1)
    assert communicator.group.job == "job"
    assert [member.worker for member in communicator.group.members] == ["0", "1", "2"]
    assert agent.hear(worker_link.Entered).epoch == 7
    assert backend.next_epoch() == 7
    assert [member.worker for member in backend.next_members()] == ["0", "1", "2"]
    communicator.close()


def test_a_death_ends_a_blocked_call_with_who_and_why(
    agent: ScriptedAgent, backend: AgentBackend, silent_port: int
) -> None:
    communicator = formed(agent, backend, view(1, "0", "1", port=silent_port))
    call = blocked_in(communicator)
    agent.say(worker_link.GroupOver(1, "0", True, "worker 0 killed by SIGKILL (9)"))
    error = call.result()
    assert isinstance(error, PeerLost)
    assert (error.rank, error.certain, error.epoch) == (0, True, 1)
    assert "worker 0 killed by SIGKILL (9)" in str(error)
    communicator.close()


def test_the_agent_is_told_of_a_call_that_does_not_end(
    agent: ScriptedAgent, backend: AgentBackend, silent_port: int
) -> None:
    communicator = formed(agent, backend, view(4, "0", "1", port=silent_port))
    call = blocked_in(communicator)
    assert agent.hear(worker_link.Waiting).epoch == 4
    assert agent.hear(worker_link.Waiting).epoch == 4
    agent.say(worker_link.GroupOver(4, "0", False, "its process is stopped"))
    assert isinstance(call.result(), PeerLost)
    communicator.close()


def test_the_next_group_after_a_loss_is_asked_for_with_its_cause(
    agent: ScriptedAgent, backend: AgentBackend, silent_port: int
) -> None:
    communicator = formed(agent, backend, view(1, "0", "1", port=silent_port))
    backend.begin_step(60)
    call = blocked_in(communicator)
    agent.say(worker_link.GroupOver(1, "0", True, "killed"))
    error = call.result()
    communicator.close()
    forming = Call(backend.form, 1, error, WAIT_S)
    lost = agent.hear(worker_link.Lost)
    assert (lost.epoch, lost.rank, lost.certain, lost.step) == (1, 0, True, 60)
    assert "killed" in lost.cause
    agent.say(view(2, "1"))
    communicator = forming.result()
    assert (communicator.group.epoch, communicator.group.world_size) == (2, 1)
    communicator.close()


def test_an_evicted_worker_is_told_so_and_comes_back_as_a_newcomer(
    agent: ScriptedAgent, backend: AgentBackend, silent_port: int
) -> None:
    communicator = formed(agent, backend, view(1, "0", "1", port=silent_port))
    call = blocked_in(communicator)
    agent.say(worker_link.GroupOver(1, "1", False, "no sign of life"))
    error = call.result()
    assert isinstance(error, Evicted)
    communicator.close()
    forming = Call(backend.form, 1, error, WAIT_S)
    assert agent.hear(worker_link.Ready).after_epoch == 1
    agent.say(view(3, "0", "1"))
    communicator = forming.result()
    assert communicator.group.epoch == 3
    communicator.close()


def test_a_worker_evicted_while_it_waits_asks_again(
    agent: ScriptedAgent, backend: AgentBackend
) -> None:
    forming = Call(backend.form, 4, None, WAIT_S)
    agent.hear(worker_link.Ready)
    agent.say(worker_link.GroupOver(5, "1", False, "no sign of life"))
    assert agent.hear(worker_link.Ready).after_epoch == 4
    agent.say(view(6, "0", "1"))
    forming.result().close()


def test_a_view_that_is_over_already_is_not_entered(
    agent: ScriptedAgent, backend: AgentBackend
) -> None:
    agent.say(worker_link.GroupOver(1, "0", True, "killed"))
    agent.say(view(1, "0", "1"))
    forming = Call(backend.form, 0, None, WAIT_S)
    agent.hear(worker_link.Ready)
    agent.say(worker_link.Probe(1))
    assert agent.hear(worker_link.ProbeReply) == worker_link.ProbeReply("1", 1, True)
    assert forming.is_waiting
    agent.say(view(2, "1"))
    communicator = forming.result()
    assert communicator.group.epoch == 2
    communicator.close()


def test_a_group_is_not_ended_by_what_does_not_concern_it(
    agent: ScriptedAgent, backend: AgentBackend
) -> None:
    communicator = formed(agent, backend, view(2, "0", "1"))
    agent.say(worker_link.GroupOver(3, "2", True, "a newcomer died on its way in"))
    agent.say(worker_link.GroupOver(3, "", True, "its links failed"))
    agent.say(view(4, "0", "1"))
    agent.say(worker_link.Probe(5))
    assert agent.hear(worker_link.ProbeReply) == worker_link.ProbeReply("1", 5, False)
    assert communicator.error is None
    assert backend.next_epoch() == 4, "to be entered between two steps"
    communicator.close()


def test_without_a_view_in_time_the_error_says_where_to_look(
    agent: ScriptedAgent, backend: AgentBackend
) -> None:
    with pytest.raises(OperationTimeout, match=r"no group after epoch 3 within 0\.05 s"):
        backend.form(3, None, 0.05)


def test_when_the_agent_is_gone_blocked_calls_raise_agent_lost(
    agent: ScriptedAgent,
    backend: AgentBackend,
    silent_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_link, "_ORPHAN_S", 600.0)
    communicator = formed(agent, backend, view(1, "0", "1", port=silent_port))
    call = blocked_in(communicator)
    agent.hang_up()
    assert isinstance(call.result(), AgentLost)
    with pytest.raises(AgentLost):
        backend.form(1, None, WAIT_S)
    communicator.close()


def test_a_worker_whose_listener_breaks_fails_at_once_instead_of_staying(
    agent: ScriptedAgent, backend: AgentBackend, silent_port: int
) -> None:
    """It could form group after group, and no other member could link to it in any."""
    communicator = formed(agent, backend, view(1, "0", "1", port=silent_port))
    call = blocked_in(communicator)

    def broken() -> None:
        raise MemoryError("no room")

    listener = backend._base.listener
    listener._acceptor._accept = broken  # type: ignore[method-assign]
    with socket.create_connection(("127.0.0.1", listener.port)):
        failed = agent.hear(worker_link.Failed)
    assert not failed.secondary, "it is the cause, not what follows from another's failure"
    assert "no rank can connect to rank 1" in failed.text
    assert "broke (MemoryError: no room)" in failed.text
    assert "start it again" in failed.text
    error = call.result()
    assert type(error) is GroupError, "a lost peer would be answered with another group"
    with pytest.raises(GroupError, match="no rank can connect to rank 1"):
        backend.form(1, error, WAIT_S)
    communicator.close()


def test_a_worker_that_can_hear_its_agent_no_more_fails_at_once(
    agent: ScriptedAgent,
    backend: AgentBackend,
    silent_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    communicator = formed(agent, backend, view(1, "0", "1", port=silent_port))
    call = blocked_in(communicator)

    def broken(message: worker_link.FromAgent) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(agent_link, "_ORPHAN_S", 600.0)
    backend._talk.take = broken
    agent.say(worker_link.Probe(1))  # on its way to the old one
    agent.hear(worker_link.ProbeReply)
    agent.say(worker_link.Probe(2))
    failed = agent.hear(worker_link.Failed)
    assert "thread that talks to it broke (MemoryError: no room)" in failed.text
    error = call.result()
    assert isinstance(error, AgentLost)
    assert "broke (MemoryError: no room). The script is not to blame" in str(error)
    communicator.close()


def test_a_worker_whose_link_breaks_before_it_is_made_says_so(
    agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(agent_link.aio, "connect", broken)
    with pytest.raises(LinkError, match="MemoryError: no room"):
        AgentBackend()


def test_a_stopped_job_raises_the_reason_everywhere(
    agent: ScriptedAgent, backend: AgentBackend, silent_port: int
) -> None:
    communicator = formed(agent, backend, view(1, "0", "1", port=silent_port))
    call = blocked_in(communicator)
    agent.say(worker_link.Stop("rank 0, worker 0 failed: ValueError: no"))
    error = call.result()
    assert isinstance(error, RemoteError)
    assert "rank 0, worker 0 failed: ValueError: no" in str(error)
    with pytest.raises(RemoteError, match="ValueError: no"):
        backend.form(1, None, WAIT_S)
    communicator.close()


def test_an_ordered_fault_is_waited_for_before_its_step(
    agent: ScriptedAgent, backend: AgentBackend
) -> None:
    communicator = formed(agent, backend, view(1, "1", chaos=(60,)))
    backend.begin_step(59)
    call = Call(backend.begin_step, 60)
    due = agent.hear(worker_link.ChaosDue)
    assert (due.epoch, due.step) == (1, 60)
    assert call.is_waiting
    agent.say(worker_link.ChaosDone(60))
    assert call.result() is None
    communicator.close()


def test_progress_is_sent_as_plain_values(agent: ScriptedAgent, backend: AgentBackend) -> None:
    communicator = formed(agent, backend, view(1, "1"))
    backend.report(
        {
            "step": np.int64(3),
            "loss": np.float32(0.5),
            "samples_per_s": 10,
            "device": "cpu",
            "accuracy": np.float64(0.97),
            "num": 2**70,
            "names": ["a"],
            "event": "not alone",
            "committed_samples": np.int64(640),
            "total_samples": 6400.0,
        }
    )
    told = agent.hear(worker_link.WorkerProgress)
    assert (told.committed_samples, told.total_samples) == (640, 6400)
    assert (told.epoch, told.step, told.loss, told.device) == (1, 3, 0.5, "cpu")
    assert told.facts == {"accuracy": 0.97, "num": str(2**70), "names": "['a']"}
    backend.report({"event": "resumed"})
    assert agent.hear(worker_link.WorkerNote).text == "resumed"
    communicator.close()


def test_what_is_said_in_a_new_group_before_its_first_commit_is_of_the_group_before(
    agent: ScriptedAgent, backend: AgentBackend
) -> None:
    first = formed(agent, backend, view(1, "1"))
    backend.report({"step": 3, "committed_samples": "all", "total_samples": -1})
    told = agent.hear(worker_link.WorkerProgress)
    assert (told.epoch, told.step, told.committed_samples, told.total_samples) == (1, 3, 0, 0)
    agent.say(worker_link.GroupOver(1, "2", True, "killed"))
    second = formed(agent, backend, view(2, "1"), after=1)
    backend.report({"phase": "warm-up"})
    told = agent.hear(worker_link.WorkerProgress)
    assert (told.epoch, told.step, told.facts) == (1, 3, {"phase": "warm-up"})
    backend.report({"step": 4})
    told = agent.hear(worker_link.WorkerProgress)
    assert (told.epoch, told.step) == (2, 4)
    for communicator in (first, second):
        communicator.close()


def test_many_reports_are_few_messages_and_the_last_one_arrives(
    agent: ScriptedAgent, backend: AgentBackend
) -> None:
    communicator = formed(agent, backend, view(1, "1"))
    for step in range(1000):
        backend.report({"step": step, f"fact {step % 3}": step})
    communicator.close()
    backend.close()
    heard = []
    while isinstance(message := agent.heard.get(timeout=WAIT_S), worker_link.WorkerProgress):
        heard.append(message)
    assert isinstance(message, worker_link.Finished)
    assert heard[-1].step == 999
    assert len(heard) < 100
    merged: dict[str, Any] = {}
    for each in heard:
        merged |= each.facts
    assert merged == {"fact 0": 999, "fact 1": 997, "fact 2": 998}


def test_closing_says_finished_last_and_leaves_nothing(agent: ScriptedAgent) -> None:
    before = sys.excepthook
    backend = AgentBackend()
    assert sys.excepthook != before
    backend.close()
    backend.close()
    agent.hear(worker_link.WorkerProgress)
    agent.hear(worker_link.Finished)
    agent.hear_the_end()
    assert sys.excepthook is before


def test_an_uncaught_error_is_told_to_the_agent_and_to_the_group(
    agent: ScriptedAgent,
    backend: AgentBackend,
    monkeypatch: pytest.MonkeyPatch,
    silent_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    communicator = formed(agent, backend, view(1, "0", "1", port=silent_port))
    call = blocked_in(communicator)
    try:
        raise ValueError("bad batch")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    failed = agent.hear(worker_link.Failed)
    assert failed.text == "rank 1, worker 1 failed: ValueError: bad batch"
    assert failed.secondary is False
    assert isinstance(call.result(), RemoteError)
    assert "ValueError: bad batch" in capsys.readouterr().err, "and printed as ever"
    communicator.close()
    backend.close()
    agent.hear_the_end()


def test_an_error_that_only_follows_anothers_is_marked(
    agent: ScriptedAgent, backend: AgentBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.excepthook(RemoteError, RemoteError("rank 0 failed"), None)
    assert agent.hear(worker_link.Failed).secondary is True
    capsys.readouterr()


def test_an_interrupt_is_no_failure(
    agent: ScriptedAgent, backend: AgentBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    backend.close()
    agent.hear(worker_link.WorkerProgress)
    agent.hear(worker_link.Finished)
    capsys.readouterr()


def test_closing_on_the_way_out_of_an_error_does_not_say_finished(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = AgentBackend()
    try:
        try:
            raise ValueError("bad batch")
        finally:
            backend.close()
    except ValueError as error:
        sys.excepthook(type(error), error, None)
    assert "bad batch" in agent.hear(worker_link.Failed).text
    backend.close()
    agent.hear_the_end()
    capsys.readouterr()


def test_a_refusing_agent_is_a_clear_error(make_agent: Callable[..., ScriptedAgent]) -> None:
    make_agent(Refusal("duplicate", "worker 1 is connected already"))
    with pytest.raises(Refused, match="worker 1 is connected already"):
        AgentBackend()


def test_an_agent_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_AGENT", "127.0.0.1:1")
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:1"):
        AgentBackend()


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:port"])
def test_a_broken_address_says_who_sets_it(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("POTLUCK_AGENT", address)
    with pytest.raises(ConfigurationError, match="`potluck run SCRIPT` sets it"):
        AgentBackend()


def test_a_process_without_an_agent_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTLUCK_AGENT", raising=False)
    with pytest.raises(ConfigurationError, match="with `potluck run SCRIPT`"):
        AgentBackend()
