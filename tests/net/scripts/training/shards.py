"""A training that counts each sample of a data set that is still on its way: the weight of a sample
is how often it was trained on. Prints each step, and in the end whether all were counted once."""

import torch
from torch import nn
from torch.nn.functional import one_hot

import potluck
import potluck.torch as pt
from potluck.data import NumpyFiles, shared

BATCH = 8
torch.set_num_threads(1)
folder = shared("pets")
columns = {name: folder.shards(f"{name}-*.npy") for name in ("id", "pad")}
data = NumpyFiles(columns, lanes=3)
with potluck.init() as ctx:
    linear = nn.Linear(len(data), 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(linear.weight)
    model = pt.DDP(linear, ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=BATCH)
    job = pt.ElasticLoop(model, optimizer, data, batch_size=BATCH, epochs=1)
    for batch in job:
        with job.step():
            optimizer.zero_grad()
            loss = -model(one_hot(batch["id"], len(data)).double()).mean()
            loss.backward()
            job.log(loss=loss)
            optimizer.step()
        print(f"step {job.step_number} of {job.ctx.world_size}", flush=True)
    counts = linear.weight.detach().flatten()
    once = int(((counts - 1).abs() < 1e-6).sum())
    print(f"counted once {once} of {len(data)}, committed {job.committed}", flush=True)
