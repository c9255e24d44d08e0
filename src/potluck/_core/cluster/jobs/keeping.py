"""``Keeping``: has the history of each job kept on the right nodes, and answers who asks for it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from potluck._core.cluster.code_store.job_folders import key_of
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.environment import free_port
from potluck._core.cluster.jobs.history import Entry
from potluck._core.cluster.jobs.local_runner import LocalRunner
from potluck._core.cluster.jobs.permissions import objection_to_asking
from potluck._core.cluster.jobs.placement import COPIES, keepers_of
from potluck._core.cluster.jobs.summary import decode_summary
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.printable import name_of
from potluck._core.wire import jobs, peers
from potluck.errors import ConfigurationError, LinkError, PotluckError

_ANSWER_S = 5.0


def new_id(name: str) -> str:
    """The id of a new job that is called like ``name``."""
    return f"{name_of(name)}-{secrets.token_hex(4)}"


class Keeping:
    """The history (``agent.history``) of the jobs in ``runners``, which this node knows, and in
    ``led``, which it leads."""

    def __init__(
        self,
        agent: AgentParts,
        runners: Mapping[str, LocalRunner],
        why_waits: Callable[[str], str] = lambda job: "",
        spec_of: Callable[[str], jobs.JobSpec | None] = lambda job: None,
        starter_of: Callable[[str], str] = lambda job: "",
        cancel: Callable[[str, jobs.CancelJob], None] = lambda node, question: None,
    ) -> None:
        """``why_waits(job)``: why a job waits for machines, in words, ``spec_of(job)`` what one
        that waits is. ``starter_of(job)`` of one that this node leads, else empty;
        ``cancel(node, question)`` ends it for ``node``."""
        self._agent = agent
        self._runners = runners
        self._why_waits = why_waits
        self._spec_of = spec_of
        self._starter_of = starter_of
        self._cancel = cancel
        agent.links.on_request(jobs.HistoryQuestion, self._asked)
        agent.links.on_request(jobs.DebugRequest, self._debugged)

    def placed(self, runner: LocalRunner) -> None:
        """The leader has ordered a job."""
        view = self._agent.plane.view
        if view is None or self._agent.me in keepers_of(runner.spec, runner.places, view):
            self._reached(runner, "placed")

    def keep_line(self, shown: jobs.LabelledOutput) -> None:
        """The leader sent a line of a job's log."""
        runner, source = self._runners.get(shown.job), shown.source
        places = () if runner is None else runner.places
        is_of_job = source.startswith("@") or source in (each.worker for each in places)
        if runner is not None and is_of_job:
            line = jobs.LogLine(
                shown.at,
                shown.number,
                source,
                shown.stream,
                shown.worker,
                shown.text,
                shown.end,
            )
            self._agent.log.write(key_of(shown.job, runner.spec.starter), line)

    def wake(self, job: str) -> None:
        """Something happened to a job that a reader of its log may wait for."""
        if (runner := self._runners.get(job)) is not None:
            self._agent.log.wake(key_of(job, runner.spec.starter))

    def ended_here(self, spec: jobs.JobSpec) -> None:
        """This node has the job of ``spec`` no more."""
        self._agent.history.let_go(spec)
        self._agent.log.forget(key_of(spec.job, spec.starter))

    def over(self, spec: jobs.JobSpec) -> None:
        """The job of ``spec``, which a command of this machine started, is over."""
        self._agent.vouching.over(spec)
        if spec.job not in self._runners:  # else its log is forgotten with the runner
            self._agent.log.forget(key_of(spec.job, spec.starter))

    def runs(self, runner: LocalRunner) -> None:
        """The first worker on this node was started."""
        self._reached(runner, "running")

    async def ended(self, spec: jobs.JobSpec, places: jobs.Places, ended: jobs.JobEnded) -> None:
        """This node leads the job of ``spec``, which has ``ended``: return when all that keep it
        have that on disk, or could not take it. While those are fewer than ``COPIES``, the most
        senior of the other nodes keep it, too. A node that does not answer holds this up for 5
        s."""
        view, num_kept = self._agent.plane.view, 0
        if spec.is_local or view is None:
            return
        keepers = keepers_of(spec, places, view)
        spare = [node for node in view.nodes if node not in keepers]
        request = jobs.KeepEnd(spec.job, ended.summary, time.time())

        async def keep(node: str) -> int:
            try:
                await self._agent.links.ask(node, request, jobs.Kept, timeout_s=_ANSWER_S)
            except PotluckError as error:
                name = self._agent.names.called(node)
                self._agent.note(f"the end of job {spec.job} is not kept by {name}: {error}"[:4096])
                return 0
            return 1

        num_kept = sum(await asyncio.gather(*map(keep, keepers)))
        while num_kept < COPIES and spare:
            num_kept += await keep(spare.pop(0))

    def _reached(self, runner: LocalRunner, phase: jobs.Phase) -> None:
        where = self._whereabouts(runner.spec, runner.places)
        self._agent.history.reached(runner.spec, *where, phase)

    def _whereabouts(
        self, spec: jobs.JobSpec, places: jobs.Places
    ) -> tuple[str, list[tuple[str, str]]]:
        """The name of a job's starter; the nodes of its workers, with their names."""
        label = self._agent.names.label
        nodes = dict.fromkeys(each.node for each in places)
        return label(spec.starter), [(node, label(node)) for node in nodes]

    async def _asked(self, node: str, question: jobs.HistoryQuestion) -> peers.ResponseContent:
        view, reader = self._agent.plane.view, False
        entry = None
        if isinstance(question, jobs.LogRequest):
            entry = await self._agent.history.entry(question.job, question.starter)
            reader = self._may_read(node, question, entry)
        may_cancel = isinstance(question, jobs.CancelJob) and self._may_cancel(node, question)
        if why := objection_to_asking(
            node,
            question,
            view,
            me=self._agent.me,
            is_reader=reader,
            is_canceller=may_cancel,
        ):
            raise LinkError(why)
        match question:
            case jobs.HistoryRequest():
                return await self._history(question)
            case jobs.KeepEnd():
                return await self._keep_end(question)
            case jobs.LogRequest():
                return await self._lines(question)
            case jobs.CancelJob():
                self._cancel(node, question)
                return jobs.Kept()

    def _may_read(self, node: str, question: jobs.LogRequest, entry: Entry | None) -> bool:
        """Whether ``node`` may read what workers wrote. A member whose scripts run here can read
        it anyway, as the owner's files; not, if the files of the job stay with their owners."""
        if node in (self._agent.me, question.starter):
            return True
        if entry is None or entry.spec.keeps_files:
            return False
        ran_it = any(node == each for each, _ in entry.machines)
        return ran_it or not self._agent.offers.objection(self._agent.me, node)

    def _may_cancel(self, node: str, question: jobs.CancelJob) -> bool:
        starter = self._starter_of(question.job)
        if not starter:
            raise LinkError(f"job {question.job} is not led here any more")
        return node == starter or self._agent.is_admin(node)

    def _debugged(self, node: str, request: jobs.DebugRequest) -> jobs.JobRuns:
        """What is typed at a prompt runs with the rights of the job, which are its starter's, on a
        machine whose owner has every right."""
        runner, view = self._runners.get(request.job), self._agent.plane.view
        if runner is None:
            return jobs.JobRuns(False)
        is_member = view is not None and view.member(node) is not None
        is_starter = is_member and node == runner.spec.starter
        return runner.debugged(node, request, may=is_starter or node == self._agent.me)

    async def another_run(self, job: str, code_store: CodeStore) -> jobs.JobSpec:
        """The spec, to be signed, for another run of a ``job`` that this node started.
        ConfigurationError if there is none; errors as for ``CodeStore.fetch`` if no machine has its
        code any more."""
        me, own = self._agent.me, own_versions()
        entry = await self._agent.history.entry(job, me)
        if entry is None or entry.spec.package is None:
            raise ConfigurationError(
                f"this machine did not start job {job}: a job runs in the name of its starter, on "
                "which `potluck rerun` starts it again"
            )
        spec = entry.spec
        if not await asyncio.to_thread(code_store.has, entry.spec.package):
            await code_store.fetch(entry.spec.package, me)
        versions = msgspec.structs.replace(
            own,
            python=own.python if spec.versions.python else "",
            torch=own.torch if spec.versions.torch else "",
        )
        return msgspec.structs.replace(
            spec,
            job=new_id(job.rpartition("-")[0]),
            versions=versions,
            master_port=free_port(),
            started=time.time(),
        )

    async def _history(self, question: jobs.HistoryRequest) -> jobs.History:
        answer = await self._agent.history.answer(question)
        if not question.starter:
            return jobs.History(tuple(map(self._with_why, answer.jobs)))
        key = key_of(question.job, question.starter)
        held = await asyncio.to_thread(self._agent.log.held, key)
        sources = tuple((name, *of) for name, of in held.items())[:1024]
        return jobs.History(
            tuple(msgspec.structs.replace(each, sources=sources) for each in answer.jobs)
        )

    async def _keep_end(self, question: jobs.KeepEnd) -> jobs.Kept:
        runner = self._runners.get(question.job)
        spec = self._spec_of(question.job) if runner is None else runner.spec
        if spec is None or not self._agent.vouching.is_genuine(spec):
            raise LinkError("no such job was started, as far as this node knows")
        where = self._whereabouts(spec, () if runner is None else runner.places)
        summary = decode_summary(question.summary)
        await self._agent.history.end(spec, *where, summary, question.when)
        return jobs.Kept()

    def _with_why(self, info: jobs.JobInfo) -> jobs.JobInfo:
        why = self._why_waits(info.job) if info.phase == "queued" else ""
        return msgspec.structs.replace(info, problem=why[:512]) if why else info

    async def _lines(self, question: jobs.LogRequest) -> jobs.LogLines:
        log, key = self._agent.log, key_of(question.job, question.starter)
        after = dict(question.after)
        deadline = time.monotonic() + question.wait_s
        while True:
            lines, has_more = await log.read(
                key,
                after,
                since=question.since,
                sources=question.sources,
                num_last=question.num_last,
            )
            left = deadline - time.monotonic()
            is_over = not self._is_known(question.job, question.starter)
            if lines or is_over or left <= 0:
                newest = log.newest(key) if question.num_last else ()
                return jobs.LogLines(tuple(lines), has_more, is_over, newest)
            await log.changed(key, left)
            deadline = 0.0

    def _is_known(self, job: str, starter: str) -> bool:
        """Whether the cluster has this job, as far as this node knows."""
        runner = self._runners.get(job)
        spec = self._spec_of(job) if runner is None else runner.spec
        return spec is not None and spec.starter == starter
