"""MLX on potluck: means of gradients, a replica for the elastic loop, and ``mx.distributed``.

Collectives take and return ``mlx.core.array`` themselves: ``total = ctx.all_reduce(x)``. Such
arrays can't be changed, so the result is a new one. All of it is called outside of functions that
``mx.grad`` and ``mx.compile`` transform: MLX gives no sign of ``mx.grad``, in which the gradient of
a collective would be 0.

``stand_in`` lets ``mx.distributed`` work on potluck's links. MLX computes an array when it is
needed first; there a collective does so at once, since ranks that need results in another order
would wait for each other for ever. Such calls can't be compiled, so ``mx.compile`` is switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from potluck._core.context import DistributedContext, init
from potluck.errors import ConfigurationError
from potluck.training.pytree import TreeReplica, mean_of_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from potluck._core.context.collectives import Collectives

__all__ = ["PytreeReplica", "average_gradients", "stand_in"]


def average_gradients(
    ctx: DistributedContext | Collectives,
    gradients: Any,
    *,
    weight: float | None = None,
    codec: str | None = None,
) -> Any:
    """The mean of every rank's ``gradients``, a tree of dicts and lists over arrays of floats, as a
    tree of new arrays of the same dtypes and shapes; equal bit by bit on all ranks.

    Arguments, cost and errors are those of
    [potluck.jax.average_gradients][potluck.jax.average_gradients].
    """
    named: Any = tree_flatten(gradients)
    means = mean_of_leaves(ctx, [leaf for _, leaf in named], weight=weight, codec=codec)
    return tree_unflatten([(name, mean) for (name, _), mean in zip(named, means, strict=True)])


class PytreeReplica(TreeReplica):
    """``model``, an ``mlx.nn.Module``, and its ``optimizer`` (or None), as the replica of an
    elastic loop.

        optimizer.init(model.trainable_parameters())
        job = ElasticLoop(ctx, Schedule(60_000, 64), PytreeReplica(model, optimizer))
        for share in job:
            with job.step():
                loss, gradients = value_and_grad(model, x[share.indices])
                gradients = average_gradients(ctx, gradients, weight=share.weight)
                job.commit(loss=loss.item())
                optimizer.update(model, gradients)

    The state of ``optimizer`` is made before the loop, by its ``init``. A model and an optimizer
    change only after ``job.commit``. The names in checkpoints are ``model.layers.0.weight`` and
    ``optimizer.step``.
    """

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self._model, self._optimizer = model, optimizer
        super().__init__(f"mlx {version('mlx')}", str(mx.default_device()))

    def leaves(self) -> dict[str, Any]:
        tree = {"model": self._model.parameters()}
        if self._optimizer is not None:
            tree["optimizer"] = self._optimizer.state
        return dict(tree_flatten(tree))

    def take(self, leaves: Mapping[str, Any]) -> None:
        tree = tree_unflatten(list(leaves.items()))
        self._model.update(tree.get("model", {}))
        if self._optimizer is not None:
            self._optimizer.state = tree["optimizer"]


class _Group(mx.distributed.Group):
    """A group of MLX on ``ctx``, a context or a sub-group."""

    def __init__(self, ctx: Collectives) -> None:
        self.ctx = ctx

    def rank(self) -> int:
        return self.ctx.rank

    def size(self) -> int:
        return self.ctx.world_size

    def split(self, color: int, key: int = -1) -> _Group:
        """The ranks that pass the same ``color``, in the order of ``key``, then of their ranks. A
        collective call."""
        ctx = self.ctx
        if not isinstance(ctx, DistributedContext):
            raise ConfigurationError("a group that came of split can't be split: split the first")
        mine = np.array([color, key if key >= 0 else ctx.rank, ctx.rank], np.int64)
        rows = sorted(tuple(map(int, row)) for row in ctx.all_gather(mine))
        groups = {which: [rank for each, _, rank in rows if each == which] for which, *_ in rows}
        made = {which: ctx.new_group(ranks) for which, ranks in groups.items()}
        own = made[color]
        assert own is not None, "it has this rank"
        return _Group(own)


def stand_in(ctx: DistributedContext | None = None) -> _Group:
    """Let ``mx.distributed`` of this process work on ``ctx`` (None: ``potluck.init()``) from
    now on, and return its group. Two lines above a program of MLX are enough:

        import potluck.mlx
        potluck.mlx.stand_in()

    ``init``, ``is_available``, ``all_sum``, ``all_max``, ``all_min``, ``all_gather``,
    ``sum_scatter``, ``send``, ``recv`` and ``recv_like`` are replaced; their ``stream`` has no
    effect. Call it before modules that copy these names are imported. A rank that is lost ends
    the program with a PeerLost: such programs are not elastic, ``PytreeReplica`` is.
    """
    world = _Group(init() if ctx is None else ctx)
    mx.disable_compile()

    def of(group: _Group | None) -> Collectives:
        return (world if group is None else group).ctx

    def operation(
        run: Callable[[Collectives, Any], Any], back: Callable[[Collectives, Any, Any], Any]
    ) -> Callable[..., Any]:
        def call(x: Any, *, group: _Group | None = None, stream: Any = None) -> Any:
            ctx = of(group)
            function = mx.custom_function(lambda each: run(ctx, each))
            function.vjp(lambda each, gradient, output: back(ctx, each, gradient))
            return function(mx.array(x))

        return call

    def init_of_mlx(
        strict: bool = False, backend: str = "any", *, all_gather_factory: Any = None
    ) -> _Group:
        if all_gather_factory is not None:
            wrong = ValueError if callable(all_gather_factory) else TypeError
            raise wrong("all_gather_factory is a function, and JACCL's alone: leave it out")
        return world

    def send(x: Any, dst: int, *, group: _Group | None = None, stream: Any = None) -> Any:
        return of(group).send(mx.array(x), dst)

    def recv(
        shape: Sequence[int],
        dtype: Any,
        src: int,
        *,
        group: _Group | None = None,
        stream: Any = None,
    ) -> Any:
        return of(group).recv(mx.zeros(shape, dtype), src)

    def recv_like(x: Any, src: int, *, group: _Group | None = None, stream: Any = None) -> Any:
        return of(group).recv(mx.zeros_like(x), src)

    replaced: dict[str, Callable[..., Any]] = {
        "init": init_of_mlx,
        "is_available": lambda backend="any": True,
        "all_sum": operation(lambda ctx, x: ctx.all_reduce(x), _same),
        "all_max": operation(lambda ctx, x: _extreme(ctx, x, "max"), _same),
        "all_min": operation(lambda ctx, x: _extreme(ctx, x, "min"), _same),
        "all_gather": operation(_gather, _own_rows),
        "sum_scatter": operation(_scatter, lambda ctx, x, gradient: _gather(ctx, gradient)),
        "send": send,
        "recv": recv,
        "recv_like": recv_like,
    }
    for name, function in replaced.items():
        setattr(mx.distributed, name, function)
    return world


def _extreme(ctx: Collectives, x: Any, op: Literal["max", "min"]) -> Any:
    if x.dtype == mx.complex64:  # MLX orders them, by their real parts first
        return getattr(mx, op)(ctx.all_gather(x), 0)
    return ctx.all_reduce(x, op)


def _gather(ctx: Collectives, x: Any) -> Any:
    return ctx.all_gather(x).reshape(-1, *x.shape[1:])


def _scatter(ctx: Collectives, x: Any) -> Any:
    if x.ndim == 0 or x.shape[0] % ctx.world_size:
        raise ValueError(
            f"sum_scatter: the first dimension of the shape {x.shape} can't be divided by "
            f"{ctx.world_size} ranks"
        )
    return ctx.reduce_scatter(x.reshape(ctx.world_size, -1, *x.shape[1:]))


def _own_rows(ctx: Collectives, x: Any, gradient: Any) -> Any:
    count = x.shape[0] if x.ndim else 1
    return gradient[ctx.rank * count : (ctx.rank + 1) * count].reshape(x.shape)


def _same(ctx: Collectives, x: Any, gradient: Any) -> Any:
    return gradient
