"""Memory as a resource: caps, parts, and steps that run again because memory ran out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from potluck._core.backends.local import LocalBackend
from potluck._core.context import DistributedContext
from potluck.errors import ConfigurationError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.training.elastic import ElasticLoop, Policy
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule

POLICY = Policy(hash_every=1, recovery_s=100)


class Counter:
    """A training whose state is how often each sample was committed, on a worker whose memory holds
    ``fits`` samples at once from the step ``since`` on."""

    def __init__(
        self, ctx: DistributedContext, fits: int, *, since: int = 0, batch_size: int = 20
    ) -> None:
        self.ctx, self.fits, self.since = ctx, fits, since
        self.seen = np.zeros(60, np.int64)
        self.counts: list[int] = []
        self.events: list[str] = []
        report = ctx.report
        ctx.report = lambda *a, **k: (self.events.append(k.get("event", "")), report(*a, **k))  # type: ignore[method-assign]
        replica = StateReplica(lambda: {"seen": self.seen}, self.restore)
        self.job = ElasticLoop(ctx, Schedule(60, batch_size, epochs=3), replica, policy=POLICY)

    def restore(self, state: Any) -> None:
        self.seen = state["seen"].copy()

    def run(self) -> Counter:
        for share in self.job:
            with self.job.step():
                if self.job.step_number >= self.since and len(share.indices) > self.fits:
                    raise MemoryError
                mine = np.zeros(60, np.int64)
                mine[share.indices[: share.num_samples]] += 1
                self.ctx.all_reduce(mine)
                self.job.commit(loss=1.0)
                self.seen = self.seen + mine
                self.counts.append(share.num_samples)
        return self


def test_a_rank_that_runs_out_of_memory_computes_less_and_the_others_the_rest() -> None:
    fits = {"0": 20, "1": 3, "2": 20}

    def work(ctx: MortalContext) -> Counter:
        return Counter(ctx, fits[ctx.backend.worker]).run()

    results = ElasticWorld(3, work).run()
    for counter in results.values():
        assert (counter.seen == 3).all()
        assert counter.job.num_reruns <= 1, "one change of the cap, one repeat"
        assert counter.job.step_number == 9
    assert results["1"].job.num_reruns == 1, "another rank may not have begun the step"
    assert [results[worker].counts[0] for worker in "012"] == [9, 3, 8]
    assert [results[worker].job.most_at_once for worker in "012"] == [0, 3, 0]
    told = [event for event in results["1"].events if "out of memory" in event]
    assert len(told) == 1
    assert "with 7 samples at once: it computes at most 3 samples, and runs step 0 again" in told[0]


def test_memory_that_another_program_takes_away_amid_the_training() -> None:
    def work(ctx: MortalContext) -> Counter:
        return Counter(ctx, 2 if ctx.backend.worker == "0" else 20, since=4).run()

    results = ElasticWorld(2, work).run()
    for counter in results.values():
        assert (counter.seen == 3).all()
        assert counter.job.num_reruns <= 2
    assert results["0"].job.num_reruns == 2, "10, 5, 2"
    assert results["0"].counts == [10] * 4 + [2] * 5


def test_a_worker_that_joins_learns_the_caps() -> None:
    def work(ctx: MortalContext) -> Counter:
        counter = Counter(ctx, 4 if ctx.backend.worker == "0" else 20)
        if ctx.backend.worker != "2":
            real = counter.job.commit

            def commit(**facts: Any) -> None:
                if counter.job.step_number == 3 and ctx.rank == 0 and not joined:
                    joined.append(world.join())
                real(**facts)

            counter.job.commit = commit  # type: ignore[assignment, method-assign]
        return counter.run()

    joined: list[str] = []
    world = ElasticWorld(2, work)
    results = world.run()
    for counter in results.values():
        assert (counter.seen == 3).all()
    assert [results[worker].counts[-1] for worker in "012"] == [2, 9, 9], "of 10 5, then 2 fitted"


def test_a_batch_that_fits_nowhere_is_one_error_on_all_ranks() -> None:
    """The sum of a script's own gradients is the script's: it can't be computed in parts."""

    def work(ctx: MortalContext) -> None:
        with pytest.raises(ConfigurationError, match=r"at most \d, \d samples at once"):
            Counter(ctx, 9).run()

    ElasticWorld(2, work).run()


def test_one_sample_that_does_not_fit_is_the_error_of_the_script() -> None:
    with DistributedContext(LocalBackend()) as ctx:
        counter = Counter(ctx, 0, batch_size=1)
        with pytest.raises(MemoryError) as caught:
            counter.run()
    assert "with 1 sample at once; fewer can't be computed" in "".join(caught.value.__notes__)
