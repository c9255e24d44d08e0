"""Membership under random deaths, stops, wakes, broken links and delays: seeded, no clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.events import (
    Announce,
    EndGroup,
    EndWorkers,
    Event,
    Kill,
    Note,
    SendProbe,
    Start,
    Tick,
)
from potluck._core.cluster.jobs.groups.roster import JobPolicy, Phase
from potluck._core.wire.jobs import Exited
from potluck._core.wire.worker_link import Entered, Finished, Lost, ProbeReply, Ready

TIMEOUT_S = 3.0


class Process:
    """One simulated worker process: it enters views, blocks with the others, may be stopped."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.stopped_until = True, 0.0
        self.epoch, self.members = 0, ()
        self.newest: tuple[int, tuple[str, ...]] = (0, ())
        self.done = False
        self.later(0.5, lambda: self.say(self.ready()))

    def ready(self) -> Ready:
        return Ready(self.name, self.epoch, port=1)

    def later(self, most_s: float, action: Callable[[], None]) -> None:
        def run() -> None:
            if not self.alive:
                return
            if self.stopped_until > self.world.now:
                self.world.at(self.stopped_until, run)
                return
            action()

        self.world.at(self.world.now + self.world.random.uniform(0, most_s), run)

    def say(self, event: Event) -> None:
        """Events of one worker keep their order, as on its link to the agent."""
        self.world.deliver(self, event)

    def told_view(self, epoch: int, members: tuple[str, ...]) -> None:
        self.newest = max(self.newest, (epoch, members))
        if not self.epoch or self.world.random.random() < 0.7:
            self.enter()  # as a newcomer, or between two steps
        else:
            self.later(1.0, self.enter)

    def enter(self) -> None:
        if self.newest[0] > self.epoch and not self.done:
            self.epoch, self.members = self.newest
            self.say(Entered(self.name, self.epoch))

    def told_over(self, over: EndGroup) -> None:
        if self.done:
            return
        if over.worker == self.name:
            if self.newest[0] <= over.epoch:
                self.say(self.ready())
        elif self.epoch == over.epoch or (self.epoch < over.epoch and over.worker in self.members):
            self.enter()

    def lose(self, name: str, certain: bool) -> None:
        if not self.done and self.epoch and name in self.members and name != self.name:
            rank = self.members.index(name)
            self.say(Lost(self.name, self.epoch, rank, certain, "simulated"))
            self.later(0.1, self.enter)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.processes: dict[str, Process] = {}
        self.seen_epochs: list[int] = []
        self.last_view: tuple[str, ...] = ()
        self.starts: dict[str, int] = {}
        self.links: dict[int, float] = {}
        names = [str(index) for index in range(self.random.randint(1, 6))]
        self.policy = JobPolicy(max_restarts=self.random.randint(0, 4), backoff_s=0.5)
        self.state, actions = membership.begin(names, self.policy)
        self.act(actions)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (when, next(self.count), action))

    def deliver(self, process: Process, event: Event) -> None:
        arrives = max(
            self.now + self.random.uniform(0, 0.05), self.links.get(id(process), 0.0) + 1e-6
        )
        self.links[id(process)] = arrives

        def arrive() -> None:
            if self.processes.get(process.name) is process:
                self.handle(event)

        self.at(arrives, arrive)

    def handle(self, event: Event) -> None:
        self.state, actions = membership.handle(self.state, event, self.now)
        self.act(actions)
        wakeup = self.state.next_wakeup()
        if wakeup is not None:
            self.at(max(wakeup, self.now), self.tick)

    def tick(self) -> None:
        wakeup = self.state.next_wakeup()
        if wakeup is not None and wakeup <= self.now:
            self.handle(Tick())

    def act(self, actions: tuple[object, ...]) -> None:
        for action in actions:
            match action:
                case Announce():
                    self.check_view(action)
                    for member in action.members:
                        members = tuple(each.worker for each in action.members)
                        self.tell(member.worker, "told_view", action.epoch, members)
                case EndGroup():
                    for name in action.to:
                        self.tell(name, "told_over", action)
                case SendProbe(probe, to):
                    for name in to:
                        self.probe(name, probe)
                case Start(name, attempt):
                    before = self.processes.get(name)
                    assert before is None or not before.alive
                    assert attempt <= self.policy.max_restarts
                    assert attempt == self.starts.get(name, -1) + 1, "each restart is counted"
                    self.starts[name] = attempt
                    self.processes[name] = Process(self, name)
                case Kill(names):
                    for name in names:
                        self.kill(name)
                case EndWorkers(names):
                    for name in names:
                        self.exit(name, -15)
                case Note():
                    pass

    def check_view(self, action: Announce) -> None:
        names = tuple(member.worker for member in action.members)
        assert names
        assert len(set(names)) == len(names)
        assert action.epoch == (self.seen_epochs[-1] if self.seen_epochs else 0) + 1
        self.seen_epochs.append(action.epoch)
        for name in names:
            assert self.state.worker(name).phase is not Phase.GONE
        stayed = [name for name in self.last_view if name in names and name not in action.joined]
        assert list(names[: len(names) - len(action.joined)]) == stayed, "survivors keep order"
        self.last_view = names

    def tell(self, name: str, method: str, *arguments: object) -> None:
        process = self.processes[name]
        process.later(0.05, lambda: getattr(process, method)(*arguments))

    def probe(self, name: str, probe: int) -> None:
        process = self.processes[name]
        blocked = self.random.random() < 0.5
        process.later(0.05, lambda: process.say(ProbeReply(name, probe, blocked)))

    def exit(self, name: str, code: int) -> None:
        process = self.processes[name]
        if process.alive:
            process.alive = False
            self.deliver(process, Exited(name, code))

    def kill(self, name: str) -> None:
        self.exit(name, -9)
        self.others_lose(name, 0.02, certain=True)

    def others_lose(self, name: str, within_s: float, *, certain: bool) -> None:
        for other in self.processes.values():
            if other.name != name and other.alive:
                other.later(within_s, lambda other=other: other.lose(name, certain))

    def stop(self, name: str, duration_s: float) -> None:
        process = self.processes[name]
        process.stopped_until = self.now + duration_s
        if duration_s > TIMEOUT_S:
            self.at(self.now + TIMEOUT_S, lambda: self.others_lose(name, 0.5, certain=False))

    def fault(self) -> None:
        name = self.random.choice(sorted(self.processes))
        if not self.processes[name].alive:
            return
        match self.random.randrange(4):
            case 0 | 1:
                self.kill(name)
            case 2:
                self.stop(name, self.random.uniform(0.1, 12.0))
            case 3:
                self.others_lose(name, 0.3, certain=self.random.random() < 0.5)

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            when, _, action = heapq.heappop(self.queue)
            self.now = max(self.now, when)
            action()
        self.now = until


def test_membership_converges_and_never_lies() -> None:
    for seed in range(200):
        check_membership(seed)


def check_membership(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randint(0, 25)):
        world.at(world.random.uniform(0, 60), world.fault)
    world.run(60)
    world.run(150)  # faults have stopped: everything stopped wakes, every backoff ends

    state = world.state
    if not state.stopping:
        living = {worker.name for worker in state.workers if worker.phase is not Phase.GONE}
        assert living, "a job without workers is over, with a reason"
        assert set(world.last_view) == living, f"seed {seed}: not everyone came back"
        assert all(worker.entered == state.epoch for worker in state.having(Phase.MEMBER))
        assert state.inquiry is None
        for name in sorted(living):
            process = world.processes[name]
            process.done = True
            process.say(Finished(name))
            process.later(0.5, lambda name=name: world.exit(name, 0))
        world.run(200)
        assert world.state.exit_code == 0
    else:
        assert state.exit_code == 137, "only a job whose workers were all killed fails here"
    assert world.state.over
