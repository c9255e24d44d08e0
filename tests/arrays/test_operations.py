"""Arrays of JAX and MLX in all operations, in groups with NumPy's and torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import potluck
from potluck._core.context import DistributedContext
from potluck._core.wire.payload import pack
from potluck.errors import RemoteError
from potluck.testing.world import run_world

jax = pytest.importorskip("jax", reason="pip install 'potluck[jax]'")
mx = pytest.importorskip("mlx.core", reason="pip install 'potluck[mlx]'")
jnp = jax.numpy

Make = Callable[[Any], Any]
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8")


def makers(dtype: str) -> list[Make]:
    """By rank, what makes an array of a library; a rank without torch has NumPy's twice."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def of_numpy(data: Any) -> Any:
        return np.asarray(data).astype(kind)

    def of_torch(data: Any) -> Any:
        try:
            import torch
        except ModuleNotFoundError:
            return of_numpy(data)
        return torch.tensor(np.asarray(data)).to(getattr(torch, dtype))

    return [
        lambda data: jnp.asarray(np.asarray(data)).astype(kind),
        lambda data: mx.array(np.asarray(data)).astype(getattr(mx, dtype)),
        of_numpy,
        of_torch,
    ]


def host(array: Any) -> np.ndarray:
    """The elements as float64."""
    if isinstance(array, mx.array):
        return np.array(array.astype(mx.float32)).astype(np.float64)
    if hasattr(array, "detach"):
        return array.float().numpy().astype(np.float64)
    return np.asarray(array).astype(np.float64)


def is_like(array: Any, model: Any, shape: tuple[int, ...]) -> bool:
    same = type(array) is type(model) and array.dtype == model.dtype
    return same and tuple(array.shape) == shape


