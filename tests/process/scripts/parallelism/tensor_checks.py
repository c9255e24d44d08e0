"""DTensor and tensor parallelism: parallelize_module with torch's own styles."""

from __future__ import annotations

import copy

import torch
from harness import adam, batches, check, close, mlp, same_parameters, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F


@check(4)
def dtensor_from_each_placement_to_each(run):
    mesh = init_device_mesh("cpu", (run.world_size,))
    torch.manual_seed(3)
    full = torch.randn(10, 6)  # parts of unequal size
    placements = (Shard(0), Shard(1), Replicate())
    for before in placements:
        for after in placements:
            tensor = distribute_tensor(full, mesh, [before]).redistribute(mesh, [after])
            close(tensor.full_tensor(), full)
    rows, columns = (
        distribute_tensor(full, mesh, [Shard(0)]),
        distribute_tensor(full.t(), mesh, [Shard(1)]),
    )
    close((rows.sum(0) + columns.sum(1)).full_tensor(), 2 * full.sum(0))


@check(4)
def tensor_parallel_mlp(run):
    mesh = init_device_mesh("cpu", (run.world_size,))
    model = mlp(depth=1)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(copy.deepcopy(model), mesh, plan)
    assert parallel[0].weight.to_local().shape[0] * run.world_size == 24
    trained(parallel, copy.deepcopy(model), batches())


class Block(nn.Module):
    """A transformer block with its heads in separate projections."""

    def __init__(self, width: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_width = num_heads, width // num_heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(12, 16), Block(), nn.Linear(16, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


def text() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.randint(12, (2, 9), generator=generator) for _ in range(3)]
    return [(line[:, :-1], line[:, 1:]) for line in tokens]


@check(4)
def tensor_parallel_transformer(run):
    mesh = init_device_mesh("cpu", (run.world_size,))
    torch.manual_seed(9)
    model = Language()
    parallel = parallelize_module(
        copy.deepcopy(model),
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            **{f"block.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
            **{f"block.{name}": RowwiseParallel() for name in ("o", "down")},
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    trained(parallel, model, text())


@check(2)
def tensor_parallel_with_sequence_and_loss_parallel(run):
    mesh = init_device_mesh("cpu", (run.world_size,))
    torch.manual_seed(9)
    model = Language()
    along, out = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    parallel = parallelize_module(
        copy.deepcopy(model),
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), **out),
            "block": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False
            ),
            "block.norm": SequenceParallel(use_local_output=False),
            "block.norm2": SequenceParallel(use_local_output=False),
            **{f"block.{n}": ColwiseParallel(**along) for n in ("q", "k", "v", "up")},
            **{f"block.{n}": RowwiseParallel(**out, use_local_output=False) for n in ("o", "down")},
            "head": ColwiseParallel(**along, use_local_output=False, output_layouts=Shard(-1)),
        },
    )
    trained(parallel, model, text(), parallel_loss=True)


def trained(parallel: nn.Module, model: nn.Module, data, *, parallel_loss: bool = False) -> None:
    """Every rank sees the whole batch; both models learn the same."""
    optimizers = adam(parallel), adam(model)
    for x, y in data:
        losses = []
        for one, optimizer in zip((parallel, model), optimizers, strict=True):
            optimizer.zero_grad()
            logits = one(x).flatten(0, -2)
            if one is parallel and parallel_loss:
                with loss_parallel():
                    loss = F.cross_entropy(logits, y.flatten())
                    loss.backward()
            else:
                loss = F.cross_entropy(logits, y.flatten())
                loss.backward()
            losses.append(whole(loss))
            optimizer.step()
        close(*losses)
    same_parameters(parallel, model)
