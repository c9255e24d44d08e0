"""The journal: what is told, and how recoveries are measured."""

from __future__ import annotations

import msgspec

from potluck._core.cluster.jobs.journal import MAX_NOTES, Journal
from potluck._core.wire.worker_link import JobState, WorkerProgress


def training() -> Journal:
    """Three workers in epoch 1 that have committed 60 steps."""
    journal = Journal(["0", "1", "2"], now=0.0)
    journal.announced(1, ("0", "1", "2"), ("0", "1", "2"))
    for name in "012":
        journal.entered(name, 1, 1.0)
        journal.progress(step(name, 60, epoch=1), 9.0)
    return journal


def step(worker: str, number: int, *, epoch: int, **more: object) -> WorkerProgress:
    return WorkerProgress(worker, epoch=epoch, step=number, loss=0.5, **more)


def texts(journal: Journal) -> list[str]:
    return [note.text for note in journal.notes]


def test_a_recovery_is_measured_from_the_loss_to_the_next_committed_step() -> None:
    journal = training()
    journal.lost("2", "worker 2 lost (killed by SIGKILL (9))", 10.0)
    journal.announced(2, ("0", "1"), ())
    journal.reported(1, 60, 10.01)
    journal.entered("0", 2, 10.3)
    journal.entered("1", 2, 10.4)
    journal.progress(step("0", 61, epoch=2), 10.9)
    (recovery,) = journal.recoveries
    assert round(recovery.reformed_s or 0, 6) == 0.4
    assert round(recovery.recovered_s or 0, 6) == 0.9
    assert (recovery.step, recovery.run_again) == (60, True)
    assert texts(journal) == [
        "worker 2 lost (killed by SIGKILL (9)), re-formed in 0.40 s, step 60 run again, "
        "training on after 0.90 s"
    ]


def test_a_step_that_was_not_begun_is_not_run_again() -> None:
    journal = training()
    journal.reported(1, 60, 9.9)
    journal.lost("2", "worker 2 lost", 10.0)
    journal.announced(2, ("0", "1"), ())
    journal.progress(step("0", 62, epoch=2), 10.5)
    assert journal.recoveries[0].run_again is False, "step 60 counted, 61 was the next"


def test_a_loss_found_by_silence_counts_from_the_first_report() -> None:
    journal = training()
    journal.reported(1, 60, 12.0)
    journal.lost("2", "worker 2 lost (no sign of life)", 13.0)
    journal.announced(2, ("0", "1"), ())
    journal.progress(step("0", 61, epoch=2), 13.5)
    assert journal.recoveries[0].recovered_s == 1.5
    assert journal.recoveries[0].run_again is True


def test_a_late_report_about_an_old_epoch_starts_no_clock() -> None:
    journal = training()
    journal.announced(2, ("0", "1"), ())
    journal.reported(1, 60, 12.0)
    journal.lost("1", "worker 1 lost", 50.0)
    assert journal.recoveries[0].detected == 50.0


def test_the_next_group_may_be_announced_before_the_loss_is_told() -> None:
    """As where the nodes of a new view agree on the group that goes on, before its leader ends the
    old one. It may be complete by then."""
    for entered_before in (False, True):
        journal = training()
        journal.announced(2, ("0",), ())
        if entered_before:
            journal.entered("0", 2, 10.1)
        journal.lost("1", "worker 1 lost", 10.2)
        if not entered_before:
            journal.entered("0", 2, 10.3)
        journal.progress(step("0", 61, epoch=2), 10.5)
        (recovery,) = journal.recoveries
        assert round(recovery.recovered_s or 0, 6) == 0.3
        assert round(recovery.reformed_s or 0, 6) == (0.0 if entered_before else 0.1)


