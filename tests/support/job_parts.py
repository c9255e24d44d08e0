"""The parts of an agent that its jobs use, for tests that drive the dispatcher of one node: what
they would do is written down, and the messages of the other nodes are written by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from potluck._core.cluster.code_store.job_folders import JobFolder
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.content.store import ContentStore
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.dispatcher import JobDispatcher
from potluck._core.cluster.jobs.history import JobHistory
from potluck._core.cluster.jobs.log import JobLog
from potluck._core.cluster.jobs.process import Launch
from potluck._core.cluster.membership import events
from potluck._core.cluster.names import NodeNames
from potluck._core.cluster.sharing.confinement import Confinement
from potluck._core.cluster.sharing.limits import Limits
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.types import MeasuredPath
from potluck._core.wire import bulk, jobs, peers
from potluck._core.wire.nodes import JobGroup, View, ViewMember
from potluck.errors import LinkError

T = TypeVar("T")

ME, LEADER, EVE = "me", "leader", "eve"


def parts_of(
    machine: Any, *, names: NodeNames, launcher: Callable[..., Launch], note: Callable[[str], None]
) -> AgentParts:
    """The parts of the agent of node ``ME``; ``machine`` stands for each of the others."""
    return AgentParts(
        me=ME,
        port=1,
        bind="127.0.0.1",
        names=names,
        launcher=launcher,
        links=machine,
        plane=machine,
        surveyor=machine,
        offers=machine,
        vouching=machine,
        confinement=Confinement(Limits()),
        environments=machine,
        data=machine,
        sign=lambda spec: spec,
        worker_homes=machine,
        broker=machine,
        commands=machine,
        log=machine.log,
        history=machine.history,
        note=note,
        is_admin=lambda node: node == EVE,
    )


class Machine:
    """The parts of an agent that its jobs use (``AgentParts``): what they would do is written."""

    stands_still, is_banned = "", False

    def __init__(self) -> None:
        self.view: View | None = None
        self.sent: list[tuple[str, peers.PeerMessage | peers.RequestContent | bulk.Request]] = []
        self.events: list[events.Event] = []
        self.notes: list[str] = []
        self.on_linked: list[object] = []
        self.on_gone: list[object] = []
        self.listeners: list[object] = []
        self.launched: list[str] = []
        self.over_here: list[tuple[str, bool]] = []
        self.listed_here: list[set[str]] = []
        self.unreachable: set[str] = set()
        self.refusals: dict[str, str] = {}
        self.names = NodeNames(ME, ME)
        self.history = JobHistory(None)
        self.log = JobLog(None, self.note)
        self.forged: set[str] = set()
        for node in (LEADER, EVE):
            self.names.met(node, node)

    def parts(self) -> AgentParts:
        return parts_of(self, names=self.names, launcher=self.launcher, note=self.note)

    def on(self, messages: object, take: object) -> None:
        """Tests call what registers here by themselves."""

    on_request = on

    def make(self, job: str) -> Path:
        return Path(job)

    async def take_in(self, named: object, note: object, *, travels: bool) -> tuple[()]:
        """No job brings data."""
        return ()

    async def take_again(self, spec: jobs.JobSpec, note: object) -> jobs.JobSpec:
        return spec

    def remove(self, folder: Path) -> None:
        """Nothing was made."""

    def send(self, node: str, message: peers.PeerMessage) -> bool:
        self.sent.append((node, message))
        return node not in self.unreachable

    nodes = (LEADER, EVE)

    def part_bytes(self, node: str) -> int:
        return bulk.MAX_PART

    def tell(self, node: str, message: bulk.Announce) -> None:
        """Nobody fetches."""

    async def ask(
        self, node: str, request: Any, kind: type[T], *, timeout_s: float | None = 10.0
    ) -> T:
        """No node answers, except that the end of a job is kept."""
        self.sent.append((node, request))
        if isinstance(request, jobs.KeepEnd):
            return cast(T, jobs.Kept())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        raise LinkError(f"node {node} did not answer")

    def to_leader(self, message: jobs.ToLeader) -> bool:
        return self.view is not None and self.send(self.view.leader, message)

    def handle(self, event: events.Event) -> None:
        self.events.append(event)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def last_address(self, node: str) -> str:
        return node

    def introduction(self, node: str) -> peers.Introduction:
        return peers.Introduction(1, node, bytes(32), 1, own_versions())

    def refusal(self, node: str, starter: str) -> str:
        return self.refusals.get(node, "")

    objection = refusal

    def objects_to(self, node: str) -> str | None:
        return None

    def refuses(self, spec: jobs.JobSpec) -> str:
        return self.refusals.get(ME, "")

    async def start_own(self, spec: jobs.JobSpec) -> jobs.JobSpec:
        return spec

    def is_genuine(self, spec: jobs.JobSpec) -> bool:
        return spec.job not in self.forged

    async def confirm(self, spec: jobs.JobSpec) -> None:
        """All jobs run."""

    def over(self, spec: jobs.JobSpec, *, has_run: bool = True) -> None:
        self.over_here.append((spec.job, has_run))

    def listed(self, names: set[str]) -> None:
        self.listed_here.append(names)

    def unsent(self, node: str) -> int:
        return 0

    def is_dead(self, node: str) -> bool:
        return False

    def ring(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        return ()

    def relayed(self, nodes: tuple[str, ...]) -> frozenset[tuple[str, str]]:
        return frozenset()

    def facts(self, node: str) -> None:
        return None

    def paths(self, nodes: set[str]) -> tuple[MeasuredPath, ...]:
        return ()

    def launcher(
        self,
        confinement: Confinement,
        spec: jobs.JobSpec,
        folder: JobFolder,
        worker_home: Path,
        **how: object,
    ) -> Any:
        self.launched.append(spec.job)
        return self


def spec(package: bytes, starter: str) -> jobs.JobSpec:
    return jobs.JobSpec(
        job="job", script="train.py", package=package, starter=starter, versions=own_versions()
    )


def view(*nodes: str, epoch: int = 3, groups: tuple[JobGroup, ...] = ()) -> View:
    members = tuple(ViewMember(node, 1, number) for number, node in enumerate(nodes, 1))
    return View("L", epoch, members, groups)


def play(tmp_path: Path, story: Callable[[Machine, JobDispatcher, CodeStore], object]) -> Machine:
    async def run() -> Machine:
        machine = Machine()
        content = ContentStore(tmp_path / "home" / "content", ME, machine, on_note=machine.note)
        code_store = CodeStore(tmp_path / "home", ME, content)
        all_jobs = JobDispatcher(machine.parts(), code_store)
        try:
            await story(machine, all_jobs, code_store)  # type: ignore[misc]
        finally:
            await all_jobs.close()
        return machine

    return asyncio.run(run())


def install(machine: Machine, all_jobs: JobDispatcher, new: View) -> None:
    machine.view = new
    all_jobs.act(events.Install(new, ""))


async def package_of(code_store: CodeStore, folder: Path) -> bytes:
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')")
    package, _ = await code_store.take_in(folder, "train.py", ())
    return package


async def submit(
    machine: Machine,
    all_jobs: JobDispatcher,
    code_store: CodeStore,
    folder: Path,
    others: tuple[str, ...] = (LEADER, EVE),
    **options: Any,
) -> None:
    """Have this node lead a view with the ``others``, and the job of ``LEADER``, with these
    ``options``, arrive there."""
    package = await package_of(code_store, folder)
    install(machine, all_jobs, view(ME, *others))
    one = msgspec.structs.replace(spec(package, LEADER), **options)
    all_jobs.received(LEADER, jobs.Submit(one))


async def until_over(all_jobs: JobDispatcher) -> None:
    """Return when this node, which leads, has no job any more."""
    async with asyncio.timeout(20):
        while all_jobs.status():
            await asyncio.sleep(0)


def reports(machine: Machine) -> list[str]:
    return [to for to, message in machine.sent if isinstance(message, jobs.NodeReport)]
