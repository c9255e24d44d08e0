"""torch's FSDP2 (fully_shard) over potluck against Gloo: seconds per training step.

A transformer of 10.8 million parameters (6 layers of width 384, 256 tokens, float32), 4 sequences
of 64 tokens per worker and step, Adam, one compute thread per worker, each layer sharded.
Rounds alternate between the two; both train from the same parameters on the same data and must end
at the same ones.

    python benchmarks/torch_fsdp2.py            # 2 workers
    python benchmarks/torch_fsdp2.py --save     # keep the result in benchmarks/results/
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable

from common import training


def make(rank: int, world_size: int) -> training.Trained:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.functional import cross_entropy

    width, num_tokens = 384, 256
    layers = [
        nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(6)
    ]
    model = nn.Sequential(
        nn.Embedding(num_tokens, width), *layers, nn.Linear(width, num_tokens, bias=False)
    )
    alone = copy.deepcopy(model)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(num_tokens, (4, 65), generator=generator)

    def trainer(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(text[:, :-1]).mT, text[:, 1:]))
            optimizer.step()

        return step

    def parameters() -> bytes:
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        full = [p.full_tensor().detach().flatten() for p in sharded]
        data: bytes = torch.cat(full).numpy().tobytes()
        return data

    return training.Trained(trainer(model), trainer(alone), parameters)


if __name__ == "__main__":
    if "BENCH_TOKEN" in os.environ:
        sys.exit(training.worker(sys.argv[1], make))
    sys.exit(training.main(__file__, "torch_fsdp2", "torch FSDP2: potluck and Gloo", [2], 0.8))
