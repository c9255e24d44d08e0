"""Checkpoints on several machines: ranks of unlike nodes, each with a directory of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck.checkpoint import CheckpointStore, files
from potluck.errors import CheckpointError
from potluck.training import ElasticLoop, Policy, Schedule, StateReplica
from potluck.training.saving import Copies, save
from support.worlds import open_world

Store = Callable[[int], CheckpointStore]


def stores(root: Path, **options: Any) -> Store:
    """The store of a rank: each has a directory of its own."""
    return lambda rank: CheckpointStore(root / str(rank), **options)


def train(
    store: Store,
    *,
    nodes: Sequence[int] = (0, 1, 2),
    steps: int = 3,
    save_every: int = 1,
    always: bool = False,
) -> list[tuple[int, int, int]]:
    """Up to ``steps`` steps of a training whose every step adds its number; by rank, the step at
    which it began, that at which it ended, and the sum."""

    def work(ctx: DistributedContext) -> tuple[int, int, int]:
        state = {"sum": np.zeros(1)}

        def restore(new: dict[str, Any]) -> None:
            state["sum"][:] = new["sum"]

        job = ElasticLoop(
            ctx,
            Schedule(64, 8, epochs=4),
            StateReplica(lambda: state, restore),
            checkpoint=store(ctx.rank),
            policy=Policy(save_every=save_every),
        )
        began = None
        for _ in job:
            began = job.step_number if began is None else began
            with job.step():
                job.commit()
                state["sum"] += job.step_number
            if always:
                job.save()
            if job.step_number >= steps:
                job.save()
                break
        job._training.finish_saving()
        return began or 0, job.step_number, int(state["sum"][0])

    with open_world("native", len(nodes), nodes=nodes) as world:
        return world.run(work)


def on_disk(root: Path) -> dict[str, list[int]]:
    """By directory, the numbers of the checkpoints there."""
    return {
        each.name: sorted(int(path.name[:6]) for path in each.glob("*.json"))
        for each in sorted(root.iterdir())
    }


def test_a_checkpoint_lies_on_two_machines_and_a_third_goes_on_from_it(tmp_path: Path) -> None:
    """Ranks 0 and 1 are on one machine. Each machine alone has all that is needed."""
    assert train(stores(tmp_path), nodes=(0, 0, 1, 2), steps=3) == [(0, 3, 6)] * 4
    assert on_disk(tmp_path) == {"0": [1, 2, 3], "2": [1, 2, 3], "3": []}
    first, second = (CheckpointStore(tmp_path / name).load_latest() for name in "02")
    assert first is not None
    assert second is not None
    assert first.facts == second.facts
    assert first.facts["copies"] == 2
    for left in "02":
        # Rank 0 of the next training is on a machine that has nothing.
        again = tmp_path / f"again-{left}"
        again.mkdir()
        (again / "0").mkdir()
        (again / "1").mkdir()
        for path in (tmp_path / left).iterdir():
            (again / "1" / path.name).write_bytes(path.read_bytes())
        assert train(stores(again), nodes=(0, 1), steps=4) == [(3, 4, 10)] * 2
        assert on_disk(again) == {"0": [4, 5], "1": [3, 4, 5]}  # at once, and after step 4
        found = CheckpointStore(again / "0").load_latest()
        assert found is not None
        assert found.facts["lineage"] == first.facts["lineage"]


def test_a_directory_that_machines_share_is_one_place(tmp_path: Path) -> None:
    def store(rank: int) -> CheckpointStore:
        return CheckpointStore(tmp_path / ("shared" if rank < 2 else "own"))

    train(lambda rank: CheckpointStore(tmp_path / "all"), nodes=(0, 1))
    assert on_disk(tmp_path) == {"all": [1, 2, 3]}
    train(store)
    assert on_disk(tmp_path) == {"all": [1, 2, 3], "own": [1, 2, 3], "shared": [1, 2, 3]}
    assert not list(tmp_path.rglob("*.writing"))


def test_copies_is_how_many_machines_write(tmp_path: Path) -> None:
    train(stores(tmp_path, copies=1), nodes=(0, 1))
    assert on_disk(tmp_path) == {"0": [1, 2, 3], "1": []}
    train(stores(tmp_path, copies=3), steps=4)
    assert on_disk(tmp_path) == {"0": [3, 4, 5], "1": [4, 5], "2": [4, 5]}
    with pytest.raises(ValueError, match="copies is 0"):
        CheckpointStore(tmp_path, copies=0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_told_and_another_machine_takes_its_place(
    tmp_path: Path,
    asynchronous: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse(monkeypatch, tmp_path / "1")
    with caplog.at_level(logging.ERROR):
        train(stores(tmp_path, asynchronous=asynchronous), steps=3)
    assert "No space left on device" in caplog.text
    # From then on the third machine is asked before the full one.
    assert caplog.text.count("other machines have the checkpoint") == 1
    # A store that writes in the background hears of it one checkpoint later.
    has = [2, 3] if asynchronous else [1, 2, 3]
    assert on_disk(tmp_path) == {"0": [1, 2, 3], "1": [], "2": has}


def test_what_is_on_one_machine_of_two_does_not_count_and_removes_nothing_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(stores(tmp_path, keep=1), nodes=(0, 1), steps=1)
    refuse(monkeypatch, tmp_path / "1")

    def work(ctx: DistributedContext) -> str:
        store, known = CheckpointStore(tmp_path / str(ctx.rank), keep=1), Copies()
        store.safe = 1
        texts = []
        for step in (2, 3):
            try:
                texts.append(save(ctx, store, {"step": step}, step, known))
            except CheckpointError as error:
                texts.append(f"raised: {error}")
        assert texts[0].replace("step 2", "step 3") == texts[1]
        return texts[0]

    with open_world("native", 2, nodes=(0, 1)) as world:
        first, second = world.run(work)
    assert first.startswith("rank 1 (")
    assert second.startswith("raised: the checkpoint of step 2 can't be written to ")
    assert first.endswith("; it is on 1 of 2 machines")
    assert second.endswith("; it is on 1 of 2 machines")
    assert on_disk(tmp_path) == {"0": [1, 3], "1": [1]}


def test_a_damaged_copy_is_named_and_the_other_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(stores(tmp_path, keep=1), nodes=(0, 1), steps=3)
    (path,) = (tmp_path / "0").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert train(stores(tmp_path, keep=1), nodes=(0, 1), steps=4) == [(3, 4, 10)] * 2
    assert str(path) in caplog.text
    assert "that of rank 1 (" in caplog.text


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    train(stores(tmp_path), nodes=(0, 1), steps=1)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Exception, match="none of the 1 checkpoints"):
        train(stores(tmp_path), nodes=(0, 1))


def test_a_folder_of_an_older_training_is_not_taken_for_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Machine 0 was away while the others began anew; it has more steps, and higher numbers."""
    train(stores(tmp_path), nodes=(0,), steps=9)
    train(lambda rank: CheckpointStore(tmp_path / str(rank + 1)), nodes=(0, 1), steps=2)
    assert on_disk(tmp_path) == {"0": [7, 8, 9], "1": [1, 2], "2": [1, 2]}
    assert train(stores(tmp_path), steps=3) == [(2, 3, 6)] * 3
    assert "of a training that began before" in caplog.text
    assert on_disk(tmp_path)["0"] == [8, 9, 10]


def test_numbers_rise_whoever_writes(tmp_path: Path) -> None:
    """Each time the most senior is another machine, whose own directory has lower numbers."""
    for turn in range(3):
        train(
            lambda rank, turn=turn: CheckpointStore(tmp_path / str((rank + turn) % 3), copies=1),
            steps=turn + 1,
        )
    newest = {name: numbers[-1] for name, numbers in on_disk(tmp_path).items()}
    assert newest == {"0": 1, "1": 2, "2": 3}


def refuse(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The disk of ``folder`` is full from now on."""
    real = files.write

    def write(path: Path, data: bytes, directory_fd: int) -> None:
        if folder in path.parents:
            raise OSError(28, "No space left on device")
        real(path, data, directory_fd)

    monkeypatch.setattr(files, "write", write)
