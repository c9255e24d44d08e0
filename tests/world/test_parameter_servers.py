"""Several servers of one parameter server: mistakes, checkpoints that do not fit, and the end."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck._core.backends.inprocess import InProcessBackend
from potluck._core.context import DistributedContext
from potluck.errors import CheckpointError, ServiceTimeout
from potluck.parameter_server import SGD, Asynchronous, ParameterServer, Synchronous
from potluck.parameter_server.model import Mode
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import run_world
from support.momentum import value_of_version

NAMES = "abcdefgh"


def filled(value: float) -> dict[str, Any]:
    return {name: np.full(3, value) for name in NAMES}


def train(ctx: DistributedContext, num_steps: int, folder: Path, **options: Any) -> tuple[int, Any]:
    """Each step adds 1. The version at first, and the parameters at the end."""
    options = {"servers": 2, "optimizer": SGD(1.0), "save_every": 1000} | options
    ps = ParameterServer(ctx, checkpoint=folder, **options)
    ps.set_parameters("m", filled(0.0))
    first = ps.get_parameters("m").version
    for _ in range(num_steps):
        ps.accumulate_gradient("m", filled(-1.0))
        ps.get_parameters("m")
        ps.save()  # on the primary, before it pushes the next gradient
    found, version = ps.get_parameters("m")
    assert {float(x) for each in found.values() for x in each} == {float(version)}
    ps.close()
    return first, version


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_every_server_has_some_of_the_tensors_on_its_disk(tmp_path: Path) -> None:
    assert run_world(2, lambda ctx: train(ctx, 3, tmp_path)) == [(0, 3)] * 2
    ours, theirs = (len(list(d.glob("*.json"))) for d in (tmp_path, tmp_path / "server-1"))
    assert ours == 3
    assert 3 <= theirs <= 5
    assert run_world(2, lambda ctx: train(ctx, 2, tmp_path)) == [(3, 5)] * 2


@pytest.mark.parametrize("server", ["first", "second"])
def test_one_flipped_byte_on_one_server_takes_all_to_the_checkpoint_before(
    tmp_path: Path, server: str
) -> None:
    run_world(2, lambda ctx: train(ctx, 3, tmp_path))
    folder = tmp_path if server == "first" else tmp_path / "server-1"
    newest = sorted(folder.glob("*.safetensors"))
    damage(newest[-1])  # of the end, which is of version 3, too
    damage(newest[-2])
    [(version, _), _] = run_world(2, lambda ctx: train(ctx, 1, tmp_path))
    assert version == 2


def test_servers_without_a_common_checkpoint_do_not_start_anew_in_silence(tmp_path: Path) -> None:
    run_world(2, lambda ctx: train(ctx, 1, tmp_path))
    shutil.rmtree(tmp_path / "server-1")

    def run(ctx: DistributedContext) -> None:
        with pytest.raises(CheckpointError, match="other servers have no checkpoint of the same"):
            train(ctx, 1, tmp_path)
        ctx.barrier()

    run_world(2, run)


@pytest.mark.parametrize("server", ["first", "second"])
def test_with_replicas_one_server_has_what_another_ones_disk_has_lost(
    tmp_path: Path, server: str
) -> None:
    assert run_world(2, lambda ctx: train(ctx, 3, tmp_path, replicas=1)) == [(0, 3)] * 2
    for path in (tmp_path if server == "first" else tmp_path / "server-1").glob("*.safetensors"):
        damage(path)
    assert run_world(2, lambda ctx: train(ctx, 2, tmp_path, replicas=1)) == [(3, 5)] * 2
    shutil.rmtree(tmp_path / "server-1")
    assert run_world(2, lambda ctx: train(ctx, 1, tmp_path, replicas=1)) == [(5, 6)] * 2


def test_checkpoints_with_fewer_copies_are_refused(tmp_path: Path) -> None:
    run_world(2, lambda ctx: train(ctx, 1, tmp_path))

    def run(ctx: DistributedContext) -> None:
        with pytest.raises(CheckpointError, match=r"replicas=0, and .* has replicas=1: give it"):
            train(ctx, 1, tmp_path, replicas=1)
        ctx.barrier()

    run_world(2, run)


def test_checkpoints_of_other_servers_are_refused(tmp_path: Path) -> None:
    run_world(2, lambda ctx: train(ctx, 1, tmp_path))

    def run(ctx: DistributedContext) -> None:
        with pytest.raises(CheckpointError, match=r"server on worker 0, 1, and this one is on w"):
            train(ctx, 1, tmp_path, servers=1)

    run_world(1, run)


def test_a_first_server_killed_before_its_first_checkpoint_begins_without(tmp_path: Path) -> None:
    run_world(2, lambda ctx: train(ctx, 1, tmp_path))
    for path in tmp_path.glob("*-step-*"):
        path.unlink()
    assert run_world(2, lambda ctx: train(ctx, 1, tmp_path))[0][0] == 0
    # What the other one had is of another history, and is never mixed with this one's.
    assert run_world(2, lambda ctx: train(ctx, 1, tmp_path))[0][0] == 1


def test_a_mistake_on_one_server_is_one_clear_error_and_nothing_is_lost() -> None:
    def run(ctx: DistributedContext) -> None:
        ps = ParameterServer(ctx, servers=2, optimizer=SGD(1.0))
        ps.set_parameters("m", filled(0.0))
        for _ in range(6):  # more than a server keeps of what nobody has decided about
            with pytest.raises(ValueError, match=r"what is set for 'm' (lacks|has)"):
                ps.set_parameters("m", {"a": np.zeros(3), "new": np.zeros(1)})
        ctx.barrier()
        ps.get_parameters("m")
        if ctx.rank == 0:
            for name in NAMES:  # on whichever server it lies
                without = {each: np.ones(3) for each in NAMES if each != name}
                with pytest.raises(ValueError, match=f"of worker 0 for 'm' lacks '{name}'"):
                    ps.accumulate_gradient("m", without)
                unlike = without | {name: np.ones(2)}
                with pytest.raises(ValueError, match=rf"shape \(2,\) in '{name}'"):
                    ps.accumulate_gradient("m", unlike)
                with pytest.raises(ValueError, match=f"NaN or infinite numbers in '{name}'"):
                    ps.accumulate_gradient("m", without | {name: np.full(3, np.nan)})
            for more in ("new", "x", "other"):
                with pytest.raises(ValueError, match=f"has '{more}', which the model has not"):
                    ps.accumulate_gradient("m", filled(1.0) | {more: np.ones(1)})
            with pytest.raises(ValueError, match=r"step 7 .* the model is at step 0"):
                ps.accumulate_gradient("m", filled(1.0), step=7)
        assert ps.accumulate_gradient("m", filled(-1.0))
        found, version = ps.get_parameters("m")
        assert list(found) == list(NAMES)  # in their own order, not in that of servers
        assert version == 1
        assert {float(x) for each in found.values() for x in each} == {1.0}
        assert ps.stats()["m"]["counted"] == 2
        ps.close()

    run_world(2, run)


def test_workers_with_other_servers_are_told_so() -> None:
    def run(ctx: DistributedContext) -> None:
        if ctx.rank == 1:
            with pytest.raises(ValueError, match="but servers is 0, 1 on worker 1 and 0 on the"):
                ParameterServer(ctx, servers=2)
        with ParameterServer(ctx):
            ctx.barrier()

    run_world(2, run)


def test_workers_with_other_replicas_are_told_so() -> None:
    def run(ctx: DistributedContext) -> None:
        if ctx.rank == 2:
            with pytest.raises(ValueError, match="but replicas is 0 on worker 2 and 1 on the"):
                ParameterServer(ctx, servers=2)
        with ParameterServer(ctx, servers=2, replicas=1):
            ctx.barrier()

    run_world(3, run)


@pytest.mark.parametrize(
    ("servers", "replicas", "text"),
    [
        (1, 1, "replicas=1 needs at least 2 servers, and there are 1"),
        (2, 2, "replicas=2 needs at least 3 servers"),
        (2, -1, "replicas is -1; it must be an int of at least 0"),
        (2, "1", "replicas is '1'; it must be an int"),
        (2, True, "replicas is True; it must be an int"),
    ],
)
def test_replicas_that_cannot_be_are_refused(servers: int, replicas: Any, text: str) -> None:
    def run(ctx: DistributedContext) -> None:
        with pytest.raises(ValueError, match=text):
            ParameterServer(ctx, servers=servers, replicas=replicas)
        ctx.barrier()

    run_world(2, run)


def test_replicas_need_a_group_that_goes_on_after_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InProcessBackend, "elastic", False)

    def run(ctx: DistributedContext) -> None:
        with pytest.raises(ValueError, match="that goes on without a lost worker, as that of `pot"):
            ParameterServer(ctx, servers=2, replicas=1)
        ctx.barrier()

    run_world(2, run)


@pytest.mark.parametrize(
    "mode", [Synchronous(), Asynchronous(8, scale_by_staleness=False)], ids=repr
)
@pytest.mark.parametrize("victim", ["0", "1", "2"])
def test_a_server_that_is_lost_is_replaced_by_copies(mode: Mode, victim: str) -> None:
    """Of three servers and a worker one is killed; the momentum is in the copies, too."""
    num_steps = 12

    def work(ctx: MortalContext) -> tuple[list[int], float]:
        me = ctx.group.me.worker
        ps = ParameterServer(ctx, mode, servers=3, replicas=1, optimizer=SGD(1.0, momentum=0.5))
        ps.set_parameters("m", filled(0.0))
        versions = []
        while True:
            found, version = ps.get_parameters("m")
            versions.append(version)
            assert {float(x) for each in found.values() for x in each} == {
                value_of_version(version)
            }
            if me == victim and version >= 5:
                ctx.die()
            if version >= num_steps and ctx.world_size < 4:  # the victim may come late
                break
            ps.accumulate_gradient("m", filled(-1.0))
        ps.close()
        return versions, ctx.world_size

    results = ElasticWorld(4, work, timeout_s=30.0).run()
    assert results.keys() == {"0", "1", "2", "3"} - {victim}
    for versions, world_size in results.values():
        assert versions == sorted(versions)
        assert world_size < 4


def test_a_first_server_whose_others_do_not_begin_says_so() -> None:
    ended = threading.Event()

    def run(ctx: DistributedContext) -> None:
        if ctx.rank:
            assert ended.wait(30)
            return
        try:
            with pytest.raises(
                ServiceTimeout,
                match="did not come within 4 s: it waits for its servers, worker 0, 1, to b",
            ):
                ParameterServer(ctx, servers=2)
        finally:
            ended.set()

    run_world(2, run, timeout_s=4.0)


def test_a_server_serves_until_the_last_worker_has_left() -> None:
    trained = threading.Event()

    def run(ctx: DistributedContext) -> int:
        ps = ParameterServer(ctx, servers=[2, 1], optimizer=SGD(1.0))
        ps.set_parameters("m", filled(0.0))
        if ctx.rank == 0:
            for _ in range(5):
                ps.get_parameters("m")
                ps.accumulate_gradient("m", filled(-1.0))
            trained.set()
        version = ps.get_parameters("m", wait=False).version
        ps.close()
        assert trained.is_set() or ctx.rank == 0
        return version

    assert run_world(3, run)[0] == 5
