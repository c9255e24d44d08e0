"""Data sets that come with a job: to each machine that trains on them, once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.copying import wire_time
from support.figures import Figures
from support.hosts import Network
from support.machines import Machine, cluster_of, form, machines

pytestmark = pytest.mark.needs_root_netns

TRAINING = Path(__file__).parent / "scripts" / "training" / "shards.py"
SHARDS, ROWS, WIDTH = 16, 32, 130_000
"""Each shard is one chunk."""

SCRIPT = """
import hashlib
import numpy as np
import potluck, potluck.data
folder = potluck.data.shared("pets")
hashed = hashlib.sha256()
for path in sorted(folder.rglob("*")):
    if path.is_file():
        hashed.update(str(path.relative_to(folder)).encode() + path.read_bytes())
print("data", hashed.hexdigest())
try:
    (folder / "new").write_text("written")
except OSError as error:
    print("can't write:", error.strerror)
with potluck.init() as ctx:
    print("counted", int(ctx.all_reduce(np.ones(1))[0]), "of", ctx.world_size)
"""


READS = """
import potluck
from potluck.data import NumpyFiles, shared
pets = shared("pets")
data = NumpyFiles({"x": pets.shards("*.npy")})
with potluck.init() as ctx:
    data.load(ctx.rank * len(data.sizes) // ctx.world_size)
    ctx.barrier()
    print("begins with", ctx.world_size)
    str(pets)
    ctx.barrier()
"""


def made(folder: Path, num_bytes: int = 9 << 20) -> Path:
    """A data set of several files, one of several chunks."""
    (folder / "deep").mkdir(parents=True)
    (folder / "large.bin").write_bytes(os.urandom(num_bytes))
    (folder / "deep" / "a b.txt").write_text("small")
    (folder / "deep" / "again.txt").write_text("small")
    (folder / "empty").touch()
    return folder


def script_in(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def held(machine: Machine) -> dict[str, list[dict[str, Any]]]:
    """By machine, what `potluck data` shows on ``machine``."""
    done = machine.runs("data", "--json")
    assert done.returncode == 0, done.stderr
    return {each["name"]: each["sets"] for each in json.loads(done.stdout)["machines"]}


def test_data_comes_once_and_a_second_run_sends_nothing(tmp_path: Path) -> None:
    data, script = made(tmp_path / "pets"), script_in(tmp_path / "code")
    with cluster_of(3, tmp_path / "homes", POTLUCK_SANDBOX="1") as (ada, bob, carl):
        form(ada, bob, carl)
        with ada.run("--data", data, script) as run:
            assert run.finish() == 0, run.text
        found = re.findall(r"\] data (\w+)", run.text)
        assert len(found) == 3, run.text
        assert len(set(found)) == 1, run.text
        assert run.text.count("can't write: Read-only file system") == 2, run.text
        assert run.text.count("data pets: here after") == 2
        (data / "new").unlink()
        shown = held(ada)
        assert {name: [each["name"] for each in sets] for name, sets in shown.items()} == {
            "ada": [],
            "bob": ["pets"],
            "carl": ["pets"],
        }
        assert held(bob)["ada"] == []
        with ada.run("--data", data, script) as run:
            assert run.finish() == 0, run.text
        assert "here after" not in run.text
        assert "fetching" not in run.text
        assert len(set(re.findall(r"\] data (\w+)", run.text))) == 1
        assert not list((bob.home / "data" / "jobs").glob("*"))
        assert bob.runs("data", "pin", "pets").returncode == 0
        refused = bob.runs("data", "rm", "pets")
        assert refused.returncode != 0
        assert "pinned" in refused.stderr
        assert carl.runs("data", "rm", "pets").returncode == 0
        assert [each["state"] for each in held(ada)["bob"]] == ["pinned"]
        assert held(ada)["carl"] == []


def test_a_machine_that_takes_no_data_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    data, script, homes = made(tmp_path / "pets"), script_in(tmp_path / "code"), tmp_path / "homes"
    with (
        Network(4) as network,
        Machine(network[0], homes) as ada,
        Machine(network[1], homes) as bob,
        Machine(network[2], homes, POTLUCK_DATA="off") as carl,
        Machine(network[3], homes, POTLUCK_DATA="4M") as dora,
    ):
        form(ada, bob, carl, dora)
        with ada.run("--data", data, script) as run:
            assert run.finish() == 0, run.text
        assert run.text.count("counted 2 of 2") == 2, run.text
        assert "takes no data of jobs: its owner set POTLUCK_DATA=off" in run.text
        assert "takes at most 4.0 MiB of data, and pets has 9.0 MiB" in run.text
        shown = held(ada)
        assert [len(shown[name]) for name in ("bob", "carl", "dora")] == [1, 0, 0]


def test_each_sample_counts_once_while_data_travels_and_a_machine_is_killed(
    tmp_path: Path,
) -> None:
    """Training begins at the first shards. One of three machines is killed, and fetches the rest
    when it is back: chunks that are on its disk are not sent again."""
    data = tmp_path / "pets"
    data.mkdir()
    for number in range(SHARDS):
        first = number * ROWS
        np.save(data / f"id-{number:02}.npy", np.arange(first, first + ROWS))
        pad = np.frombuffer(os.urandom(ROWS * WIDTH), np.uint8).reshape(ROWS, WIDTH)
        np.save(data / f"pad-{number:02}.npy", pad)
    total = sum(each.stat().st_size for each in data.iterdir())
    with cluster_of(3, tmp_path / "homes") as (ada, bob, carl):
        form(ada, bob, carl)
        ada.host.shape("4mbit")  # all of it would take more than two minutes
        with ada.run("--data", data, "--peer-timeout", "3", TRAINING) as run:
            run.wait_for("step 2 of 3")
            since = run.mark
            bob.kill()
            kept = sum(each.stat().st_size for each in bob.home.glob("content/data/objects/*-*"))
            assert "here after" not in run.text, "it was killed amid it"
            bob.start()
            run.wait_for("of 3", since=since)
            ada.host.shape(None)
            assert run.finish() == 0, run.text
        ends = re.findall(r"counted once (\d+) of (\d+), committed (\d+)", run.text)
        assert set(ends) == {(str(SHARDS * ROWS),) * 3}, run.text
        again = "\n".join(run.lines[since:])
        found = re.search(r"data pets: fetching ([\d.]+) MiB", again)
        assert found is not None, run.text
        assert float(found[1]) <= (total - kept) / 2**20 + 0.1, "no chunk is sent again"
        assert re.search(r"rank \d on (bob|carl) waits for \S+ of pets \(", run.text), run.text


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [64 << 20, 2000 << 20], ids=["64 MiB", "2000 MiB"])
def test_three_machines_get_a_data_set_in_hardly_more_than_the_time_of_one_copy(
    figures: Figures, tmp_path: Path, count: int
) -> None:
    """2000 MiB (``--long -k 2000``) take about five minutes, and 8 GB of the disk."""
    data, script = tmp_path / "pets", tmp_path / "code" / "reads.py"
    data.mkdir()
    script.parent.mkdir()
    script.write_text(READS)
    for number in range(16):
        each = np.frombuffer(os.urandom(count // 16), np.uint8).reshape(-1, 1 << 10)
        np.save(data / f"{number:02}.npy", each)
    with (
        Network(4, rate="200mbit") as network,
        machines(network, tmp_path / "homes") as all_,
    ):
        ada, bob, *_ = all_
        form(*all_)
        bound = wire_time(ada.host, bob.host, count)
        patience_s = 120 + 4 * bound
        with ada.run("--data", data, "--min-nodes", "4", script) as run:
            began = run.when("data pets: fetching ", patience_s)
            begins = run.when("begins with 4", patience_s)
            since, ends = 0, list[float]()
            for _ in range(3):
                ends.append(run.when("data pets: here after ", patience_s, since=since))
                since = 1 + next(
                    at
                    for at, line in enumerate(run.lines)
                    if at >= since and "data pets: here after " in line
                )
            assert run.finish(patience_s) == 0, run.text
        what = f"3 machines get {count >> 20} MiB of data at 200 Mbit/s"
        asked = 1.25 if count > 1 << 30 else None
        took = (max(ends) - began) / bound
        figures.take(what, "times of one plain copy:", took, asked=asked, unit="")
        first = (begins - began) / bound
        figures.take(what, "all train after, in the same unit:", first, unit="")
