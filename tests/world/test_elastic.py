"""The elastic loop, without torch: losses and joins at any moment, and nothing lost or repeated.

What is trained here is a count: each step adds, through an all_reduce, one to every sample of its
batch. In the end every sample must have been counted exactly once per epoch, on every worker.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import ConfigurationError, Diverged, RemoteError
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.training.elastic import ElasticLoop, Policy
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule

EVERY_STEP = Policy(hash_every=1, save_every=5, recovery_s=30)


@dataclass
class Counter:
    """A training whose state is how often each sample was committed."""

    ctx: DistributedContext
    schedule: Schedule
    store: CheckpointStore | None = None
    on_step: Callable[[ElasticLoop], None] = lambda job: None
    policy: Policy = EVERY_STEP
    seen: np.ndarray = field(init=False)
    job: ElasticLoop = field(init=False)

    def __post_init__(self) -> None:
        self.seen = np.zeros(self.schedule.num_samples, np.int64)
        replica = StateReplica(lambda: {"seen": self.seen}, self.restore)
        self.job = ElasticLoop(
            self.ctx, self.schedule, replica, checkpoint=self.store, policy=self.policy
        )

    def restore(self, state: Any) -> None:
        self.seen = state["seen"].copy()

    def run(self) -> Counter:
        for share in self.job:
            with self.job.step():
                self.on_step(self.job)
                mine = np.zeros(len(self.seen), np.int64)
                mine[share.indices[: share.num_samples]] += 1
                self.ctx.all_reduce(mine)
                self.job.commit(loss=float(len(share.indices)))
                self.seen = self.seen + mine
        return self


def assert_complete(results: dict[str, Counter] | list[Counter], epochs: int) -> None:
    found = list(results.values()) if isinstance(results, dict) else results
    assert found
    for counter in found:
        assert counter.job.done
        assert (counter.seen == epochs).all()


def test_ranks_that_know_the_outcome_of_a_vote_and_ranks_that_do_not_compare_hashes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ``hash_every`` above 1: worker 2 dies in the vote, and worker 1 does not learn how it
    ended. At the next vote both must send a hash, or they seem to differ."""
    vote = MortalContext.commit

    def commit(ctx: MortalContext, step: int, **facts: Any) -> Any:
        outcome = vote(ctx, step, **facts)
        if step == 2 and ctx.world_size == 3:
            if ctx.backend.worker == "2":
                ctx.die()
            if ctx.backend.worker == "1":
                ctx.recv(np.zeros(1), 2)  # raises what the vote would have raised
        return outcome

    monkeypatch.setattr(MortalContext, "commit", commit)
    schedule = Schedule(num_samples=24, batch_size=4, epochs=2, seed=3)
    policy = Policy(hash_every=50, save_every=1000, recovery_s=30)
    results = ElasticWorld(3, lambda ctx: Counter(ctx, schedule, policy=policy).run()).run()
    assert sorted(results) == ["0", "1"]
    assert_complete(results, epochs=2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_without_faults_every_sample_is_committed_once_per_epoch(world_size: int) -> None:
    schedule = Schedule(num_samples=23, batch_size=7, epochs=3, seed=1)
    results = run_world(world_size, lambda ctx: Counter(ctx, schedule).run())
    assert_complete(results, 3)
    for counter in results:
        assert counter.job.step_number == len(counter.job.losses) == 12
        assert counter.job.num_reruns == 0
        assert counter.job.recoveries == []


def test_a_worker_that_dies_costs_one_step_that_is_run_again() -> None:
    schedule = Schedule(num_samples=40, batch_size=8, epochs=2)
    # Otherwise a survivor may still be waiting for the outcome of the step before.
    all_are_there = threading.Barrier(4)

    def work(ctx: MortalContext) -> Counter:
        def on_step(job: ElasticLoop) -> None:
            if job.step_number == 4 and ctx.world_size == 4:
                all_are_there.wait(30)
                if ctx.backend.worker == "2":
                    ctx.die()

        return Counter(ctx, schedule, on_step=on_step).run()

    results = ElasticWorld(4, work).run()
    assert sorted(results) == ["0", "1", "3"]
    assert_complete(results, 2)
    for counter in results.values():
        assert counter.job.num_reruns == 1
        assert len(counter.job.recoveries) == 1


def test_a_newcomer_receives_the_state_and_takes_part() -> None:
    schedule = Schedule(num_samples=40, batch_size=8, epochs=8)
    joined = threading.Event()
    sizes: dict[int, int] = {}
    world: ElasticWorld[Counter]

    def work(ctx: MortalContext) -> Counter:
        def on_step(job: ElasticLoop) -> None:
            if ctx.backend.worker == "0":  # so many steps were committed before this one
                sizes[job.step_number] = ctx.world_size
            if job.step_number == 5 and ctx.backend.worker == "0" and not joined.is_set():
                joined.set()
                world.join()

        return Counter(ctx, schedule, on_step=on_step).run()

    world = ElasticWorld(2, work)
    results = world.run()
    assert sorted(results) == ["0", "1", "2"]
    assert_complete(results, 8)
    newcomer = results["2"].job
    assert 0 < len(newcomer.losses) < newcomer.step_number == 40
    first = min(step for step, size in sizes.items() if size == 3)
    assert len(newcomer.losses) == 40 - first, "it is in from the first step after the transfer"
    assert results["0"].job.num_reruns == 0, "a join is no reason to run a step again"


@pytest.mark.parametrize("round_", range(40))
def test_over_random_deaths_and_joins_every_sample_is_committed_exactly_once(
    round_: int, seed: int
) -> None:
    rng = random.Random(seed)
    schedule = Schedule(rng.randint(1, 30), rng.randint(1, 9), epochs=rng.randint(1, 4), seed=2)
    world_size = rng.randint(2, 5)
    # Worker 0 stays, so that somebody is left; the others die at a random half of an operation.
    fate = {
        str(worker): rng.choice([rng.randint(0, 12), rng.randint(0, 90)])
        for worker in range(1, 9)
        if rng.random() < 0.6
    }
    joins = sorted(rng.randint(0, 20) for _ in range(rng.randint(0, 4)))
    lock = threading.Lock()
    world: ElasticWorld[Counter]

    def work(ctx: MortalContext) -> Counter:
        def on_step(job: ElasticLoop) -> None:
            with lock:
                due = [joins.pop(0) for at in list(joins) if job.step_number >= at]
            for _ in due:
                world.join()

        return Counter(ctx, schedule, on_step=on_step).run()

    world = ElasticWorld(
        world_size, work, dies=lambda worker, name, number: fate.get(worker) == number
    )
    results = world.run()
    assert "0" in results
    assert_complete(results, schedule.epochs)
    # One death costs each survivor at most one step.
    deaths = len(fate)
    assert all(counter.job.num_reruns <= deaths for counter in results.values())


@pytest.mark.parametrize("moment", range(25))
def test_a_death_at_every_half_of_an_operation(moment: int) -> None:
    """Covers the agreement at the start, the transfer, the all_reduce, the vote and the end."""
    schedule = Schedule(num_samples=6, batch_size=3, epochs=1)
    results = ElasticWorld(
        3,
        lambda ctx: Counter(ctx, schedule).run(),
        dies=lambda worker, name, number: worker == "1" and number == moment,
    ).run()
    assert_complete(results, 1)
    assert {"0", "2"} <= results.keys()
    hashes = {tuple(counter.seen) for counter in results.values()}
    assert len(hashes) == 1


def test_when_all_are_killed_training_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    schedule = Schedule(num_samples=40, batch_size=4, epochs=2)
    store = CheckpointStore(tmp_path)

    def doomed(ctx: MortalContext) -> Counter:
        def on_step(job: ElasticLoop) -> None:
            if job.step_number == 13:
                ctx.die()

        return Counter(ctx, schedule, store, on_step).run()

    assert ElasticWorld(3, doomed).run() == {}
    saved = store.load_latest()
    assert saved is not None
    assert saved.step == 10

    begun: list[int] = []

    def heir(ctx: DistributedContext) -> Counter:
        return Counter(ctx, schedule, store, lambda job: begun.append(job.step_number)).run()

    results = run_world(2, heir)
    assert_complete(results, 2)
    assert min(begun) == 10


def test_the_checkpoint_is_found_by_whichever_rank_has_it(tmp_path: Path) -> None:
    """Without a shared directory the leader of the second run may not be that of the first."""
    schedule = Schedule(num_samples=12, batch_size=2, epochs=1)
    stores = [CheckpointStore(tmp_path / str(rank)) for rank in range(3)]
    longer = Schedule(num_samples=12, batch_size=2, epochs=2)
    assert_complete(run_world(1, lambda ctx: Counter(ctx, schedule, stores[2]).run()), 1)
    begun: list[int] = []

    def work(ctx: DistributedContext) -> Counter:
        return Counter(
            ctx, longer, stores[ctx.rank], lambda job: begun.append(job.step_number)
        ).run()

    assert_complete(run_world(3, work), 2)
    assert min(begun) == 6


def test_a_checkpoint_of_another_data_set_is_refused_on_all_ranks(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    run_world(1, lambda ctx: Counter(ctx, Schedule(10, 2), store).run())
    with pytest.raises(WorldError) as caught:
        run_world(2, lambda ctx: Counter(ctx, Schedule(11, 2), store).run())
    assert isinstance(caught.value.errors[0], ConfigurationError)
    assert "10 samples" in str(caught.value.errors[0])
    assert isinstance(caught.value.errors[1], RemoteError)


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = CheckpointStore(tmp_path / "file" / "below")
    store.load_latest = lambda: None  # type: ignore[method-assign]
    results = run_world(2, lambda ctx: Counter(ctx, Schedule(20, 2), store).run())
    assert_complete(results, 1)


def test_an_error_in_one_ranks_code_names_that_rank_everywhere() -> None:
    def work(ctx: DistributedContext) -> Counter:
        def on_step(job: ElasticLoop) -> None:
            if ctx.rank == 1 and job.step_number == 2:
                raise ZeroDivisionError("a bug in the script")

        return Counter(ctx, Schedule(20, 2), on_step=on_step).run()

    with pytest.raises(WorldError) as caught:
        run_world(3, work)
    errors = caught.value.errors
    assert isinstance(errors[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RemoteError)
        assert "rank 1" in str(errors[rank])
        assert "a bug in the script" in str(errors[rank])


def test_replicas_that_differ_stop_training_on_all_ranks() -> None:
    def work(ctx: DistributedContext) -> None:
        counter = Counter(ctx, Schedule(20, 2))

        def corrupt(job: ElasticLoop) -> None:
            if ctx.rank == 1 and job.step_number == 3:
                counter.seen[0] += 1

        counter.on_step = corrupt
        counter.run()

    with pytest.raises(WorldError) as caught:
        run_world(3, work)
    assert [type(error) for _, error in sorted(caught.value.errors.items())] == [Diverged] * 3


def test_a_step_that_one_rank_votes_down_is_run_again_everywhere() -> None:
    schedule = Schedule(num_samples=20, batch_size=2)

    def work(ctx: DistributedContext) -> int:
        refused = False
        seen: list[int] = []
        replica = StateReplica(lambda: {"n": len(seen)}, lambda state: None)
        job = ElasticLoop(ctx, schedule, replica, policy=EVERY_STEP)
        for share in job:
            with job.step():
                ok = refused or not (ctx.rank == 1 and job.step_number == 3)
                refused = refused or not ok
                job.commit(ok=ok)
                seen.append(len(share.indices))
        return job.num_reruns

    assert run_world(2, work) == [1, 1]


def test_the_body_must_use_the_step_and_the_step_belongs_to_the_body() -> None:
    def work(ctx: DistributedContext) -> None:
        job = ElasticLoop(ctx, Schedule(4, 2), StateReplica(lambda: {}, lambda state: None))
        with pytest.raises(RuntimeError, match="in the loop over the job"), job.step():
            pass
        with pytest.raises(RuntimeError, match="inside the block"):
            job.commit()
        with pytest.raises(RuntimeError, match=r"inside `with job.step\(\)"):
            for _ in job:
                pass

    run_world(1, work)


def test_progress_and_the_end_are_reported() -> None:
    def work(ctx: DistributedContext) -> list[dict[str, Any]]:
        counter = Counter(ctx, Schedule(20, 2)).run()
        counter.job.log(score=np.float64(0.5))
        return ctx._backend.reports  # type: ignore[attr-defined]

    for reports in run_world(2, work):
        steps = [facts["step"] for facts in reports if "step" in facts]
        assert steps == list(range(1, 11))
        first = next(facts for facts in reports if "step" in facts)
        assert first["loss"] == 1.0
        assert first["device"] == "cpu"
        assert first["samples_per_s"] > 0
        told = [(f["committed_samples"], f["total_samples"]) for f in reports if "step" in f]
        assert told == [(2 * step, 20) for step in steps]
        end = next(facts for facts in reports if "committed_steps" in facts)
        assert end["committed_steps"] == 10
        assert end["steps_run_again"] == 0
        assert end["recoveries"] == []
        assert len(end["parameter_hash"]) == 64
        assert reports[-1] == {"score": 0.5}


def test_a_training_stops_on_all_ranks_after_the_step_in_which_the_script_says_so() -> None:
    schedule = Schedule(num_samples=23, batch_size=7, epochs=3, seed=1)

    def stop_early(job: ElasticLoop) -> None:
        if job.step_number == 4:
            job.stop()

    def work(ctx: MortalContext) -> Counter:
        return Counter(ctx, schedule, on_step=stop_early).run()

    for fatal in (0, 30, 31, 38, 39, 41):
        world = ElasticWorld(3, work, dies=lambda w, _, at, fatal=fatal: (w, at) == ("1", fatal))
        for counter in world.run().values():
            assert counter.job.done
            assert counter.job.step_number == 5
            assert counter.seen.sum() == 23 + 7


def test_a_resumed_training_that_was_stopped_says_why_it_does_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(ctx: DistributedContext) -> int:
        counter = Counter(
            ctx,
            Schedule(num_samples=23, batch_size=7, epochs=3),
            store=CheckpointStore(tmp_path),
            on_step=lambda job: job.stop() if job.step_number == 2 else None,
        )
        return counter.run().job.step_number

    assert run_world(2, run) == [3, 3]
    assert not caplog.records
    assert run_world(3, run) == [3, 3, 3]
    [record] = caplog.records
    assert record.getMessage().startswith(
        "resumed from the checkpoint of step 3, at which job.stop() has ended the training: no step"
    )


def test_a_loss_that_is_logged_after_the_commit_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(ctx: DistributedContext) -> None:
        job = ElasticLoop(ctx, Schedule(8, 2), StateReplica(lambda: {}, lambda state: None))
        for _ in job:
            with job.step():
                job.log(loss=0.5)
                job.commit()
                job.log(accuracy=0.5)
        assert not caplog.records
        job = ElasticLoop(ctx, Schedule(8, 2), StateReplica(lambda: {}, lambda state: None))
        for _ in job:
            with job.step():
                job.commit()
                job.log(loss=0.5)

    run_world(1, run)
    [record] = caplog.records
    assert "job.log(loss=...) comes after the step's commit" in record.getMessage()


def test_a_training_is_stopped_only_inside_a_step() -> None:
    def stop_between_steps(ctx: DistributedContext) -> None:
        with pytest.raises(RuntimeError, match="inside the block of a step"):
            Counter(ctx, Schedule(4, 2)).job.stop()

    run_world(1, stop_between_steps)
