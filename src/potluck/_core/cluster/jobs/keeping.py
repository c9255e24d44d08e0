"""``Keeping``: has the history of each job kept on the right nodes, and answers who asks for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec

from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.local_runner import LocalRunner
from potluck._core.cluster.jobs.permissions import objection_to_asking
from potluck._core.cluster.jobs.summary import Summary
from potluck._core.wire import jobs
from potluck._core.wire.format import decoded
from potluck.errors import LinkError, PotluckError

_summaries = msgspec.json.Decoder(Summary)

_ANSWER_S = 5.0
COPIES = 2
"""Machines that have the end of a job on disk before its leader lets go of it, if there are so
many."""


class Keeping:
    """The history (``agent.history``) of the jobs in ``runners``, which this node knows."""

    def __init__(self, agent: AgentParts, runners: Mapping[str, LocalRunner]) -> None:
        self._agent = agent
        self._runners = runners
        agent.links.on_request(jobs.HistoryQuestion, self._asked)

    def placed(self, runner: LocalRunner) -> None:
        """The leader has ordered a job."""
        if self._agent.me in self._keepers(runner.spec, runner.places):
            self._reached(runner, "placed")

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
        keepers = self._keepers(spec, places)
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

        num_kept = sum(await asyncio.gather(*map(keep, sorted(keepers))))
        while num_kept < COPIES and spare:
            num_kept += await keep(spare.pop(0))

    def _keepers(self, spec: jobs.JobSpec, places: jobs.Places) -> set[str]:
        """The nodes that keep what becomes of a job, of those that are there: those that run it,
        its starter, its leader."""
        view = self._agent.plane.view
        if view is None:
            return {self._agent.me}
        keepers = {spec.starter, view.leader, *(each.node for each in places)}
        return keepers & set(view.nodes)

    def _reached(self, runner: LocalRunner, phase: jobs.Phase) -> None:
        self._agent.history.reached(runner.spec, *self._whereabouts(runner), phase)

    def _whereabouts(self, runner: LocalRunner) -> tuple[str, list[tuple[str, str]]]:
        """The name of a job's starter; the nodes of its workers, with their names."""
        label = self._agent.names.label
        nodes = dict.fromkeys(each.node for each in runner.places)
        return label(runner.spec.starter), [(node, label(node)) for node in nodes]

    async def _asked(self, node: str, question: jobs.HistoryQuestion) -> jobs.History | jobs.Kept:
        view = self._agent.plane.view
        if objection := objection_to_asking(node, question, view, me=self._agent.me):
            raise LinkError(objection)
        if isinstance(question, jobs.HistoryRequest):
            return await self._agent.history.answer(question)
        runner = self._runners.get(question.job)
        if runner is None or not self._agent.vouching.is_genuine(runner.spec):
            raise LinkError("no such job was started, as far as this node knows")
        summary = decoded(_summaries, question.summary, "the summary of a job")
        where = self._whereabouts(runner)
        await self._agent.history.end(runner.spec, *where, summary, question.when)
        return jobs.Kept()
