"""Training in rounds: losses and joins at any moment, and no sample lost or doubled."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import Diverged, PeerLost
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import WorldError, run_world
from potluck.training.elastic import Policy
from potluck.training.policy import ProportionalShares
from potluck.training.sampler import Schedule
from support.counts import Counts


def assert_complete(results: Any, epochs: int) -> None:
    found = list(results.values()) if isinstance(results, dict) else results
    assert found
    for counts in found:
        assert counts.job.done
        assert (counts.seen == epochs).all(), counts.seen


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_without_faults_every_sample_is_committed_once_per_epoch(
    world_size: int, delay: int
) -> None:
    schedule = Schedule(num_samples=47, batch_size=5, epochs=3, seed=1)
    results = run_world(world_size, lambda ctx: Counts(ctx, schedule, delay=delay).run())
    assert_complete(results, 3)
    for counts in results:
        assert counts.job.step_number == 30, "rounds count their steps"
        assert len(counts.job.losses) == 12, "four rounds an epoch, the last one shorter"
        assert counts.num_taken == 30 or world_size > 2, "equal shares are equally many steps"
        assert counts.job.num_reruns == 0
        assert counts.fractions == [1.0] * 12
        assert counts.num_delayed == (9 if delay else 0), "all but the last round of an epoch"


@pytest.mark.parametrize("delay", [0, 2])
def test_a_slow_rank_gets_fewer_steps_of_the_rounds_after_the_first_reports(delay: int) -> None:
    """Rank 0 is said to take a quarter of rank 1's time for each sample."""
    schedule = Schedule(num_samples=400, batch_size=10, epochs=1)
    policy = Policy(hash_every=1, shares=ProportionalShares())

    def work(ctx: DistributedContext) -> Counts:
        counts = Counts(ctx, schedule, 4, policy=policy, delay=delay)
        pace = counts.job._training.pace
        add_round = pace.add_round

        def told(ctx: DistributedContext, step: int, done: Any) -> None:
            quick, slow = (num for num, _ in done)
            add_round(ctx, step, [(quick, quick * 1.0), (slow, slow * 4.0)])

        pace.add_round = told  # type: ignore[method-assign]
        return counts.run()

    results = run_world(2, work)
    assert_complete(results, 1)
    num_equal = 2 if delay else 1  # a round is dealt before the one before it is reported
    steps = [4 * num_equal + each * (10 - num_equal) for each in (6, 2)]
    assert [counts.num_taken for counts in results] == steps


def test_who_is_lost_inside_a_round_costs_the_others_no_step() -> None:
    """Its samples of the round are owed, and computed by the others in a later one."""
    schedule = Schedule(num_samples=36, batch_size=4, epochs=2)

    def work(ctx: MortalContext) -> Counts:
        def on_step(counts: Counts) -> None:
            if ctx.backend.worker == "1" and counts.num_taken == 4:
                ctx.die()

        return Counts(ctx, schedule, on_step=on_step).run()

    results = ElasticWorld(2, work).run()
    assert sorted(results) == ["0"]
    assert_complete(results, 2)
    (counts,) = results.values()
    assert counts.fractions[1] == 0.5, "the round counts with what the survivor did"
    assert counts.fractions[2:] == [1.0] * (len(counts.fractions) - 2)
    assert counts.job.num_reruns == 0
    # The owed half of a round is a round of six samples in two steps.
    assert [round(loss) for loss in counts.job.losses] == [2, 2, 4, 3, 4, 4, 4]


def test_a_newcomer_enters_at_a_round() -> None:
    schedule = Schedule(num_samples=60, batch_size=4, epochs=4)
    joined = threading.Event()
    world: ElasticWorld[Counts]

    def work(ctx: MortalContext) -> Counts:
        def on_step(counts: Counts) -> None:
            if counts.num_taken == 7 and ctx.backend.worker == "0" and not joined.is_set():
                joined.set()
                world.join()

        return Counts(ctx, schedule, on_step=on_step).run()

    world = ElasticWorld(2, work)
    results = world.run()
    assert sorted(results) == ["0", "1", "2"]
    assert_complete(results, 4)
    assert set(results["0"].fractions) == {1.0}, "a join costs nothing"
    assert results["2"].num_taken > 0


