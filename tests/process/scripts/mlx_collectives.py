"""A program of MLX's own collectives: what each does, its gradients, and nn.average_gradients.

With ``--own`` on MLX's ring, which has no sum_scatter, else on potluck's links; both print the same
lines.
"""

import sys

import mlx.core as mx
from mlx import nn

if "--own" not in sys.argv:
    import potluck.mlx

    potluck.mlx.stand_in()

world = mx.distributed.init()
rank, size = world.rank(), world.size()
x = mx.array([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
distributed = mx.distributed


def show(name: str, array: mx.array) -> None:
    print(f"{name} {array.dtype} {array.tolist()}", flush=True)


show("rank", mx.array([rank, size]))
names = ["all_sum", "all_max", "all_min", "all_gather"]
for name in names if "--own" in sys.argv else [*names, "sum_scatter"]:
    operation = getattr(distributed, name)
    show(name, operation(x))
    show(f"{name} bfloat16", operation(x.astype(mx.bfloat16)))
for name in ("all_sum", "all_max", "all_min"):
    show(f"{name} complex64", getattr(distributed, name)(mx.array([1 + rank * 1j, 2 - rank])))
weights = mx.array([[1.0, 2.0], [3.0, 4.0]])
show("gradient all_sum", mx.grad(lambda each: (distributed.all_sum(each) * weights).sum())(x))
rows = mx.array([[float(k)] for k in range(2 * size)])
show("gradient all_gather", mx.grad(lambda each: (distributed.all_gather(each) * rows).sum())(x))
if rank == 0:
    mx.eval(distributed.send(x, 1))
    show("recv_like", distributed.recv_like(x, 1))
else:
    show("recv", distributed.recv(x.shape, x.dtype, 0))
    mx.eval(distributed.send(x, 0))
mean = nn.average_gradients({"a": x, "b": [x * 2]})
show("mean a", mean["a"])
show("mean b", mean["b"][0])
step = mx.compile(lambda each: distributed.all_sum(each * 2))
show("compiled", step(x))
