"""Tensor parallelism over potluck: each layer's matrix is cut, every worker sees every sample.

potluck run --workers 2 examples/torch/tensor_parallel.py
torchrun --nproc-per-node 2 examples/torch/tensor_parallel.py
python examples/torch/tensor_parallel.py
"""

import argparse
import sys

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.functional import cross_entropy
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    sys.exit(f"this needs {package}: pip install 'potluck[torch,sklearn]'")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()

dist.init_process_group("potluck", init_method="potluck://")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
y = torch.tensor(digits.target)
test = torch.arange(len(y)) % 5 == 0
train_x, train_y = x[~test], y[~test]

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
# The first layer's outputs are dealt out, the second sums what each worker makes of its part.
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for _ in range(args.steps):
    batch = torch.randint(len(train_y), (64,))  # the same on all workers: one seed
    optimizer.zero_grad()
    cross_entropy(model(train_x[batch]), train_y[batch]).backward()
    optimizer.step()

with torch.no_grad():
    accuracy = (model(x[test]).argmax(1) == y[test]).double().mean()
if dist.get_rank() == 0:
    shape = tuple(model[0].weight.to_local().shape)
    print(f"test accuracy {accuracy:.4f}; this worker holds {shape} of the first (512, 64) matrix")
dist.destroy_process_group()
