"""Scripts that find each other: processes on the loopback that start, are killed, or come late.

They know each other's first port (POTLUCK_PEERS); what multicast adds, tests/net has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.ports import reserved_ports
from support.talking import TalkingProcess

PATIENCE_S = 200.0

HEAD = """
import json, sys, time
import numpy as np
from potluck import AutoDiscoveryBackend, DistributedContext
from potluck._core.cluster.discovery.configured import StaticPeers
from potluck.errors import GroupError, PotluckError

def say(**facts):
    print(json.dumps(facts), flush=True)

own, *ports = [int(port) for port in sys.argv[1:]]
finders = [StaticPeers([("127.0.0.1", port) for port in ports])]
"""

FIVE_LINES = """
backend = AutoDiscoveryBackend(finders=finders, port=own)
say(port=backend.port)
sys.stdin.readline()
backend.wait_for_peers(1, timeout=60)
ring = backend.establish_ring(60)
ctx = DistributedContext(backend)
assert ctx.communicator is ring, "what establish_ring made is handed out"
total = ctx.all_reduce(np.ones(4), op="sum")
say(world=ctx.world_size, rank=ctx.rank, total=float(total[0]))
"""

ELASTIC = """
backend = AutoDiscoveryBackend(min_peers=2, finders=finders, port=own)
say(port=backend.port)
with DistributedContext(backend, timeout_s=60) as ctx:
    say(world=ctx.world_size, rank=ctx.rank, worker=ctx.members[ctx.rank].worker)
    sys.stdin.readline()
    while True:
        try:
            total = ctx.all_reduce(np.ones(1000), op="sum", timeout=20)
            assert total[0] == ctx.world_size
            if ctx.broadcast(np.zeros(1), root=0)[0]:
                break
        except GroupError as error:
            ctx.reform(error)
            say(world=ctx.world_size, rank=ctx.rank, worker=ctx.members[ctx.rank].worker,
                epoch=ctx.epoch)
"""

LATE = """
backend = AutoDiscoveryBackend(finders=finders, port=own)
say(port=backend.port)
began = time.monotonic()
try:
    backend.wait_for_peers(1, timeout=60)
except PotluckError as error:
    say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - began)
"""

SUCCESSOR = """
backend = AutoDiscoveryBackend(finders=finders, port=own)
say(port=backend.port)
try:
    backend.establish_ring(60)
except PotluckError as error:
    say(error=type(error).__name__, text=str(error))
sys.stdin.readline()
"""

TRAINING = """
import hashlib, select
from potluck.training.elastic import ElasticLoop
from potluck.training.replica import StateReplica
from potluck.training.sampler import Schedule

backend = AutoDiscoveryBackend(min_peers=2, finders=finders, port=own)
say(port=backend.port)
ctx = DistributedContext(backend, timeout_s=60)
weights = np.zeros(1000)
job = ElasticLoop(
    ctx,
    Schedule(num_samples=64, batch_size=8, epochs=1_000_000, seed=3),
    StateReplica(lambda: {"weights": weights}, lambda new: np.copyto(weights, new["weights"])),
)
world = 0
for share in job:
    with job.step():
        gradient = np.full(1000, float(share.indices.sum() * (share.weight > 0)))
        ctx.all_reduce(gradient, op="sum")
        is_told_to_end = bool(select.select([sys.stdin], [], [], 0)[0])
        job.commit(loss=float(is_told_to_end))
        weights += gradient
    if ctx.world_size != world and job.step_number > 5:
        world = ctx.world_size
        say(world=world, rank=ctx.rank)
    if job.last_loss > 0:
        break
