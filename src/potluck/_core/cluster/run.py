"""The command's side of ``potluck run``: submits a job to an agent, and waits for its summary.

The job is run by this machine's agent (``potluck up``) on its cluster, or, on a machine without
one, by a private agent in the same process.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from potluck._core.background import stop
from potluck._core.cluster.code_store.imports import (
    importable_from,
    module_file,
    project_root,
    repository_of,
)
from potluck._core.cluster.home.node_state import AgentRecord
from potluck._core.cluster.jobs.agent_parts import OuterWorld
from potluck._core.cluster.jobs.summary import Summary, decode_summary
from potluck._core.cluster.members import AgentLink, connected, machines_of, reached
from potluck._core.cluster.node_agent import NodeAgent
from potluck._core.cluster.past_jobs import (
    AskLog,
    Cursor,
    asking,
    attach,
    cancel,
    find_job,
    follow,
    summary_of,
    wait_for,
)
from potluck._core.settings import Settings
from potluck._core.system import SIGHUP, heard
from potluck._core.wire import jobs, local
from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.local import RunRequest
from potluck._core.wire.worker_link import JobState
from potluck.errors import ConfigurationError, LinkError, ProtocolError


def checked(request: RunRequest) -> RunRequest:
    """``request``, given in this directory, with the ``root`` that travels, what is ``importable``,
    and the file of a ``module`` as its ``script``; ConfigurationError, with what to do, if it can't
    be run."""
    if not 1 <= request.per_node <= jobs.MAX_PER_NODE:
        raise ConfigurationError(
            f"--workers {request.per_node}: a number from 1 to {jobs.MAX_PER_NODE} is needed"
        )
    if request.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts {request.max_restarts}: 0 or more is needed")
    if request.min_workers < 1:
        raise ConfigurationError(f"--min-workers {request.min_workers}: 1 or more is needed")
    if not 0 <= request.wait_s < float("inf"):
        raise ConfigurationError(f"--wait {request.wait_s:g}: seconds, 0 or more, are needed")
    if request.max_nodes and request.min_nodes > request.max_nodes:
        raise ConfigurationError(
            f"--min-nodes {request.min_nodes} is more than --nodes {request.max_nodes}"
        )
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigurationError(
            "the directory that this was called in has been removed; change to another one"
        ) from None
    request = msgspec.structs.replace(request, directory=str(here))
    return _module_found(request, here) if request.module else _script_found(request, here)


def _script_found(request: RunRequest, here: Path) -> RunRequest:
    script = Path(request.script)
    if not script.is_file():
        what = "is no file" if script.exists() else "does not exist"
        what = "is a directory" if script.is_dir() else what
        hint = _meant(request.script, here)
        raise ConfigurationError(f"the script {str(script)!r} {what} (seen from {here}){hint}")
    script = script.absolute()
    root = Path(request.root).absolute() if request.root else project_root(script, script.parent)
    if not root.is_dir() or not script.is_relative_to(root):
        raise ConfigurationError(
            f"--root {request.root}: name a folder that the script {script} is in, or below"
        )
    places = importable_from(root) if root != script.parent else ()
    return msgspec.structs.replace(request, root=str(root), importable=tuple(map(str, places)))


def _meant(script: str, here: Path) -> str:
    """What to write instead of a ``script`` that is no file; empty if nothing like it is there."""
    if Path(f"{script}.py").is_file():
        return f"; is it {script}.py?"
    name = script.strip("/").replace("/", ".")
    places = [here, *importable_from(repository_of(here))]
    if "" not in name.split(".") and module_file(name, places) is not None:
        return f"; a module runs with -m: potluck run -m {name}"
    return ""


def _module_found(request: RunRequest, here: Path) -> RunRequest:
    """As Python does: in the working directory first. Only what travels is looked through."""

    def places() -> list[Path]:
        own = [here] if here.is_relative_to(root) else []
        return list(dict.fromkeys([*own, *importable_from(root)]))

    root = Path(request.root).absolute() if request.root else repository_of(here)
    if not root.is_dir():
        raise ConfigurationError(f"--root {request.root}: there is no such folder")
    is_name = "" not in request.module.split(".") and not {"/", "\\"} & set(request.module)
    if not is_name or Path(request.module).is_file():
        raise ConfigurationError(
            f"-m {request.module}: the name of a module is needed, such as pkg.train; a file runs "
            "without -m"
        )
    found = module_file(request.module, places())
    if found is None:
        looked = ", ".join(map(str, places()))
        raise ConfigurationError(
            f"-m {request.module}: there is no such module, and no package of that name with a "
            f"__main__.py, in {looked}. Call it in the folder that the first name of the module is "
            "in, or name that folder by --root DIR"
        )
    script, place = found
    if place == here and not request.root:
        root = project_root(script, here)
    return msgspec.structs.replace(
        request, script=str(script), root=str(root), importable=tuple(map(str, places()))
    )


_GIT_S = 5.0


def commit_of(folder: Path) -> str:
    """The commit of the git repository that ``folder`` is in, ``-dirty`` behind it if files of it
    were changed since; empty if there is none, or git does not tell in 5 s."""
    words = ["git", "-c", "core.fsmonitor=false", "-C", str(folder)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [*words, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
        )
        return done.stdout.strip()[:64] if done.returncode == 0 else ""
    return ""


def travelling(request: RunRequest) -> RunRequest:
    """The ``checked`` ``request`` for other machines: its folder travels, paths are below it.
    Calls git, which takes up to 5 s."""
    root, script = Path(request.root), Path(request.script).absolute()
    places = map(Path, request.importable)
    return msgspec.structs.replace(
        request,
        folder=str(root),
        script=script.relative_to(root).as_posix(),
        importable=tuple(each.relative_to(root).as_posix() for each in places),
        commit=commit_of(root),
    )


class Watcher(Protocol):
    """Shows a job to people. All calls come from the event loop and must not block."""

    def begin(self, job: JobClient) -> None:
        """The job is about to start; ``job`` answers questions from now on."""

    def line(self, worker: str, stream: str, text: str, end: jobs.End = "\n") -> None:
        """A worker wrote a line to ``stdout`` or ``stderr``."""

    def note(self, text: str) -> None:
        """Something happened."""

    def end(self) -> None:
        """The job is over. Called once, whatever happened."""

    @property
    def is_behind(self) -> bool:
        """Whether more lines have come than it can take: workers' output waits meanwhile."""


