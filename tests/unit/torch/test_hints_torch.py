"""What torch's DDP, sampler and reductions are called here, told by potluck's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader  # noqa: E402

import potluck  # noqa: E402
import potluck.torch as pt  # noqa: E402

LINE = (
    r"DataLoader\(dataset, batch_sampler=DistributedSampler\(dataset, batch_size=32 \* world_size"
)
ITEMS = list(range(10))


def sampler() -> Any:
    return pt.DistributedSampler(ITEMS, batch_size=4, ctx=potluck.InProcessBackend.world(1)[0])


def test_the_builder_of_axonmls_ddp() -> None:
    ddp: Any = pt.DDP
    with pytest.raises(AttributeError, match=r"no attribute 'builder'; write potluck.torch.DDP\("):
        ddp.builder(nn.Linear(1, 1))
    assert not hasattr(ddp, "builder")


def test_a_name_of_the_context_in_potluck_torch() -> None:
    with pytest.raises(AttributeError, match=r"'potluck.torch' has no .*; write ctx.all_reduce, w"):
        _ = pt.all_reduce
    with pytest.raises(ImportError, match=r"'all_reduce' from 'potluck.torch'; write ctx.all_red"):
        exec("from potluck.torch import all_reduce")
    exec("from potluck.torch import ddp")  # a submodule


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: pt.DistributedSampler(ITEMS, num_replicas=4, rank=0), LINE),
        (lambda: pt.DistributedSampler(ITEMS, 4, 0), LINE),
        (
            lambda: pt.DistributedSampler(ITEMS, batch_size=4, drop_last=True),
            "no sample is dropped",
        ),
        (lambda: pt.DDP(nn.Linear(1, 1), device_ids=[0]), "move the module to its device before"),
        (lambda: pt.DDP(nn.Linear(1, 1), [0]), r"a context, potluck.init\(\), not \[0\]"),
        (lambda: pt.DDP(nn.Linear(1, 1), bucket_cap_mb=25), "bucket_size_mb="),
        (lambda: pt.DDP(nn.Linear(1, 1), find_unused_parameters=True), "it is not needed"),
        (lambda: list(DataLoader(ITEMS, 4, sampler=sampler())), "write DataLoader.*batch_sampler="),
        (lambda: list(BatchSampler(sampler(), 4, False)), "this one gives batches"),
    ],
)
def test_arguments_of_torch(mistake: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        mistake()


@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND"])
def test_a_reduction_of_torch_is_named_as_potluck_has_it(name: str) -> None:
    assert getattr(potluck.ReduceOp, name)
    theirs = getattr(dist.ReduceOp, name)
    with potluck.init("local") as ctx, pytest.raises(ValueError, match='write "') as caught:
        ctx.all_reduce(torch.ones(2), theirs)
    assert f'(write "{potluck.ReduceOp[name].value}")' in str(caught.value)
