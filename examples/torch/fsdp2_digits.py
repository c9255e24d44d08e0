"""FSDP2 over potluck: parameters, gradients and optimizer state in parts, one part per worker.

potluck run --workers 2 examples/torch/fsdp2_digits.py
torchrun --nproc-per-node 2 examples/torch/fsdp2_digits.py
torchrun --nproc-per-node 4 examples/torch/fsdp2_digits.py --replicas 2    (HSDP)
python examples/torch/fsdp2_digits.py
"""

import argparse
import sys

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.functional import cross_entropy
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    sys.exit(f"this needs {package}: pip install 'potluck[torch,sklearn]'")

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--replicas", type=int, default=1, help="copies of the sharded model")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, sum in float32")
args = parser.parse_args()

dist.init_process_group("potluck", init_method="potluck://")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(
    "cpu", (args.replicas, world_size // args.replicas), mesh_dim_names=("replicate", "shard")
)
torch.manual_seed(0)
torch.set_num_threads(1)

digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
y = torch.tensor(digits.target)
test = torch.arange(len(y)) % 5 == 0
train_x, train_y = x[~test], y[~test]

model = nn.Sequential(
    *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
)
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else None
options = {"mesh": mesh if args.replicas > 1 else mesh["shard"]}
if policy:
    options["mp_policy"] = policy
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, **options)
fully_shard(model, **options)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)  # after sharding: its state is in parts

for _ in range(args.steps):
    batch = torch.randint(len(train_y), (64,))  # the same on all workers: one seed
    mine = batch.chunk(world_size)[rank]
    optimizer.zero_grad()
    cross_entropy(model(train_x[mine]).float(), train_y[mine]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

with torch.no_grad():
    accuracy = (model(x[test]).argmax(1) == y[test]).double().mean()
if rank == 0:
    total = sum(p.numel() for p in model.parameters())
    here = sum(p.to_local().numel() for p in model.parameters())
    print(f"test accuracy {accuracy:.4f}; this worker holds {here} of {total} parameters")
dist.destroy_process_group()
