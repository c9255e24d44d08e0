"""``Table``: the table of the jobs that wait for machines, as one node has it. PURE.

The leader sends each job that waits to all nodes of its view (``wire.jobs.JobWaits``), as it sends
orders; then its list says who waits. So each node has the table, and the next leader goes on with
its own. The rule by which no job begins twice: *a table is good while its holder stays the same
member of the same history of views*. It is in memory only. So a machine that starts, alone or not,
has none; one that was away, forked off or merged drops its own: in its absence the jobs may have
begun. A job that was ordered is in no table; who has that order takes no ``JobWaits`` of it again.

What a table lacks comes from the starters: each submits its jobs that wait again to a new leader,
if its own table is good. A machine that was alone knows that its jobs did not begin, and submits
them again wherever it gets.

What is lost: a job that waits, when its starter and all machines that lead next are off or away at
once; and in a fork (``potluck continue --alone``), for the part that forked off. Its starter and
its leader have it in their histories, as a job without an end. A job begins again if the leader
that began it is lost, and the next one, or the job's starter, was cut off from that leader
meanwhile: the next leader's list ends what runs of it, and no machine on which it ran runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from potluck._core.cluster.sharing.limits import in_units
from potluck._core.wire import jobs, peers
from potluck._core.wire.nodes import View, ViewMember

_MAX_BEGUN = 1024
_MAX_OF_ONE = 64
"""Jobs of one machine that wait: no member keeps all others out."""
_MAX_BYTES = 4 << 20
_MAX_BYTES_OF_ONE = 1 << 20
"""Of what waits: a new link gets all of it at once."""


class Table:
    """The jobs that wait, in the order in which they came, as node ``me`` has them."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._view: View | None = None
        self._jobs: dict[str, jobs.JobWaits] = {}
        self._sizes: dict[str, int] = {}
        """By job: the bytes of its message."""
        self._begun: deque[str] = deque(maxlen=_MAX_BEGUN)

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def __iter__(self) -> Iterator[jobs.JobWaits]:
        return iter(tuple(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def spec(self, job: str) -> jobs.JobSpec | None:
        """What ``job``, which waits, is; None if it does not."""
        return self._jobs[job].spec if job in self._jobs else None

    def waits(self, job: str) -> bool:
        """Whether ``job`` is to begin some time: it was not cancelled."""
        return job in self._jobs and not self._jobs[job].is_cancelled

    def has_begun(self, job: str) -> bool:
        """Whether this node has seen an order of ``job``: it waits no more, whoever says so."""
        return job in self._begun

    def objection(self, spec: jobs.JobSpec) -> str:
        """Why ``spec`` can't wait, too, in words; empty if it can."""
        size, starter = _size(spec), spec.starter
        own = [self._sizes[job] for job, each in self._jobs.items() if each.spec.starter == starter]
        num_bytes, total = sum(own) + size, sum(self._sizes[job] for job in self._jobs) + size
        if (
            len(self._jobs) < jobs.MAX_QUEUED
            and len(own) < _MAX_OF_ONE
            and num_bytes <= _MAX_BYTES_OF_ONE
            and total <= _MAX_BYTES
        ):
            return ""
        return (
            f"{len(self._jobs)} jobs wait already, {len(own)} of this machine, with this one "
            f"{in_units(num_bytes)} of its own, {in_units(total)} in all: at most "
            f"{jobs.MAX_QUEUED} jobs wait ({in_units(_MAX_BYTES)}), {_MAX_OF_ONE} of one "
            f"machine ({in_units(_MAX_BYTES_OF_ONE)})"
        )

    def installed(self, view: View) -> tuple[jobs.JobSpec, ...]:
        """``view`` is used from now on: the jobs that this node is to submit again to its
        leader."""
        before, self._view = self._view, view
        if before is not None and _place(before, self._me) == _place(view, self._me):
            return self._own() if before.leader != view.leader else ()
        was_alone = before is not None and before.nodes == (self._me,)
        again = self._own() if was_alone else ()
        self._jobs.clear()
        return again

    def _own(self) -> tuple[jobs.JobSpec, ...]:
        return tuple(each.spec for each in self if each.spec.starter == self._me)

    def take(self, told: jobs.JobWaits) -> bool:
        """A job waits, or was cancelled while it did; whether that is new here. Of what is too
        much, whoever says so, this node knows nothing."""
        job = told.spec.job
        known = self._jobs.get(job)
        if job in self._begun or known == told or (known is not None and known.is_cancelled):
            return False
        if known is None and self.objection(told.spec):
            return False
        self._sizes = {each: self._sizes[each] for each in self._jobs} | {job: _size(told.spec)}
        self._jobs[job] = told
        return True

    def begins(self, job: str) -> None:
        """The job was ordered."""
        if job not in self._begun:
            self._begun.append(job)
        self._jobs.pop(job, None)

    def drop(self, names: Iterable[str]) -> list[jobs.JobSpec]:
        """The jobs ``names`` wait no more; those of them that did."""
        return [self._jobs.pop(job).spec for job in names if job in self._jobs]

    def unlisted(self, listed: Collection[str]) -> list[str]:
        """The jobs that are not on the leader's list: they wait no more."""
        return [job for job in self._jobs if job not in listed]


def _size(spec: jobs.JobSpec) -> int:
    return len(peers.MESSAGE.encode(jobs.JobWaits(spec)))


def _place(view: View, node: str) -> tuple[str, ViewMember | None]:
    return view.history, view.member(node)
