"""Parameter servers between workers of one process, over every kind of link."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import potluck
from potluck._core.backends.inprocess import InProcessBackend
from potluck._core.context import DistributedContext
from potluck.errors import CheckpointError, ServiceTimeout, UnknownService
from potluck.parameter_server import (
    SGD,
    Adam,
    AggregationMethod,
    Asynchronous,
    ElasticAveraging,
    ParameterServer,
    Synchronous,
    server,
)
from potluck.parameter_server.arguments import servers_of
from potluck.testing.elastic import ElasticWorld, MortalContext
from potluck.testing.world import run_world
from support.worlds import open_world

KINDS = ("inproc", "tls", *(("native",) if potluck._core.native.available else ()))


def in_tensors(values: Any) -> dict[str, Any]:
    """Several tensors, so that each of several servers has some."""
    return {"all": values} | {f"w{n}": values[10 * n : 10 * n + 10] for n in range(5)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "servers"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, [1, 3, 0])]
)
def test_a_synchronous_step_is_that_of_all_reduce_bit_by_bit(
    kind: str, world_size: int, servers: int | list[int]
) -> None:
    """In float64, with gradients whose sum depends on the order of its terms."""

    def run(ctx: DistributedContext) -> None:
        chance = np.random.default_rng(ctx.rank)
        expected = np.linspace(-1, 1, 50)
        with ParameterServer(ctx, optimizer=SGD(0.1), servers=servers) as ps:
            ps.set_parameters("m", in_tensors(expected.copy()))
            for step in range(5):
                parameters, version = ps.get_parameters("m")
                assert version == step
                np.testing.assert_array_equal(parameters["all"], expected)
                for number in range(5):
                    each = expected[10 * number : 10 * number + 10]
                    np.testing.assert_array_equal(parameters[f"w{number}"], each)
                gradient = chance.normal(size=50) * 10.0 ** chance.integers(-8, 8, 50)
                assert ps.accumulate_gradient("m", in_tensors(gradient), worker_rank=ctx.rank)
                mean = ctx.all_reduce(gradient.copy(), "mean", algorithm="centralized")
                expected = expected - 0.1 * mean
            assert ps.stats()["m"] == {"version": 5, "counted": 5 * ctx.world_size}

    with open_world(kind, world_size) as world:
        world.run(run)


def test_the_loop_by_hand_that_users_of_other_servers_write() -> None:
    def run(ctx: DistributedContext) -> list[float]:
        ps = ParameterServer(ctx, Synchronous(automatic=False))
        ps.set_parameters("m", {"w": np.zeros(2)})
        for _ in range(3):
            _, version = ps.get_parameters("m")
            ps.accumulate_gradient("m", {"w": np.full(2, ctx.rank + 1.0)}, step=version)
            if ps.ready("m"):
                ps.apply_gradients("m", learning_rate=1.0)
                ps.clear_gradients("m")
        found = ps.get_parameters("m").parameters["w"].tolist()
        ps.close()
        return found

    assert run_world(2, run) == [[-4.5, -4.5]] * 2


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pull_never_mixes_two_versions(kind: str, servers: int) -> None:
    """Each update adds 1 to every element; pullers look for arrays that differ within."""

    def run(ctx: DistributedContext) -> None:
        mode = Asynchronous(scale_by_staleness=False)
        with ParameterServer(ctx, mode, optimizer=SGD(1.0), servers=servers) as ps:
            start = {name: np.zeros(40_000) for name in "abcdef"}
            ps.set_parameters("m", start)
            for _ in range(15):
                parameters, version = ps.get_parameters("m")
                values = {float(each) for array in parameters.values() for each in np.unique(array)}
                assert values == {float(version)}
                minus = {name: np.full(40_000, -1.0) for name in "abcdef"}
                assert ps.accumulate_gradient("m", minus)
            ctx.barrier()
            assert ps.get_parameters("m", wait=False).version == 15 * ctx.world_size

    with open_world(kind, 3) as world:
        world.run(run)


def test_a_slow_worker_holds_nobody_up_until_its_parameters_would_be_too_old() -> None:
    fast_ran = threading.Event()

    def run(ctx: DistributedContext) -> dict[str, Any] | None:
        ps = ParameterServer(ctx, Asynchronous(max_staleness=6), optimizer=SGD(0.1))
        ps.set_parameters("m", {"w": np.zeros(1)})
        ps.get_parameters("m")
        ctx.barrier()
        if ctx.rank == 1:
            assert fast_ran.wait(20)
            assert ps.accumulate_gradient("m", {"w": np.ones(1)})
            ps.close()
            return None
        for _ in range(6):
            assert ps.accumulate_gradient("m", {"w": np.ones(1)})
            ps.get_parameters("m")
        with pytest.raises(ServiceTimeout, match=r"waits for worker 1, which computes on the old"):
            ps.accumulate_gradient("m", {"w": np.ones(1)}, timeout=2.0)
        assert ps.get_parameters("m", wait=False).version == 6
        fast_ran.set()
        assert ps.get_parameters("m").version == 8  # what was pushed is applied, after the other
        stats = ps.stats()["m"]
        ps.close()
        return stats

    stats, _ = run_world(2, run)
    assert stats == {"version": 8, "counted": 8, "max staleness": 6}


def test_elastic_averaging_of_parameters_is_the_papers_algorithm() -> None:
    """One worker, so that the order is known: x and the centre by hand."""

    def run(ctx: DistributedContext) -> None:
        mode = ElasticAveraging(alpha=0.25, of="parameters")
        with ParameterServer(ctx, mode) as ps:
            ps.set_parameters("m", {"w": np.zeros(3)})
            x, centre = np.full(3, 8.0), np.zeros(3)
            for _ in range(4):
                difference = 0.25 * (x - centre)
                got = ps.average_parameters("m", {"w": x})["w"]
                x, centre = x - difference, centre + difference
                np.testing.assert_array_equal(got, x)
                pulled = ps.get_parameters("m", wait=False).parameters["w"]
                np.testing.assert_array_equal(pulled, centre)
            with pytest.raises(ValueError, match="takes average_parameters"):
                ps.accumulate_gradient("m", {"w": x})
            with pytest.raises(ValueError, match="do not fit 'm' on the server"):
                ps.average_parameters("m", {"w": np.zeros(2)})

    run_world(1, run)


def test_workers_of_elastic_averaging_come_together() -> None:
    def run(ctx: DistributedContext) -> float:
        mode = AggregationMethod.ELASTIC_AVERAGING.value
        mode = ElasticAveraging(alpha=0.3, of="parameters") if mode.of == "gradients" else mode
        with ParameterServer(ctx, mode) as ps:
            ps.set_parameters("m", {"w": np.zeros(1)})
            x = np.full(1, 10.0 * ctx.rank)
            for _ in range(40):
                x = ps.average_parameters("m", {"w": x})["w"]
                ctx.barrier()
            return float(x[0])

    found = run_world(3, run)
    assert max(found) - min(found) < 1e-3


@pytest.mark.parametrize(
    ("optimizer", "servers"), [(SGD(0.1, momentum=0.9), 1), (Adam(0.1), 1), (Adam(0.1), 2)]
)
def test_a_server_that_starts_again_goes_on_from_its_checkpoint(
    tmp_path: Path, optimizer: Any, servers: int
) -> None:
    def steps(ctx: DistributedContext, count: int, folder: Path | None) -> list[Any]:
        ps = ParameterServer(
            ctx, optimizer=optimizer, servers=servers, checkpoint=folder, save_every=3
        )
        ps.set_parameters("m", in_tensors(np.ones(50, np.float32)))
        for _ in range(count):
            parameters = ps.get_parameters("m").parameters
            ps.accumulate_gradient("m", {name: 2 * each for name, each in parameters.items()})
        found = ps.get_parameters("m").parameters
        ps.close()
        return [found[name].tolist() for name in sorted(found)]

    run_world(2, lambda ctx: steps(ctx, 4, tmp_path))
    again = run_world(2, lambda ctx: steps(ctx, 3, tmp_path))
    assert again == run_world(2, lambda ctx: steps(ctx, 7, None))


def test_a_worker_says_when_the_parameters_go_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is stopped without its last checkpoint, and another one goes on from the first."""

    def work(ctx: DistributedContext) -> None:
        kept: dict[str, int] = {}
        for checkpoint in (tmp_path / "kept", tmp_path / "copy"):
            ps = ParameterServer(ctx, checkpoint=checkpoint, save_every=100, name=checkpoint.name)
            ps._newest = kept
            ps.set_parameters("m", {"w": np.zeros(2)})
            ps.get_parameters("m")
            if checkpoint.name == "kept":
                ps.save()
                shutil.copytree(checkpoint, tmp_path / "copy")
                for _ in range(3):
                    ps.accumulate_gradient("m", {"w": np.ones(2)})
                    ps.get_parameters("m")
            ps.get_parameters("m")
            ps.close()

    run_world(1, work)
    said = [record.getMessage() for record in caplog.records if "went back" in record.message]
    assert len(said) == 1
    assert said[0].startswith("the parameters of 'm' went back from version 3 to 0:")


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_directory_that_cannot_be_is_refused_at_the_start(tmp_path: Path, place: str) -> None:
    path = tmp_path / "file"
    path.write_text("no directory")
    directory = path if place == "a file" else path / "kept"

    def work(ctx: DistributedContext) -> None:
        with pytest.raises(
            CheckpointError, match=r"can't be a directory of checkpoints: .*other one"
        ):
            ParameterServer(ctx, checkpoint=directory)

    run_world(1, work)


