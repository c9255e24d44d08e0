"""The usage that pmetal's, ml_core's and axonml's documents show, as potluck has it, from top to
bottom, on 1, 2 and 4 workers, with the values that NumPy or one process gives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import potluck
from potluck._core.context import DistributedContext
from potluck.testing.world import run_world

SIZES = pytest.mark.parametrize("size", [1, 2, 4])
X = np.random.default_rng(1).normal(size=(120, 6))
SECRET = np.array([1.0, -2.0, 0.5, 3.0, 0.0, -1.0])
Y = X @ SECRET


def gradient_of(weights: Any, x: Any, y: Any) -> Any:
    return 2 * x.T @ (x @ weights - y) / len(x)


def mine(ctx: DistributedContext) -> tuple[Any, Any]:
    partitioner = potluck.DataPartitioner(len(X), ctx.world_size)
    start, end = partitioner.get_partition(ctx.rank)
    return X[start:end], Y[start:end]


def serial(rate: float, num_steps: int) -> Any:
    weights = np.zeros(6)
    for _ in range(num_steps):
        weights -= rate * gradient_of(weights, X, Y)
    return weights


@SIZES
@pytest.mark.parametrize("algorithm", ["Ring", "Tree", "Centralized"])
def test_ml_cores_ring_all_reduce_trains_like_one_process(size: int, algorithm: str) -> None:
    def work(ctx: DistributedContext) -> Any:
        x, y = mine(ctx)
        weights = np.zeros(6)
        for _ in range(20):
            gradient = gradient_of(weights, x, y)
            weights -= 0.05 * ctx.all_reduce(gradient, "mean", algorithm=algorithm)
        return weights

    found = run_world(size, work)
    np.testing.assert_allclose(found[0], serial(0.05, 20), rtol=1e-9)
    assert all((each == found[0]).all() for each in found)


@SIZES
def test_ml_cores_rounds_of_federated_learning_by_hand(size: int) -> None:
    """Each worker is a client with an unequal number of samples; the mean is by samples."""
    cuts = np.cumsum([0, *(np.arange(size) + 1)]) * len(X) // (size * (size + 1) // 2)

    def client(weights: Any, rank: int) -> Any:
        x, y = X[cuts[rank] : cuts[rank + 1]], Y[cuts[rank] : cuts[rank + 1]]
        for _ in range(5):
            weights = weights - 0.05 * gradient_of(weights, x, y)
        return weights

    def work(ctx: DistributedContext) -> Any:
        model: Any = np.zeros(6) if ctx.rank == 0 else np.full(6, np.nan)
        num = np.array([float(cuts[ctx.rank + 1] - cuts[ctx.rank])])
        for _ in range(6):
            ctx.broadcast(model, root_rank=0)  # type: ignore[call-arg]
            share = num / potluck.all_reduce_sum(ctx, num)
            model = ctx.all_reduce(client(model, ctx.rank) * share)
        return model

    wanted = np.zeros(6)
    for _ in range(6):
        updates = [client(wanted, rank) for rank in range(size)]
        wanted = np.average(updates, axis=0, weights=np.diff(cuts))
    for found in run_world(size, work):
        np.testing.assert_allclose(found, wanted, rtol=1e-9)


@SIZES
@pytest.mark.parametrize("method", list(potluck.AggregationMethod))
def test_ml_cores_parameter_server_in_each_mode(
    size: int, method: potluck.AggregationMethod
) -> None:
    def work(ctx: DistributedContext) -> Any:
        x, y = mine(ctx)
        optimizer = potluck.parameter_server.SGD(0.05)  # type: ignore[attr-defined]
        with potluck.ParameterServer(ctx, method, optimizer=optimizer) as server:
            server.set_parameters("model", {"w": np.zeros(6)})
            for _ in range(60):
                parameters, _version = server.get_parameters("model")
                gradient = gradient_of(parameters["w"], x, y)
                server.accumulate_gradient("model", {"w": gradient}, ctx.rank)
            ctx.barrier()
            return server.get_parameters("model", wait=False).parameters["w"]

    for found in run_world(size, work):
        if method is potluck.AggregationMethod.SYNCHRONOUS:
            np.testing.assert_allclose(found, serial(0.05, 60), rtol=1e-9)
        np.testing.assert_allclose(found, SECRET, atol=0.2)


@SIZES
def test_axonmls_groups_of_even_and_odd_ranks(size: int) -> None:
    def work(ctx: DistributedContext) -> Any:
        evens, odds = range(0, size, 2), range(1, size, 2)  # no odd rank on one worker
        groups = [ctx.new_group(list(ranks)) for ranks in (evens, odds)]
        group = next(each for each in groups if each is not None)
        total = potluck.all_reduce_sum(group, np.array([ctx.rank + 1.0]))
        mean = potluck.all_reduce_mean(group, [float(ctx.rank)])
        return total[0], mean[0]

    for rank, (total, mean) in enumerate(run_world(size, work)):
        ranks = np.arange(rank % 2, size, 2)
        assert (total, mean) == ((ranks + 1).sum(), ranks.mean())


@SIZES
def test_axonmls_accumulation_with_ddp_equals_one_process(size: int) -> None:
    torch = pytest.importorskip("torch")
    steps, each = 4, 8
    first = torch.nn.Linear(6, 1).double()

    def trained(batch_of: Any, wrap: Any) -> Any:
        net = wrap(copy.deepcopy(first))  # ranks are threads, which share torch's random numbers
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for step in range(6):
            for number in range(steps):
                x, y = batch_of(step, number)
                loss = (net(x)[:, 0] - y).square().mean() / steps
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters()]

    def batch(step: int, number: int, begin: int, end: int) -> Any:
        rows = (np.arange(begin, end) + 32 * (steps * step + number)) % len(X)
        return torch.from_numpy(X[rows]), torch.from_numpy(Y[rows])

    def work(ctx: DistributedContext) -> Any:
        begin, end = ctx.rank * each, (ctx.rank + 1) * each
        return trained(
            lambda step, number: batch(step, number, begin, end),
            lambda net: potluck.torch.DDP(net, ctx, bucket_size_mb=25.0, broadcast_buffers=True),
        )

    wanted = trained(lambda step, number: batch(step, number, 0, size * each), lambda net: net)
    for found in run_world(size, work):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@SIZES
@pytest.mark.parametrize(
    "strategy",
    [
        *(
            potluck.TopK(0.1),
            potluck.RandomK(0.1),
            potluck.FP16(),
            potluck.BF16(),
            potluck.Quantize(8),
        ),
        potluck.PowerSGD(2),
    ],
    ids=str,
)
def test_pmetals_compressor_loses_nothing_with_error_feedback(size: int, strategy: Any) -> None:
    """What was decompressed over all calls, and the residual, is the sum of the gradients."""

    def work(ctx: DistributedContext) -> None:
        compressor = potluck.GradientCompressor(strategy, True)
        random = np.random.default_rng(ctx.rank)
        total, got = np.zeros((40, 30)), np.zeros((40, 30))
        for _ in range(5):
            gradient = random.normal(size=(40, 30)).astype(np.float32)
            total += gradient
            got += compressor.decompress(compressor.compress(gradient))
        residual = compressor.residual()
        assert residual is not None
        np.testing.assert_allclose(got + residual, total, atol=2e-4)

    run_world(size, work)
