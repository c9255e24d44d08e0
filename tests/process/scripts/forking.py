"""Two ranks, of which rank 0 forks: what its children may not do, and that the ranks go on right.

    forking.py SCENARIO,... FOLDER

The scenarios one after the other, in one world. Ends with code 0 if all was right. ``FOLDER`` is
for notes between the ranks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import potluck
from potluck.errors import ForkedProcess, GroupError
from support.notes import Notebook

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

CHILD_S = 60
"""A child that hangs is ended by a signal then, which is no code of a right one."""
LARGE = 1 << 20
FOLDER = Path(sys.argv[2])
wait_for = Notebook(FOLDER / "notes").wait_for


def exact(ctx: Any) -> None:
    """Sums of the ranks, small and large, waited for and not, are right in every element."""
    total = sum(range(1, ctx.world_size + 1))
    for size in (1, 1000, LARGE):
        mine = np.full(size, ctx.rank + 1.0)
        assert (ctx.all_reduce(mine) == total).all(), (size, mine)
    works = [ctx.all_reduce(np.full(5000, ctx.rank + 1.0), async_op=True) for _ in range(3)]
    assert all((work.wait() == total).all() for work in works)
    ring = ctx.all_reduce(np.full(5000, ctx.rank + 1.0), algorithm="ring")
    assert (ring == total).all()
    rows = ctx.all_gather(np.array([ctx.rank]))
    assert rows.ravel().tolist() == list(range(ctx.world_size))


def refused(call: Callable[[], object], owner: int = 0) -> None:
    """``call`` raises the one error, at once; ``owner``: the process that it names, else the
    parent."""
    began = time.monotonic()
    try:
        call()
    except ForkedProcess as error:
        assert f"belongs to process {owner or os.getppid()}," in str(error), error
        assert f"this is process {os.getpid()}" in str(error), error
        assert "spawn" in str(error), error
    else:
        raise AssertionError("it was not refused")
    assert time.monotonic() - began < 5


def start_child(work: Callable[[], object], *, is_clean: bool = False) -> int:
    """Fork a child that does ``work``; ``is_clean``: it ends as the interpreter does, by exit."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(CHILD_S)
    try:
        work()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if is_clean:
        sys.exit(0)
    os._exit(0)