class JobClient:
    """The command's end of one job (a ``links.local.Client``). ``watcher`` shows the job;
    ``workers`` are the labels before lines of output."""

    def __init__(self, script: str, workers: tuple[str, ...], watcher: Watcher) -> None:
        """``workers`` are the ones known before the agent's first status."""
        self.workers = workers
        loop = asyncio.get_running_loop()
        self.submitted: asyncio.Future[local.JobSubmitted] = loop.create_future()
        self.taken: asyncio.Future[local.JobTaken] = loop.create_future()
        self.summary: asyncio.Future[Summary] = loop.create_future()
        self.cursor = Cursor()
        self._status = JobState("", "", 0, script, time.time(), 0, -1, None, (), ())
        self._watcher = watcher
        self._order: Callable[[int], None] | None = None
        self._early: list[int] = []

    @property
    def is_behind(self) -> bool:
        return self._watcher.is_behind

    def status(self) -> JobState:
        """The last status of the job from the agent."""
        return self._status

    def interrupt(self, number: int) -> None:
        """End the job: by ``number`` first, by SIGKILL the second time."""
        if self._order is None:
            self._early.append(number)
        else:
            self._order(number)

    def interrupts_by(self, order: Callable[[int], None]) -> None:
        """The agent has the job: ``order(number)`` interrupts it."""
        self._order = order
        for number in self._early:
            order(number)

    def show(self, line: jobs.LogLine) -> None:
        """Show a line of the job's log."""
        if missed := self.cursor.take(line):
            whose = f"rank {line.label}" if line.label else "potluck"
            self._watcher.note(f"{missed} lines of {whose} before this are not kept any more")
        if line.stream == jobs.NOTE:
            self._watcher.note(line.text)
        else:
            self._watcher.line(line.label, line.stream, line.text, line.end)

    async def follow(self, ask: AskLog) -> None:
        """Show the log of the job to its end, once the cluster is asked for it: ``ask`` asks its
        starter."""
        submitted = await self.submitted
        info = jobs.JobInfo(
            job=submitted.job,
            starter=submitted.node,
            machine="",
            script="",
            started=0.0,
            phase="placed",
        )
        await follow(
            ask,
            info,
            self.cursor,
            self.show,
            is_behind=lambda: self.is_behind,
            is_over=self.summary.done,
        )

    def take(self, message: local.Reply) -> None:
        """The agent sent ``message``."""
        match message:
            case local.JobSubmitted() if not self.submitted.done():
                self.submitted.set_result(message)
            case local.JobTaken(job, node) if not self.taken.done():
                self.taken.set_result(message)
                if not self.submitted.done():  # an agent of the release before, still running
                    self.submitted.set_result(local.JobSubmitted(job, node))
            case jobs.JobNote(_, text):
                self._watcher.note(text)
            case jobs.LabelledOutput(_, worker, stream, text, end):
                self._watcher.line(worker, stream, text, end)
            case jobs.JobStatus(status):
                self._status = status
                self.workers = tuple(
                    f"{each.worker if each.rank < 0 else each.rank} {each.node}".strip()
                    for each in status.workers
                )
            case jobs.JobEnded(_, summary):
                self.summary.set_result(decode_summary(summary))
            case local.CommandResult(_, text):
                for future in (self.submitted, self.taken, self.summary):
                    if not future.done():
                        future.set_exception(ConfigurationError(text))
                        future.exception()  # whoever waits for the other one has it
            case _:
                pass


