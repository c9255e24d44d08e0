"""Who may make a node run something: the leader of its own view, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from potluck.cluster import views
from potluck.cluster.bundle_depot import KEPT_JOBS, BundleDepot
from potluck.cluster.jobs import Jobs
from potluck.cluster.lead import Lead
from potluck.cluster.versions import own_versions
from potluck.launch.chaos import ChaosPlan
from potluck.wire import jobs, peers
from potluck.wire.names import Versions
from potluck.wire.nodes import Seat, View

ME, LEADER, EVE = "me", "leader", "eve"


class Machine:
    """What an agent is to its jobs (``JobHost`` and ``Shop``): what it would do is written down."""

    me, port, bind, stands_still, is_banned = ME, 1, "127.0.0.1", "", False

    def __init__(self) -> None:
        self.view: View | None = None
        self.sent: list[tuple[str, peers.PeerMessage]] = []
        self.events: list[views.Event] = []
        self.notes: list[str] = []
        self.launched: list[str] = []

    @property
    def shop(self) -> Machine:
        return self

    def send(self, node: str, message: peers.PeerMessage) -> bool:
        self.sent.append((node, message))
        return True

    def to_leader(self, message: jobs.ToLeader) -> bool:
        return self.view is not None and self.send(self.view.leader, message)

    def handle(self, event: views.Event) -> None:
        self.events.append(event)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log(self, job: str, line: str) -> None:
        self.notes.append(line)

    def called(self, node: str) -> str:
        return node

    label = readable = address = called

    def versions(self, node: str) -> Versions:
        return own_versions()

    def unsent(self, node: str) -> int:
        return 0

    def is_dead(self, node: str) -> bool:
        return False

    def free_port(self) -> int:
        return 1

    def chaos(self, text: str) -> ChaosPlan:
        return ChaosPlan([])

    def launcher(self, spec: jobs.JobSpec, folder: Path, **how: object) -> Machine:
        self.launched.append(spec.job)
        return self

    def summary(
        self, spec: jobs.JobSpec, lead: Lead, last_words: Mapping[str, Sequence[str]]
    ) -> tuple[int, bytes]:
        return 0, b"{}"


def spec(bundle: bytes, starter: str) -> jobs.JobSpec:
    return jobs.JobSpec("job", "train.py", (), bundle, starter, own_versions())


def view(*nodes: str, epoch: int = 3) -> View:
    return View("L", epoch, tuple(Seat(node, 1, number) for number, node in enumerate(nodes, 1)))


def play(tmp_path: Path, story: Callable[[Machine, Jobs, BundleDepot], object]) -> Machine:
    async def run() -> Machine:
        machine = Machine()
        depot = BundleDepot(tmp_path / "bundles", machine.send)
        all_jobs = Jobs(machine, depot)  # type: ignore[arg-type]
        try:
            await story(machine, all_jobs, depot)  # type: ignore[misc]
        finally:
            await all_jobs.close()
        return machine

    return asyncio.run(run())


def install(machine: Machine, all_jobs: Jobs, new: View) -> None:
    machine.view = new
    all_jobs.act(views.Install(new, ""))


async def bundle_of(depot: BundleDepot, folder: Path) -> bytes:
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')")
    return await depot.take_in(folder)


def reports(machine: Machine) -> list[str]:
    return [to for to, message in machine.sent if isinstance(message, jobs.Reported)]


def test_an_order_of_the_leader_is_carried_out_also_if_it_comes_before_its_view(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: Jobs, depot: BundleDepot) -> None:
        bundle = await bundle_of(depot, tmp_path / "code")
        places = (jobs.Place("0", ME, 0),)
        all_jobs.received(LEADER, jobs.Order(spec(bundle, LEADER), places))
        assert not all_jobs.floor.posts
        install(machine, all_jobs, view(LEADER, ME))
        async with asyncio.timeout(20):
            while not reports(machine):
                await asyncio.sleep(0)

    machine = play(tmp_path, story)
    assert machine.launched == ["job"]
    assert reports(machine) == [LEADER]


def test_a_banned_node_ends_its_workers(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: Jobs, depot: BundleDepot) -> None:
        bundle = await bundle_of(depot, tmp_path / "code")
        install(machine, all_jobs, view(LEADER, ME))
        all_jobs.received(LEADER, jobs.Order(spec(bundle, LEADER), ()))
        all_jobs.act(views.Leave("a cut"))
        assert all_jobs.floor.posts, "it may come back"
        machine.is_banned = True
        all_jobs.act(views.Leave("banned"))
        assert not all_jobs.floor.posts

    play(tmp_path, story)


def test_an_order_of_anybody_else_is_refused_and_said(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: Jobs, depot: BundleDepot) -> None:
        bundle = await bundle_of(depot, tmp_path / "code")
        install(machine, all_jobs, view(LEADER, ME, EVE))
        order = jobs.Order(spec(bundle, EVE), (jobs.Place("0", ME, 0),))
        all_jobs.received(EVE, order)
        all_jobs.received(EVE, jobs.StartWorker("job", "0", 0))
        install(machine, all_jobs, view(LEADER, ME, EVE, epoch=4))
        assert not all_jobs.floor.posts

    machine = play(tmp_path, story)
    assert machine.launched == []
    assert machine.notes == [
        "eve does not lead the cluster, and ordered a job: nothing is run for it"
    ]
    assert not [m for _, m in machine.sent if isinstance(m, peers.BundleWanted | jobs.Reported)]


def test_nobody_outside_the_view_or_in_anothers_name_can_submit_a_job(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: Jobs, depot: BundleDepot) -> None:
        install(machine, all_jobs, view(ME, LEADER))
        machine.sent.clear()
        all_jobs.received(EVE, jobs.Submit(spec(bytes(32), EVE)))
        assert machine.sent == []
        all_jobs.received(LEADER, jobs.Submit(spec(bytes(32), ME)))
        [(to, answer)] = machine.sent
        assert to == LEADER
        assert isinstance(answer, jobs.Submitted)
        assert answer.error

    play(tmp_path, story)


def test_a_node_speaks_for_its_own_workers_only(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: Jobs, depot: BundleDepot) -> None:
        bundle = await bundle_of(depot, tmp_path / "code")
        install(machine, all_jobs, view(ME, LEADER, EVE))
        all_jobs.received(LEADER, jobs.Submit(spec(bundle, LEADER)))
        for node in (ME, LEADER, EVE):
            all_jobs.received(node, jobs.Reported("job"))
        [status] = all_jobs.status()
        assert {worker.phase for worker in status.workers} == {"starting"}
        all_jobs.received(EVE, jobs.WorkerEnded("job", "0", 1))
        [status] = all_jobs.status()
        assert {worker.phase for worker in status.workers} == {"starting"}
        all_jobs.received(LEADER, jobs.WorkerEnded("job", "0", 1))
        [status] = all_jobs.status()
        assert status.workers[0].phase == "gone"

    play(tmp_path, story)


def test_what_jobs_leave_behind_is_bounded(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: Jobs, depot: BundleDepot) -> None:
        bundle = await bundle_of(depot, tmp_path / "code")
        for number in range(KEPT_JOBS + 3):
            folder = depot.open(bundle, f"job-{number}")
            assert (folder / "train.py").read_text() == "print('hello')"
            depot.close(f"job-{number}")

    play(tmp_path, story)
    assert len(list((tmp_path / "bundles" / "jobs").iterdir())) == KEPT_JOBS
