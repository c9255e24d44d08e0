"""Trains with 1,200, 700 and 500 MB of memory for the workers, and at step 1 with 500 MB less for
the first one, as if another program took it. That worker then compares with plain torch and all
samples at once, without a limit. A sample's graph takes 20 MB.
"""

from __future__ import annotations

import resource

import torch
from torch import nn

import potluck
from potluck.torch import DDP, ElasticLoop

MB = 1_000_000
LIMITS = (1200, 700, 500)
NUM_SAMPLES, STEPS, WIDTH, LENGTH, LAYERS = 60, 2, 50, 2500, 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(0.5 + torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(x * self.scale)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).double()
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        return x, torch.randn(1, WIDTH, generator=generator, dtype=torch.float64)


def limit_memory(megabytes: int | None) -> None:
    """Of private memory, as ``potluck up --memory`` does without a control group."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard if megabytes is None else megabytes * MB, hard))


torch.set_num_threads(1)
data = Samples()
ctx = potluck.init()
mine = ctx.rank
limit_memory(LIMITS[mine])
inner, optimizer = made()
model = DDP(inner, ctx)
job = ElasticLoop(model, optimizer, data, batch_size=NUM_SAMPLES, epochs=STEPS, shuffle=False)
parts = 0
for inputs, targets in job:
    if job.step_number == 1 and mine == 0:
        limit_memory(LIMITS[0] - 500)
    with job.step():
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        job.log(loss=loss)
        parts += 1
        optimizer.step()
limit_memory(None)
print(
    f"worker of {LIMITS[mine]} MB: {job.step_number} steps, at most {job.most_at_once} at once, "
    f"{parts} parts, {job.num_reruns} steps run again",
    flush=True,
)
if mine == 0:
    expected, optimizer = made()
    x, y = torch.utils.data.default_collate([data[index] for index in range(NUM_SAMPLES)])
    for _ in range(STEPS):
        optimizer.zero_grad()
        (expected(x) - y).square().mean().backward()
        optimizer.step()
    pairs = zip(inner.parameters(), expected.parameters(), strict=True)
    print("difference", max((a - b).abs().max().item() for a, b in pairs), flush=True)
