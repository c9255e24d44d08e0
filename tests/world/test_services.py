"""Services between workers of one process, over every kind of link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import potluck
from potluck._core.context import DistributedContext
from potluck._core.wire.payload import Packed
from potluck.errors import (
    ConfigurationError,
    GroupClosed,
    HandlerError,
    ServiceLost,
    ServiceTimeout,
    UnknownService,
)
from potluck.testing.world import run_world
from support.worlds import open_world

KINDS = ("inproc", "tls", *(("native",) if potluck._core.native.available else ()))


@potluck.service("counter")
class Counter:
    """Counts, for each caller."""

    def __init__(self) -> None:
        self.total = 0
        self.callers: list[potluck.Call] = []

    def add(self, call: potluck.Call, amount: Any, *, times: int = 1) -> Any:
        self.callers.append(call)
        before = self.total
        self.total = before + amount * times
        return self.total

    def fail(self, call: potluck.Call) -> None:
        raise LookupError("no such tensor")

    def wrong(self, call: potluck.Call) -> object:
        return {"a": [object()]}

    def _hidden(self, call: potluck.Call) -> None:
        raise AssertionError


@potluck.service("echo", concurrent=True)
def echo(call: potluck.Call, payload: Any) -> Any:
    return payload


def on_two(kind: str, act: Callable[[DistributedContext, Any], None]) -> Counter:
    """``act(ctx, remote)`` on rank 1, with the counter that rank 0 serves."""
    counter = Counter()

    def run(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ctx.serve(counter, echo)
        else:
            act(ctx, ctx.connect("counter"))
        ctx.barrier()

    with open_world(kind, 2) as world:
        world.run(run)
    return counter


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_is_called_as_if_it_were_here(kind: str) -> None:
    def act(ctx: DistributedContext, counter: Any) -> None:
        assert counter.add(3) == 3
        assert counter.add(amount=2, times=2) == 7
        array = np.arange(400_000.0).reshape(4, -1)
        got = ctx.connect("echo").echo({"a": [array, (1, "x", None)]})
        np.testing.assert_array_equal(got["a"][0], array)
        assert got["a"][1] == (1, "x", None)
        [caller] = {(call.worker, call.rank, call.node) for call in served.callers}
        assert caller == (ctx.group.me.worker, 1, ctx.group.me.node)

    served = Counter()

    def run(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ctx.serve(served, echo)
        else:
            act(ctx, ctx.connect("counter"))
        ctx.barrier()

    with open_world(kind, 2) as world:
        world.run(run)


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_wrong_there_is_told_here_with_its_place(kind: str) -> None:
    def act(ctx: DistributedContext, counter: Any) -> None:
        here = Path(__file__).name
        with pytest.raises(
            HandlerError, match=rf"fail\(\).* LookupError: no such tensor .*{here}:\d+ in fail"
        ) as caught:
            counter.fail()
        assert (caught.value.type, caught.value.text) == ("LookupError", "no such tensor")
        with pytest.raises(HandlerError, match=rf"TypeError.*amonut.*{here}:\d+ in add"):
            counter.add(amonut=1)
        with pytest.raises(HandlerError, match=r'TypeError: result\["a"\]\[0\] is of type object'):
            counter.wrong()
        with pytest.raises(UnknownService, match="no method 'sub'; it has: add, fail, wrong"):
            counter.sub(1)
        with pytest.raises(TypeError, match=r'arguments\["amount"\]\[1\] is of type set'):
            counter.add(amount=[1, {2}])
        with pytest.raises(UnknownService, match=r"rank 0|worker 0.*: 'counter', 'echo'"):
            ctx.connect("adder", timeout=5.0)
        with pytest.raises(UnknownService, match=r"worker 1.*: none"):
            ctx.connect("counter", rank=1, timeout=3.0)
        assert counter.add(1) == 1

    on_two(kind, act)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_overlap_run_one_after_the_other(kind: str) -> None:
    """Ten additions that would lose some if two ran at once; and a method that calls another."""

    def act(ctx: DistributedContext, counter: Any) -> None:
        works = [counter.add.start(np.full(10_000, 1.0)) for _ in range(20)]
        totals = sorted(float(work.wait()[0]) for work in works)
        assert totals == [float(number) for number in range(1, 21)]

    on_two(kind, act)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_has_a_deadline_and_the_next_one_works(kind: str) -> None:
    opened = threading.Event()

    @potluck.service("gate", concurrent=True)
    def wait(call: potluck.Call) -> str:
        assert opened.wait(20)
        return "through"

    @potluck.service("gate", concurrent=True)
    def knock(call: potluck.Call) -> None:
        pass

    def run(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ctx.serve(wait, knock)
        else:
            gate = ctx.connect("gate")
            gate.knock()  # from then on it has a connection, which may take longer than 0.1 s
            with pytest.raises(ServiceTimeout, match=r"gate.wait\(\) on worker 0 gave no result"):
                gate.wait(timeout=0.1)
            opened.set()
            assert gate.wait(timeout=20) == "through"
        ctx.barrier()

    with open_world(kind, 2) as world:
        world.run(run)


def test_a_header_of_more_values_than_the_bound_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile = b"\xdd" + (2 << 20).to_bytes(4, "big") + b"\x80" * (2 << 20)

    def act(ctx: DistributedContext, counter: Any) -> None:
        packed = Packed(hostile, [], 0)
        with monkeypatch.context() as patched:
            patched.setattr("potluck.services.client.pack", lambda value, path: packed)
            with pytest.raises(ServiceLost, match=r"counter.add\(\) on worker 0 was cut off"):
                counter.add(1)
        with monkeypatch.context() as patched:
            patched.setattr("potluck.services.server.pack", lambda value, path: packed)
            with pytest.raises(ServiceLost, match="a payload has more than 1048576 values"):
                counter.add(1)
        assert counter.add(0) == 1, "the first call was not run"

    on_two("inproc", act)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_ends_ends_its_calls_first(kind: str) -> None:
    is_called, may_end = threading.Event(), threading.Event()

    @potluck.service("slow")
    def work(call: potluck.Call) -> None:
        is_called.set()
        assert may_end.wait(20)

    def run(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ctx.serve(work)
            assert is_called.wait(20)
            threading.Timer(0.05, may_end.set).start()
            ctx.close()
            return
        remote = ctx.connect("slow")
        assert remote.work() is None  # a method that runs is waited for
        with pytest.raises(ServiceLost):
            remote.work()

    with open_world(kind, 2) as world:
        world.run(run)


def test_a_worker_calls_its_own_services_also_alone() -> None:
    with potluck.init("local") as ctx:
        ctx.serve(Counter())
        assert ctx.connect("counter").add(5) == 5

    def run(ctx: DistributedContext) -> int:
        ctx.serve(Counter())
        mine: int = ctx.connect("counter", rank=ctx.rank).add(ctx.rank)
        ctx.barrier()
        return mine

    assert run_world(2, run) == [0, 1]
    with open_world("tls", 2) as world:
        assert world.run(run) == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_is_taken_back_is_known_no_more_and_its_name_is_free(kind: str) -> None:
    def run(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ctx.serve(Counter(), echo)
        counter = ctx.connect("counter", rank=0)
        ctx.barrier()
        if ctx.rank == 0:
            ctx.withdraw("counter")
        ctx.barrier()
        with pytest.raises(UnknownService, match="no service 'counter'"):
            counter.add(1)
        assert ctx.connect("echo").echo(5) == 5
        ctx.barrier()
        if ctx.rank == 0:
            ctx.serve(Counter())
        ctx.barrier()
        assert counter.add(0) == 0
        ctx.barrier()

    with open_world(kind, 2) as world:
        world.run(run)


def test_a_call_that_runs_when_its_service_is_taken_back_is_answered() -> None:
    @potluck.service("leaver")
    def leave(call: potluck.Call) -> str:
        ctx.withdraw("leaver")
        return "gone"

    with potluck.init(backend="local") as ctx:
        ctx.serve(leave)
        leaver = ctx.connect("leaver")
        assert leaver.leave() == "gone"
        with pytest.raises(UnknownService, match="'leaver'"):
            leaver.leave()


def test_what_is_not_served_can_not_be_taken_back() -> None:
    with potluck.init(backend="local") as ctx:
        with pytest.raises(ValueError, match="serves no 'counter'; its services: none"):
            ctx.withdraw("counter")
        ctx.serve(echo)
        with pytest.raises(ValueError, match="serves no 'counter'; its services: 'echo'"):
            ctx.withdraw("echo", "counter")
        assert ctx.connect("echo").echo(1) == 1


def test_a_call_without_a_method_says_how_to_name_it() -> None:
    def run(ctx: DistributedContext) -> None:
        ctx.serve(echo)
        remote = ctx.connect("echo")
        assert remote.echo(1) == 1
        with pytest.raises(TypeError, match="no function: name a method"):
            remote(1)

    run_world(1, run)


def test_what_can_not_be_served() -> None:
    with potluck.init("local") as ctx:
        ctx.serve(Counter())
        with pytest.raises(ValueError, match="serves 'counter' already"):
            ctx.serve(Counter())
        with pytest.raises(TypeError, match=r"an instance, Counter\(\)"):
            ctx.serve(Counter)
        with pytest.raises(TypeError, match="now of service 'clock' takes no argument; the first"):
            ctx.serve(potluck.service("clock")(now))
        with pytest.raises(TypeError, match=r"what @potluck.service\(...\) made"):
            ctx.serve(print)
        with pytest.raises(ValueError, match="1 to 64 printable"):
            potluck.service("")
        with pytest.raises(ValueError, match="outside a world of 1"):
            ctx.connect("counter", rank=1)
        with pytest.raises(ValueError, match="above 0"):
            ctx.connect("counter").add(1, timeout=0)


def test_links_of_other_libraries_have_no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    from potluck._core.backends.local import LocalBackend

    monkeypatch.setattr(LocalBackend, "service_transport", None)
    with potluck.init("local") as ctx, pytest.raises(ConfigurationError, match="own links"):
        ctx.serve(Counter())


def now() -> float:
    return 0.0


def test_a_closed_context_says_so_at_once_and_does_not_look_for_services() -> None:
    with potluck.init("local") as ctx:
        pass
    for call in (lambda: ctx.connect("counter"), lambda: ctx.serve(Counter())):
        with pytest.raises(GroupClosed, match="this context was closed here"):
            call()
