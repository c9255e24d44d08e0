"""A checkpoint written by any number of workers, read by any other number.

torchrun --nproc-per-node 4 examples/torch/checkpoint_reshard.py --folder ~/digits
potluck run --workers 2 examples/torch/checkpoint_reshard.py --folder ~/digits    (goes on)
python examples/torch/checkpoint_reshard.py --folder ~/digits    (goes on, alone)

Torch's checkpoints hold pickled data: whoever may write to the folder can run code in the script
that loads them, so the folder must not be one that others share, such as /tmp.
"""

import argparse
import sys
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    sys.exit(f"this needs {package}: pip install 'potluck[torch,sklearn]'")

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path.home() / "potluck-digits")
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

dist.init_process_group("potluck", init_method="potluck://")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
y = torch.tensor(digits.target)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

first = 0
if (args.folder / ".metadata").exists():
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=args.folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    first = state["step"]

for step in range(first, first + args.steps):
    torch.manual_seed(step)  # so that a run that goes on sees the same batches
    mine = torch.randint(len(y), (64,)).chunk(world_size)[rank]
    optimizer.zero_grad()
    loss = cross_entropy(model(x[mine]), y[mine])
    loss.backward()
    optimizer.step()

weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "step": first + args.steps}
dcp.save(state, checkpoint_id=args.folder)
with torch.no_grad():
    whole = cross_entropy(model(x), y)
if rank == 0:
    print(f"steps {first} to {first + args.steps} on {world_size} workers: loss {whole:.6f}")
dist.destroy_process_group()
