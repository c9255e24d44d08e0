"""Several servers: each has its tensors in the versions of all, however late the log comes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core.types import Group, Member
from potluck.errors import ProtocolError
from potluck.parameter_server import SGD, Asynchronous, ElasticAveraging, Synchronous
from potluck.parameter_server.layout import Placement, holders, layout_of, of_plain
from potluck.parameter_server.log import (
    Drop,
    Entry,
    Grant,
    Leave,
    Save,
    SetParameters,
    Update,
    decode,
    encode,
)
from potluck.parameter_server.model import LIFE_BITS, MAX_STAGED, Gradient, Mode, Model
from potluck.parameter_server.replica import Replica
from potluck.services.presence import Presence

SERVERS = ("0", "1", "2")
NAMES = [f"layer{number}.weight" for number in range(12)]
MODES = [Synchronous(), Synchronous(backup_workers=1), Asynchronous(3), ElasticAveraging(0.5)]


def on_server(server: str, mode: Mode, servers: tuple[str, ...]) -> Replica:
    presence = Presence(lambda: Group(1, 0, (Member("0"),)), 1e6)
    return Replica(mode, SGD(1.0), presence, server, servers)


def pushed(worker: str, push: int) -> Gradient:
    return Gradient(worker, int(worker), push, 0)


class Story:
    """A model on three servers, whose entries reach each one late, and two workers or three."""

    def __init__(self, mode: Mode, num_workers: int) -> None:
        self.workers = [str(number) for number in range(num_workers)]
        self.shards = {server: on_server(server, mode, SERVERS) for server in SERVERS}
        whole = Placement(("0",), 1, ("0",))
        self.model = Model("m", mode, SGD(1.0), whole, self.decide)
        self.layout = layout_of({name: np.zeros(1) for name in NAMES})
        self.versions: dict[int, float] = {}
        self.log: list[Entry] = []
        self.reached = dict.fromkeys(SERVERS, 0)
        self.computes: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.num_pushes = 0
        self.stage("0", 0, 0.0)
        self.model.set("0", 0, self.layout)

    def stage(self, worker: str, push: int, value: float) -> None:
        given = {name: np.full(1, value) for name in NAMES}
        for server, part in Placement(SERVERS, 1, SERVERS).split(given).items():
            assert self.shards[server].stage("m", pushed(worker, push), part, "it", self.layout)
        assert self.model.stage(pushed(worker, push), given, "it", self.layout, has_room=True)

    def decide(self, entry: Entry) -> None:
        self.model.follow(entry)
        self.log += decode(encode([entry]))
        self.versions[self.model.version] = float(self.model.table.tensors[NAMES[0]][0])

    def act(self, worker: str) -> None:
        """Pull, or push what was computed, and ask for the parameters that were granted."""
        if worker in self.asked:
            return self.fetch(worker)
        if worker in self.computes:
            self.num_pushes += 1
            version = self.computes.pop(worker)
            self.stage(worker, self.num_pushes, float(self.num_pushes))
            gradient = Gradient(worker, int(worker), self.num_pushes, version)
            if isinstance(self.model.mode, Synchronous) and version != self.model.version:
                self.model.drop(worker, self.num_pushes, "late")
            else:
                self.model.push(gradient, self.workers)
            return None
        waits = worker in self.model.waiting
        if waits or not self.model.may_pull(worker, self.workers, 1e9):
            return None
        self.log.append(Grant("m", worker, self.model.version))
        self.asked[worker] = self.model.version
        return None

    def fetch(self, worker: str) -> None:
        version = self.asked[worker]
        grant = Grant("m", worker, version)
        if not all(grant in self.log[: self.reached[server]] for server in SERVERS):
            return
        parts = Placement(SERVERS, 1, SERVERS).split(dict.fromkeys(NAMES))
        found = [
            self.shards[server].models["m"].fetch(worker, version, list(part))
            for server, part in parts.items()
        ]
        values = {float(each[0]) for part in found if part is not None for each in part.values()}
        assert sum(len(part or ()) for part in found) == len(NAMES)
        assert values == {self.versions[version]}
        self.computes[worker] = self.asked.pop(worker)

    def deliver(self, server: str) -> None:
        if self.reached[server] < len(self.log):
            self.shards[server].apply(self.log[self.reached[server]], 1)
            self.reached[server] += 1


@settings(max_examples=150, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    num_workers=st.integers(2, 3),
    schedule=st.lists(st.integers(0, 5), max_size=120),
)
def test_whoever_is_late_every_worker_gets_one_version_of_all_tensors(
    mode: Mode, num_workers: int, schedule: list[int]
) -> None:
    story = Story(mode, num_workers)
    for number in schedule:
        if number < 3:
            story.act(story.workers[number % num_workers])
        else:
            story.deliver(SERVERS[number - 3])
    for server in SERVERS:
        while story.reached[server] < len(story.log):
            story.deliver(server)
    whole = story.model.table.tensors
    for server, shard in story.shards.items():
        tensors = shard.models["m"].table.tensors
        assert tensors.keys() == {n for n in NAMES if holders(n, SERVERS) == (server,)}
        for name, each in tensors.items():
            np.testing.assert_array_equal(each, whole[name])
        # What is staged is bounded by what was pushed and not carried out.
        assert sum(map(len, shard.models["m"].staged.values())) <= num_workers


def test_a_server_more_takes_its_tensors_from_the_others_and_moves_no_other() -> None:
    names = [f"tensor {number}" for number in range(3000)]
    before = {name: holders(name, ("0", "1", "2")) for name in names}
    after = {name: holders(name, ("0", "1", "2", "3")) for name in names}
    assert {after[name] for name in names if after[name] != before[name]} == {("3",)}
    counts = Counter(server for (server,) in after.values())
    assert all(650 < counts[server] < 850 for server in "0123")


def test_copies_of_a_tensor_lie_on_unlike_servers_and_load_these_alike() -> None:
    names = [f"tensor {number}" for number in range(3000)]
    servers = ("0", "1", "2", "3")
    every = {name: holders(name, servers, 2) for name in names}
    assert all(len(set(each)) == 2 for each in every.values())
    assert all(each[:1] == holders(name, servers) for name, each in every.items())
    lost = Placement(servers, 2, ("0", "2", "3"))
    counts = Counter({server: len(part) for server, part in lost.sources(names).items()})
    assert counts.total() == len(names)
    assert all(850 < count < 1150 for count in counts.values())
    parts = lost.split(dict.fromkeys(names))
    assert sorted(name for part in parts.values() for name in part) == sorted(
        name for name, each in every.items() for server in each if server != "1"
    )


def test_a_worker_stages_a_few_gradients_until_the_log_comes() -> None:
    shard = on_server("1", Synchronous(), ("1",))
    one = {"w": np.ones(1)}
    for number in range(MAX_STAGED):
        name = f"model {number}"
        assert shard.stage(name, pushed("0", number), one, "it", layout_of(one))
    assert not shard.stage("one more", pushed("0", 9), one, "it", layout_of(one))
    assert shard.stage("one more", pushed("2", 9), one, "it", layout_of(one))  # of another worker
    shard.apply(SetParameters("model 0", layout_of(one), "0", 0, 0), 1)
    for number in range(MAX_STAGED):
        for _ in range(2):  # a repeat takes no room
            assert shard.stage("model 0", pushed("0", 10 + number), one, "a gradient")
    assert not shard.stage("model 0", pushed("0", 20), one, "a gradient")
    again = 1 << LIFE_BITS
    # It was killed before it pushed.
    assert shard.stage("model 0", pushed("0", again), one, "a gradient")
    assert not shard.models["model 0"].is_staged(pushed("0", 10), layout_of(one))
    shard.apply(Drop("model 0", "0", again), 1)
    shard.apply(Drop("model 0", "0", 11), 1)
    assert shard.stage("model 0", pushed("0", 20), one, "a gradient")
    shard.apply(Update("model 0", "step", (("0", 20),), 1.0, 1), 1)
    assert shard.models["model 0"].table.tensors["w"] == [0.0]
    assert not shard.models["model 0"].staged["0"]  # those before were never pushed


def test_a_server_that_has_lost_a_gradient_says_so_and_does_not_go_on_without() -> None:
    shard = on_server("1", Synchronous(), ("1",))
    one = {"w": np.ones(1)}
    assert shard.stage("m", pushed("0", 0), one, "it", layout_of(one))
    shard.apply(SetParameters("m", layout_of(one), "0", 0, 0), 1)
    with pytest.raises(ProtocolError, match="server 1 has no push 5 of worker 2 for 'm'"):
        shard.apply(Update("m", "step", (("2", 5),), 1.0, 1), 1)


def test_a_version_that_was_granted_is_kept_until_it_is_fetched() -> None:
    shard = on_server("1", Synchronous(), ("1",))
    one = {"w": np.ones(1)}
    assert shard.stage("m", pushed("0", 0), one, "it", layout_of(one))
    shard.apply(SetParameters("m", layout_of(one), "0", 0, 0), 1)
    shard.apply(Grant("m", "0", 0), 1)
    shard.apply(Grant("m", "2", 0), 1)
    assert shard.stage("m", pushed("0", 1), one, "a gradient")
    shard.apply(Update("m", "step", (("0", 1),), 1.0, 1), 1)
    assert shard.models["m"].fetch("0", 1, ["w"]) is None
    with pytest.raises(ValueError, match="server 1 has no tensor 'b' of 'm'"):
        shard.models["m"].fetch("0", 0, ["w", "b"])
    granted = shard.models["m"].fetch("0", 0, ["w"])
    assert granted is not None
    assert granted["w"] == [1.0]
    assert shard.models["m"].fetch("0", 0, ["w"]) is None
    shard.apply(Leave("2"), 1)
    assert shard.models["m"].fetch("2", 0, ["w"]) is None


@pytest.mark.parametrize(
    "given",
    ["w", {"w": 3}, {"w": [[2], "<U1000000000"]}, {"w": [[2], "O"]}, {"w": [["x"], "float32"]}],
)
def test_a_layout_that_is_none_is_an_error_before_memory_is_taken(given: Any) -> None:
    with pytest.raises(TypeError, match="layout"):
        of_plain(given)


@pytest.mark.parametrize("data", [b"", b"junk", encode([Save(1)])[:-1], b"\x91\x92\xa5Other\x01"])
def test_bytes_that_are_no_log_are_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not the log of a parameter server"):
        decode(data)
