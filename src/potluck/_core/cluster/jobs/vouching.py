"""``Vouching``: a node asks the starter of a job that it does not know whether the job runs.

The ledger of a node knows what ran on it. A machine that came later, or did not take part, does not
know whether a job that the leader orders runs or was over long ago. Its starter does: the node asks
it over their own link, which the leader has no part in. Where there is no such link (the starter
has left, or is cut off from here) a right signature is enough, so that the job can go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from potluck._core.background import Tasks
from potluck._core.cluster.complaint import Complaint
from potluck._core.cluster.jobs.ledger import JobLedger
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.wire import jobs
from potluck.errors import ConfigurationError, LinkError, PotluckError

_ANSWER_S = 10.0
_ASK_AGAIN_S = 1.0
"""A link may end, and another one begin, while the answer is on its way."""


class Vouching:
    """What node ``me`` vouches for, and asks others. ``cluster()`` is the id of the cluster; empty
    if it is open."""

    def __init__(
        self,
        me: str,
        links: PeerLinks,
        ledger: JobLedger,
        cluster: Callable[[], bytes],
        on_note: Callable[[str], None],
    ) -> None:
        self._me = me
        self._ledger = ledger
        self._complain = Complaint(on_note)
        self._saving = Tasks()
        self._links = links
        self._cluster = cluster
        self._asked: dict[tuple[str, int], asyncio.Future[bool]] = {}
        links.on(jobs.VouchMessage, self._received)

    async def start_own(self, spec: jobs.JobSpec) -> jobs.JobSpec:
        """``spec`` of this node, to be signed: for this cluster, and for one run."""
        spec = msgspec.structs.replace(spec, cluster=self._cluster())
        spec = self._ledger.begin_own(spec)
        await self._ledger.save()
        return spec

    async def confirm(self, spec: jobs.JobSpec) -> None:
        """Return if the job of ``spec`` is one that runs now. ConfigurationError if it is of
        another cluster, over, or not its starter's any more; LinkError if the starter, which is
        linked, says nothing for 10 s."""
        cluster = self._cluster()
        if cluster and spec.cluster != cluster:
            raise ConfigurationError("it was started in another cluster")
        ledger, starter = self._ledger, spec.starter
        if ledger.runs(starter, spec.number):
            return
        if ledger.is_over(spec) or starter == self._me:
            raise ConfigurationError("it is over here: a job runs once, whoever orders it again")
        if not await self._ask(starter, spec.number):
            raise ConfigurationError("the node that started it says that it does not run any more")
        ledger.begin(spec)
        await ledger.save()

    def over(self, spec: jobs.JobSpec, *, has_run: bool = True) -> None:
        """The job of ``spec`` is over: it never runs here again. If nothing of it ``has_run`` here,
        its starter is asked once more when it is ordered again: the leader may have been lost while
        it gave its first orders."""
        if has_run:
            self._ledger.over(spec)
        else:
            self._ledger.forget(spec)
        self._saving.start(self._save())

    def listed(self, names: Collection[str]) -> None:
        """Only the jobs ``names`` run in the cluster, or are about to."""
        if self._ledger.listed(names):
            self._saving.start(self._save())

    async def close(self) -> None:
        """All is on disk."""
        await self._saving.ended()

    async def _save(self) -> None:
        try:
            await self._ledger.save()
        except PotluckError as error:
            self._complain(str(error))

    async def _ask(self, starter: str, number: int) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ANSWER_S
        answer = self._asked.setdefault((starter, number), loop.create_future())
        try:
            while self._links.send(starter, jobs.JobAsked(number)):
                await asyncio.wait([answer], timeout=_ASK_AGAIN_S)
                if answer.done():
                    return answer.result()
                if loop.time() > deadline:
                    raise LinkError(
                        f"node {starter[:12]}, which started it, does not answer whether it runs"
                    )
            return True
        finally:
            self._asked.pop((starter, number), None)

    def _received(self, node: str, message: jobs.VouchMessage) -> None:
        if isinstance(message, jobs.JobAsked):
            runs = self._ledger.runs(self._me, message.number)
            self._links.send(node, jobs.JobAnswered(message.number, runs))
        elif (answer := self._asked.get((node, message.number))) and not answer.done():
            answer.set_result(message.runs)