def run_job(
    request: RunRequest,
    settings: Settings,
    watcher: Watcher,
    agent: AgentRecord | None,
    outer_world: OuterWorld | None = None,
) -> Summary:
    """Run the job to its end: by this machine's ``agent`` on its cluster; without one here, by a
    private agent in this process, which runs the script where it is, its workers as a part of
    ``outer_world`` if there is one.

    Must be called on the main thread; takes over SIGINT, SIGTERM and SIGHUP meanwhile,
    except ignored ones.
    ConfigurationError or IdentityError if the job can't begin; LinkError if ``agent`` is lost.
    """
    return asyncio.run(_run(request, settings, watcher, agent, outer_world))


def start_job(request: RunRequest, settings: Settings, watcher: Watcher, agent: AgentRecord) -> str:
    """Start a job that ``outlives`` this command on the cluster of this machine's ``agent``; its
    id. Errors as for ``run_job``, whose place it takes."""
    return asyncio.run(_start(request, settings, watcher, agent))


async def _start(
    request: RunRequest, settings: Settings, watcher: Watcher, agent: AgentRecord
) -> str:
    client = JobClient(request.script, (), watcher)
    watcher.begin(client)
    try:
        with _signals(client.interrupt):
            async with _submitted(agent, settings, request, client) as (_, _, taken):
                return taken.job
    finally:
        watcher.end()


async def _run(
    request: RunRequest,
    settings: Settings,
    watcher: Watcher,
    agent: AgentRecord | None,
    outer_world: OuterWorld | None,
) -> Summary:
    num = request.per_node + request.extra_workers
    known = () if agent is not None else tuple(map(str, range(num)))
    client = JobClient(request.script, known, watcher)
    watcher.begin(client)
    try:
        with _signals(client.interrupt):
            if agent is None:
                return await _run_alone(settings, request, client, outer_world)
            return await _run_by_agent(agent, settings, request, client)
    finally:
        watcher.end()


@contextlib.asynccontextmanager
async def _submitted(
    agent: AgentRecord, settings: Settings, request: RunRequest, client: JobClient
) -> AsyncIterator[tuple[AgentLink, asyncio.Task[None], local.JobTaken]]:
    """Have ``agent`` start the job on its cluster: the connection to it, and what shows the job's
    log meanwhile, to its end. LinkError if it goes away; ConfigurationError if the cluster does not
    take the job."""
    main, num_interrupts = asyncio.current_task(), 0
    assert main is not None

    def interrupt(number: int) -> None:
        """The third time, leave; at once if the terminal has gone and the job outlives it."""
        nonlocal num_interrupts
        num_interrupts += 1
        outlives = request.outlives and number == SIGHUP
        if not outlives:
            link.link.send(local.InterruptRequest(number))
        if num_interrupts >= 3 or outlives:
            main.cancel()

    try:
        local.REQUEST.decode(local.REQUEST.encode(request)[PREFIX_BYTES:])
    except ProtocolError as error:
        raise ConfigurationError(f"no agent takes this job: {error}") from None
    if not request.again:
        request = await asyncio.to_thread(travelling, request)
    async with connected(settings, agent, client.take) as link:
        link.link.send(request)
        client.interrupts_by(interrupt)
        following = asyncio.create_task(
            client.follow(lambda request: asking(link, request.starter)(request))
        )
        try:
            yield link, following, await link.result(client.taken)
        except asyncio.CancelledError:
            raise LinkError(
                "left without waiting for the end; `potluck status` shows what still runs"
            ) from None
        finally:
            await stop(following)


