"""gossip.py STOP: a linear regression by gossip, until the file STOP exists. Says after each round
the number of the round, of how many ranks, the links that are cut, and the loss of this rank's
parameters on all samples."""

import pathlib
import sys
import threading

import torch
from torch import nn

import potluck
import potluck.torch as pt

stop = pathlib.Path(sys.argv[1])
computing = threading.Event()
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(4)
X = torch.randn(4096, 6, generator=generator)
Y = X @ torch.arange(1.0, 7.0)

ctx = potluck.init()
torch.manual_seed(0)
model = pt.DDP(nn.Linear(6, 1, bias=False), ctx)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)


def loss_of_all() -> float:
    with torch.no_grad():
        return float(((model.module(X)[:, 0] - Y) ** 2).mean())


class Says:
    def on_step_end(self, step: int, loss: float) -> None:
        cut = " ".join(f"{a}-{b}" for a, b in ctx.group.cut) or "none"
        print(f"round {step} of {ctx.world_size}, cut: {cut}, loss {loss_of_all():.4f}", flush=True)


job = pt.ElasticLoop(
    model, optimizer, (X, Y), batch_size=24, epochs=1_000_000, seed=3,
    strategy=pt.Gossip("ring", every=2), callbacks=[Says()],
)  # fmt: skip
for x, y in job:
    with job.step():
        computing.wait(0.05)
        optimizer.zero_grad()
        loss = ((model(x)[:, 0] - y) ** 2).mean()
        loss.backward()
        job.log(loss=loss)
        if stop.exists():
            job.stop()
        optimizer.step()
print(f"ended, {job.parameter_hash()}", flush=True)
ctx.close()
