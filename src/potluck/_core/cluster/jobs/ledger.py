"""The ledger of jobs: which jobs run on this node, and which are over. A signed job is good for
one run.

A job's number is its starter's: higher than that of each job it started before. The node remembers
the numbers of the jobs that ran here, so a leader that orders an old job once more, with its old
and right signature, is refused. No clock decides: the clocks of two machines may differ by years.
Views don't decide either: a job lives through many, and machines that come later take part in it.

``Vouching``: a machine that joined later, or took no part, can't know whether an ordered job runs
or was over long ago. The job's starter can: the node asks it over their own link, in which the
leader has no part. Without such a link (the starter has left, or is cut off from here) a right
signature is enough, so that the job can go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from potluck._core.background import Tasks
from potluck._core.cluster.home.keyfile import read_private, replace_private
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.cluster.trust.credentials import is_by_starter
from potluck._core.waiting import Complaint
from potluck._core.wire import jobs
from potluck._core.wire.jobs import MAX_JOB_NUMBER, JobSpec
from potluck.errors import ConfigurationError, LinkError, PotluckError

FILE = "jobs.json"
MAX_OVER = 1024
"""Of one starter. Beyond that the lowest number is forgotten, and all below count as over."""
MAX_STARTERS = 4096

_WHAT = "the list of jobs that ran here"
_MAX_BYTES = 256 << 20


class _Started(msgspec.Struct):
    """The jobs of one starter: names of the running ones by number, numbers of the ones that are
    over, and the number up to which all others are over."""

    running: dict[int, str] = {}
    over: list[int] = []
    floor: int = 0


class JobLedger:
    """The ledger of node ``me`` in ``home``; without a home, of a private agent, in memory. An
    agent does not start while the file is damaged (ConfigurationError). Changes hold at once, and
    outlive the agent when ``save`` has returned."""

    def __init__(self, me: str, home: Path | None) -> None:
        self._me = me
        self._path = None if home is None else home / FILE
        self._saving = asyncio.Lock()
        self._starters = self._read()

    def begin_own(self, spec: JobSpec) -> JobSpec:
        """``spec``, which this node starts, with its number."""
        mine = self._of(self._me)
        last = max(mine.floor, *mine.over, *mine.running, 0)
        now_ms = min(int(time.time() * 1000), MAX_JOB_NUMBER // 2)
        numbered = msgspec.structs.replace(spec, number=max(last + 1, now_ms))
        self.begin(numbered)
        return numbered

    def begin(self, spec: JobSpec) -> None:
        """The job of ``spec`` runs here."""
        self._of(spec.starter).running[spec.number] = spec.job

    def runs(self, starter: str, number: int) -> bool:
        """Whether the job of ``starter`` with this number runs, and is known here."""
        return number in self._starters.get(starter, _NOTHING).running

    def is_over(self, spec: JobSpec) -> bool:
        """Whether the job of ``spec`` ran here, or is older than all that is remembered."""
        known = self._starters.get(spec.starter, _NOTHING)
        if spec.number in known.running:
            return False
        return spec.number <= known.floor or spec.number in known.over

    def over(self, spec: JobSpec) -> None:
        """The job of ``spec`` is over: it never runs here again."""
        self._end(spec.starter, spec.number)

    def forget(self, spec: JobSpec) -> None:
        """Nothing of the job of ``spec``, of another node, ran here."""
        if spec.starter != self._me:
            self._starters.get(spec.starter, _NOTHING).running.pop(spec.number, None)

    def listed(self, names: Collection[str]) -> bool:
        """The jobs ``names`` run: others, maybe of an earlier run of the agent, are over. Whether
        there were such."""
        gone = [
            (node, number)
            for node, each in self._starters.items()
            for number, name in each.running.items()
            if name not in names
        ]
        for node, number in gone:
            self._end(node, number)
        return bool(gone)

    async def save(self) -> None:
        """Write the ledger to the disk. IdentityError if it can't be written."""
        if self._path is not None:
            async with self._saving:
                data = msgspec.json.encode(self._starters)
                await asyncio.to_thread(replace_private, self._path, _WHAT, data)

    def _of(self, node: str) -> _Started:
        known = self._starters.pop(node, None) or _Started()
        while len(self._starters) >= MAX_STARTERS:
            del self._starters[next(iter(self._starters))]
        self._starters[node] = known  # in order of use
        return known

    def _end(self, node: str, number: int) -> None:
        known = self._starters.get(node, _NOTHING)
        if known.running.pop(number, None) is not None:
            known.over = sorted((*known.over, number))
            if len(known.over) > MAX_OVER:
                known.floor = known.over.pop(0)

    def _read(self) -> dict[str, _Started]:
        if self._path is None:
            return {}
        try:
            data = read_private(self._path, _WHAT, max_bytes=_MAX_BYTES)
            return msgspec.json.decode(data, type=dict[str, _Started])
        except FileNotFoundError:
            return {}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{_WHAT} {self._path} is damaged: {error}. Remove it; jobs that ran here before "
                "could then be ordered again by a leader that means harm"
            ) from error