def every_operation(ctx: DistributedContext, make: Make) -> None:
    size, rank = ctx.world_size, ctx.rank
    model, rows = make([1]), np.arange(6.0).reshape(2, 3)

    def checked(result: Any, wanted: Any) -> None:
        wanted = np.asarray(wanted, np.float64)
        assert is_like(result, model, wanted.shape), (type(result), result.dtype, result.shape)
        np.testing.assert_array_equal(host(result), wanted)

    own = make(rows + rank)
    checked(ctx.all_reduce(own), size * rows + size * (size - 1) / 2)
    if isinstance(own, jax.Array | mx.array):
        checked(own, rows + rank)  # as it was
    checked(ctx.all_reduce(make(rows + rank), "max", async_op=True).wait(), rows + size - 1)
    checked(ctx.all_reduce(make(5)), 5 * size)
    everyone = np.repeat(np.arange(size), 2).reshape(size, 2)
    checked(ctx.all_gather(make([rank, rank])), everyone)
    checked(ctx.reduce_scatter(make(np.full((size, 3), rank))), [size * (size - 1) / 2] * 3)
    checked(ctx.broadcast(make([rank] * 3), 1), [1, 1, 1])
    given = make(np.arange(2 * size).reshape(size, 2)) if rank == 0 else None
    checked(ctx.scatter(make([0, 0]), given), [2 * rank, 2 * rank + 1])
    gathered = ctx.gather(make([rank, rank]), 1)
    if rank == 1:
        checked(gathered, everyone)
    reduced = ctx.reduce(make([rank]), 2)
    checked(reduced, [size * (size - 1) / 2] if rank == 2 else [rank])
    checked(ctx.all_to_all(make(np.arange(size) + 10 * rank)), np.arange(size) * 10 + rank)
    for number, part in enumerate(ctx.all_gather_uneven(make([rank] * rank))):
        checked(part, [number] * number)
    for number, part in enumerate(ctx.gather_uneven(make([rank] * rank), 3) or ()):
        checked(part, [number] * number)
    parts = [make([7] * number) for number in range(size)] if rank == 0 else None
    checked(ctx.scatter_uneven(parts, like=model), [7] * rank)
    if rank % 2:
        checked(ctx.recv(make([0, 0]), rank - 1), [rank - 1] * 2)
    else:
        ctx.send(make([rank, rank]), rank + 1)
    checked(potluck.all_reduce_sum(ctx, make([rank])), [size * (size - 1) / 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_takes_and_returns_arrays_of_each_library(dtype: str) -> None:
    """Ranks with JAX, MLX, NumPy and torch in one group."""
    run_world(4, lambda ctx: every_operation(ctx, makers(dtype)[ctx.rank]))


def test_codecs_neighbours_and_messages_take_them_too() -> None:
    def run(ctx: DistributedContext) -> None:
        make = makers("float32")[ctx.rank]
        halved = ctx.all_reduce(make(np.full(5000, 1.5)), codec="bf16")
        assert is_like(halved, make([1]), (5000,))
        assert (host(halved) == 3).all()
        mean = ctx.neighbor_all_reduce(make([float(ctx.rank)] * 3), potluck.graphs.ring(2))
        assert is_like(mean, make([1]), (3,))
        assert (host(mean) == 0.5).all()

    run_world(2, run)
    for array in (jnp.ones((2, 3), jnp.bfloat16), mx.ones((2, 3), dtype=mx.bfloat16)):
        sent = pack({"weights": array})
        same = pack({"weights": np.ones((2, 3), ml_dtypes.bfloat16)})
        assert sent.header == same.header
        assert [bytes(each) for each in sent.buffers] == [bytes(each) for each in same.buffers]


def test_float64_and_transposed_arrays_keep_what_they_are() -> None:
    def run(ctx: DistributedContext) -> None:
        rows = mx.array(np.arange(6, dtype=np.float64).reshape(2, 3), dtype=mx.float64)
        total = ctx.all_reduce(mx.transpose(rows, stream=mx.cpu))
        assert total.dtype == mx.float64
        np.testing.assert_array_equal(np.array(total), 2 * np.arange(6).reshape(2, 3).T)
        turned = ctx.all_gather(jnp.arange(6.0).reshape(2, 3).T)
        np.testing.assert_array_equal(turned[1], np.arange(6).reshape(2, 3).T)

    run_world(2, run)


def test_an_array_of_mlx_that_is_set_anew_while_it_is_sent_arrives_as_it_was() -> None:
    def run(ctx: DistributedContext) -> None:
        if ctx.rank:
            assert (host(ctx.recv(mx.zeros(1 << 20), 0)) == 1).all()
        else:
            array = mx.ones(1 << 20)
            sending = ctx.send(array, 1, async_op=True)
            array[:] = 7
            mx.eval(array)
            sending.wait()

    run_world(2, run)


def alone(ctx: DistributedContext) -> None:
    """What can't be communicated is refused where it is, before anything is sent."""
    x = jnp.ones(3)
    for transformed in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TypeError, match="call the operation outside of the function"):
            transformed(lambda each: ctx.all_reduce(each).sum())(x)
    with pytest.raises(TypeError, match="call the operation outside of the function"):
        mx.compile(ctx.all_reduce)(mx.ones(3))
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(ValueError, match="the array was deleted"):
        ctx.all_reduce(deleted)
    for out in (jnp.ones((1, 3)), mx.ones((1, 3))):
        with pytest.raises(TypeError, match="can't be changed; take what is returned"):
            ctx.all_gather(np.ones(3, np.float32), out=out)
    with pytest.raises(TypeError, match="dtype"):
        ctx.all_reduce(jnp.ones(3, jnp.float8_e4m3fn))
    with pytest.raises(TypeError, match="expected an array of NumPy, torch, JAX or MLX, got list"):
        ctx.all_reduce([1, 2])
    assert float(ctx.all_reduce(x).sum()) == 3, "the group goes on"


def test_what_has_no_values_is_refused_with_what_to_do() -> None:
    run_world(1, alone)


def test_a_rank_that_fails_in_its_own_transformation_ends_the_others_call() -> None:
    def run(ctx: DistributedContext) -> None:
        if ctx.rank:
            with pytest.raises(RemoteError, match="outside of the function"):
                ctx.all_reduce(jnp.ones(3))
        else:
            jax.jit(ctx.all_reduce)(jnp.ones(3))

    with pytest.raises(Exception, match="outside of the function"):
        run_world(2, run)