def end_of(pid: int) -> int:
    """The exit code of a child; minus the number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(work: Callable[[], object], *, is_clean: bool = False) -> None:
    code = end_of(start_child(work, is_clean=is_clean))
    assert code == 0, f"the child ended with {code}"


def holds_nothing() -> bool:
    """Whether this process has no connection, no listening port, and no memory shared with
    others."""
    maps = Path("/proc/self/maps").read_text()
    return not psutil.Process().net_connections("tcp") and "memfd:potluck" not in maps


def note(name: str) -> None:
    (FOLDER / name).touch()


def await_note(name: str) -> None:
    wait_for(f"the note {name!r}", (FOLDER / name).exists)


def every_call(ctx: Any, part: Any, work: Any) -> list[Callable[[], object]]:
    one = np.ones(4)
    return [
        lambda: ctx.all_reduce(one),
        lambda: ctx.all_reduce(np.ones(LARGE), async_op=True),
        lambda: ctx.all_reduce(one, algorithm="ring"),
        lambda: ctx.all_reduce(np.ones(4, np.float32), codec="int8"),
        lambda: ctx.all_gather(one),
        lambda: ctx.broadcast(one),
        lambda: ctx.reduce(one),
        lambda: ctx.all_to_all(np.ones((ctx.world_size, 2))),
        ctx.barrier,
        lambda: ctx.send(one, 1),
        lambda: ctx.recv(one, 1),
        lambda: ctx.send_message({"a": 1}, 1),
        lambda: ctx.recv_message(1),
        lambda: ctx.new_group([0, 1]),
        lambda: part.all_reduce(one),
        lambda: ctx.commit(0),
        lambda: ctx.begin_step(0),
        ctx.settle,
        ctx.reform,
        lambda: ctx.reform_due,
        lambda: ctx.has_next_group,
        lambda: ctx.serve(len),
        lambda: ctx.connect("double", rank=1),
        lambda: ctx.withdraw("double"),
        ctx.stats,
        ctx.metrics_text,
        lambda: ctx.waited_s,
        work.wait,
    ]


@potluck.service("double")
def double(_: potluck.Call, value: int) -> int:
    return 2 * value


def idle(ctx: Any) -> None:
    """A child calls everything, and ends in every way; then others do the same at their exit."""
    part = ctx.new_group([0, 1])
    ctx.serve(double)
    remote = ctx.connect("double", rank=1 - ctx.rank)
    exact(ctx)
    exact(part)
    assert remote.double(4) == 8
    if ctx.rank == 0:
        assert not holds_nothing()
        parent, pending = os.getpid(), ctx.recv(np.empty(3), 1, async_op=True)

        def tries() -> None:
            assert (ctx.rank, ctx.world_size, ctx.is_master) == (0, 2, True)
            for call in every_call(ctx, part, pending):
                refused(call)
            refused(lambda: remote.double(1))
            refused(lambda: remote.double.start(1))
            ctx.report(loss=1.0)
            assert holds_nothing()

        def leaves() -> None:
            ctx.abort(RuntimeError("of a child"))
            remote.close()
            ctx.close()
            with ctx:
                pass

        def drops() -> None:
            nonlocal part, remote, pending
            del part, remote, pending
            ctx.__dict__.clear()  # also the last references to what the native core made
            gc.collect()

        def grandchild() -> None:
            refused(ctx.barrier, parent)

        for work in (tries, leaves, lambda: None):
            for is_clean in (False, True):
                in_child(work, is_clean=is_clean)
        for work in (drops, lambda: in_child(grandchild)):
            in_child(work)
        assert remote.double(5) == 10
        note("done")
        ctx.all_reduce(np.ones(1))
        assert (pending.wait() == 7).all()
    else:
        await_note("done")
        ctx.all_reduce(np.ones(1))
        ctx.send(np.full(3, 7.0), 0)
    exact(ctx)
    exact(part)


def own_context(ctx: Any) -> None:
    """A child may have a context of its own, that works and is closed at its exit. It can't be this
    rank of the world."""

    def makes() -> None:
        mine = potluck.init("local")
        assert (mine.all_reduce(np.ones(3)) == 1).all()
        refused(ctx.barrier)
        refused(potluck.init)

    if ctx.rank == 0:
        in_child(makes)
        in_child(makes, is_clean=True)
    exact(ctx)


def load(ctx: Any, num_forks: int = 30) -> None:
    """``num_forks`` forks on every rank while the ranks reduce without a pause."""
    is_over = threading.Event()
    failures: list[BaseException] = []

    def tries() -> None:
        refused(lambda: ctx.all_reduce(np.full(100, 1000.0)))
        refused(lambda: ctx.all_reduce(np.full(100, 1000.0), algorithm="ring"))

    def forks() -> None:
        try:
            for _ in range(num_forks):
                in_child(tries)
        except BaseException as error:
            failures.append(error)
        finally:
            is_over.set()

    thread = threading.Thread(target=forks)
    thread.start()
    step = 0
    while True:
        for size in (1, 3000, 100_000):
            for algorithm in (None, "ring"):
                mine = np.full(size, float(step + ctx.rank))
                ctx.all_reduce(mine, algorithm=algorithm)
                assert (mine == 2 * step + 1).all(), (step, size, algorithm, mine)
        step += 1
        ended = ctx.all_reduce(np.array([float(is_over.is_set())]))
        if ended[0] == ctx.world_size:
            break
    thread.join()
    if failures:
        raise failures[0]
    exact(ctx)


def much_load(ctx: Any) -> None:
    load(ctx, 100)


def amid_a_call(ctx: Any) -> None:
    """A thread forks while the main thread waits in a call, and while others are under way."""
    exact(ctx)
    for size in (10, LARGE):
        for algorithm in (None, "ring"):
            name = f"{size}-{algorithm}"
            if ctx.rank == 1:
                await_note(name)
                mine = ctx.all_reduce(np.full(size, 2.0), algorithm=algorithm)
                assert (mine == 3).all()
                assert (ctx.all_reduce(np.full(size, 2.0)) == 3).all()
                continue
            codes: list[int] = []

            def forks(name: str = name, size: int = size, codes: list[int] = codes) -> None:
                wait_for("the call", lambda: bool(ctx.communicator.ongoing()))

                def tries() -> None:
                    refused(lambda: ctx.all_reduce(np.full(size, 1000.0)))

                codes.append(end_of(start_child(tries)))
                note(name)

            thread = threading.Thread(target=forks)
            thread.start()
            mine = ctx.all_reduce(np.full(size, 1.0), algorithm=algorithm)
            assert (mine == 3).all()
            thread.join()
            assert codes == [0]
            assert (ctx.all_reduce(np.full(size, 1.0)) == 3).all()
    exact(ctx)


def in_a_handler(ctx: Any) -> None:
    """A signal handler forks, in the thread that waits; the child returns into the call."""
    exact(ctx)
    parent = os.getpid()
    children: list[int] = []

    def forks(*_: object) -> None:
        pid = os.fork()
        if pid:
            children.append(pid)
        else:
            signal.alarm(CHILD_S)

    calls: list[Callable[[np.ndarray[Any, Any]], object]] = [
        ctx.all_reduce,
        lambda mine: ctx.all_reduce(mine, async_op=True).wait(),
        lambda mine: ctx.all_reduce(mine, algorithm="ring"),
    ]
    signal.signal(signal.SIGUSR1, forks)
    for number, call in enumerate(calls):
        mine = np.full(1000, ctx.rank + 1.0)
        if ctx.rank == 1:
            await_note(str(number))
            call(mine)
        else:

            def interrupts(number: int = number) -> None:
                wait_for("the call", lambda: bool(ctx.communicator.ongoing()))
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                wait_for("the fork", lambda: len(children) > number)
                assert end_of(children[number]) == 7
                note(str(number))

            thread = threading.Thread(target=interrupts)
            thread.start()
            try:
                call(mine)
            except ForkedProcess:
                assert os.getpid() != parent
                sys.exit(7)
            assert os.getpid() == parent
            thread.join()
            assert len(children) == number + 1
        assert (mine == 3).all()
    exact(ctx)


def outlived(ctx: Any) -> None:
    """Rank 0 is killed; its child lives on. Rank 1 hears of it at once."""
    exact(ctx)
    if ctx.rank == 0:
        pid = start_child(lambda: await_note("over"))
        note("forked")
        ctx.barrier()
        assert pid
        await_note("passed")  # what is on its way to rank 1 could be lost with this process
        os.kill(os.getpid(), signal.SIGKILL)
    await_note("forked")
    ctx.barrier()
    note("passed")
    began = time.monotonic()
    try:
        ctx.all_reduce(np.ones(3))
    except GroupError as error:
        assert error.rank == 0, error
    else:
        raise AssertionError("a sum with a dead rank")
    finally:
        note("over")
    assert time.monotonic() - began < 10


def reform(ctx: Any) -> None:
    """Rank 2 of an elastic job dies; while the others form the next groups, they fork."""
    is_late = (FOLDER / "died").exists()
    exact(ctx)
    if is_late:
        return
    if ctx.rank == 2:
        note("died")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            ctx.barrier()
    except GroupError as lost:
        with forking(ctx):
            ctx.reform(lost)
    until = time.monotonic() + 60
    while ctx.world_size < 3:  # it is started again
        assert time.monotonic() < until
        exact(ctx)
        if ctx.commit(0).reform:
            with forking(ctx):
                ctx.reform()
    exact(ctx)


@contextmanager
def forking(ctx: Any) -> Iterator[None]:
    """A thread forks again and again."""
    is_over = threading.Event()
    codes: list[int] = []

    def tries() -> None:
        refused(ctx.barrier)
        refused(ctx.reform)

    def forks() -> None:
        while not is_over.is_set() or not codes:
            codes.append(end_of(start_child(tries)))

    thread = threading.Thread(target=forks)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert not any(codes), codes


_inherited: Any = None


def forked_work(_: int) -> str:
    try:
        _inherited.barrier()
    except ForkedProcess:
        return "refused"
    return "done"


def fresh_work(_: int) -> str:
    with potluck.init("local") as mine:
        return f"{mine.all_reduce(np.ones(2)).sum():g}"


def processes(ctx: Any) -> None:
    """multiprocessing's three ways: two of them make no copies of the context."""
    global _inherited
    _inherited = ctx
    exact(ctx)
    if ctx.rank == 0:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(forked_work, range(4)) == ["refused"] * 4
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                assert pool.map(fresh_work, range(4)) == ["2"] * 4
    exact(ctx)