_NOTHING = _Started()


_ANSWER_S = 10.0
_ASK_AGAIN_S = 1.0
_PAUSE_S = 0.05
"""A link may end, and another one begin, while the answer is on its way."""


@dataclass(eq=False, repr=False)
class Vouching:
    """What node ``me`` vouches for, and asks others. ``cluster()`` is the id of the cluster; empty
    if it is open."""

    me: str
    links: PeerLinks
    ledger: JobLedger
    cluster: Callable[[], bytes]
    on_note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._complain = Complaint(self.on_note)
        self._saving = Tasks()
        self._starting: set[str] = set()
        self.links.on_request(jobs.JobRunsRequest, self._requested)

    async def start_own(self, spec: jobs.JobSpec) -> jobs.JobSpec:
        """``spec`` of this node, to be signed: for this cluster, and for one run."""
        spec = msgspec.structs.replace(spec, cluster=self.cluster())
        spec = self.ledger.begin_own(spec)
        self._starting.add(spec.job)  # the leader's list can't have it yet
        try:
            await self.ledger.save()
        finally:
            self._starting.remove(spec.job)
        return spec

    def is_genuine(self, spec: jobs.JobSpec) -> bool:
        """Whether the starter of ``spec`` signed it; this node also has to run what it started."""
        is_mine = spec.starter == self.me
        return is_by_starter(spec) and (not is_mine or self.ledger.runs(self.me, spec.number))

    async def confirm(self, spec: jobs.JobSpec) -> None:
        """Return if the job of ``spec`` is one that runs now. ConfigurationError if it is of
        another cluster, over, or not its starter's any more; LinkError if the starter, which is
        linked, does not answer for 10 s."""
        cluster = self.cluster()
        if cluster and spec.cluster != cluster:
            raise ConfigurationError("it was started in another cluster")
        ledger, starter = self.ledger, spec.starter
        if ledger.runs(starter, spec.number):
            return
        if ledger.is_over(spec) or starter == self.me:
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
            self.ledger.over(spec)
        else:
            self.ledger.forget(spec)
        self._saving.start(self._save())

    def listed(self, names: Collection[str]) -> None:
        """Only the jobs ``names`` run in the cluster, or are about to."""
        if self.ledger.listed({*names, *self._starting}):
            self._saving.start(self._save())

    async def close(self) -> None:
        """All is on disk."""
        await self._saving.ended()

    async def _save(self) -> None:
        try:
            await self.ledger.save()
        except PotluckError as error:
            self._complain(str(error))

    async def _ask(self, starter: str, number: int) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ANSWER_S
        request = jobs.JobRunsRequest(number)
        while starter in self.links.nodes:
            try:
                answer = await self.links.ask(
                    starter, request, jobs.JobRuns, timeout_s=_ASK_AGAIN_S
                )
                return answer.runs
            except LinkError:
                if loop.time() > deadline:
                    raise LinkError(
                        f"node {starter[:12]}, which started it, does not answer whether it runs"
                    ) from None
                await asyncio.sleep(_PAUSE_S)  # it may have failed at once
        return True

    def _requested(self, node: str, request: jobs.JobRunsRequest) -> jobs.JobRuns:
        return jobs.JobRuns(self.ledger.runs(self.me, request.number))
