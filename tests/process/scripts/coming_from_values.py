"""What the lines of docs/coming-from.md give, computed with NumPy alone.

A value is compared; a function gets what the line gave, and returns whether that is right. In lines
that change ``t`` one after the other each finds what the one before it left.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def values_of(
    world: list[dict[str, Any]], rank: int, points: Any, *, is_found: bool
) -> dict[str, Any]:
    """By line, for ``rank``; ``world`` has the arrays of each rank before a row. ``is_found``: the
    context's rank is another one, which the processes agreed on when they found each other."""
    ts = np.stack([np.asarray(each["t"]) for each in world])
    rows = np.stack([np.asarray(each["rows"]) for each in world])
    size, mine = len(world), ts[rank]
    total, mean, first = ts.sum(0), ts.mean(0), ts[0]
    share = (np.arange(size) + 1.0) / (size * (size + 1) / 2)
    everything = np.array_split(np.arange(256), size)[rank]
    is_even = points[:, 0] > 0

    def about(wanted: Any, error: float) -> Any:
        return lambda value: np.abs(np.asarray(value) - wanted).max() <= error

    def largest_half(value: Any) -> bool:
        kept = np.sort(np.abs(mine))[1:]  # two of three: half of them, rounded up
        return bool(np.allclose(np.sort(np.abs(value[value != 0])), kept))

    def is_a_loss(value: Any) -> bool:
        return 0 < value < math.inf

    def centers(value: Any) -> bool:
        """k-means of two far clouds: their means."""
        wanted = sorted([points[::2].mean(0).tolist(), points[1::2].mean(0).tolist()])
        return bool(np.allclose(sorted(np.asarray(value).tolist()), wanted))

    def at_zero(value: Any) -> bool:
        parameters, version = value
        return version == 0 and not parameters["w"].any()

    return {
        "ctx.rank": (lambda value: value in range(size)) if is_found else rank,
        "ctx.is_master": (lambda value: isinstance(value, bool)) if is_found else rank == 0,
        **{"ctx.local_rank": rank, "ctx.world_size": size},
        "ctx.all_reduce(t)": total,
        'ctx.all_reduce(t, "mean")': mean,
        'ctx.all_reduce(t, "average")': mean,
        'ctx.all_reduce(t, "avg")': mean,
        "ctx.all_reduce(t, potluck.ReduceOp.AVERAGE)": mean,
        'ctx.all_reduce(t, "product")': np.prod(np.broadcast_to(mean, ts.shape), 0),
        'ctx.all_reduce(t, "mean", algorithm="ring")': mean,
        'ctx.all_reduce(t, "mean", codec="fp16")': about(mean, 1e-2),
        'ctx.all_reduce(t, algorithm="ring")': total,
        'ctx.all_reduce(t, algorithm="hierarchical")': total,
        'ctx.all_reduce(t, algorithm="tree")': size * total,
        'ctx.all_reduce(t, algorithm="centralized")': size**2 * total,
        'ctx.all_reduce(t, codec="int8", residual=residual)': about(total, 0.1),
        'ctx.all_reduce(t, "mean", codec="int8", residual=residual)': about(mean, 0.1),
        'work = ctx.all_reduce(t, "mean", async_op=True)': lambda value: True,  # perhaps not yet
        "work.wait()": mean,
        "potluck.all_reduce_sum(ctx, t)": total,
        "potluck.all_reduce_sum(group, t)": total,
        "potluck.all_reduce_mean(ctx, t)": mean,
        "with potluck.DistributedContext(ring) as fixed: fixed.all_reduce(t)": total,
        'with potluck.init("gloo") as other: other.all_reduce(t)': total,
        "ctx.broadcast(t, root=0)": first,
        "ctx.scatter(t, rows if rank == 0 else None, root=0)": rows[0][rank],
        "flat.reshape(world, -1)": rows[rank],
        "everything = ctx.gather(t, root=0)": (lambda v: v is None) if rank else ts,
        "ctx.all_gather(t).reshape(-1, *t.shape[1:])": ts.ravel(),
        "ctx.all_to_all(rows)": rows[:, rank],
        "part = ctx.scatter_uneven(np.arange(5) if rank == 0 else None, "
        "counts=[3, 2] if rank == 0 else None)": np.split(np.arange(5), [3])[rank],
        'message.payload["loss"] if rank == 1 else 0.5': 0.5,
        "if rank == 1: ctx.recv(t, 0)": first if rank == 1 else lambda value: value is None,
        "start, end = potluck.DataPartitioner(total_samples=256, world_size=world)"
        ".get_partition(rank)": (everything[0], everything[-1] + 1),
        "potluck.DataPartitioner(256, world).get_indices(rank)": everything,
        "tasks = potluck.balance_workload([4.0, 2.0, 1.0], world)": lambda v: v == [[0], [1, 2]],
        "trainer.train_epoch(X[start:end], y[start:end])": is_a_loss,
        "loss = trainer.get_global_loss()": is_a_loss,
        "parameters = trainer.get_parameters()": lambda value: (
            {name: each.shape for name, each in value.items()}
            == {"0.weight": (8, 3), "0.bias": (8,), "2.weight": (1, 8), "2.bias": (1,)}
        ),
        "trainer.predict(X)": lambda value: value.shape == (256, 1),
        "trainer.aggregate_gradients(t.numpy(), potluck.AggregationMethod.SYNCHRONOUS)": mean,
        "means.train_epoch(points[start:end])": is_a_loss,
        "means.get_centroids()": centers,
        "forest.train_epoch(points[start:end], classes[start:end])": about(0, 0.1),
        "forest.predict(points)": lambda value: np.mean(value == is_even) > 0.95,
        "client.train_epoch(X[start:end], y[start:end])": is_a_loss,
        **{
            f'{each}.set_parameters("model", {{"w": np.zeros(3)}})': 0
            for each in ("server", "by_hand")
        },
        **{
            f'parameters, version = {each}.get_parameters("model")': at_zero
            for each in ("server", "by_hand")
        },
        '[(link["bytes_sent"], link["messages_sent"]) for link in ctx.stats()["links"].values()]': (
            lambda value: all(sent > 0 and number > 0 for sent, number in value)
        ),
        'server.accumulate_gradient("model", {"w": np.ones(3)}, rank)': True,
        'server.get_parameters("model").parameters["w"]': np.full(3, -0.01),
        'by_hand.accumulate_gradient("model", {"w": np.ones(3)}, rank)': True,
        'by_hand.get_parameters("model").parameters["w"]': np.full(3, -0.5),
        "weight = np.array([rank + 1.0])": [rank + 1.0],
        "share = weight / potluck.all_reduce_sum(ctx, weight)": share[rank],
        "ctx.all_reduce(t.numpy() * share)": share @ ts,
        "potluck.quantize_gradients(t.numpy(), num_bits=8).decompress()": about(mine, 0.05),
        "potluck.sparsify_gradients(t.numpy(), sparsity=0.5).decompress()": largest_half,
        "potluck.testing.world.run_world(4, lambda ctx: ctx.rank)": [0, 1, 2, 3],
        "potluck.testing.world.run_world(4, lambda ctx: ctx.all_reduce("
        'np.array([1.0, 2.0]), "mean", algorithm="ring"))': np.tile([1.0, 2.0], (4, 1)),
    }