def test_losses_before_the_next_step_are_one_recovery() -> None:
    journal = training()
    journal.lost("2", "worker 2 lost", 10.0)
    journal.announced(2, ("0", "1"), ())
    journal.entered("0", 2, 10.1)
    journal.entered("1", 2, 10.1)
    journal.lost("1", "worker 1 lost", 10.2)
    journal.announced(3, ("0",), ())
    journal.entered("0", 3, 10.5)
    journal.progress(step("0", 61, epoch=2), 10.6)
    assert journal.open_recovery is not None, "epoch 2 was over by then"
    journal.progress(step("0", 62, epoch=3), 11.0)
    (recovery,) = journal.recoveries
    assert recovery.workers == ("2", "1")
    assert recovery.recovered_s == 1.0


def test_a_group_that_ended_without_anyone_to_blame_is_a_recovery_too() -> None:
    journal = training()
    journal.lost("", "epoch 1 ended (its links failed)", 10.0)
    journal.announced(2, ("0", "1", "2"), ())
    journal.progress(step("0", 61, epoch=2), 10.5)
    assert journal.recoveries[0].workers == ()
    assert journal.recoveries[0].recovered_s == 0.5


def test_a_worker_that_comes_back_is_told_with_its_first_step() -> None:
    journal = training()
    journal.announced(2, ("0", "1"), ())
    journal.announced(3, ("0", "1", "2"), ("2",))
    journal.progress(step("0", 85, epoch=2), 20.0)
    journal.progress(step("2", 86, epoch=3), 20.1)
    journal.progress(step("2", 87, epoch=3), 20.2)
    assert texts(journal) == ["worker 2 rejoined at step 85"]


def test_the_first_members_do_not_rejoin() -> None:
    assert texts(training()) == []


def test_the_newest_of_each_fact_is_kept() -> None:
    journal = training()
    journal.progress(step("0", 61, epoch=1, device="cpu", facts={"a": 1, "b": 2}), 10.0)
    journal.progress(step("0", 62, epoch=1, facts={"b": 3}), 11.0)
    facts = journal.workers["0"]
    assert (facts.step, facts.device, facts.facts) == (62, "cpu", {"a": 1, "b": 3})
    assert (journal.step, journal.loss) == (62, 0.5)


def test_notes_are_bounded() -> None:
    journal = Journal(["0"], now=0.0)
    for number in range(MAX_NOTES + 10):
        journal.note(str(number), 1.0)
    assert len(journal.notes) == MAX_NOTES
    assert journal.notes[-1].text == str(MAX_NOTES + 9)


def samples(worker: str, number: int, *, epoch: int = 1) -> WorkerProgress:
    """A worker has committed step ``number``, of 10 samples as all of 100 steps."""
    return step(worker, number, epoch=epoch, committed_samples=10 * number, total_samples=1000)


def test_workers_that_tell_of_one_step_late_take_nothing_back() -> None:
    journal = Journal(["0", "1"], now=0.0)
    journal.announced(1, ("0", "1"), ("0", "1"))
    seen = []
    for name, number in (("0", 1), ("0", 2), ("1", 1), ("0", 3), ("1", 2), ("1", 3)):
        journal.progress(samples(name, number), 1.0)
        seen.append((journal.step, journal.sample_progress.committed))
    assert seen == [(1, 10), (2, 20), (2, 20), (3, 30), (3, 30), (3, 30)]


def test_a_lost_worker_and_one_that_comes_back_take_nothing_back() -> None:
    journal = training()
    for name in "012":
        journal.progress(samples(name, 60), 9.5)
        journal.progress(samples(name, 61), 10.0)
    journal.lost("2", "worker 2 lost", 10.1)
    journal.announced(2, ("0", "1"), ())
    journal.progress(samples("1", 62, epoch=2), 11.0)
    journal.progress(samples("0", 61), 11.1)
    journal.progress(WorkerProgress("2"), 11.2)
    assert (journal.step, journal.sample_progress.committed) == (62, 620)
    journal.announced(3, ("0", "1", "2"), ("2",))
    journal.progress(samples("2", 63, epoch=3), 12.0)
    journal.progress(samples("0", 62, epoch=2), 12.1)
    assert (journal.step, journal.sample_progress.committed) == (63, 630)


