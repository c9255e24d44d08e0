from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from potluck._core import waiting
from potluck._core.backends.environment import EnvironmentBackend, world_rendezvous
from potluck._core.context import DistributedContext
from potluck._core.settings import Settings
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import (
    ConfigurationError,
    LinkError,
    OperationTimeout,
    PotluckError,
    Refused,
    WrongSecret,
)
from support.worlds import run_all

SETTINGS = Settings(
    psk=hashlib.sha256(b"test").hexdigest(), peer_timeout_s=10, connection_timeout_s=5.0
)


@pytest.fixture
def port() -> Iterator[str]:
    """Bound but not listening: nobody else gets it, and a listener may have it."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield str(sock.getsockname()[1])


def variables(port: str, rank: object, world: object = 2, **more: str) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        **more,
    }


def backend(environment: dict[str, str], settings: Settings = SETTINGS) -> EnvironmentBackend:
    return EnvironmentBackend(settings=settings, environment=environment)


BAD = [
    ({"RANK": ""}, "RANK is not set; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
    ({"RANK": "one"}, "RANK='one' is not an integer from 0 to 65535"),
    ({"RANK": "-1"}, "RANK='-1' is not an integer"),
    ({"RANK": "1.0"}, "RANK='1.0' is not an integer"),
    ({"RANK": "²"}, "RANK='²' is not an integer"),
    ({"RANK": "9" * 5000}, "RANK='9+' is not an integer"),
    ({"RANK": "5"}, "RANK=5 is not below WORLD_SIZE=2; ranks begin at 0"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not an integer from 1 to 65536"),
    ({"WORLD_SIZE": "70000"}, "WORLD_SIZE='70000' is not an integer"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT='0' is not an integer from 1 to 65535"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT='99999' is not an integer"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' is not"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_a_variable_that_can_not_be_used_is_named(change: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        backend({**variables("29500", 1), **change})


def test_ranks_find_each_other_through_rank_0(port: str) -> None:
    def act(rank: int) -> tuple[int, int, list[str], float]:
        made = backend(variables(port, rank, 3, LOCAL_RANK=str(rank % 2)))
        with DistributedContext(made, timeout_s=10) as ctx:
            total = float(ctx.all_reduce(np.full(1, rank + 1.0))[0])
            hosts = [member.host for member in ctx.members]
            assert [member.local_rank for member in ctx.members] == [0, 1, 0]
            assert all(member.port and member.node for member in ctx.members)
            with pytest.raises(ConfigurationError, match="potluck run"):
                made.form(1, None, 1)
            return ctx.rank, ctx.local_rank, hosts, total

    hosts = ["127.0.0.1"] * 3
    assert run_all([lambda rank=rank: act(rank) for rank in range(3)]) == [
        (0, 0, hosts, 6.0),
        (1, 1, hosts, 6.0),
        (2, 0, hosts, 6.0),
    ]


def test_a_world_of_one_needs_nobody(port: str) -> None:
    with DistributedContext(backend(variables(port, 0, 1)), timeout_s=5) as ctx:
        assert ctx.all_reduce(np.ones(2)).tolist() == [1, 1]


def form(
    environment: dict[str, str], timeout_s: float = 10.0, settings: Settings = SETTINGS
) -> None:
    with closing(backend(environment, settings)) as made:
        made.form(0, None, timeout_s).close()


def errors_of(*functions) -> list[PotluckError | None]:
    def guarded(function) -> PotluckError | None:
        try:
            function()
        except PotluckError as error:
            return error
        return None

    return run_all([lambda function=function: guarded(function) for function in functions])


def test_world_sizes_that_differ_are_told_to_whoever_is_wrong(port: str) -> None:
    zero, one = errors_of(
        lambda: form(variables(port, 0, 2), 2.5), lambda: form(variables(port, 1, 3), 10.0)
    )
    assert isinstance(one, Refused)
    assert "rank 0 has WORLD_SIZE=2, rank 1 has 3; give all ranks the same" in str(one)
    assert isinstance(zero, OperationTimeout)


def test_a_rank_that_is_missing_is_named(port: str) -> None:
    zero, one = errors_of(
        lambda: form(variables(port, 0, 4), 2.5), lambda: form(variables(port, 2, 4), 10.0)
    )
    assert isinstance(zero, OperationTimeout)
    assert "rank 1, 3 (of 4 ranks) did not connect to rank 0 at" in str(zero)
    assert "`potluck run --workers N` under these variables" in str(zero)
    assert isinstance(one, LinkError)
    assert "did not send the members; are all 4 ranks started?" in str(one)
    assert one.__suppress_context__, "its text has the cause: one traceback, not three"


def test_while_ranks_wait_one_of_each_machine_says_for_whom(
    port: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 names the missing; of the others those with local rank 0 say that they wait."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.1)
    nodes = {"POTLUCK_NODES": "ada,ada,bob,carl"}
    monkeypatch.setenv(*nodes.popitem())
    came = threading.Barrier(4)

    def form_later(rank: int, local_rank: int) -> None:
        came.wait(20)
        form(variables(port, rank, 4, LOCAL_RANK=str(local_rank)), 20.0)

    def come_last() -> None:
        came.wait(20)
        told = ""
        while not all(text in told for text in wanted):
            told += capfd.readouterr().err
        lines.extend(told.splitlines())
        form(variables(port, 3, 4), 20.0)

    lines: list[str] = []
    wanted = (
        f"potluck: rank 0 waits at 127.0.0.1:{port} for rank 3 on carl (of 4 ranks); are all",
        f"potluck: rank 2 waits for rank 0 at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port} to send",
    )
    run_all(
        [*(lambda each=each: form_later(*each) for each in [(0, 0), (1, 1), (2, 0)]), come_last]
    )
    assert not any("rank 1 waits" in line for line in lines)


def test_without_rank_0_the_others_say_where_they_looked(port: str) -> None:
    with pytest.raises(LinkError, match=f"rank 0 at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}"):
        form(variables(port, 1), 0.4)


def test_two_processes_with_the_same_rank(port: str) -> None:
    """The second one is told; the group forms with the first."""
    done = threading.Event()
    inside = threading.Barrier(2)

    def first() -> None:
        inside.wait(10)
        form(variables(port, 1, 3), 10.0)

    def second() -> None:
        inside.wait(10)
        form(variables(port, 1, 3), 10.0)

    def third() -> None:
        assert done.wait(10)
        form(variables(port, 2, 3), 10.0)

    def watched(function) -> None:
        try:
            function()
        except Refused:
            done.set()
            raise

    results = errors_of(
        lambda: form(variables(port, 0, 3), 10.0),
        lambda: watched(first),
        lambda: watched(second),
        third,
    )
    refused = [error for error in results if error is not None]
    assert len(refused) == 1
    assert "another process has already connected as rank 1" in str(refused[0])


def test_another_secret_is_refused_and_harms_nobody(port: str) -> None:
    stranger = Settings(psk=hashlib.sha256(b"another").hexdigest(), connection_timeout_s=5.0)
    tried = threading.Event()

    def intruder() -> None:
        try:
            form(variables(port, 1), 10.0, stranger)
        finally:
            tried.set()

    def proper() -> None:
        assert tried.wait(20)
        form(variables(port, 1), 10.0)

    zero, wrong, right = errors_of(lambda: form(variables(port, 0), 10.0), intruder, proper)
    assert zero is None
    assert right is None
    assert isinstance(wrong, WrongSecret)


def test_a_port_in_use_is_a_clear_error(port: str) -> None:
    with closing(backend(variables(port, 0))), pytest.raises(ConfigurationError, match=port):
        backend(variables(port, 0))


def test_a_rank_that_hung_up_before_it_was_told_may_call_again() -> None:
    rendezvous = world_rendezvous(2)
    hello = Hello("rendezvous", rank=1, worker="1", port=1234, world_size=2)
    first = rendezvous.admit(hello, "ada")
    assert isinstance(rendezvous.admit(hello, "ada").answer, Refusal), "it is taken"
    assert first.withdraw is not None
    first.withdraw()
    assert isinstance(rendezvous.admit(hello, "ada").answer, Welcome)
