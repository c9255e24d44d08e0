"""ZeRO over potluck: plain DDP, but each worker keeps only its part of the optimizer's state.

potluck run --workers 2 examples/torch/zero_digits.py
torchrun --nproc-per-node 2 examples/torch/zero_digits.py
python examples/torch/zero_digits.py
"""

import argparse
import sys

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    sys.exit(f"this needs {package}: pip install 'potluck[torch,sklearn]'")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()

dist.init_process_group("potluck", init_method="potluck://")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
y = torch.tensor(digits.target)
test = torch.arange(len(y)) % 5 == 0
train_x, train_y = x[~test], y[~test]

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=2e-3)

for _ in range(args.steps):
    batch = torch.randint(len(train_y), (64,))  # the same on all workers: one seed
    mine = batch.chunk(world_size)[rank]
    optimizer.zero_grad()
    cross_entropy(model(train_x[mine]), train_y[mine]).backward()
    optimizer.step()

accuracy = (model(x[test]).argmax(1) == y[test]).double().mean()
if rank == 0:
    kept = sum(state["exp_avg"].numel() for state in optimizer.optim.state.values())
    total = sum(p.numel() for p in model.parameters())
    print(f"test accuracy {accuracy:.4f}; this worker keeps {kept} of {total} moments")
dist.destroy_process_group()
