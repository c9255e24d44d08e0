"""The pages of docs/dev/ways: real runs enter the files that they name, and no others."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import potluck
from potluck._core.context import DistributedContext
from potluck._core.engine.loop.native import is_available
from potluck.federated import Federation, Update, simulate
from potluck.torch import DDP
from support.ways import Trace, watched
from support.worlds import World, open_world

native_only = pytest.mark.skipif(
    not is_available() or sys.platform != "linux",
    reason="the pages show the way through the native core, and shared memory on Linux",
)


def train(trace: Trace, world: World, **options: Any) -> None:
    """Two backwards under ``DDP(**options)`` on every rank, recorded from its construction on."""

    def step(ctx: DistributedContext) -> None:
        model = DDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), ctx, **options)
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()

    with trace.recording():
        world.run(step)


@native_only
def test_a_gradient_goes_the_way_of_its_page() -> None:
    """Over links by the native loop, by Python's, with memory of the links; and in memory alone."""
    with watched() as trace:
        for kind, world_size in (("native", 2), ("tls", 2), ("tls+shm", 3), ("shm", 2)):
            with open_world(kind, world_size) as world:
                train(trace, world)
    trace.check("gradient")


@native_only
def test_a_compressed_gradient_goes_the_way_of_its_page() -> None:
    strategies = (
        potluck.TopK(0.1),
        potluck.Quantize(8),
        potluck.RandomK(0.1),
        potluck.PowerSGD(2, start_step=0),
    )
    with watched() as trace:
        for strategy in strategies:
            with open_world("native", 2) as world:
                train(trace, world, compression=strategy)
    trace.check("compressed", "gradient")


@potluck.service("echo")
def echo(call: potluck.Call, payload: Any) -> Any:
    return payload


@native_only
def test_a_service_call_goes_the_way_of_its_page() -> None:
    """From ``serve`` on; arrays that fit into a frame's beginning, and one of memory's blocks."""
    with watched() as trace, open_world("native", 2) as world, trace.recording():
        server, caller = world.contexts
        server.serve(echo)
        remote = caller.connect("echo")
        for size in (3, 3, 1 << 18):
            assert remote.echo(np.ones(size)).sum() == size
    trace.check("service")


def test_a_federated_update_goes_the_way_of_its_page() -> None:
    def client(parameters: Any, config: Any) -> Update:
        return Update([parameters[0] + 1], num_samples=10, metrics={"loss": 1.0})

    def server(federation: Federation) -> Any:
        with trace.recording():
            return federation.run([np.zeros(3)], rounds=2)

    with watched() as trace:
        history = simulate(server, client, num_clients=3)
    assert history.parameters[0].tolist() == [2.0] * 3
    trace.check("federated")