def test_a_training_that_goes_on_from_a_checkpoint_is_where_that_was() -> None:
    journal = training()
    journal.progress(samples("0", 61), 10.0)
    journal.announced(2, ("0", "1", "2"), ("0", "1", "2"))
    journal.progress(samples("1", 51, epoch=2), 20.0)
    assert (journal.step, journal.sample_progress.committed) == (51, 510)


def test_a_second_training_of_one_script_begins_at_its_own_beginning() -> None:
    journal = Journal(["0", "1"], now=0.0)
    journal.announced(1, ("0", "1"), ("0", "1"))
    for name in "01":
        journal.progress(samples(name, 100), 1.0)
    seen = []
    for name, number in (("0", 1), ("1", 1), ("0", 2), ("1", 2)):
        journal.progress(samples(name, number), 2.0)
        seen.append((journal.step, journal.sample_progress.committed))
    assert seen == [(1, 10), (1, 10), (2, 20), (2, 20)]


def test_the_next_leader_goes_on_with_the_journal() -> None:
    journal = training()
    journal.note("worker 2 is slow", 9.5)
    journal.lost("2", "worker 2 lost (killed by SIGKILL (9))", 10.0)
    journal.reported(1, 60, 10.01)
    journal.announced(2, ("0", "1"), ())
    journal.entered("0", 2, 10.3)
    journal.entered("1", 2, 10.4)
    journal.progress(step("0", 61, epoch=2, committed_samples=610, total_samples=900), 10.9)
    journal.lost("1", "worker 1 lost", 11.0)
    told = JobState(
        *("job", "node", 0, "train.py", 0.0, 2, journal.step, journal.loss, ()),
        events=tuple(texts(journal)),
        samples=journal.sample_progress.samples(12.0),
        record=journal.record(60, 12.0),
    )
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=JobState)

    later = Journal(["0", "1", "2"], now=505.0)  # by another clock
    later.take_over(heard, 500.0)
    later.lost("0", "worker 0 lost (its machine)", 505.0)
    later.announced(3, ("1", "2"), ())
    later.entered("1", 3, 506.0)
    later.entered("2", 3, 506.0)
    later.progress(step("1", 62, epoch=3, committed_samples=620, total_samples=900), 507.0)
    assert later.began == 488.0
    assert [(note.at, note.text) for note in later.notes[:2]] == [
        (9.5, "worker 2 is slow"),
        (10.9, texts(journal)[-1]),
    ]
    first, second = later.recoveries
    assert (first.workers, first.step, first.run_again) == (("2",), 60, True)
    assert round(first.recovered_s or 0, 6) == 0.9
    assert second.workers == ("1", "0"), "a recovery that no step had ended goes on"
    assert second.cause == "worker 1 lost; worker 0 lost (its machine)"
    assert second.recovered_s == 507.0 - 499.0
    assert (later.step, later.num_run_again) == (62, 1)
    assert later.sample_progress.committed == 620


def test_the_rates_of_the_workers_add_up_to_that_of_the_job() -> None:
    """Whatever part of a step a worker waits for the others, and says to be as fast as."""
    journal = Journal(["0", "1"], now=0.0)
    journal.announced(1, ("0", "1"), ("0", "1"))
    for number in range(1, 101):
        now = 0.1 * number
        for name, share in (("0", 48), ("1", 16)):
            told = step(
                *(name, number),
                epoch=1,
                samples_per_s=5000.0,
                committed_samples=64 * number,
                total_samples=10**6,
                worker_samples=share * number,
            )
            journal.progress(told, now)
    rates = [journal.facts_of(name).rate(10.0) for name in "01"]
    assert [round(rate or 0) for rate in rates] == [480, 160]
    assert round(journal.sample_progress.samples(10.0).per_s) == 640