@pytest.mark.parametrize("round_", range(40))
def test_over_random_deaths_and_joins_every_sample_is_committed_exactly_once(
    round_: int, seed: int
) -> None:
    rng = random.Random(seed)
    schedule = Schedule(rng.randint(1, 60), rng.randint(1, 9), epochs=rng.randint(1, 4), seed=2)
    every, delay = rng.randint(1, 5), rng.randint(0, 4) if round_ % 2 else 0
    deadline = rng.choice([None, 0.0])
    shares = ProportionalShares() if round_ % 3 == 0 else None
    policy = Policy(hash_every=1, save_every=5, adapt_every=2, shares=shares)
    fate = {
        str(worker): rng.choice([rng.randint(0, 12), rng.randint(0, 60)])
        for worker in range(1, 9)
        if rng.random() < 0.6
    }
    in_steps = {str(worker): rng.randint(0, 20) for worker in range(1, 9) if rng.random() < 0.3}
    joins = sorted(rng.randint(0, 20) for _ in range(rng.randint(0, 4)))
    lock = threading.Lock()
    world: ElasticWorld[Counts]

    def work(ctx: MortalContext) -> Counts:
        def on_step(counts: Counts) -> None:
            if in_steps.get(ctx.backend.worker) == counts.num_taken:
                ctx.die()
            with lock:
                due = [joins.pop(0) for at in list(joins) if counts.num_taken >= at]
            for _ in due:
                world.join()

        return Counts(
            ctx, schedule, every, on_step=on_step, delay=delay, policy=policy, deadline=deadline
        ).run()

    world = ElasticWorld(
        rng.randint(2, 5), work, dies=lambda worker, name, number: fate.get(worker) == number
    )
    results = world.run()
    assert "0" in results
    assert_complete(results, schedule.epochs)
    assert len({counts.job._training.progress.round for counts in results.values()}) == 1


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("moment", range(28))
def test_a_death_at_every_half_of_an_operation(moment: int, delay: int) -> None:
    """Covers the agreement at the start, the reports, the sum, the vote and the end."""
    schedule = Schedule(num_samples=20, batch_size=3, epochs=1)
    results = ElasticWorld(
        3,
        lambda ctx: Counts(ctx, schedule, 2, delay=delay).run(),
        dies=lambda worker, name, number: worker == "1" and number == moment,
    ).run()
    assert_complete(results, 1)
    assert {"0", "2"} <= results.keys()


def test_a_training_whose_workers_are_all_killed_resumes_at_a_round(tmp_path: Path) -> None:
    schedule = Schedule(num_samples=40, batch_size=4, epochs=2)
    store = CheckpointStore(tmp_path)

    def doomed(ctx: MortalContext) -> Counts:
        def on_step(counts: Counts) -> None:
            if counts.num_taken == 13:
                ctx.die()

        return Counts(ctx, schedule, store=store, on_step=on_step).run()

    assert ElasticWorld(3, doomed).run() == {}
    saved = store.load_latest()
    assert saved is not None
    assert saved.step in (10, 12), "after the round that passed a multiple of save_every"
    begun: list[int] = []

    def heir(ctx: DistributedContext) -> Counts:
        return Counts(
            ctx, schedule, store=store, on_step=lambda counts: begun.append(counts.job.step_number)
        ).run()

    assert_complete(run_world(2, heir), 2)
    assert min(begun) == saved.step


def test_a_newcomer_with_a_stale_learning_rate_is_found() -> None:
    schedule = Schedule(num_samples=60, batch_size=4, epochs=9)
    joined = threading.Event()
    world: ElasticWorld[Counts]

    def work(ctx: MortalContext) -> Counts:
        def on_step(counts: Counts) -> None:
            if counts.num_taken == 7 and ctx.backend.worker == "0" and not joined.is_set():
                joined.set()
                world.join()
            counts.rate = 1 + (ctx.backend.worker == "2")  # as a script that counts its own steps

        return Counts(ctx, schedule, on_step=on_step).run()

    world = ElasticWorld(2, work)
    with pytest.raises(Diverged, match="rank 2 has other hyperparameters than rank 0"):
        world.run()


