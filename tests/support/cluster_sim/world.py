"""One simulated cluster: hosts, a fault plan, and the invariants that must hold in any case."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.protocol import MembershipProtocol
from potluck._core.wire.nodes import View
from support.cluster_sim.faults import FAULTS_S, Fault, make_bans, make_plan
from support.cluster_sim.hosts import JOB, Host
from support.cluster_sim.network import Network, Queue

HEAL_S = 10.0


class Broken(AssertionError):
    """An invariant does not hold."""


class World:
    """``run()`` plays the plan and raises ``Broken`` for the first invariant that does not hold.

    One view per epoch of a history, those of banned hosts included; a host's epochs never go back,
    also not after a restart; no host uses a view with a node that it knows to be banned; no two
    sides commit: each step of a job's history was committed in one epoch, and an older history than
    the newest commits nothing; when faults stop, all hosts that are not banned are in one view
    within ten seconds.
    """

    def __init__(
        self,
        seed: int,
        plan: Sequence[Fault] | None = None,
        num_hosts: int | None = None,
        make_node: Callable[..., MembershipProtocol] = MembershipProtocol,
        job: bool = True,
    ) -> None:
        self.seed = seed
        chance = self.chance = random.Random(seed)
        count = num_hosts or chance.choice([2, 3, 3, 3, 4, 4, 5])
        names = [chr(ord("a") + i) for i in range(count)]
        self.queue = Queue()
        self.network = Network(self.queue, chance, names)
        self.hosts = {name: Host(name, self.queue, self.network, chance, self) for name in names}
        for host in self.hosts.values():
            host.others = {name: other for name, other in self.hosts.items() if other is not host}
            host.make_node = make_node
        self.plan = make_plan(chance, names) if plan is None else list(plan)
        self.lines: list[str] = []
        self.views: dict[tuple[str, int], View] = {}
        self.changes: list[tuple[float, str, View]] = []
        self.commits: dict[str, dict[int, tuple[int, str]]] = {}
        self.num_commits = 0
        self.is_job = job
        self._newest_branch = ""
        self._old_branches: set[str] = set()
        self._epochs: dict[str, int] = {}

    # What hosts report.

    def installed(self, host: Host, view: View) -> None:
        before = self._epochs.get(host.name, 0)
        if view.epoch <= before:
            raise self.broken(f"{host.name} went from epoch {before} back to {view.epoch}")
        self._epochs[host.name] = view.epoch
        known = self.views.setdefault((view.history, view.epoch), view)
        if known != view:
            raise self.broken(f"two views in epoch {view.epoch}: {known} and {view}")
        if host.disk.installed < view.epoch:
            raise self.broken(f"{host.name} uses epoch {view.epoch}, which is not on its disk")
        assert host.node is not None
        wrong = host.node.banned & set(view.nodes)
        if wrong:
            raise self.broken(f"{host.name} uses a view with {wrong}, which it knows is banned")
        self.changes.append((self.queue.now, host.name, view))

    def committed(self, host: Host, branch: str, step: int, epoch: int) -> None:
        self.num_commits += 1
        steps = self.commits.setdefault(branch, {})
        before, _ = steps.setdefault(step, (epoch, host.name))
        if before != epoch:
            raise self.broken(
                f"{host.name} commits step {step} in epoch {epoch}, others in {before}"
            )
        if "/" in branch or branch == self._newest_branch:
            return
        if branch in self._old_branches:
            raise self.broken(f"{host.name} commits on {branch} beside {self._newest_branch}")
        if self._newest_branch:
            self._old_branches.add(self._newest_branch)
        self._newest_branch = branch

    def noted(self, host: Host, action: events.Action) -> None:
        if isinstance(action, events.Save):
            return
        text = getattr(action, "reason", "")
        self.say(f"{host.name}: {type(action).__name__}: {text}")

    def say(self, text: str) -> None:
        self.lines.append(f"{self.queue.now:7.3f} {text}")

    def broken(self, text: str) -> Broken:
        lines = [f"seed {self.seed}, at {self.queue.now:.2f} s: {text}", "faults:"]
        lines += [f"  {fault}" for fault in self.plan]
        return Broken("\n".join([*lines, "what happened last:", *self.lines[-60:]]))

    # Faults.

    def _strike(self, fault: Fault) -> None:
        self.say(f"-- {fault}")
        first = self.hosts[fault.hosts[0]]
        match fault.kind:
            case "cut one way":
                self._cut([(fault.hosts[0], fault.hosts[1])], fault.duration)
            case "cut":
                a, b = fault.hosts[:2]
                self._cut([(a, b), (b, a)], fault.duration)
            case "partition":
                self._split(fault.hosts, fault.duration)
            case "isolate":
                self._split(fault.hosts[:1], fault.duration)
            case "kill" | "power off":
                self._crash([first], fault.duration, is_seen=fault.kind == "kill")
            case "power cut of all":
                self._crash(list(self.hosts.values()), 0.5, is_seen=False)
            case "freeze":
                if first.node is not None:
                    first.freeze(fault.duration)
            case "lossy" | "doubled" | "slow":
                for pair, wire in self.network.wires.items():
                    if fault.hosts[0] in pair:
                        wire.loss = max(wire.loss, 0.2 if fault.kind == "lossy" else 0.0)
                        wire.doubled = 0.2 if fault.kind == "doubled" else wire.doubled
                        if fault.kind == "slow":
                            wire.delay_s, wire.jitter_s = 0.03, self.chance.choice([0.04, 0.5])
            case "ban":
                if first.node is not None:
                    first.bar(frozenset(fault.hosts[1:2]))
            case "continue alone":
                for host in self.hosts.values():
                    if host.node is not None and host.node.paused:
                        host.handle(events.ContinueAlone())
                        break

    def _split(self, side: Sequence[str], duration: float) -> None:
        self._cut(
            [pair for pair in self.network.wires if (pair[0] in side) != (pair[1] in side)],
            duration,
        )

    def _cut(self, pairs: list[tuple[str, str]], duration: float) -> None:
        for pair in pairs:
            self.network.wires[pair].cut += 1

        def mend() -> None:
            for pair in pairs:
                self.network.wires[pair].cut = max(0, self.network.wires[pair].cut - 1)

        self.queue.after(duration, mend)

    def _crash(self, hosts: list[Host], duration: float, *, is_seen: bool) -> None:
        for host in hosts:
            incarnation = host.incarnation
            if host.node is None:
                continue
            host.crash(is_seen=is_seen)

            def again(host: Host = host, incarnation: int = incarnation) -> None:
                if host.node is None and host.incarnation == incarnation:
                    host.start()

            self.queue.after(duration, again)

    # The run.

    def begin(self) -> None:
        """All hosts come up within a second; a job begins when a leader is there."""
        for host in self.hosts.values():
            self.queue.at(self.chance.uniform(0, 1), host.start)
        if self.is_job:
            self.queue.at(3.0, self._begin_job)

    def _begin_job(self) -> None:
        for host in self.hosts.values():
            view = None if host.node is None else host.node.view
            if view is not None and view.group(JOB) is not None:
                return
        if not any(host.begin_job() for host in self.hosts.values()):
            self.queue.after(0.5, self._begin_job)

    def run(self) -> None:
        """The plan, then ten seconds of peace, after which all must be well."""
        self.begin()
        for fault in self.plan:
            self.queue.at(fault.at, partial(self._strike, fault))
        self.queue.run(FAULTS_S)
        self.network.heal()
        self.queue.run(FAULTS_S + 0.001)
        self.say("-- faults have stopped")
        self.queue.run(FAULTS_S + HEAL_S)
        self.check_converged()

    def check_converged(self) -> None:
        """All hosts that are not banned are in one view, and none is paused."""
        banned = {node for host in self.hosts.values() for node in host.barred}
        alive = [host for host in self.hosts.values() if host.name not in banned]
        found = {
            host.name: None
            if host.node is None or host.node.view is None
            else (host.node.view.history, host.node.view.epoch)
            for host in alive
        }
        wanted = {host.name for host in alive}
        if len(set(found.values())) != 1 or None in found.values():
            raise self.broken(f"not in one view: {found}")
        view = alive[0].node.view if alive[0].node is not None else None
        assert view is not None
        if set(view.nodes) != wanted:
            raise self.broken(f"the view has {view.nodes}, not {sorted(wanted)}")
        paused = [host.name for host in alive if host.node is not None and host.node.paused]
        if paused:
            raise self.broken(f"paused: {paused}")


class BanWorld(World):
    """A world in which several hosts are banned, mostly under cuts."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"bans {seed}")
        count = chance.choice([2, 3, 3, 4, 4, 5])
        plan = make_bans(chance, [chr(ord("a") + i) for i in range(count)])
        super().__init__(seed, plan, count)