async def _run_by_agent(
    agent: AgentRecord, settings: Settings, request: RunRequest, client: JobClient
) -> Summary:
    """Have ``agent`` run the job on its cluster, and show it to its end; errors as for
    ``_submitted``."""
    async with _submitted(agent, settings, request, client) as (link, following, taken):
        try:
            await following
            return await link.result(client.summary)
        except LinkError as error:
            raise LinkError(
                "this machine's agent has ended; if others are left, they go on with the job: "
                f"`potluck attach {taken.job}` there"
            ) from error
        except ConfigurationError:  # the end was told to others, while this machine was away
            machines = await machines_of(settings, link)
            found = await find_job(machines, taken.job)
            if found.state != "ended":
                raise
            return await summary_of(machines, found)


_TWICE_S = 2.0
_LAST_LINES = 10
_STATUS_S = 0.5


def attach_to(
    settings: Settings, text: str, watcher: Watcher, is_to_cancel: Callable[[str], bool]
) -> Summary | None:
    """Show the job that ``text`` names, which runs, to its end; None if Ctrl-C ends that. Pressed
    twice, the job is cancelled if ``is_to_cancel(job)``, and its end waited for.
    ConfigurationError, with what to do instead, if it does not run."""
    return asyncio.run(_attach_to(settings, text, watcher, is_to_cancel))


async def _attach_to(
    settings: Settings, text: str, watcher: Watcher, is_to_cancel: Callable[[str], bool]
) -> Summary | None:
    async with reached(settings) as machines:
        job = await find_job(machines, text)
        name, agent = job.info.job, machines.agent
        if job.is_over or agent is None:
            raise ConfigurationError(
                f"job {name} does not run: `potluck jobs {name}` shows how it ended, "
                f"`potluck logs {name}` what it wrote"
            )
        client = JobClient(job.info.script, (), watcher)
        client.cursor.is_partial = True
        left = asyncio.Event()

        async def tell_status() -> None:
            while True:
                reply = await agent.ask(local.JobsRequest(), local.JobsReply)
                for status in reply.jobs:
                    if status.job == name:
                        client.take(jobs.JobStatus(status))
                await asyncio.sleep(_STATUS_S)

        loop, num_interrupts = asyncio.get_running_loop(), 0

        def interrupt(number: int) -> None:
            nonlocal num_interrupts
            num_interrupts += 1
            if num_interrupts > 1:
                left.set()
                return
            watcher.note(f"leaving job {name}, which goes on; Ctrl-C again now to cancel it")
            loop.call_later(_TWICE_S, left.set)

        watcher.begin(client)
        client.interrupts_by(interrupt)
        telling = asyncio.create_task(tell_status())
        attached = asyncio.create_task(
            attach(
                machines,
                job,
                client.cursor,
                client.show,
                is_behind=lambda: client.is_behind,
                num_last=_LAST_LINES,
            )
        )
        leaving = asyncio.create_task(left.wait())
        try:
            with _signals(client.interrupt, signal.SIGINT):
                ends = {attached, leaving}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if attached.done():
                attached.result()
        finally:
            await stop(telling, attached, leaving)
            watcher.end()
        if left.is_set():
            if num_interrupts < 2 or not await asyncio.to_thread(is_to_cancel, name):
                return None
            await cancel(machines, job)
        return await summary_of(machines, await wait_for(machines, job))


async def _run_alone(
    settings: Settings, request: RunRequest, client: JobClient, outer_world: OuterWorld | None
) -> Summary:
    """Run the job on this machine alone, by a private agent that lives as long as the job."""
    agent = NodeAgent(settings, on_note=lambda text: None, is_private=True, outer_world=outer_world)
    running = asyncio.create_task(agent.run())
    ready = asyncio.create_task(agent.ready.wait())
    try:
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await agent.jobs.submit(request, client)
            client.interrupts_by(partial(agent.jobs.interrupt, client))
            ends: set[asyncio.Future[Any]] = {running, client.summary}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # why the agent broke
        return client.summary.result()
    finally:
        await stop(ready, running)


@contextlib.contextmanager
def _signals(interrupt: Callable[[int], None], *only: int) -> Iterator[None]:
    """Have signals that ask for the end passed to ``interrupt``, or ``only`` these. A job that was
    started to outlive its terminal does so."""
    loop = asyncio.get_running_loop()
    numbers = heard(*(only or (signal.SIGINT, signal.SIGTERM, SIGHUP)))
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
