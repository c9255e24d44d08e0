"""Means of trees of gradients, and trees as replicas of the elastic loop, of JAX and of MLX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck.checkpoint import CheckpointStore
from potluck.checkpoint.state import decode, encode
from potluck.errors import CheckpointError, Desync
from potluck.testing.world import run_world
from potluck.training import ElasticLoop, Schedule
from potluck.training.pytree import mean_of_leaves

jax = pytest.importorskip("jax", reason="pip install 'potluck[jax]'")
mx = pytest.importorskip("mlx.core", reason="pip install 'potluck[mlx]'")
jnp = jax.numpy

import optax  # noqa: E402
from mlx import nn, optimizers  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

import potluck.jax as pj  # noqa: E402
import potluck.mlx as pm  # noqa: E402

SHAPES = {"a": (3, 4), "b": (0,), "c": (), "d": (70,)}


def gradients(rank: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    random = np.random.default_rng(rank)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("weights", [None, (1, 3, 0), (0.25, 0.5, 0.25)])
def test_the_mean_of_trees_is_the_weighted_mean_of_each_leaf(weights: Any) -> None:
    def run(ctx: DistributedContext) -> None:
        own = gradients(ctx.rank)
        weight = weights and weights[ctx.rank]
        tree = {"layers": [{k: jnp.asarray(v) for k, v in own.items()}], "none": None}
        mean = pj.average_gradients(ctx, tree, weight=weight)
        assert jax.tree.structure(mean) == jax.tree.structure(tree)
        other = pm.average_gradients(
            ctx, {"layers": [{k: mx.array(v) for k, v in own.items()}]}, weight=weight
        )
        factors = np.array(weights or [1, 1, 1]) / np.sum(weights or 3)
        if weights and not weights[ctx.rank]:  # the mean of no samples
            own = {name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}
            tree = {"layers": [{k: jnp.asarray(v) for k, v in own.items()}], "none": None}
        if weights:
            mean = pj.average_gradients(ctx, tree, weight=weight)
        for name in SHAPES:
            wanted = sum(f * gradients(rank)[name] for rank, f in enumerate(factors))
            for found in (mean["layers"][0][name], other["layers"][0][name]):
                assert found.shape == SHAPES[name]
                np.testing.assert_allclose(np.array(found), wanted, rtol=1e-6, atol=1e-7)

    run_world(3, run)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_the_mean_does_not_depend_on_the_buckets_and_dtypes_are_kept(bucket_bytes: int) -> None:
    def run(ctx: DistributedContext) -> list[Any]:
        own = gradients(ctx.rank)
        leaves = [*map(jnp.asarray, own.values()), jnp.asarray(own["d"], jnp.bfloat16)]
        leaves.append(gradients(ctx.rank, "float64")["d"])
        found = mean_of_leaves(ctx, leaves, weight=2.0, codec=None, bucket_bytes=bucket_bytes)
        assert [each.dtype for each in found] == [each.dtype for each in leaves]
        return [np.asarray(each).tobytes() for each in found]

    first, second = run_world(2, run)
    assert first == second
    own, others = gradients(0, "float64")["d"], gradients(1, "float64")["d"]
    np.testing.assert_allclose(np.frombuffer(first[-1]), (own + others) / 2, rtol=1e-14)


def test_wrong_weights_and_trees_are_refused_on_all_ranks() -> None:
    def run(ctx: DistributedContext) -> None:
        tree = {"w": jnp.ones(4)}
        for weights in ((0, 0), (1, -1), (float("nan"), 1), (float("inf"), 1)):
            with pytest.raises(ValueError, match="a weight is 0 or more"):
                pj.average_gradients(ctx, tree, weight=weights[ctx.rank])
        with pytest.raises(TypeError, match="the mean of int32 values is not int32"):
            pj.average_gradients(ctx, {"w": jnp.ones(4, jnp.int32)})
        with pytest.raises(TypeError, match="a leaf is a str"):
            pj.average_gradients(ctx, {"w": "text"})
        with pytest.raises(TypeError, match="outside of the function"):
            jax.jit(lambda each: pj.average_gradients(ctx, each))(tree)
        np.testing.assert_array_equal(pj.average_gradients(ctx, tree)["w"], 1)
        with pytest.raises(Desync):
            pj.average_gradients(ctx, {"w": jnp.ones(4 + ctx.rank)})

    run_world(2, run)


def jax_replica(seed: int = 0) -> pj.PytreeReplica:
    params = {"w": jax.random.normal(jax.random.PRNGKey(seed), (3,)), "b": [jnp.zeros(2)]}
    state = optax.adam(0.1).init(params)
    return pj.PytreeReplica({"params": params, "optimizer": state, "rate": 0.5})


def mlx_replica(seed: int = 0) -> pm.PytreeReplica:
    mx.random.seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    optimizer = optimizers.AdamW(0.1)
    optimizer.init(model.trainable_parameters())
    return pm.PytreeReplica(model, optimizer)


@pytest.mark.parametrize("made", [jax_replica, mlx_replica])
def test_a_replicas_state_survives_its_bytes_and_fits_only_its_tree(made: Any) -> None:
    replica, other = made(0), made(1)
    assert replica.fingerprint() != other.fingerprint()
    other.restore(decode(encode(replica.capture())))
    assert other.fingerprint() == replica.fingerprint()
    assert other.structure() == replica.structure()
    for leaf, same in zip(replica.leaves().values(), other.leaves().values(), strict=True):
        assert type(leaf) is type(same)
    state = replica.capture()
    name = next(each for each, value in state.items() if getattr(value, "ndim", 0))
    for wrong in ({**state, name: state[name][..., :-1]}, {**state, "more": state[name]}):
        with pytest.raises(CheckpointError, match="the state belongs to another tree"):
            other.restore(wrong)
    assert other.fingerprint() == replica.fingerprint(), "nothing was changed"


def test_names_in_checkpoints_are_paths() -> None:
    with pytest.raises(ValueError, match=r"two leaves of the tree have the path 'a\.b'"):
        pj.PytreeReplica({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}).leaves()
    assert {"params.w", "params.b.0", "rate"} < set(jax_replica().leaves())
    assert {"model.layers.0.weight", "optimizer.step"} < set(mlx_replica().leaves())


X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)


def train_jax(ctx: DistributedContext, store: CheckpointStore | None, epochs: int) -> Any:
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = {"w": jnp.zeros(3)}
    replica = pj.PytreeReplica({"params": params, "optimizer": optimizer.init(params)})
    grad = jax.value_and_grad(lambda p, x, y: ((x @ p["w"] - y) ** 2).mean())
    job = ElasticLoop(ctx, Schedule(64, 16, epochs=epochs), replica, checkpoint=store)
    for share in job:
        with job.step():
            loss, found = grad(replica.tree["params"], X[share.indices], Y[share.indices])
            found = pj.average_gradients(ctx, found, weight=share.weight)
            job.commit(loss=float(loss))
            updates, state = optimizer.update(found, replica.tree["optimizer"])
            params = optax.apply_updates(replica.tree["params"], updates)
            replica.tree = {"params": params, "optimizer": state}
    return job, np.asarray(replica.tree["params"]["w"])


def train_mlx(ctx: DistributedContext, store: CheckpointStore | None, epochs: int) -> Any:
    model = nn.Linear(3, 1, bias=False)
    model.update({"weight": mx.zeros((1, 3))})
    optimizer = optimizers.SGD(0.1, momentum=0.9)
    optimizer.init(model.trainable_parameters())
    grad = nn.value_and_grad(model, lambda m, x, y: ((m(x)[:, 0] - y) ** 2).mean())
    replica = pm.PytreeReplica(model, optimizer)
    job = ElasticLoop(ctx, Schedule(64, 16, epochs=epochs), replica, checkpoint=store)
    for share in job:
        with job.step():
            loss, found = grad(model, mx.array(X[share.indices]), mx.array(Y[share.indices]))
            found = pm.average_gradients(ctx, found, weight=share.weight)
            job.commit(loss=loss.item())
            optimizer.update(model, found)
    return job, np.array(dict(tree_flatten(model.parameters()))["weight"])[0]


@pytest.mark.parametrize("train", [train_jax, train_mlx])
def test_three_ranks_train_as_one_does_and_go_on_from_a_checkpoint(
    train: Any, tmp_path: Path
) -> None:
    """In float32 only the order of additions differs."""
    [(alone, wanted)] = run_world(1, lambda ctx: train(ctx, None, 8))
    ranks = run_world(3, lambda ctx: train(ctx, None, 8))
    for job, weights in ranks:
        assert job.step_number == alone.step_number == 32
        np.testing.assert_allclose(weights, wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(weights, ranks[0][1])
    assert alone.losses[-1] < 0.2 * alone.losses[0]

    run_world(2, lambda ctx: train(ctx, CheckpointStore(tmp_path / str(ctx.rank)), 4))
    resumed = run_world(2, lambda ctx: train(ctx, CheckpointStore(tmp_path / str(ctx.rank)), 8))
    assert [len(job.losses) for job, _ in resumed] == [16, 16], "the first half is not run again"
    np.testing.assert_allclose(resumed[0][1], wanted, rtol=1e-4, atol=1e-6)