def helpers(ctx: Any) -> None:
    """What is made of a context: parameter servers, work queues, stores that write behind."""
    from potluck.checkpoint import CheckpointStore

    server = potluck.ParameterServer(ctx)
    server.set_parameters("m", {"w": np.zeros(3)})
    queue = potluck.WorkQueue(ctx, range(4))
    server.get_parameters("m")
    store = CheckpointStore(FOLDER / f"store-{ctx.rank}", asynchronous=True)
    store.save({"w": np.ones(1 << 20)}, 1)
    if ctx.rank == 0:

        def tries() -> None:
            refused(lambda: server.get_parameters("m"))
            refused(lambda: server.set_parameters("n", {"w": np.zeros(3)}))
            refused(lambda: server.accumulate_gradient("m", {"w": np.ones(3)}))
            refused(server.stats)
            refused(server.save)
            refused(lambda: next(iter(queue)))
            refused(lambda: queue.finish(0, 1))
            refused(queue.stats)
            refused(lambda: store.save({"w": np.ones(3)}, 2))
            refused(store.wait)

        def leaves() -> None:
            server.close()
            queue.close()

        for work in (tries, leaves):
            for is_clean in (False, True):
                in_child(work, is_clean=is_clean)
    store.wait()
    store.save({"w": np.ones(3)}, 2)
    store.wait()
    assert sorted(store.steps()) == [1, 2]
    for task in queue:
        queue.finish(task, task.payload)
    assert queue.results() == list(range(4))
    assert (server.get_parameters("m")[0]["w"] == 0).all()
    queue.close()
    server.close()
    exact(ctx)


SCENARIOS = {
    each.__name__: each
    for each in (idle, own_context, load, much_load, amid_a_call, in_a_handler, outlived, reform,
                 processes, helpers)
}  # fmt: skip

if __name__ == "__main__":
    with potluck.init(timeout_s=30) as context:
        for scenario in sys.argv[1].split(","):
            SCENARIOS[scenario](context)