def test_means_in_callbacks_after_a_loss_inside_a_round_are_those_of_all_members() -> None:
    """A newcomer has seen no loss; it makes the same calls as the members that have."""
    schedule = Schedule(num_samples=60, batch_size=4, epochs=4)
    joined = threading.Event()
    world: ElasticWorld[tuple[str, list[float]]]

    class Means:
        def __init__(self) -> None:
            self.found: list[float] = []

        def on_step_end(self, step: int, loss: float) -> None:
            self.found.append(counts_of[threading.get_ident()].job.average(step=step)["step"])

    counts_of: dict[int, Counts] = {}

    def work(ctx: MortalContext) -> tuple[str, list[float]]:
        def on_step(counts: Counts) -> None:
            if counts.num_taken == 4 and ctx.backend.worker == "0":
                joined.set()
                world.join()
            if counts.num_taken == 4 and ctx.backend.worker == "1":
                assert joined.wait(30)
                ctx.die()

        means = Means()
        counts = Counts(ctx, schedule, on_step=on_step, callbacks=[means])
        counts_of[threading.get_ident()] = counts
        counts.run()
        assert_complete([counts], 4)
        return ctx.backend.worker, means.found

    world = ElasticWorld(2, work)
    found = dict(world.run().values())
    assert sorted(found) == ["0", "2"]
    assert len(found["2"]) > 1
    assert found["0"][-len(found["2"]) :] == found["2"]


def test_losses_far_apart_in_one_round_are_recoveries_of_their_own() -> None:
    """With a ``recovery_s`` of 0 any two losses are far apart."""
    schedule = Schedule(num_samples=60, batch_size=4, epochs=1)
    all_have_begun, has_recovered = threading.Barrier(3), threading.Event()

    def work(ctx: MortalContext) -> Counts:
        def sees_the_loss_of(rank: int) -> None:
            with pytest.raises(PeerLost):
                ctx.recv(np.zeros(1), rank)

        def on_step(counts: Counts) -> None:
            me, num_taken = ctx.backend.worker, counts.num_taken
            if num_taken == 0:
                all_have_begun.wait(30)  # so that all have steps of this round
            if (me, num_taken) == ("0", 5):
                has_recovered.set()
            if (me, num_taken) == ("2", 6):
                assert has_recovered.wait(30)
            if (me, num_taken) in (("1", 2), ("2", 6)):
                ctx.die()
            if (num_taken, ctx.world_size) in ((3, 3), (7, 2)):  # else it was seen before the step
                sees_the_loss_of(1)

        policy = Policy(recovery_s=0.0, max_attempts=1)
        return Counts(ctx, schedule, 15, on_step=on_step, policy=policy).run()

    results = ElasticWorld(3, work).run()
    assert list(results) == ["0"]
    assert_complete(results, 1)


def test_who_comes_back_with_a_deal_that_others_have_made_anew_drops_it() -> None:
    """Worker 2 was dealt a round, and cut off before the others were. They deal it among
    themselves; when worker 2 is back, its part of the round is another one's."""
    schedule = Schedule(num_samples=72, batch_size=6, epochs=2)
    is_cut, is_dealt_anew, is_back = (threading.Event() for _ in range(3))
    world: ElasticWorld[Counts]

    class Waits:
        def on_step_end(self, step: int, loss: float) -> None:
            counts = here[threading.get_ident()]
            if step == 6 and counts.ctx.world_size == 3 and counts.ctx.rank != 2:
                assert is_cut.wait(30)
                counts.job.average(step=step)  # sees the loss, before the next round is dealt

    here: dict[int, Counts] = {}

    def work(ctx: MortalContext) -> Counts:
        me = ctx.backend.worker

        def on_step(counts: Counts) -> None:
            if counts.job.step_number != 6 or is_back.is_set():
                return
            if me == "2":
                world.hub.cut_off("2")
                is_cut.set()
                assert is_dealt_anew.wait(30)
                world.hub.return_("2")
                is_back.set()
            else:
                is_dealt_anew.set()
                assert is_back.wait(30)

        counts = Counts(ctx, schedule, on_step=on_step, callbacks=[Waits()])
        here[threading.get_ident()] = counts
        return counts.run()

    world = ElasticWorld(3, work)
    results = world.run()
    assert sorted(results) == ["0", "1", "2"]
    assert_complete(results, 2)
    assert is_back.is_set()