def test_mistakes_are_one_clear_error_each() -> None:
    def run(ctx: DistributedContext) -> None:
        ps = ParameterServer(ctx)
        with pytest.raises(
            ValueError, match=r"no model 'm' on this .*; there are: none. Call set_"
        ):
            ps.get_parameters("m")
        ps.set_parameters("m", {"w": np.zeros(2)})
        with pytest.raises(ValueError, match=r"get_parameters\('m'\) comes before a gradient"):
            ps.accumulate_gradient("m", {"w": np.zeros(2)})
        with pytest.raises(ValueError, match=r"what is set for 'm' has shape \(3,\) in 'w'"):
            ps.set_parameters("m", {"w": np.zeros(3)})
        with pytest.raises(TypeError, match="dict of arrays by name"):
            ps.set_parameters("m", np.zeros(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="parameters are floats, but 'w' is int64"):
            ps.set_parameters("n", {"w": np.zeros(3, np.int64)})
        ps.get_parameters("m")
        with pytest.raises(ValueError, match="worker_rank is 5, but the rank of this worker is 0"):
            ps.accumulate_gradient("m", {"w": np.zeros(2)}, worker_rank=5)
        with pytest.raises(ValueError, match=r"step 7 of worker 0 .* the model is at step 0"):
            ps.accumulate_gradient("m", {"w": np.zeros(2)}, step=7)
        with pytest.raises(ValueError, match="has 'v', which the model has not"):
            ps.accumulate_gradient("m", {"w": np.zeros(2), "v": np.zeros(2)})
        with pytest.raises(ValueError, match="average_parameters is for Elastic"):
            ps.average_parameters("m", {"w": np.zeros(2)})
        with pytest.raises(ValueError, match="there is no directory"):
            ps.save()
        assert ps.accumulate_gradient("m", {"w": np.ones(2)})
        assert ps.get_parameters("m").version == 1
        assert ps.set_parameters("m", {"w": np.ones(2)}, replace=True) == 2
        ps.close()
        for wrong, kind, message in [
            ({"servers": 3}, ValueError, "servers=3: there are 1 workers"),
            ({"servers": [3]}, ValueError, "there is no such worker; there are: 0"),
            ({"servers": []}, TypeError, r"servers is \[\]"),
            ({"mode": "sync"}, TypeError, "mode is 'sync'"),
            ({"mode": Synchronous(1)}, ValueError, "backup_workers is 1 of 1 workers"),
            ({"optimizer": "adam"}, TypeError, "optimizer is 'adam'"),
            ({"save_every": 0}, ValueError, "save_every is 0"),
        ]:
            with pytest.raises(kind, match=message):
                ParameterServer(ctx, **wrong)
        with pytest.raises(TypeError, match="takes a context"):
            ParameterServer(None)  # type: ignore[arg-type]

    run_world(1, run)


def test_workers_with_unlike_arguments_are_told_so() -> None:
    def run(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            ps = ParameterServer(ctx, optimizer=SGD(0.1))
            ctx.barrier()
            ps.close()
            return
        with pytest.raises(ValueError, match=r"mode is Asynchronous\(.* on worker 1 and Synchr"):
            ParameterServer(ctx, Asynchronous(), optimizer=SGD(0.1))
        with pytest.raises(ValueError, match=r"optimizer is SGD\(learning_rate=0.2.* on worker 1"):
            ParameterServer(ctx, optimizer=SGD(0.2))
        ParameterServer(ctx, optimizer=SGD(0.1)).close()
        ctx.barrier()

    run_world(2, run)


def test_the_error_at_the_deadline_names_the_workers_that_are_missing() -> None:
    def run(ctx: DistributedContext) -> None:
        ps = ParameterServer(ctx)
        ps.set_parameters("m", {"w": np.zeros(2)})
        ps.get_parameters("m")
        if ctx.rank == 0:
            ps.accumulate_gradient("m", {"w": np.ones(2)})
            with pytest.raises(ServiceTimeout, match="waits for a gradient of step 0 of worker 1"):
                ps.get_parameters("m", timeout=0.2)
        ctx.barrier()
        ps.close()

    run_world(2, run)


def test_a_worker_that_has_closed_is_not_waited_for() -> None:
    def run(ctx: DistributedContext) -> int:
        ps = ParameterServer(ctx)
        ps.set_parameters("m", {"w": np.zeros(2)})
        for _ in range(2 if ctx.rank else 4):
            ps.get_parameters("m")
            ps.accumulate_gradient("m", {"w": np.ones(2)})
        version = ps.get_parameters("m").version
        ps.close()
        return version

    assert run_world(2, run) == [4, 2]


def test_a_servers_own_worker_that_has_closed_is_not_waited_for_either() -> None:
    closed = threading.Event()

    def run(ctx: DistributedContext) -> int:
        ps = ParameterServer(ctx, Asynchronous(max_staleness=1), optimizer=SGD(0.1))
        ps.set_parameters("m", {"w": np.zeros(2)})
        ps.get_parameters("m")  # and nothing follows on rank 0
        ctx.barrier()
        version = 0
        if ctx.rank == 1:
            assert closed.wait(20)
            for _ in range(5):
                ps.accumulate_gradient("m", {"w": np.ones(2)})
                version = ps.get_parameters("m").version
        else:
            closed.set()
        ps.close()
        return version

    assert run_world(2, run) == [0, 5]


def test_more_workers_wait_than_the_server_has_threads() -> None:
    def run(ctx: DistributedContext) -> int:
        with ParameterServer(ctx) as ps:
            ps.set_parameters("m", {"w": np.zeros(2)})
            for _ in range(3):
                ps.get_parameters("m")
                ps.accumulate_gradient("m", {"w": np.ones(2)})
            return ps.get_parameters("m").version

    assert run_world(12, run) == [3] * 12


def test_a_worker_that_leaves_during_a_save_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LEAVE_S", 0.2)
    left = threading.Event()

    def run(ctx: DistributedContext) -> None:
        ps = ParameterServer(ctx)
        ctx.barrier()
        if ps._serving is None:
            ps.close()
            left.set()
            return
        with ps._serving._primary.replica.changed:  # as a save does
            assert left.wait(20)
        ps.close()

    run_world(2, run)


def test_a_push_that_comes_before_the_server_has_entered_the_group_waits_for_it() -> None:
    """A worker that was started again is in the next group at once."""
    [backend] = InProcessBackend.world(1)
    first = DistributedContext(backend)
    ps = ParameterServer(first, optimizer=SGD(1.0))
    ps.set_parameters("m", {"w": np.zeros(2)})
    refused = threading.Event()
    counted: list[bool] = []
    second = DistributedContext(backend.hub.join())
    with ParameterServer(second, optimizer=SGD(1.0)) as other:

        def push() -> None:
            other.get_parameters("m")
            other._calls.reform_if_due = refused.set  # type: ignore[assignment,method-assign]
            counted.append(other.accumulate_gradient("m", {"w": np.ones(2)}))

        thread = threading.Thread(target=push)
        thread.start()
        assert refused.wait(20)
        assert first.world_size == 1
        ps.get_parameters("m")
        assert first.world_size == 2
        ps.accumulate_gradient("m", {"w": np.ones(2)})
        thread.join(20)
        assert counted == [True]
        assert ps.get_parameters("m").version == 1
    ps.close()
    second.close()
    first.close()


def test_a_worker_that_comes_back_while_the_server_ends_is_served() -> None:
    """It is in the next group, which the server has not entered when all others have closed."""
    [backend] = InProcessBackend.world(1)
    first = DistributedContext(backend, timeout_s=8.0)
    ps = ParameterServer(first, optimizer=SGD(1.0))
    ps.set_parameters("m", {"w": np.zeros(2)})
    ps.get_parameters("m")
    ps.accumulate_gradient("m", {"w": np.ones(2)})
    second = DistributedContext(backend.hub.join(), timeout_s=8.0)

    def end() -> None:
        ps.close()
        first.close()

    thread = threading.Thread(target=end)
    thread.start()
    with ParameterServer(second, optimizer=SGD(1.0)) as late:
        assert late.get_parameters("m").version == 1
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()
    second.close()


def test_in_a_later_group_a_server_that_is_away_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server and worker start again at once, and the worker is back first."""
    [backend] = InProcessBackend.world(1)
    contexts = [DistributedContext(each, timeout_s=20.0) for each in (backend, backend.hub.join())]
    is_checked = threading.Event()
    found: dict[str, float] = {}

    def work(ctx: DistributedContext) -> None:
        # Fewer are in this group than in the job: that too is no mistake of the arguments.
        mode = Synchronous(backup_workers=2)
        options: dict[str, Any] = {"checkpoint": tmp_path, "servers": [2]}
        with ParameterServer(ctx, mode, optimizer=SGD(1.0), **options) as ps:
            ps.set_parameters("m", {"w": np.ones(2)})
            found[ctx.group.me.worker] = float(ps.get_parameters("m").parameters["w"][0])

    def noted(*arguments: Any) -> tuple[str, ...]:
        names = servers_of(*arguments)
        is_checked.set()
        return names

    monkeypatch.setattr(server, "servers_of", noted)
    assert [each.worker for each in contexts[1].members] == ["0", "1"]
    threads = [threading.Thread(target=work, args=(ctx,), daemon=True) for ctx in contexts]
    threads[1].start()
    assert is_checked.wait(20)
    contexts.append(DistributedContext(backend.hub.join(), timeout_s=20.0))
    threads[0].start()
    work(contexts[2])
    for thread in threads:
        thread.join(20)
    assert found == {"0": 1.0, "1": 1.0, "2": 1.0}
    for ctx in contexts:
        ctx.close()


MODES = (
    Synchronous(),
    Asynchronous(),
    ElasticAveraging(0.5, of="gradients"),
    ElasticAveraging(0.5, of="parameters"),
)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), SGD(0.1, 0.9, nesterov=True, weight_decay=0.1), Adam()], ids=str
)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_parameter_without_dimensions_is_one_as_any_other(
    tmp_path: Path, mode: Any, optimizer: Any, servers: int
) -> None:
    """A learned temperature, a layer's scale: its values are those of an array with one number,
    before and after a restart from the checkpoint."""

    def run(ctx: DistributedContext) -> list[list[float]]:
        given = {
            f"{dtype} {shape}": np.full(shape, 0.5, dtype)
            for dtype in ("float64", "float32", "float16", ml_dtypes.bfloat16, "complex64")
            for shape in ((), (1,))
        }
        found = []
        with ParameterServer(
            ctx, mode, optimizer=optimizer, servers=servers, checkpoint=tmp_path
        ) as ps:
            ps.set_parameters("m", given)
            for step in range(3):
                pulled = ps.get_parameters("m").parameters
                if step == 0:
                    ctx.barrier()  # no worker pushes before all have pulled
                if mode == MODES[-1]:
                    moved = {name: each + each.dtype.type(1) for name, each in pulled.items()}
                    pulled = ps.average_parameters("m", moved)
                else:
                    ps.accumulate_gradient("m", {n: np.cos(each) for n, each in pulled.items()})
                for name, each in pulled.items():
                    assert isinstance(each, np.ndarray)
                    assert (each.shape, each.dtype) == (given[name].shape, given[name].dtype)
                names = [name for name in pulled if "()" in name]
                found.append([complex(pulled[name]) for name in names])
                same = [complex(pulled[name.replace("()", "(1,)")][0]) for name in names]
                assert found[-1] == same, step
            assert all(each.flags.writeable for each in given.values())
        return found

    [before] = run_world(1, run) if servers == 1 else run_world(2, run)[:1]
    [after] = run_world(1, run) if servers == 1 else run_world(2, run)[:1]
    assert before[0] == [0.5] * 5 or isinstance(mode, ElasticAveraging)
    assert after != before


def test_nothing_is_called_after_close(tmp_path: Path) -> None:
    """A gradient that counted after the last checkpoint would be lost."""

    def run(ctx: DistributedContext) -> None:
        ps = ParameterServer(ctx, Synchronous(), optimizer=SGD(0.1), checkpoint=str(tmp_path))
        ps.set_parameters("m", {"w": np.zeros(2)})
        ps.get_parameters("m")
        ps.close()
        for late in (
            lambda: ps.accumulate_gradient("m", {"w": np.ones(2)}),
            lambda: ps.get_parameters("m"),
            lambda: ps.set_parameters("m", {"w": np.zeros(2)}),
            *(ps.stats, ps.save),
        ):
            with pytest.raises(RuntimeError, match="'parameters' was closed by this worker"):
                late()
        ps.close()

    run_world(1, run)


def test_a_second_one_of_the_same_name_is_refused_on_all_workers() -> None:
    """The others would find the first one, and compute on its parameters."""

    def run(ctx: DistributedContext) -> float:
        for name, value in (("parameters", 1.0), ("parameters", 2.0), ("others", 3.0)):
            if value == 2.0:
                with pytest.raises(ValueError, match="has had a ParameterServer 'parameters'"):
                    ParameterServer(ctx, name=name)
                continue
            with ParameterServer(ctx, name=name) as ps:
                ps.set_parameters("m", {"w": np.full(2, value)})
                found = ps.get_parameters("m")
        return float(found.parameters["w"][0])

    assert run_world(2, run) == [3.0, 3.0]


def test_a_server_that_does_not_come_is_an_unknown_service_in_an_elastic_context_too() -> None:
    is_over = threading.Event()

    def run(ctx: MortalContext) -> None:
        if ctx.rank == 0:
            assert is_over.wait(20)
            return
        with pytest.raises(UnknownService, match="nobody served 'n' within"):
            ParameterServer(ctx, name="n")
        is_over.set()

    ElasticWorld(2, run, timeout_s=3.0).run()
