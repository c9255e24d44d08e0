"""JAX on potluck: means of gradients over all ranks, and a replica for the elastic loop.

Collectives take and return ``jax.Array`` themselves: ``total = ctx.all_reduce(x)``. Such arrays
can't be changed, so the result is a new one, on the device of ``x``. All of it is called outside of
functions that jit, grad, vmap or pmap transform; a TypeError says so inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from potluck.training.pytree import TreeReplica, mean_of_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from potluck._core.context import DistributedContext
    from potluck._core.context.collectives import Collectives

__all__ = ["PytreeReplica", "average_gradients"]


def average_gradients(
    ctx: DistributedContext | Collectives,
    gradients: Any,
    *,
    weight: float | None = None,
    codec: str | None = None,
) -> Any:
    """The mean of every rank's ``gradients``, a pytree of arrays of floats, as a pytree of new
    arrays of the same dtypes, shapes and devices; equal bit by bit on all ranks.

    ``weight`` is this rank's weight in the mean, such as its samples or tokens (None: all ranks
    have the same); 0 is allowed. ``codec`` sends fewer bytes, as for
    [all_reduce][potluck.DistributedContext.all_reduce]. Leaves of one dtype travel together, in
    messages of up to 25 MiB. Cost beside these all_reduces: one of 8 bytes with a ``weight``; one
    copy of each leaf into memory of the host, and one back where the device is another.

    TypeError for traced arrays and for integers; ValueError for a negative weight, or if all are 0,
    on all ranks. Desync if the ranks' trees differ in size or dtype.
    """
    leaves, tree = jax.tree.flatten(gradients)
    return jax.tree.unflatten(tree, mean_of_leaves(ctx, leaves, weight=weight, codec=codec))


class PytreeReplica(TreeReplica):
    """``tree``, a pytree of arrays and numbers, as the replica of an elastic loop.

        replica = PytreeReplica({"params": params, "optimizer": optimizer.init(params)})
        job = ElasticLoop(ctx, Schedule(60_000, 64), replica)
        for share in job:
            with job.step():
                loss, gradients = value_and_grad(replica.tree["params"], x[share.indices])
                gradients = average_gradients(ctx, gradients, weight=share.weight)
                job.commit(loss=float(loss))
                replica.tree = updated(replica.tree, gradients)

    The script sets ``tree`` anew after ``job.commit``, with the same structure, dtypes and shapes:
    parameters, the optimizer's state, and random keys that must be equal on all ranks, as
    ``jax.random.key_data``. The names of the leaves in checkpoints are their paths:
    ``params.layers.0.weight``. ValueError if two leaves have one path.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        device = jax.devices()[0]
        super().__init__(f"jax {jax.__version__}", f"{device.platform} ({device.device_kind})")

    def leaves(self) -> dict[str, Any]:
        paths, _ = jax.tree_util.tree_flatten_with_path(self.tree)
        named = [
            (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths
        ]
        if len(leaves := dict(named)) < len(named):
            names = [name for name, _ in named]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two leaves of the tree have the path {twice!r}: rename one")
        return leaves

    def take(self, leaves: Mapping[str, Any]) -> None:
        structure = jax.tree.structure(self.tree)
        self.tree = jax.tree.unflatten(structure, [leaves[name] for name in self.leaves()])