def test_a_newcomer_is_let_in_between_two_steps_of_a_round() -> None:
    """Rounds can take longer than anyone waits to get in."""
    schedule = Schedule(num_samples=60, batch_size=4, epochs=1)
    world: ElasticWorld[Counts]

    def work(ctx: MortalContext) -> Counts:
        def on_step(counts: Counts) -> None:
            sizes.append(ctx.world_size)
            if counts.num_taken == 2:
                world.join()

        return Counts(ctx, schedule, 15, on_step=on_step).run()

    sizes: list[int] = []
    world = ElasticWorld(1, work)
    results = world.run()
    assert sorted(results) == ["0", "1"]
    assert_complete(results, 1)
    assert sizes == [1] * 3 + [2] * 12
    assert results["1"].num_taken == 0, "it has the parameters, and no steps of this round"


def test_stop_and_save_take_effect_at_the_end_of_the_round(tmp_path: Path) -> None:
    def work(ctx: DistributedContext) -> Counts:
        store = CheckpointStore(tmp_path / str(ctx.rank))

        def on_step(counts: Counts) -> None:
            if counts.num_taken == 4:
                counts.job.stop()

        counts = Counts(ctx, Schedule(90, 5), store=store, on_step=on_step)
        for share in counts.job:
            with counts.job.step():
                on_step(counts)
                counts.mine[share.indices] += 1
                counts.num_taken += 1
            if counts.num_taken == 2:
                counts.job.save()
        assert [found.step for found in [store.load_latest()] if found] in ([], [6])
        return counts

    for counts in run_world(2, work):
        assert counts.job.step_number == 6
        assert counts.job.committed == 30


def test_an_error_in_a_step_of_a_round_names_that_rank_everywhere() -> None:
    def work(ctx: DistributedContext) -> Counts:
        def on_step(counts: Counts) -> None:
            if ctx.rank == 1 and counts.num_taken == 2:
                raise ZeroDivisionError("a bug in the script")

        return Counts(ctx, Schedule(40, 4), on_step=on_step).run()

    with pytest.raises(WorldError) as caught:
        run_world(3, work)
    assert isinstance(caught.value.errors[1], ZeroDivisionError)
    for rank in (0, 2):
        assert "rank 1" in str(caught.value.errors[rank])
        assert "a bug in the script" in str(caught.value.errors[rank])


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("num_fragments", [2, 3])
def test_fragments_are_reduced_in_turn_and_all_of_them_before_a_checkpoint_and_at_the_end(
    num_fragments: int, delay: int, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path)

    def work(ctx: DistributedContext) -> Counts:
        return Counts(
            ctx, Schedule(50, 5, epochs=2), 2, store=store, num_fragments=num_fragments, delay=delay
        ).run()

    for counts in run_world(2, work):
        assert (counts.seen == 2).all()
        assert not counts.mine.any()
        assert counts.job.step_number == 20
        assert len(counts.job.losses) == 10, "rounds without samples are not the script's"
        assert all(loss == loss for loss in counts.job.losses)
    saved = store.load_latest()
    assert saved is not None
    assert saved.state["replica"]["seen"].sum() == saved.state["committed"] == 100


@pytest.mark.parametrize("case", range(16))
def test_fragments_are_reduced_in_the_same_order_after_deaths_and_joins(
    case: int, seed: int
) -> None:
    """A rank that reduced another fragment than the others would end with another state."""
    rng = random.Random(seed)
    schedule = Schedule(rng.randint(10, 40), rng.randint(1, 5), epochs=2, seed=3)
    options = {"num_fragments": rng.randint(2, 4), "delay": rng.randint(0, 2)}
    fate = {str(worker): rng.randint(0, 60) for worker in range(1, 4)}
    joins = sorted(rng.randint(0, 15) for _ in range(2))
    lock = threading.Lock()
    world: ElasticWorld[Counts]

    def work(ctx: MortalContext) -> Counts:
        def on_step(counts: Counts) -> None:
            with lock:
                due = [joins.pop(0) for at in list(joins) if counts.num_taken >= at]
            for _ in due:
                world.join()

        return Counts(ctx, schedule, 3, on_step=on_step, **options).run()

    world = ElasticWorld(3, work, dies=lambda worker, name, number: fate.get(worker) == number)
    results = world.run()
    assert "0" in results
    assert len({counts.seen.tobytes() for counts in results.values()}) == 1
    assert all(counts.job.committed == schedule.total for counts in results.values())