say(steps=job.step_number, weights=hashlib.sha256(weights.tobytes()).hexdigest())
"""


class Script(TalkingProcess):
    """One process at port ``own`` (0: any), which says JSON line by line; it knows the ``ports`` of
    others."""

    def __init__(self, text: str, *ports: int, own: int = 0) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + textwrap.dedent(text), *map(str, (own, *ports))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"POTLUCK_DISCOVERY": "static"},
        )
        super().__init__(process, timeout_s=PATIENCE_S)
        self.port: int = self.hears()["port"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)


@contextmanager
def started(text: str, count: int) -> Iterator[list[Script]]:
    """So many processes, each of which knows those before it."""
    scripts: list[Script] = []
    with reserved_ports(count) as ports:
        try:
            for own in ports:
                scripts.append(Script(text, *(script.port for script in scripts), own=own))
            yield scripts
        finally:
            for script in scripts:
                script.end()


@pytest.mark.parametrize("count", [2, 3])
def test_the_five_lines_make_one_world_of_all_that_were_started(count: int) -> None:
    with started(FIVE_LINES, count) as scripts:
        for script in scripts:
            script.go()
        said = [script.hears() for script in scripts]
        codes = [script.process.wait(PATIENCE_S) for script in scripts]
    assert sorted(each["rank"] for each in said) == list(range(count))
    assert all(each["world"] == count and each["total"] == count for each in said), said
    assert codes == [0] * count


@pytest.mark.parametrize("lost", [[0], [2], [0, 1]], ids=["rank 0", "rank 2", "ranks 0 and 1"])
def test_a_killed_process_is_left_out_and_the_others_go_on(lost: list[int]) -> None:
    with started(ELASTIC, 3) as scripts:
        first = [script.hears() for script in scripts]
        by_rank = {said["rank"]: script for said, script in zip(first, scripts, strict=True)}
        assert sorted(by_rank) == [0, 1, 2]
        for script in scripts:
            script.go()
        left = sorted({0, 1, 2} - set(lost))
        for number, rank in enumerate(lost, start=1):
            by_rank[rank].kill()
            alive = [each for each in sorted(by_rank) if each not in lost[:number]]
            said = {each: by_rank[each].hears() for each in alive}
            assert all(each["world"] == 3 - number for each in said.values()), said
            assert [said[each]["rank"] for each in alive] == list(range(len(alive)))
        assert [said[each]["worker"] for each in left] == [str(each) for each in left]


def test_a_process_that_comes_late_is_told_by_whom_the_group_was_formed() -> None:
    with started(ELASTIC, 3) as scripts:
        for script in scripts:
            script.hears()
        late = Script(LATE, *(script.port for script in scripts))
        said = late.hears()
        assert late.process.wait(PATIENCE_S) == 0
        late.process.communicate()
    assert said["error"] == "Refused"
    assert "a group of 3 processes was formed at" in said["text"]
    assert f"127.0.0.1:{scripts[0].port}" in said["text"]
    assert "POTLUCK_MIN_PEERS" in said["text"]
    assert "this machine" not in said["text"], "it is read on another one"


def test_a_process_that_takes_the_port_of_the_killed_rank_0_holds_nobody_up() -> None:
    """As under a supervisor that starts rank 0 again at once, at the same port."""
    with started(ELASTIC, 3) as scripts:
        first = [script.hears() for script in scripts]
        by_rank = {said["rank"]: script for said, script in zip(first, scripts, strict=True)}
        by_rank[0].kill()
        known = (by_rank[0].port, by_rank[1].port)
        successor = Script(SUCCESSOR, *known, own=by_rank[0].port)
        try:
            assert successor.port == by_rank[0].port
            for rank in (1, 2):
                by_rank[rank].go()
            said = [by_rank[rank].hears() for rank in (1, 2)]
            refused = successor.hears()
        finally:
            successor.kill()
            successor.process.communicate()
    assert [each["world"] for each in said] == [2, 2]
    assert [each["worker"] for each in said] == ["1", "2"]
    assert refused["error"] == "Refused"


def test_a_training_goes_on_with_equal_weights_after_rank_0_was_killed() -> None:
    with started(TRAINING, 3) as scripts:
        first = [script.hears() for script in scripts]
        by_rank = {said["rank"]: script for said, script in zip(first, scripts, strict=True)}
        assert all(said["world"] == 3 for said in first)
        by_rank[0].kill()
        for rank in (1, 2):
            assert by_rank[rank].hears()["world"] == 2
        by_rank[1].go()
        ends = [by_rank[rank].hears() for rank in (1, 2)]
        assert [by_rank[rank].process.wait(PATIENCE_S) for rank in (1, 2)] == [0, 0]
    assert ends[0] == ends[1]
    assert ends[0]["steps"] > 5
