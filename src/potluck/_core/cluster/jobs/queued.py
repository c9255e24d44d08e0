"""``QueuedJobs``: the jobs that wait for machines, on one node.

The node that leads the cluster decides which job starts next (``queue.py``). All nodes have the
table of those that wait (``waiting.py``), and check each entry as they check an order; the leader
and the next one in seniority have the code, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence

from potluck._core.background import Tasks, why
from potluck._core.cluster.code_store.job_folders import key_of
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.jobs import queue
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.chaos import parse_chaos
from potluck._core.cluster.jobs.placement import COPIES, differences, keepers_of, preferred
from potluck._core.cluster.jobs.queue import Machine, Part, Running, Verdict, Waiting
from potluck._core.cluster.jobs.summary import Summary, encode_summary
from potluck._core.cluster.jobs.waiting import Table
from potluck._core.cluster.sharing.limits import in_units
from potluck._core.wire import jobs
from potluck._core.wire.nodes import View
from potluck.errors import ConfigurationError, PotluckError

_log = logging.getLogger(__name__)

_LOOK_S = 5.0
_RELEASE_S = 60.0


class QueuedJobs:
    """``running()`` are the jobs that run; ``start(spec, nodes)`` begins one;
    ``send_all(message)`` sends to all nodes, if this one leads; ``on_changed()`` is called when
    the ``names`` have changed."""

    def __init__(
        self,
        agent: AgentParts,
        code_store: CodeStore,
        *,
        running: Callable[[], Sequence[Running]],
        start: Callable[[jobs.JobSpec, Sequence[str]], None],
        send_all: Callable[[jobs.JobWaits], None],
        on_changed: Callable[[], None],
    ) -> None:
        self.table = Table(agent.me)
        self._leads = False
        self._agent = agent
        self._code_store = code_store
        self._running = running
        self._start = start
        self._send_all = send_all
        self._on_changed = on_changed
        self._misses: set[str] = set()
        """The jobs for which there are too few machines, whatever ends."""
        self._why: dict[str, str] = {}
        self._held: dict[str, set[bytes]] = {}
        self._bringing: set[str] = set()
        """The jobs whose code is brought here, until it is here."""
        self._first = "", 0.0
        self._used: dict[str, float] = {}
        self._tasks = Tasks()
        self._tasks.start(self._look_again())

    @property
    def names(self) -> tuple[str, ...]:
        """The jobs that wait, and those that were cancelled and whose ends are not kept yet."""
        return tuple(each.spec.job for each in self.table)

    def why(self, job: str) -> str:
        """Why ``job`` waits, in words; empty if it does not, or if another node leads."""
        return self._why.get(job, "")

    def starter_of(self, job: str) -> str:
        """The node on which ``job`` was started; empty if it does not wait."""
        spec = self.table.spec(job)
        return "" if spec is None else spec.starter

    async def close(self) -> None:
        await self._tasks.close()

    # What the nodes know.

    def installed(self, view: View) -> tuple[jobs.JobSpec, ...]:
        """``view`` is used from now on; as for ``Table.installed``."""
        before = list(self.table)
        again = self.table.installed(view)
        for each in before:
            if each.spec.job not in self.table:
                self._gone(each.spec)
                self._agent.history.let_go(each.spec, is_over=False)
        self._leads = view.leader == self._agent.me
        if not self._leads:
            self._why.clear()
        for each in self.table:
            self._note_it(each.spec)
            self._keep_code(each.spec)
            if self._leads:
                self._send_all(each)
        return again

    def stop(self) -> None:
        """This node does not lead any more."""
        self._leads = False
        self._why.clear()

    def take(self, told: jobs.JobWaits) -> None:
        """The leader has told of a job that waits. One that its starter did not sign, or whose
        starter is out, is not believed."""
        if not self._leads and not self._objection(told.spec) and self.table.take(told):
            self._note_it(told.spec)
            self._keep_code(told.spec)

    def ordered(self, job: str) -> None:
        """The job begins: the nodes hold its code from their orders on."""
        self.table.begins(job)
        self._why.pop(job, None)
        if job in self._held:
            asyncio.get_running_loop().call_later(_RELEASE_S, self._release, job)

    def listed(self, names: Collection[str]) -> None:
        """The leader's list has the jobs ``names``: others wait no more."""
        if not self._leads:
            self._drop(self.table.unlisted(names))

    def linked(self, node: str) -> None:
        """There is a new link to ``node``, from this leader: what was sent before may be lost."""
        for each in self.table:
            self._agent.links.send(node, each)

    def _objection(self, spec: jobs.JobSpec) -> str:
        """Why nobody may have this machine believe that ``spec`` waits; empty if one may."""
        if not self._agent.vouching.is_genuine(spec):
            return "its starter did not sign it, or does not run it any more"
        return self._agent.offers.objects_to(spec.starter) or ""

    def _note_it(self, spec: jobs.JobSpec) -> None:
        view = self._agent.plane.view
        if view is not None and self._agent.me in keepers_of(spec, (), view):
            label = self._agent.names.label(spec.starter)
            self._agent.history.reached(spec, label, (), "queued")

    def _drop(self, names: Collection[str]) -> None:
        for spec in self.table.drop(names):
            self._gone(spec)
            self._agent.history.let_go(spec)

    def _gone(self, spec: jobs.JobSpec) -> None:
        self._why.pop(spec.job, None)
        self._release(spec.job)
        self._agent.log.forget(key_of(spec.job, spec.starter))

    # Jobs come and go.

    def submitted(self, spec: jobs.JobSpec) -> None:
        """Start the job of ``spec``, or have it wait; ConfigurationError if it can't."""
        if spec.is_local:
            self._start(spec, (spec.starter,))
            return
        if objection := self.table.objection(spec):
            raise ConfigurationError(objection)
        parse_chaos(spec.chaos)
        self.table.take(jobs.JobWaits(spec))
        if self.look(new=spec.job):
            return
        if spec.starts_now or spec.job in self._misses:
            self.table.drop([spec.job])
            when = "now" if spec.starts_now else "in this cluster as it is"
            raise ConfigurationError(f"it can't start {when}: {self._why.pop(spec.job)}")
        self._tasks.start(self._keep(spec))

    async def _keep(self, spec: jobs.JobSpec) -> None:
        """Have this node keep the code of the job, and all nodes know of it."""
        error = ""
        try:
            await self._hold(spec)
        except (PotluckError, OSError) as found:
            error = f"the job can't wait for its machines: {found}"
        except Exception as found:  # the starter would wait for an answer for ever
            _log.exception("keeping job %s broke", spec.job)
            error = f"this is potluck's fault, please report it: {why(found)}"
        if spec.job not in self.table or not self._leads:
            return  # it has started, or was cancelled; or its starter asks the next leader
        if error:
            self._drop([spec.job])
        else:
            self._note_it(spec)
            self._send_all(jobs.JobWaits(spec))
        self._agent.links.send(spec.starter, jobs.Submitted(spec.job, error[:4000]))
        if not error and (reason := self.why(spec.job)):
            self._tell(spec, reason)
        self._on_changed()

    def _keep_code(self, spec: jobs.JobSpec) -> None:
        """The leader and the next one keep it; whatever the starter does, a leader has it."""
        if self._keeps(spec.job) and spec.job not in self._bringing:
            self._bringing.add(spec.job)
            self._tasks.start(self._bring(spec))

    def _keeps(self, job: str) -> bool:
        view = self._agent.plane.view
        is_keeper = view is not None and self._agent.me in view.nodes[:COPIES]
        return is_keeper and self.table.waits(job)

    async def _hold(self, spec: jobs.JobSpec) -> None:
        """Have what the job needs here, as long as it waits: its starter may leave. Errors as for
        ``CodeStore.fetch``."""
        for package in filter(None, (spec.package, spec.plan)):
            if not self.table.waits(spec.job):
                return  # it was let go meanwhile, with what was held for it
            if package not in self._held.setdefault(spec.job, set()):
                self._held[spec.job].add(package)
                self._code_store.hold(package)
            if not await asyncio.to_thread(self._code_store.has, package):
                await self._code_store.fetch(package, spec.starter)

    async def _bring(self, spec: jobs.JobSpec) -> None:
        """``_hold``, again and again: who had the code may be lost while it comes from there."""
        try:
            while self._keeps(spec.job):
                with contextlib.suppress(PotluckError, OSError):
                    return await self._hold(spec)
                await asyncio.sleep(_LOOK_S)
        finally:
            self._bringing.remove(spec.job)

    def _release(self, job: str) -> None:
        for package in self._held.pop(job, ()):
            self._code_store.release(package)

    def cancel(self, job: str) -> jobs.JobSpec | None:
        """``job`` is not to be started any more, under no leader; ``forget`` it when its end is
        kept. None if that was asked for before."""
        spec = self.table.spec(job)
        if spec is None or not self.table.take(told := jobs.JobWaits(spec, is_cancelled=True)):
            return None
        self._gone(spec)
        self._send_all(told)
        return spec

    def forget(self, job: str) -> None:
        """The end of a job that was cancelled is told."""
        self._drop([job])
        self._on_changed()

    def barred(self, nodes: Collection[str]) -> None:
        """``nodes`` are out of the cluster: what they started does not wait any more."""
        names = [each.spec.job for each in self.table if each.spec.starter in nodes]
        for job in names:
            self._agent.note(f"job {job} does not wait any more: its starter is out")
        if names:
            self._drop(names)
            self._on_changed()

    # Decisions.

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self._leads and len(self.table):
                    await self._read_usage()
                    self.look()
            except Exception:  # one job must not hold up all others for ever
                _log.exception("the jobs that wait could not be looked at")

    async def _read_usage(self) -> None:
        ended = [each for each in await self._agent.history.found() if each.summary is not None]
        self._used = queue.usage(
            (
                (
                    each.spec.starter,
                    each.summary.seconds * sum(self._cores(n, each.spec) for n, _ in each.machines),
                    each.ended,
                )
                for each in ended
                if each.summary is not None
            ),
            time.time(),
        )

    def _cores(self, node: str, spec: jobs.JobSpec) -> int:
        return part_of(spec).of(self._machine(node)).cores

    def _machine(self, node: str) -> Machine:
        facts = self._agent.surveyor.facts(node)
        if facts is None:
            return Machine(node, 1)
        return Machine(node, facts.cores, len(facts.accelerators), facts.memory_bytes)

    def look(self, new: str = "") -> bool:
        """Start the jobs whose turn it is, and tell the starters of others why they wait, but not
        that of the job ``new``, which is not kept yet. Whether ``new`` was started."""
        view, now = self._agent.plane.view, time.monotonic()
        if view is None or not self._leads or self._agent.plane.stands_still:
            return False
        first, since = self._first
        specs = {each.spec.job: each.spec for each in self.table if not each.is_cancelled}
        waiting = [
            Waiting(
                job=spec.job,
                person=spec.starter,
                may=tuple(self.may(spec, view)),
                since=place,
                part=part_of(spec),
                min_nodes=spec.min_nodes,
                max_nodes=spec.max_nodes,
                priority=spec.priority,
                may_pass=self._agent.is_admin(spec.starter),
                seconds=spec.seconds or math.inf,
                first_since=since if spec.job == first else None,
            )
            for place, spec in enumerate(specs.values())
        ]
        machines = {node: self._machine(node) for node in view.nodes}
        running = self._running()
        order = queue.in_order(waiting, lambda who: self._used.get(who, 0.0))
        verdicts = queue.decide(order, running, machines, now)
        self._misses = {each.job for each in verdicts if each.misses}
        stand = next((each.job for each in verdicts if not each.nodes and not each.misses), "")
        if stand != first:
            self._first = stand, now
        num_running = len(running)
        for verdict in verdicts:
            spec = specs[verdict.job]
            if verdict.nodes and num_running < jobs.MAX_JOBS:
                num_running += 1
                self.ordered(verdict.job)
                try:
                    self._start(spec, verdict.nodes)
                except Exception as error:
                    _log.exception("job %s can't begin", spec.job)
                    text = f"it can't begin: {why(error)}"[:4000]
                    self._agent.links.send(spec.starter, jobs.Submitted(spec.job, text))
                continue
            reason = self._in_words(spec, verdict, running, now)
            if reason != self._why.get(verdict.job):
                self._why[verdict.job] = reason
                if verdict.job != new:
                    self._tell(spec, reason)
        return bool(new) and new not in self.table

    def may(self, spec: jobs.JobSpec, view: View) -> list[str]:
        """The nodes that may run the job, in the order in which it takes them."""
        return [
            node
            for node in preferred(spec, view.nodes)
            if not self._agent.offers.objection(node, spec.starter)
            if (introduction := self._agent.links.introduction(node)) is not None
            if not differences("", spec.versions, introduction.versions)
        ]

    def objection(self, node: str, spec: jobs.JobSpec) -> str:
        """Why the running job of ``spec`` gets no more workers on ``node``; empty if it may."""
        if spec.is_local:
            return ""
        others = [each for each in self._running() if each.job != spec.job]
        here = ", ".join(each.job for each in others if node in each.nodes)
        machine = self._machine(node)
        left = queue.left_on(machine, others)
        if not part_of(spec).of(machine).fits(left):
            return f"it runs {here}"
        view = self._agent.plane.view
        for each in self.table if view is not None else ():
            assert view is not None
            is_out = each.is_cancelled or each.spec.job in self._misses
            if not is_out and node in self.may(each.spec, view):
                return f"{each.spec.job} waits for it"
        return ""

    def _tell(self, spec: jobs.JobSpec, reason: str) -> None:
        self._agent.links.send(spec.starter, jobs.JobNote(spec.job, f"{spec.job} waits: {reason}"))

    def _in_words(
        self, spec: jobs.JobSpec, verdict: Verdict, running: Sequence[Running], now: float
    ) -> str:
        label = self._agent.names.label
        count = f"it needs {spec.min_nodes} machine{'s' * (spec.min_nodes != 1)}"
        left = spec.min_nodes - verdict.short
        if verdict.nodes:
            return f"{jobs.MAX_JOBS} jobs run already"
        if verdict.misses:
            part = part_of(spec)
            of = [f"{part.cores} core{'s' * (part.cores != 1)}"] if part.cores else []
            of += [f"{part.gpus} GPU{'s' * (part.gpus != 1)}"] if part.gpus else []
            of += [f"{in_units(part.memory_bytes)} of memory"] if part.memory_bytes else []
            having = f" with {', '.join(of)}" if of else ""
            return f"{count}{having}, and {left} of those that are there can run it"
        texts = [f"{count}, {left} {'is' if left == 1 else 'are'} free"]
        for each in running:
            if each.job in verdict.blockers:
                where = ", ".join(map(label, each.nodes))
                texts.append(f"{label(each.person)}'s {each.job} runs on {where}")
        ahead = [job for job in verdict.blockers if job in self.table]
        texts += [f"{job} goes first" for job in ahead]
        if verdict.starts < math.inf and not ahead:
            minutes = math.ceil((verdict.starts - now) / 300) * 5
            texts.append(f"it starts within {minutes} minutes at the latest")
        return "; ".join(texts)


def part_of(spec: jobs.JobSpec) -> Part:
    """What the job of ``spec`` takes of each machine."""
    return Part(spec.cores, spec.gpus, spec.memory_bytes)


def as_running(spec: jobs.JobSpec, nodes: tuple[str, ...], since: float) -> Running:
    """The job of ``spec``, which runs on ``nodes`` since ``since`` (``time.monotonic``)."""
    seconds = spec.seconds or math.inf
    return Running(spec.job, spec.starter, nodes, since, part_of(spec), seconds)


def never_begun(spec: jobs.JobSpec, exit_code: int, problem: str) -> bytes:
    """The summary of a job that never began, and why."""
    return encode_summary(
        Summary(
            job=spec.job,
            script=spec.script,
            exit_code=exit_code,
            seconds=0.0,
            committed_steps=0,
            steps_run_again=0,
            facts={},
            hashes_equal=None,
            workers=(),
            recoveries=(),
            problems=(problem,),
            events=(),
        )
    )
