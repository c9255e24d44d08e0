"""``QueuedJobs``: the jobs that wait for machines, on the node that leads the cluster.

Which job starts next is decided in ``queue.py``. A job waits once a majority of the view's nodes
have it on disk, in their histories, and the leader has its code: so the next leader, which asks a
majority, finds it, whichever nodes are lost with this one. A job that was ordered is no longer in
the queue; a new leader takes it over from its own runner, as every job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence

from potluck._core.background import Tasks, why
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.jobs import queue
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.chaos import parse_chaos
from potluck._core.cluster.jobs.history import merged
from potluck._core.cluster.jobs.placement import differences, preferred
from potluck._core.cluster.jobs.queue import Machine, Part, Running, Verdict, Waiting
from potluck._core.cluster.jobs.summary import Summary, encode_summary
from potluck._core.cluster.sharing.limits import in_units
from potluck._core.wire import jobs
from potluck._core.wire.nodes import View
from potluck.errors import ConfigurationError, LinkError, PotluckError

_log = logging.getLogger(__name__)

_ANSWER_S = 5.0
_AGAIN_S = 1.0
_LOOK_S = 5.0
_RELEASE_S = 60.0
_MAX_OF_ONE = 64
"""Jobs of one machine that wait: no member keeps all others out."""


class QueuedJobs:
    """``running()`` are the jobs that run, ``is_known_here(job)`` whether this node leads a job or
    has orders of it; ``start(spec, nodes)`` begins one; ``on_changed()`` is called when the
    ``names`` have changed."""

    def __init__(
        self,
        agent: AgentParts,
        code_store: CodeStore,
        *,
        running: Callable[[], Sequence[Running]],
        is_known_here: Callable[[str], bool],
        start: Callable[[jobs.JobSpec, Sequence[str]], None],
        on_changed: Callable[[], None],
    ) -> None:
        self.known = asyncio.Event()
        """Set while this node leads, and has learned of all jobs that wait."""
        self._agent = agent
        self._code_store = code_store
        self._running = running
        self._is_known_here = is_known_here
        self._start = start
        self._on_changed = on_changed
        self._specs: dict[str, jobs.JobSpec] = {}
        self._cancelled: set[str] = set()
        self._misses: set[str] = set()
        """The jobs for which there are too few machines, whatever ends."""
        self._why: dict[str, str] = {}
        self._held: dict[str, set[bytes]] = {}
        self._first = "", 0.0
        self._used: dict[str, float] = {}
        self._tasks = Tasks()
        self._tasks.start(self._look_again())

    @property
    def is_known(self) -> bool:
        return self.known.is_set()

    @property
    def names(self) -> tuple[str, ...]:
        """The jobs that wait, and those that were cancelled and whose starters don't know yet."""
        return (*self._specs, *self._cancelled)

    def why(self, job: str) -> str:
        """Why ``job`` waits, in words; empty if it does not."""
        return self._why.get(job, "")

    def starter_of(self, job: str) -> str:
        """The node on which ``job`` was started; empty if it does not wait."""
        return self._specs[job].starter if job in self._specs else ""

    async def close(self) -> None:
        await self._tasks.close()

    # The leader changes.

    def lead(self, view: View) -> None:
        """This node leads from ``view`` on: learn of the jobs that wait."""
        if self._agent.history.root is None:
            self.known.set()  # a private agent: its one job never waits
        elif not self.is_known:
            self._tasks.start(self._learn(view))

    def stop(self) -> None:
        """Another node leads: it has all of them on a majority of disks."""
        self.known.clear()
        self._specs.clear()
        self._cancelled.clear()
        self._why.clear()
        for job in list(self._held):
            self._release(job)

    async def _learn(self, view: View) -> None:
        """Ask a majority of the nodes of ``view``, as long as this node leads it."""
        found: dict[str, jobs.JobInfo] = {}
        answered: set[str] = set()

        async def ask(node: str) -> None:
            request = jobs.HistoryRequest(queued=True)
            try:
                answer = await self._agent.links.ask(
                    node, request, jobs.History, timeout_s=_ANSWER_S
                )
            except PotluckError:
                return
            answered.add(node)
            found.update((each.job, each) for each in answer.jobs)

        while self._agent.plane.view is view and len(answered) <= len(view.nodes) // 2:
            if answered:
                await asyncio.sleep(_AGAIN_S)
            await asyncio.gather(*map(ask, set(view.nodes) - answered))
        for info in list(found.values())[: jobs.MAX_QUEUED]:
            spec = None
            if not self._is_known_here(info.job):
                spec = await self._spec_of(info, view)
            if self._agent.plane.view is not view:
                return  # the next leader, or this node for the next view, asks again
            if spec is not None:
                self._specs.setdefault(spec.job, spec)
                self._tasks.start(self._hold_found(spec))
        if self._agent.plane.view is view:
            self.known.set()
            self._on_changed()
            self.look()

    async def _spec_of(self, told: jobs.JobInfo, view: View) -> jobs.JobSpec | None:
        """What is to be started of the job ``told``; None if any node knows that it has run. One
        that was only ordered is lost with its leader, unless this node has that order."""
        infos, spec = [told], None
        for node in view.nodes:
            whole = jobs.HistoryRequest(told.job, told.starter)
            wanted = jobs.SpecRequest(told.job, told.starter)
            try:
                answer = await self._agent.links.ask(node, whole, jobs.History, timeout_s=_ANSWER_S)
                same = (told.job, told.starter)
                infos += [each for each in answer.jobs if (each.job, each.starter) == same]
                if answer.jobs and spec is None:
                    found = await self._agent.links.ask(
                        node, wanted, jobs.Spec, timeout_s=_ANSWER_S
                    )
                    if (found.spec.job, found.spec.starter) == same:
                        spec = found.spec
            except PotluckError:
                continue
        [best] = merged(infos)
        if best.phase not in ("queued", "placed") or spec is None or self._objection(spec):
            return None
        return spec

    def _objection(self, spec: jobs.JobSpec) -> str:
        """Why nobody may have this machine believe that ``spec`` waits; empty if one may."""
        if not self._agent.vouching.is_genuine(spec):
            return "its starter did not sign it, or does not run it any more"
        return self._agent.offers.objects_to(spec.starter) or ""

    # Jobs come and go.

    def submitted(self, spec: jobs.JobSpec) -> None:
        """Start the job of ``spec``, or have it wait; ConfigurationError if it can't."""
        if spec.is_local:
            self._start(spec, (spec.starter,))
            return
        assert self.is_known
        of_this = sum(each.starter == spec.starter for each in self._specs.values())
        if len(self.names) >= jobs.MAX_QUEUED or of_this >= _MAX_OF_ONE:
            raise ConfigurationError(
                f"{len(self.names)} jobs wait already, {of_this} of this machine: at most "
                f"{jobs.MAX_QUEUED} wait, {_MAX_OF_ONE} of one machine"
            )
        parse_chaos(spec.chaos)
        self._specs[spec.job] = spec
        if self.look(new=spec.job):
            return
        if spec.starts_now or spec.job in self._misses:
            del self._specs[spec.job]
            when = "now" if spec.starts_now else "in this cluster as it is"
            raise ConfigurationError(f"it can't start {when}: {self._why.pop(spec.job)}")
        self._tasks.start(self._keep(spec))

    async def _keep(self, spec: jobs.JobSpec) -> None:
        """Have a majority of nodes keep the job, and this node its code."""
        view = self._agent.plane.view
        nodes = () if view is None else view.nodes
        request = jobs.KeepQueued(spec)

        async def keep(node: str) -> bool:
            try:
                await self._agent.links.ask(node, request, jobs.Kept, timeout_s=_ANSWER_S)
            except PotluckError:
                return False
            return True

        error = ""
        try:
            await self._hold(spec)
            num_kept = sum(await asyncio.gather(*map(keep, nodes)))
            if num_kept <= len(nodes) // 2:
                raise LinkError(f"only {num_kept} of {len(nodes)} machines could keep it on disk")
        except (PotluckError, OSError) as found:
            error = f"the job can't wait for its machines: {found}"
        except Exception as found:  # the starter would wait for an answer for ever
            _log.exception("keeping job %s broke", spec.job)
            error = f"this is potluck's fault, please report it: {why(found)}"
        if spec.job not in self._specs:
            return  # it has started, or was cancelled
        if error:
            self._drop(spec.job)
        self._agent.links.send(spec.starter, jobs.Submitted(spec.job, error[:4000]))
        if not error:
            self._tell(spec, self._why[spec.job])
            self._on_changed()

    async def _hold(self, spec: jobs.JobSpec) -> None:
        """Have what the job needs here, as long as it waits: its starter may leave. Errors as for
        ``CodeStore.fetch``."""
        for package in filter(None, (spec.package, spec.plan)):
            if package not in self._held.setdefault(spec.job, set()):
                self._held[spec.job].add(package)
                self._code_store.hold(package)
            if not await asyncio.to_thread(self._code_store.has, package):
                await self._code_store.fetch(package, spec.starter)

    async def _hold_found(self, spec: jobs.JobSpec) -> None:
        """As ``_hold``, of a job that the leader before had. The nodes that run it ask others."""
        with contextlib.suppress(PotluckError, OSError):
            await self._hold(spec)

    def _release(self, job: str) -> None:
        for package in self._held.pop(job, ()):
            self._code_store.release(package)

    def cancel(self, job: str) -> jobs.JobSpec | None:
        """``job`` is not to be started any more; ``forget`` it when its end is kept. None if that
        was asked for before."""
        self._why.pop(job, None)
        if (spec := self._specs.pop(job, None)) is not None:
            self._cancelled.add(job)
            self._release(job)
        return spec

    def forget(self, spec: jobs.JobSpec) -> None:
        """The end of a job that was cancelled is told."""
        self._cancelled.discard(spec.job)
        self._agent.history.let_go(spec)
        self._on_changed()

    def barred(self, nodes: Collection[str]) -> None:
        """``nodes`` are out of the cluster: what they started does not wait any more."""
        for job in [job for job, each in self._specs.items() if each.starter in nodes]:
            self._agent.note(f"job {job} does not wait any more: its starter is out")
            self._drop(job)

    def _drop(self, job: str) -> None:
        self._agent.history.let_go(self._specs.pop(job))
        self._why.pop(job, None)
        self._release(job)
        self._on_changed()

    # Decisions.

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self._specs:
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
        if view is None or not self.is_known or self._agent.plane.stands_still:
            return False
        first, since = self._first
        waiting = [
            Waiting(
                job=spec.job,
                person=spec.starter,
                may=tuple(self._may(spec, view)),
                since=spec.started,
                part=part_of(spec),
                min_nodes=spec.min_nodes,
                max_nodes=spec.max_nodes,
                priority=spec.priority,
                seconds=spec.seconds or math.inf,
                first_since=since if spec.job == first else None,
            )
            for spec in self._specs.values()
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
            spec = self._specs[verdict.job]
            if verdict.nodes and num_running < jobs.MAX_JOBS:
                num_running += 1
                del self._specs[verdict.job]
                self._why.pop(verdict.job, None)
                # The nodes hold it from their orders on.
                asyncio.get_running_loop().call_later(_RELEASE_S, self._release, spec.job)
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
        return bool(new) and new not in self._specs

    def _may(self, spec: jobs.JobSpec, view: View) -> list[str]:
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
        if not self.is_known:
            return "this node leads since a moment ago, and does not know yet which jobs wait"
        others = [each for each in self._running() if each.job != spec.job]
        here = ", ".join(each.job for each in others if node in each.nodes)
        machine = self._machine(node)
        left = queue.left_on(machine, others)
        if not part_of(spec).of(machine).fits(left):
            return f"it runs {here}"
        view = self._agent.plane.view
        for each in self._specs.values() if view is not None else ():
            assert view is not None
            if each.job not in self._misses and node in self._may(each, view):
                return f"{each.job} waits for it"
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
        ahead = [job for job in verdict.blockers if job in self._specs]
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
