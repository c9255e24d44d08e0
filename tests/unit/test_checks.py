"""Durations and numbers that a caller passes: one meaning everywhere, or one error."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import potluck
from potluck._core.checks import checked_rank, checked_seconds, checked_tag
from potluck._core.context import DistributedContext
from potluck._core.settings import load_settings
from potluck.checkpoint import CheckpointStore
from potluck.errors import ConfigurationError, OperationTimeout
from potluck.federated.patience import Patience
from potluck.testing.world import run_world
from potluck.training.policy import Policy

TWO = [2, 2.0, np.float32(2), timedelta(seconds=2), np.timedelta64(2, "s")]
TWO += [np.timedelta64(2000, "ms"), np.timedelta64(2_000_000_000, "ns")]
NONE = ["2", b"2", True, None, [2], {}, np.array([1, 2]), math.nan, -1, 0, timedelta(seconds=-1)]
NONE += [np.timedelta64("NaT", "s")]


@pytest.mark.parametrize("duration", TWO)
def test_two_seconds(duration: Any) -> None:
    assert checked_seconds(duration) == 2.0


@pytest.mark.parametrize("duration", NONE)
def test_no_duration(duration: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^patience is .*seconds"):
        checked_seconds(duration, "patience")


def test_zero_where_a_call_need_not_wait() -> None:
    assert checked_seconds(timedelta(0), at_least=0) == 0.0
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match="must be at least 0"):
            checked_seconds(wrong, at_least=0)


def local() -> DistributedContext:
    return DistributedContext(potluck.LocalBackend())


def of_call(timeout: Any) -> None:
    with local() as ctx:
        ctx.all_reduce(np.ones(2), timeout=timeout)


def of_barrier(timeout: Any) -> None:
    with local() as ctx:
        ctx.barrier(timeout=timeout)


def of_work(timeout: Any) -> None:
    with local() as ctx:
        ctx.all_reduce(np.ones(2), async_op=True).wait(timeout)


def of_context(timeout: Any) -> None:
    with DistributedContext(potluck.LocalBackend(), timeout_s=timeout) as ctx:
        assert ctx.timeout_s == 2.0


def of_init(timeout: Any) -> None:
    with potluck.init("local", timeout_s=timeout) as ctx:
        assert ctx.timeout_s == 2.0


def of_service(timeout: Any) -> None:
    @potluck.service("double")
    def double(call: potluck.Call, value: float) -> float:
        return 2 * value

    with local() as ctx:
        ctx.serve(double)
        remote = ctx.connect("double", timeout=timeout)
        assert remote.double(4.0, timeout=timeout) == 8.0


def of_world(timeout: Any) -> None:
    assert run_world(2, lambda ctx: ctx.timeout_s, timeout_s=timeout) == [2.0, 2.0]


TAKERS: list[Callable[[Any], None]] = [
    *(of_call, of_barrier, of_work, of_context, of_init, of_service, of_world),
]


@pytest.mark.parametrize("take", TAKERS)
def test_a_time_out_is_any_duration(take: Callable[[Any], None]) -> None:
    for duration in (timedelta(seconds=2), np.timedelta64(2, "s")):
        take(duration)
    words = [] if take is of_init else ["2"]  # a setting may be text, as in the environment
    for wrong in (*words, -1, math.nan, timedelta(seconds=-1)):
        with pytest.raises((TypeError, ValueError, ConfigurationError), match="seconds"):
            take(wrong)


def test_options_that_are_durations(tmp_path: Any) -> None:
    minute = timedelta(minutes=1)
    assert Policy(recovery_s=minute).recovery_s == 60.0  # type: ignore[arg-type]
    patience = Patience(start_s=minute, deadline=minute)  # type: ignore[arg-type]
    assert (patience.start_s, patience.deadline) == (60.0, 60.0)
    assert load_settings(connection_timeout_s=minute).connection_timeout_s == 60.0
    CheckpointStore(tmp_path, parts_timeout_s=minute)
    for make in (
        lambda: Policy(recovery_s=math.nan),
        lambda: Patience(start_s=math.nan),
        lambda: CheckpointStore(tmp_path, parts_timeout_s=-1),
    ):
        with pytest.raises(ValueError, match="is in seconds and must be"):
            make()


def test_a_wait_for_peers_takes_a_duration_and_whole_numbers() -> None:
    backend: Any
    with pytest.raises(TypeError, match="min_peers is '2'; it must be a whole number"):
        backend = potluck.AutoDiscoveryBackend(min_peers="2", finders=[], port=0)  # type: ignore[arg-type]
    backend = potluck.AutoDiscoveryBackend(finders=[], port=0)
    try:
        with pytest.raises(OperationTimeout, match=r"0 of 1 other processes found in 0\.05 s"):
            backend.wait_for_peers(1, timedelta(milliseconds=50))
        for n, timeout, words in (
            *((1, -1, "must be above 0"), (1, math.nan, "must be above 0"), (1, "1", "seconds")),
            *(("1", 1, "n is '1'; it must be a whole number"), (-1, 1, "n is -1")),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                backend.wait_for_peers(n, timeout)
        with pytest.raises(TypeError, match="timeout is a number of seconds"):
            backend.establish_ring("2")
    finally:
        backend.close()


def test_a_rank_is_an_integer() -> None:
    ring: Any = potluck.RingBackend
    with pytest.raises(TypeError, match="rank is a rank, an integer from 0 to 1, not '0'"):
        ring(["127.0.0.1:1", "127.0.0.1:2"], "0")
    assert checked_rank("root", np.int64(3), 4) == 3
    assert checked_tag(np.int32(7)) == 7
    for wrong in (1.0, "1", None, [1]):
        with pytest.raises(TypeError, match="root is a rank"):
            checked_rank("root", wrong, 4)
        with pytest.raises(ValueError, match="a tag is an integer"):
            checked_tag(wrong)
