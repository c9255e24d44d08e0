"""torch's DistributedDataParallel over potluck against Gloo: seconds per training step.

An MLP of 8.4 million parameters (two 2048 x 2048 layers, float32), 32 samples per worker and step,
plain SGD, one compute thread per worker, DDP as it comes (25 MB buckets). Rounds alternate between
the two; both train from the same parameters on the same data and must end at the same ones.
Scaling efficiency: the time of one worker's step while nobody else computes, over a step with all.

    python benchmarks/torch_ddp.py            # 2 and 4 workers
    python benchmarks/torch_ddp.py --save     # keep the result in benchmarks/results/
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

from common import claims, script, training

REACH = 0.7


def make(rank: int, world_size: int) -> training.Trained:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    width = 2048
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(32, width, generator=generator)

    def trainer(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()

        return step

    def parameters() -> bytes:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        return flat.numpy().tobytes()

    def as_it_is(bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    alone, hollow = copy.deepcopy(model), DistributedDataParallel(copy.deepcopy(model))
    hollow.register_comm_hook(None, lambda state, bucket: as_it_is(bucket))
    parallel = DistributedDataParallel(model)
    return training.Trained(trainer(parallel), trainer(alone), parameters, trainer(hollow))


def measure(quick: bool, say: script.Say) -> script.Measured:
    """Two workers: the step time and the scaling efficiency, as claims."""
    rounds, steps = (1, 1) if quick else (11, 8)
    result = training.measure(__file__, ("potluck", "gloo"), (2,), rounds, steps, REACH, say)
    [row] = result["rows"]
    part = row["potluck"]["median_s"] / row["gloo"]["median_s"]
    bound = f"(DDP that communicates nothing: {row['efficiency_bound']:.0%})"
    return result, [
        claims.at_most(
            "DDP step, MLP of 8.4 M parameters, batch 32, 2 workers: time over Gloo's",
            f"<= {REACH}x",
            REACH,
            [("", part)],
        ),
        claims.at_least(
            "the same: scaling efficiency", ">= 85%", 85.0, [(bound, row["efficiency"] * 100)], "%"
        ),
    ]


if __name__ == "__main__":
    if "BENCH_TOKEN" in os.environ:
        sys.exit(training.worker(sys.argv[1], make))
    sys.exit(training.main(__file__, "torch_ddp", "torch DDP: potluck and Gloo", [2, 4], REACH))
